"""`sgl run --record` and `--replay`: what a file's programs sent and were answered, and the same once more.

A trace holds each program as it went to the engine, in segments. What tools and Python code made of observed values is
part of them, so a replay runs no code of the file: it sends each segment when the answers are there that were before.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl.errors import ConfigError, InvalidRequest, ProgramError
from sgl.lang.backends.base import Backend, Session
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.check import Checker, Limits, program_from_wire
from sgl.lang.ir.encoding import to_json

FORMAT, VERSION = "sgl trace", 2
MOST_BYTES = 1 << 28
"""Of a trace."""
_OPTIONS = (
    *("deterministic", "dtype", "kv_cache_dtype", "quantization", "attention_backend", "model_impl", "tp_size"),
    *("pp_size", "device_name", "torch_version"),
)
"""Of the engine's info, that decide which bits come out."""
_PATIENCE = 600.0  # seconds for an answer


class Recorder:
    """Notes what a backend's programs send and are answered, from now on."""

    def __init__(self, backend: Backend, engine: Any) -> None:
        self._open, self._shutdown = backend.open, backend.shutdown
        backend.open = self._opened  # type: ignore[method-assign]  # of this one object
        backend.shutdown = self._ended  # type: ignore[method-assign]
        self._lock = threading.Condition()
        self._num_open = 0
        self._programs: list[dict[str, Any]] = []
        self._about = about(engine)

    def _opened(self, program: ir.Program, sink: ir.Sink) -> Session:
        is_text = isinstance(program.chat_template, str | None)
        steps: list[dict[str, Any]] = []
        sent = to_json(program if is_text else replace(program, chat_template=None))
        with self._lock:
            self._programs.append({"program": sent, "steps": steps})
            self._num_open += 1

        def noted(event: ir.Event) -> None:
            with self._lock:
                if (note := _note(event)) is not None:
                    steps.append({"event": note})
                self._num_open -= isinstance(event, ir.Done)
                self._lock.notify_all()
            sink(event)

        return _Noted(self._open(program, noted), steps, self._lock)

    def _ended(self) -> None:
        """The file has ended, perhaps before its programs: they are awaited."""
        with self._lock:
            self._lock.wait_for(lambda: not self._num_open, _PATIENCE)
        self._shutdown()

    def write(self, path: str) -> int:
        """Write the trace; returns how many programs it has. Raises ConfigError if it is too large."""
        with self._lock:
            text = json.dumps({"format": FORMAT, "v": VERSION, **self._about, "programs": self._programs})
        if len(text) > MOST_BYTES:
            raise ConfigError(f"the trace has {len(text)} bytes, more than {MOST_BYTES}", option="record")
        Path(path).write_text(text, encoding="utf-8")
        return len(self._programs)


class _Noted:
    """A session whose segments are noted."""

    def __init__(self, session: Session, steps: list[dict[str, Any]], lock: threading.Condition) -> None:
        self._session, self._steps, self._lock = session, steps, lock

    def send(self, segment: ir.Segment) -> None:
        with self._lock:
            self._steps.append({"send": to_json(segment)})
        self._session.send(segment)

    def cancel(self) -> None:
        self._session.cancel()


def about(engine: Any) -> dict[str, Any]:
    """What decides an engine's answers."""
    info = engine.get_server_info()
    options = {name: info[name] for name in _OPTIONS}
    return {"model": engine.config.model_name, "weights": engine.weights_hash(), "options": options}


