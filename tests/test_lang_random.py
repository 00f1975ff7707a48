"""Random programs against a reference that is plain Python: texts, values and streams, whoever executes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl
from tests.lang_mocks import MockBackend, ProgramBackend, text_hash

NAMES = st.sampled_from("xyz")
TEXTS = st.text("ab ,", min_size=1, max_size=4)
LEAVES = (
    st.tuples(st.just("text"), TEXTS)
    | st.tuples(st.just("gen"), NAMES)
    | st.tuples(st.just("read"), NAMES)
    | st.tuples(st.just("ref"), NAMES, st.sampled_from(["plain", "strip", "upper", "split", "slice", "replace"]))
    | st.tuples(st.just("select"), NAMES, st.lists(TEXTS, min_size=1, max_size=3))
    | st.tuples(st.just("set"), NAMES, TEXTS)
    | st.tuples(st.just("meta"), NAMES)
    | st.tuples(st.just("all"))
)
PLANS = st.recursive(
    st.lists(LEAVES, max_size=5),
    lambda inner: st.lists(
        LEAVES
        | st.tuples(st.just("scope"), NAMES, inner)
        | st.tuples(st.just("copy"), inner)
        | st.tuples(st.just("turn"), st.sampled_from(["user", "assistant"]), st.lists(LEAVES, max_size=3))
        | st.tuples(
            st.just("fork"), st.lists(inner, min_size=1, max_size=3), st.sampled_from(["gather", "append", "none"])
        ),
        max_size=5,
    ),
    max_leaves=12,
)


def written(prompt: str) -> str:
    """What the model writes after a text."""
    return f"<{text_hash(prompt) % 1000}>"


def chosen(choices: list[str]) -> str:
    """What the mock's log-probabilities make of a select."""
    means = [sum((ord(letter) % 32 - 32) / 32 for letter in choice) / len(choice) for choice in choices]
    return choices[max(range(len(choices)), key=means.__getitem__)]


def changed(text: str, how: str) -> str:
    """Text functions of a ref, as Python's."""
    parts = text.split(",")
    return {
        "plain": text,
        "strip": text.strip(),
        "upper": text.upper(),
        "split": parts[1] if len(parts) > 1 else "",
        "slice": text[1:-1],
        "replace": text.replace("a", "bb"),
    }[how]


@dataclass
class Reference:
    """A state that executes everything at once. `texts` are the variables that a ref can point at, `own` those that
    were set since the fork."""

    text: str = ""
    own: dict[str, None] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)

    def branch(self) -> Reference:
        return Reference(self.text, {}, dict(self.values), dict(self.texts), self.seen)

    def put(self, name: str, text: str) -> None:
        self.values[name] = self.texts[name] = text
        self.own[name] = None

    def take(self, name: str, value: Any) -> None:
        """A value that is no text of one node."""
        self.values[name] = value
        self.own[name] = None
        self.texts.pop(name, None)

    def run(self, plan: Any) -> None:
        for op, *args in plan:
            if op == "text":
                self.text += args[0]
            else:
                getattr(self, op)(*args)

    def gen(self, name: str) -> None:
        self.put(name, written(self.text))
        self.text += self.values[name]

    def read(self, name: str) -> None:
        if name in self.values:
            self.seen.append(self.values[name])

    def ref(self, name: str, how: str) -> None:
        if name in self.texts:
            self.text += changed(self.texts[name], how)

    def select(self, name: str, choices: list[str]) -> None:
        self.put(name, chosen(choices))
        self.text += self.values[name]

    def set(self, name: str, value: str) -> None:
        self.put(name, value)

    def meta(self, name: str) -> None:
        pass

    def all(self) -> None:
        self.seen.append(self.text)

    def scope(self, name: str, plan: Any) -> None:
        start = len(self.text)
        self.run(plan)
        self.put(name, self.text[start:])

    def copy(self, plan: Any) -> None:
        branch = self.branch()
        branch.run(plan)
        for name in branch.own:
            self.take(name, branch.values[name])
            if name in branch.texts:
                self.texts[name] = branch.texts[name]

    def turn(self, role: str, plan: Any) -> None:
        self.text += {"user": "USER:", "assistant": "ASSISTANT:"}[role]
        self.run(plan)
        self.text += "\n"

    def fork(self, plans: Any, mode: str) -> None:
        branches = [self.branch() for _ in plans]
        start = len(self.text)
        for branch, plan in zip(branches, plans, strict=True):
            branch.run([("text", "|"), *plan])
        if mode == "append":
            self.text += "".join(branch.text[start:] for branch in branches)
        elif mode == "gather":
            for name in dict.fromkeys(name for branch in branches for name in branch.own):
                self.take(name, [branch.values.get(name) for branch in branches])
        else:
            self.seen += [branch.text for branch in branches]


def execute(s: Any, plan: Any, seen: list[Any]) -> None:
    """The same plan in the language."""
    for op, *args in plan:
        match op:
            case "text":
                s += args[0]
            case "gen":
                s += sgl.gen(args[0])
            case "read":
                if args[0] in s:
                    seen.append(s[args[0]])
            case "ref":
                if args[0] in s:
                    append_ref(s, *args)
            case "select":
                s += sgl.select(args[0], args[1])
            case "set":
                s[args[0]] = args[1]
            case "meta":
                s.get_meta_info(args[0])
            case "all":
                seen.append(s.text())
            case "scope":
                with s.var_scope(args[0]):
                    execute(s, args[1], seen)
            case "copy":
                with s.copy() as branch:
                    execute(branch, args[0], seen)
            case "turn":
                with s.user() if args[0] == "user" else s.assistant():
                    execute(s, args[1], seen)
            case "fork":
                fork(s, *args, seen)


def append_ref(s: Any, name: str, how: str) -> None:
    """Append a reference, where the variable has one."""
    try:
        ref = s.ref(name)
    except sgl.errors.ProgramError:
        return  # a list of branches
    if how == "plain":
        s += ref
    elif isinstance(ref, sgl.lang.ir.nodes.Text):  # Python has the text already
        s += changed(ref.text, how)
    else:
        changes = {"split": ref.split(",", take=1), "slice": ref.slice(1, -1), "replace": ref.replace("a", "bb")}
        s += changes[how] if how in changes else getattr(ref, how)()


def fork(s: Any, plans: Any, mode: str, seen: list[Any]) -> None:
    """Branches with plans of their own."""
    forks = s.fork(len(plans))
    forks += "|"
    for branch, plan in zip(forks, plans, strict=True):
        execute(branch, plan, seen)
    if mode == "none":
        seen += [branch.text() for branch in forks]
    else:
        forks.join("gather_variable" if mode == "gather" else "concate_and_append")


@sgl.function
def program(s, plan, seen):
    """Any plan."""
    execute(s, plan, seen)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["calls", "programs"])
@given(plan=PLANS, stream=st.booleans())
@settings(max_examples=150)
def test_random_programs_do_what_python_would(kind: str, plan: Any, stream: bool) -> None:
    expected, seen = Reference(), []
    expected.run(plan)
    mock = MockBackend(lambda prompt, _: written(prompt.text), chat_template="default")
    backend = mock if kind == "calls" else ProgramBackend(mock)
    state = program.run(plan, seen, backend=backend, stream=stream)
    assert state.text() == expected.text
    assert seen == expected.seen
    for name, value in expected.values.items():
        assert state[name] == value
    assert "".join(state.text_iter()) == expected.text
    if kind == "programs":
        assert all(not session.is_cancelled for session in backend.sessions)
