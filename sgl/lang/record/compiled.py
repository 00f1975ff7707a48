"""Compiled programs: a body's record with holes for texts, which runs without the body; kept in files and pickles."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from sgl.errors import InvalidRequest, ProgramError
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.check import Checker, program_from_wire
from sgl.lang.ir.encoding import to_json
from sgl.lang.ir.sampling import sampling_params
from sgl.lang.record.open_runs import Hold
from sgl.lang.record.opening import opened, take_sampling
from sgl.lang.record.place import Place
from sgl.lang.record.state import ProgramState
from sgl.lang.record.stream import Stream

MAX_FILE_BYTES = 64_000_000

Recorded = tuple[int, ir.Node, Place | None]  # a node of a stream


class _Program(Protocol):
    """The part of `SglFunction` used here."""

    __name__: str

    def bind(self, **kwargs: Any) -> Any: ...
    def compile(self, *, backend: Any = None, **kwargs: Any) -> CompiledProgram: ...


class CompiledProgram:
    """Recorded `nodes` under a `header`, whose `args` are the holes. `made_of`: the program and the arguments that
    it was compiled of, if not loaded from a file."""

    def __init__(
        self,
        header: ir.Program,
        nodes: Sequence[Recorded],
        backend: Any = None,
        made_of: tuple[_Program, dict[str, Any]] | None = None,
    ) -> None:
        self.header = header
        self.nodes = nodes
        self._backend = backend
        self._made_of = made_of

    def __repr__(self) -> str:
        return f"CompiledProgram({self.header.name}({', '.join(self.args)}))"

    @property
    def args(self) -> list[str]:
        """The arguments that a run fills in."""
        return list(self.header.args)

    def print_graph(self) -> None:
        """Print every node with its path."""
        paths, lengths = {0: ""}, {0: 0}
        for stream, node, _ in self.nodes:
            index = lengths[stream]
            sys.stdout.write(f"{ir.node_path(paths[stream], index)}: {node!r}\n")
            lengths[stream] += 1
            for i, child in enumerate(node.children if isinstance(node, ir.Fork) else ()):
                paths[child], lengths[child] = ir.branch_path(paths[stream], index, i), 0

    def run(
        self, *, backend: Any = None, stream: bool = False, chat_template: Any = None, **kwargs: Any
    ) -> ProgramState:
        """Run with the open arguments' values; other keywords are sampling parameters. Returns before generation is
        done: reading waits."""
        header = self.header
        args = {name: kwargs.pop(name) for name in list(kwargs) if name in header.args}
        if missing := sorted(header.args.keys() - args.keys()):
            raise TypeError(f"program {header.name!r} lacks its arguments {', '.join(missing)}")
        if wrong := [name for name, value in args.items() if not isinstance(value, str)]:
            raise TypeError(f"the arguments of a compiled program are texts; {', '.join(wrong)} is not")
        run = opened(
            header.name,
            {**header.defaults, **take_sampling(kwargs), **kwargs},
            backend=self._backend if backend is None else backend,
            chat_template=header.chat_template if chat_template is None else chat_template,
            stream=stream,
            speculate_tokens=header.speculate_tokens,
            args=args,
        )
        _replay(self.nodes, run.root)
        run.body_ended()
        return ProgramState(run, run.root, hold=Hold(run))

    def run_batch(
        self, rows: Sequence[Mapping[str, Any]], *, return_exceptions: bool = False, **options: Any
    ) -> list[Any]:
        """Run all rows to their ends. Raises the first error, unless `return_exceptions` leaves errors in the list."""
        states = [self.run(**row, **options) for row in rows]
        errors = [state.error() for state in states]
        if return_exceptions:
            return [error or state for error, state in zip(errors, states, strict=True)]
        for error in filter(None, errors):
            raise error
        return list(states)

    def save(self, path: str | Path) -> None:
        """Write the program for `sgl.load` and `sgl run`. Python types stay behind: `value` gives what JSON has. Raises
        InvalidRequest for what no file can hold: tools, and templates that are no text."""
        data = self._to_json()
        try:
            Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except (OSError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the program cannot be written to {path}: {error}", param="path") from error

    def _to_json(self) -> dict[str, Any]:
        if any(isinstance(node, ir.Gen) and node.tools for _, node, _ in self.nodes):
            raise InvalidRequest(f"program {self.header.name!r} has tools, which no file can hold", param="tools")
        header = to_json(self.header)
        del header["seed"]
        segment = to_json(ir.Segment(tuple((stream, node) for stream, node, _ in self.nodes)))
        return {**header, "args": self.args, "nodes": segment["nodes"]}

    def __reduce__(self) -> Any:
        if self._made_of is None:
            return _from_json, (self._to_json(), "a pickle")
        program, given = self._made_of
        return _compiled, (program, given, self._backend)


class Uncompiled(CompiledProgram):
    """A program that calls others, in place of a compiled one: each run executes its body."""

    def __init__(self, program: _Program, given: dict[str, Any], backend: Any) -> None:
        super().__init__(ir.Program(program.__name__, 0), (), backend, (program, given))
        self._run = program.bind(**given).run

    def print_graph(self) -> None:
        sys.stdout.write(f"{self.header.name} calls other programs\n")

    def run(self, *, backend: Any = None, **kwargs: Any) -> ProgramState:
        state: ProgramState = self._run(**kwargs, backend=self._backend if backend is None else backend)
        return state

    def save(self, path: str | Path) -> None:
        raise ProgramError(f"program {self.header.name!r} calls other programs, and a file holds one")


def load(path: str | Path) -> CompiledProgram:
    """The program that `CompiledProgram.save` wrote there. Raises InvalidRequest; executes nothing."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} has more than {MAX_FILE_BYTES} bytes: is it a program?", param="path")
        data = json.loads(text)
    except OSError as error:
        raise InvalidRequest(f"no program can be read from {path}: {error.strerror}", param="path") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{path} is no program: it is not JSON ({error})", param="path") from error
    return _from_json(data, str(path))


