"""What commands end with."""

from __future__ import annotations

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
    try:
        code = command()
        sys.stdout.flush()
        return code
    except SglError as error:
        sys.stderr.write(f"sgl: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _is_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the end of the process flushes once more
        return 141


def _is_unread() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def end_with(command: Callable[[], int]) -> NoReturn:
    """Run it and end the process, without what Python and libraries do at its end."""
    code = 1
    try:
        code = exit_code(command)
    except BaseException:  # a defect
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it
            continue
    os._exit(code)
