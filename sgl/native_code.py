"""Compiles the package's C for this processor, once per machine, into the user's cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_FLAGS = ("-O3", "-shared", "-fPIC", "-Wl,--as-needed")
_SECONDS = 600.0  # for the compiler, on a busy machine, too
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "": None}


class CannotCompile(Exception):
    """Why the code cannot be compiled here."""


def cache_folder() -> Path | None:
    """The folder for compiled code, which may not exist; None without a home."""
    try:
        return Path.home() / ".cache" / "sgl"
    except RuntimeError:
        return None


def load(
    source: Path, functions: Mapping[str, str], flags: Sequence[str] = (), *, libgomp: Path | None = None
) -> ctypes.CDLL:
    """A C file's functions; its headers lie beside it. By name: types of arguments and, after a colon, the result, of
    p(ointer), i(nt64), f(loat). `libgomp`: the OpenMP runtime, so only GCC will do. Raises CannotCompile."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise CannotCompile("there is no C compiler: install gcc")
    tuned = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [compiler, *_FLAGS, *flags, tuned]
    macros = _run([*command, "-E", "-dM", "-x", "c", os.devnull])  # compiler version, processor features
    if libgomp is not None and "__clang__" in macros:
        raise CannotCompile(f"{compiler} is Clang: install gcc")
    command += [str(source)] if libgomp is None else [str(source), str(libgomp)]
    texts = [each.read_bytes() for each in (source, *sorted(source.parent.glob("*.h")))]
    key = hashlib.sha256("\0".join((*command, macros)).encode() + b"".join(texts)).hexdigest()
    kept = _kept(f"{source.stem}_{key[:20]}.so")
    if kept is not None:
        with contextlib.suppress(OSError, AttributeError):
            return _load(kept, functions)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            made = Path(folder) / "made.so"
            _run([*command, "-o", str(made)])
            if kept is not None:
                with contextlib.suppress(OSError):
                    _keep(made, kept)
                    return _load(kept, functions)
            return _load(made, functions)
    except (OSError, AttributeError) as error:
        raise CannotCompile(str(error)) from error


def _kept(name: str) -> Path | None:
    """A library's cache place; None unless only this user can write there."""
    folder = private_folder()
    return None if folder is None else folder / name


def private_folder() -> Path | None:
    """The user's cache folder, made at need; None unless only this user can write there."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    return folder if found.st_uid == os.geteuid() and not found.st_mode & 0o022 else None


def _keep(made: Path, kept: Path) -> None:
    """Copy a finished file to where others see it."""
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        try:
            file.write(made.read_bytes())
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, kept)
        except OSError:
            os.unlink(file.name)
            raise


def _load(path: Path, functions: Mapping[str, str]) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, types in functions.items():
        arguments, _, result = types.partition(":")
        function = getattr(found, name)
        function.argtypes = [_TYPES[each] for each in arguments]
        function.restype = _TYPES[result]
    return found


def _run(command: list[str]) -> str:
    """The compiler's output."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise CannotCompile(f"{command[0]} failed: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout
