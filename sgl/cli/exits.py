"""What commands end with."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from sgl.errors import ConfigError, SglError


def exit_code(command: Callable[[], int]) -> int:
    """A command's own, or that of an error, which is said: 1 failed, 2 called wrongly, 130 interrupted; 141: whoever
    read its output has left, as `head` does."""
    _open_streams()
    try:
        code = command()
        sys.stdout.flush()
        return code
    except SglError as error:
        return failed(f"sgl: {error}", 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _is_unread():
            raise
        _drop_output()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        _drop_output()
        return failed(f"sgl: the output cannot be written: {error.strerror}", 1)


def _drop_output() -> None:
    """Have what is left of it lead nowhere: the end of the process flushes once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Have standard streams that were closed lead nowhere, and their numbers to no file or socket that is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 - for good


def _is_unread() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def failed(why: str, code: int) -> int:
    """Say why, where anything takes it. Returns the code."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{why}\n")
    return code


def end_with(command: Callable[[], int]) -> NoReturn:
    """Run it and end the process, without what Python and libraries do at its end."""
    code = 1
    try:
        code = exit_code(command)
    except BaseException:  # a defect
        with contextlib.suppress(OSError):
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it
            continue
    os._exit(code)
