"""What commands end with."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from sgl.errors import ConfigError, SglError


def exit_code(command: Callable[[], int]) -> int:
    """A command's own, or that of an error, which is said: 1 failed, 2 called wrongly, 130 interrupted."""
    try:
        return command()
    except SglError as error:
        sys.stderr.write(f"sgl: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


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
