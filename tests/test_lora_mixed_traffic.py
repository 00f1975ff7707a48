"""Constraints, forks, selects and plain requests with adapters that come and go meanwhile equal engines of models with
the adapters' weights merged."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl.errors import InvalidRequest, ProgramError
from tests.tiny_adapters import ALL, merged, tiny_adapter
from tests.tiny_models import byte_tokenizer, tiny_checkpoint

KINDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 4, "targets": ALL, "lora_alpha": 6},
    "two": {"rank": 8, "targets": ("q_proj", "down_proj"), "use_rslora": True},
    "one": {"rank": 1, "targets": ("v_proj",), "lora_alpha": 3},
}
OPTIONS: dict[str, Any] = {"device": "cpu", "page_size": 4, "check_ledger": True, "enable_lora": True}
OPTIONS |= {"max_lora_rank": 8, "max_total_tokens": 2048, "random_seed": 3}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEXTS = ["one and two and one and", "one and two and then", "two or three", "the list: 1, 2, 3,"]
PARAMS: list[dict[str, Any]] = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 9, "ignore_eos": True},
    {"max_new_tokens": 16, "regex": r"(ab|cd|[e-k]){3,9}!?"},
    {"max_new_tokens": 40, "json_schema": SCHEMA},
    {"max_new_tokens": 12, "temperature": 0.8, "sampling_seed": 5},
    {"max_new_tokens": 14, "regex": r"\d+( and \d+)*", "temperature": 1.0, "sampling_seed": 11},
    {"max_new_tokens": 6, "n": 2, "temperature": 0.7, "sampling_seed": 2},
]
TURN: dict[str, Any] = {
    "max_new_tokens": 9,
    "regex": "[a-z ]{2,9}",
}  # its text tells its tokens


@sgl.function
def branches(s: sgl.ProgramState, start: str) -> None:
    s += start
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f" {i}:" + sgl.gen("x", max_tokens=6, temperature=0, regex=r"[a-e]{2,5}" if i else None)
    s += "|".join(fork["x"] for fork in forks)
    s += ", then " + sgl.select("which", ["one", "two", "twenty", "none"])
    s += sgl.gen("object", max_tokens=40, temperature=0, json_schema=SCHEMA)


@sgl.function
def in_turn(s: sgl.ProgramState, start: str, names: list[str | None]) -> None:
    """Each with another adapter behind what the others wrote."""
    s += start
    for number, name in enumerate(names):
        s += f" {number}: "
        s.set_var(f"before {number}", s.text())
        s += sgl.gen(f"{number}", max_tokens=9, temperature=0, regex=TURN["regex"], extra={"lora_path": name})


class Oracles:
    """An engine for each adapter's merged model, and what it said."""

    def __init__(self, engines: dict[str | None, sgl.Engine]) -> None:
        self._engines = engines
        self._said: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def generated(self, kind: str | None, text: str, params: dict[str, Any]) -> Any:
        return self._once(("generated", kind, text, repr(params)), lambda: said(self._engines[kind], text, params))

    def branches(self, kind: str | None, text: str) -> Any:
        def run() -> Any:
            return branched(branches.run(start=text, backend=self._engines[kind]))

        return self._once(("branches", kind, text), run)

    def _once(self, key: Any, run: Any) -> Any:
        with self._lock:
            if key not in self._said:
                self._said[key] = run()
            return self._said[key]


def said(engine: sgl.Engine, text: str, params: dict[str, Any], **options: Any) -> Any:
    result = engine.generate(text, {"temperature": 0.0, **params}, **options)
    return [each["text"] for each in (result if isinstance(result, list) else [result])]


def branched(state: sgl.ProgramState) -> tuple[str, ...]:
    return state.text(), state["which"], state["object"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("mixed") / "model", vocab_size=259, with_tokenizer=True)


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    return {
        name: tiny_adapter(model.parent / name, model, seed=seed, **kind)
        for seed, (name, kind) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="module")
def oracles(model: Path, adapters: dict[str, Path]) -> Iterator[Oracles]:
    plain = {name: its for name, its in OPTIONS.items() if "lora" not in name}
    with ExitStack() as stack:
        engines: dict[str | None, sgl.Engine] = {}
        for kind, adapter in [(None, None), *adapters.items()]:
            folder = model.parent / f"merged {kind}"
            its = merged(model, adapter)
            its.save_pretrained(folder)
            byte_tokenizer(its.config.vocab_size).save_pretrained(folder)
            engines[kind] = stack.enter_context(sgl.Engine(model_path=folder, speculative_algorithm="off", **plain))
        yield Oracles(engines)


class Names:
    """The adapters under names that come and go: what may be loaded as each, one change after the other."""

    def __init__(self, engine: sgl.Engine, adapters: dict[str, Path]) -> None:
        self._engine, self._adapters = engine, adapters
        self.history: dict[str, list[set[str | None]]] = {"x": [{None}], "y": [{None}]}

    def change(self, rng: random.Random) -> None:
        name = rng.choice(sorted(self.history))
        its = self.history[name]
        if None not in its[-1]:
            its.append({*its[-1], None})
            self._engine.unload_lora_adapter(name)
            its.append({None})
        kind = rng.choice([None, *KINDS, *KINDS])
        if kind is not None:
            its.append({None, kind})
            self._engine.load_lora_adapter(name, str(self._adapters[kind]), pinned=rng.random() < 0.2)
            its.append({kind})

    def now(self) -> dict[str, int]:
        return {name: len(its) for name, its in self.history.items()}