def read(path: str) -> dict[str, Any]:
    """A trace. Raises ConfigError for a file that is none."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no trace {path}", option="file")
    if file.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES} bytes: no trace is as large", option="file")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no trace, or a torn one: {error}", option="file") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("programs"), list):
        raise ConfigError(f"{path} is no trace: `sgl run --record {path} FILE` writes one", option="file")
    if found.get("v") != VERSION:
        raise ConfigError(
            f"{path} is a trace of version {found.get('v')!r}, and this sgl reads {VERSION}", option="file"
        )
    if not isinstance(found.get("options"), dict):
        raise ConfigError(f"{path} does not say what engine it is of", option="file")
    return found


def replay(path: str, engine: Any, backend: Backend, say: Callable[[str], None]) -> None:
    """Run a trace again. Raises ConfigError for another model or a wrong trace, and ProgramError with the place of the
    first difference."""
    trace = read(path)
    here = about(engine)
    there = trace["options"]
    pairs = [(name, there.get(name), its) for name, its in here["options"].items()]
    others = "; ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in pairs if old != new)
    if trace.get("weights") != here["weights"]:
        raise ConfigError(
            f"{path} is of {trace.get('model')!r} with other weights ({str(trace.get('weights'))[:12]}…) than "
            f"{here['model']!r} has here ({here['weights'][:12]}…){others and '; ' + others}",
            option="model",
        )
    if others:
        say(f"sgl: the engine is another, so logprobs, and with them texts, may differ: {others}")
    elif not there.get("deterministic"):
        say("sgl: recorded without deterministic=True, so the last digits of logprobs may differ")
    num_nodes = 0
    for number, recorded in enumerate(trace["programs"], 1):
        try:
            program = program_from_wire(recorded["program"])
            steps = [*recorded["steps"]]
            num_nodes += _Replayed(number, program, steps, backend, engine).run()
        except (KeyError, TypeError, InvalidRequest) as error:
            raise ConfigError(f"{path}: program {number} is no program's trace: {error}", option="file") from error
    if not num_nodes:
        has = f"{len(trace['programs'])} programs without a value" if trace["programs"] else "no program"
        raise ConfigError(
            f"nothing was replayed: {path} has {has}; record a file that runs a program with a gen or select",
            option="file",
        )
    say(f"{num_nodes} values of {len(trace['programs'])} programs are the same")


class _Replayed:
    """One program, run again."""

    def __init__(
        self, number: int, program: ir.Program, steps: list[dict[str, Any]], backend: Backend, engine: Any
    ) -> None:
        self._number, self._program, self._steps, self._engine = number, program, steps, engine
        self._news = threading.Condition()
        self._found: dict[tuple[str, Any, Any], dict[str, Any]] = {}
        self._is_done = False
        self._names: dict[int, list[str]] = {}  # of each stream's nodes
        self._checker = Checker(program, Limits())
        self._session = backend.open(program, self._sink)

    def run(self) -> int:
        """How many values were compared."""
        count = 0
        try:
            for step in self._steps:
                if "send" in step:
                    segment = self._checker.segment(step["send"])
                    for stream, node in segment.nodes:
                        self._names.setdefault(stream, []).append(getattr(node, "name", None) or node.op)
                    self._session.send(segment)
                else:
                    count += self._compare(step["event"])
        finally:
            self._session.cancel()
        return count

    def _sink(self, event: ir.Event) -> None:
        note = _note(event)
        with self._news:
            if note is not None:
                self._found[_key(note)] = note
            self._is_done |= isinstance(event, ir.Done)
            self._news.notify_all()

    def _compare(self, expected: Mapping[str, Any]) -> int:
        key = _key(expected)
        with self._news:
            if not self._news.wait_for(lambda: key in self._found or self._is_done, _PATIENCE):
                raise ProgramError(f"{self._place(expected)}: nothing came for {_PATIENCE:g} s")
            found = self._found.get(key)
        if found is None:
            others = [its for its in self._found.values() if "error" in its]
            raise ProgramError(f"{self._place(expected)}: expected {_short(expected)}, found {others or 'nothing'}")
        if found.get("value") != expected.get("value") or found.get("text") != expected.get("text"):
            raise ProgramError(f"{self._place(expected)}, {self._difference(expected, found)}")
        if (its := _first(expected.get("logprobs"), found.get("logprobs"))) is not None:
            raise ProgramError(f"{self._place(expected)}, {its[0]}: expected {its[1]}, found {its[2]}")
        return "text" in found

    def _place(self, note: Mapping[str, Any]) -> str:
        names, index = self._names.get(note["stream"], []), note["index"]
        name = names[index] if isinstance(index, int) and index < len(names) else index
        return f"program {self._number} ({self._program.name}), {name!r} of stream {note['stream']}"

    def _difference(self, expected: Mapping[str, Any], found: Mapping[str, Any]) -> str:
        """Where two texts part, in tokens."""
        tokenizer = self._engine.tokenizer
        texts = [_text(its) for its in (expected, found)]
        ids = [tokenizer.encode(text) for text in texts]
        first = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
        shown = [tokenizer.decode(its[first : first + 8]) for its in ids]
        return f"token {first}: expected {shown[0]!r}, found {shown[1]!r}"


def _note(event: ir.Event) -> dict[str, Any] | None:
    """What a trace keeps of an event."""
    if isinstance(event, ir.NodeDone):
        its: dict[str, Any] = {"kind": "done", "stream": event.stream, "index": event.index, "text": event.text}
        its["value"] = event.value
        samples = event.meta.get("samples", [event.meta])
        logprobs = [{name: of for name, of in meta.items() if name.endswith("logprobs")} for meta in samples]
        if any(logprobs):
            its["logprobs"] = json.loads(json.dumps(logprobs))
        return its
    if isinstance(event, ir.Need):
        return {"kind": "need", "stream": event.stream, "index": event.index}
    if isinstance(event, ir.NodeFailed):
        return {"kind": "failed", "stream": event.stream, "index": event.index, "error": str(event.error)}
    return None


def _key(note: Mapping[str, Any]) -> tuple[str, Any, Any]:
    return note["kind"], note["stream"], note["index"]


def _text(note: Mapping[str, Any]) -> str:
    value = note.get("value", note.get("text"))
    return value if isinstance(value, str) else "\n".join(map(str, value or ()))


def _short(note: Mapping[str, Any]) -> str:
    return repr(_text(note)[:80]) if "text" in note else str(note.get("error", "a question for tools"))


def _first(expected: Any, found: Any, where: str = "logprobs") -> tuple[str, Any, Any] | None:
    """Where two of JSON begin to differ, and what is there."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        pairs = [(f"{where}.{key}", expected[key], found[key]) for key in expected]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = [(f"{where}[{i}]", *both) for i, both in enumerate(zip(expected, found, strict=True))]
    else:
        return None if expected == found else (where, expected, found)
    firsts = (_first(a, b, its) for its, a, b in pairs)
    return next((first for first in firsts if first is not None), None)