def _from_json(data: Any, source: str) -> CompiledProgram:
    """A checked program. Raises InvalidRequest, which names the source and the place in it."""
    try:
        if not isinstance(data, dict) or not {"args", "nodes"} <= data.keys():
            raise InvalidRequest("a saved program is an object with v, name, args and nodes", param="program")
        names, nodes = data["args"], data["nodes"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidRequest(f"args must be a list of names, not {names!r:.80}", param="args")
        header = {key: value for key, value in data.items() if key not in ("args", "nodes")}
        for key in ("seed", "stream", "lease_s", "deadline_s"):
            if key in header:
                raise InvalidRequest(f"{key} is an option of a run, not of a saved program", param=key)
        program = program_from_wire({**header, "seed": 0, "args": dict.fromkeys(names, "")})
        segment = Checker(program).segment({"nodes": nodes, "final": True})
        if any(isinstance(node, ir.Gen) and node.tools for _, node in segment.nodes):
            raise InvalidRequest("a gen has tools, which no file can hold", param="tools")
        program = replace(program, defaults=sampling_params(**program.defaults))
        checked = [(stream, _checked(node), None) for stream, node in segment.nodes]
    except InvalidRequest as error:
        raise InvalidRequest(f"{source} is no program of this version: {error}", param=error.param) from error
    return CompiledProgram(program, checked)


def _checked(node: ir.Node) -> ir.Node:
    return replace(node, params=sampling_params(**node.params)) if isinstance(node, ir.Gen) else node


def _compiled(program: _Program, given: dict[str, Any], backend: Any) -> CompiledProgram:
    return program.compile(backend=backend, **given)


def _replay(nodes: Sequence[Recorded], root: Stream) -> None:
    """Record nodes again, from `root` on; streams may be numbered otherwise."""
    streams = {0: root}
    for source, node, place in nodes:
        stream = streams[source]
        if isinstance(node, ir.Fork):
            streams |= zip(node.children, stream.fork(len(node.children)), strict=True)
        elif isinstance(node, ir.Join):
            stream.join([streams[child] for child in node.children], node.mode)
        elif isinstance(node, ir.SetVar):
            stream.set(node.name, node.value)
        elif isinstance(node, ir.Ref):
            stream.append(replace(node, stream=streams[node.stream].id), place)
        elif not isinstance(node, ir.ToolResults):  # recording the gen adds them
            stream.append(node, place)