class Traffic:
    """Requests that are compared."""

    def __init__(self, engine: sgl.Engine, oracles: Oracles, names: Names) -> None:
        self._engine, self._oracles, self._names = engine, oracles, names
        self.counts = Counter[str]()

    def send(self, rng: random.Random) -> None:
        names = [rng.choice([None, *KINDS, "x", "x", "y"]) for _ in range(3)]
        do = rng.choice([self._generate, self._generate, self._branch, self._take_turns, self._leave])
        then = self._names.now()
        try:
            do(rng, names, rng.choice(TEXTS), then)
            self.counts["served"] += 1
        except (InvalidRequest, ProgramError) as error:
            if "LoRA adapter" not in str(error):
                raise
            assert any(None in self._meant(then, name) for name in names if name is not None)
            self.counts["refused"] += 1

    def _meant(self, then: dict[str, int], name: str | None) -> set[str | None]:
        """The adapters that a name may have meant since then, and None if it may have been none's."""
        history = self._names.history.get(name or "")
        return {name} if history is None else set().union(*history[then[name or ""] - 1 :])

    def _check(self, then: dict[str, int], name: str | None, found: Any, text: str, params: dict[str, Any]) -> None:
        kinds = self._meant(then, name) - ({None} if name else set())
        expected = {kind: self._oracles.generated(kind, text, params) for kind in kinds}
        assert found in expected.values(), f"{name}, {text!r}, {params}: {found}, not one of {expected}"

    def _generate(self, rng: random.Random, names: list[str | None], text: str, then: dict[str, int]) -> None:
        params, options = rng.choice(PARAMS), {"return_logprob": True} if rng.random() < 0.3 else {}
        self._check(then, names[0], said(self._engine, text, params, lora_path=names[0], **options), text, params)

    def _branch(self, rng: random.Random, names: list[str | None], text: str, then: dict[str, int]) -> None:
        found = branched(branches.run(start=text, backend=self._engine, extra={"lora_path": names[0]}))
        if len(kinds := self._meant(then, names[0])) == 1:
            assert found == self._oracles.branches(*kinds, text), f"{names[0]}, {text!r}"

    def _take_turns(self, rng: random.Random, names: list[str | None], text: str, then: dict[str, int]) -> None:
        state = in_turn.run(start=text, names=names, backend=self._engine)
        for number, name in enumerate(names):
            self._check(then, name, [state[f"{number}"]], state[f"before {number}"], TURN)

    def _leave(self, rng: random.Random, names: list[str | None], text: str, then: dict[str, int]) -> None:
        """Drop a stream after an event or two."""
        params = {"max_new_tokens": 60, "ignore_eos": True}
        events = self._engine.generate(text, params, lora_path=names[0], stream=True)
        for _ in range(rng.randrange(1, 3)):
            next(events)
        events.close()


def meet(model: Path, adapters: dict[str, Path], oracles: Oracles, seed: int, count: int, **options: Any) -> None:
    """Four threads send, a fifth loads and unloads."""
    with sgl.Engine(model_path=model, lora_paths=adapters, **{**OPTIONS, **options}) as engine:
        names = Names(engine, adapters)
        traffic = Traffic(engine, oracles, names)
        failures: list[BaseException] = []
        is_over = threading.Event()

        def watched(run: Callable[[], None]) -> None:
            try:
                run()
            except BaseException as error:
                failures.append(error)

        def send(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            for _ in range(count):
                if not failures:
                    traffic.send(rng)

        def change() -> None:
            rng = random.Random(f"{seed} changes")
            while not is_over.wait(rng.uniform(0, 0.05)):
                names.change(rng)

        threads = [threading.Thread(target=watched, args=(partial(send, number),)) for number in range(4)]
        changing = threading.Thread(target=watched, args=(change,))
        for thread in (*threads, changing):
            thread.start()
        for thread in threads:
            thread.join()
        is_over.set()
        changing.join()
        if failures:
            raise failures[0]
        assert engine.check_ledger() == []
        assert traffic.counts["served"] > count


@pytest.mark.parametrize(
    "options",
    [
        {"max_loras_per_batch": 3, "max_total_tokens": 512, "speculative_algorithm": "off"},
        {"max_loras_per_batch": 4, **DRAFTS},
    ],
)
def test_mixed_traffic_equals_merged_models(
    model: Path, adapters: dict[str, Path], oracles: Oracles, options: dict[str, Any]
) -> None:
    meet(model, adapters, oracles, 1, 10, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"max_loras_per_batch": 3, "max_total_tokens": 384, "chunked_prefill_size": 5},
        {"max_loras_per_batch": 3, **DRAFTS, "max_total_tokens": 512},
        {"max_loras_per_batch": 3, "enable_hierarchical_cache": True, "max_total_tokens": 384},
        {"max_loras_per_batch": 3, "speculative_algorithm": "GRAMMAR", "disable_overlap_schedule": True},
    ],
)
def test_more_mixed_traffic(
    model: Path, adapters: dict[str, Path], oracles: Oracles, options: dict[str, Any], seed: int
) -> None:
    meet(model, adapters, oracles, 100 + seed, 60, **options)
