"""Engines that speculate with a draft model or an EAGLE-3 head give plain decoding's tokens, whatever happens."""

from __future__ import annotations

import json
import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import sgl
from sgl import Engine
from sgl.errors import ConfigError
from sgl.runtime.speculate.budget import Budget
from tests.every_draft import stop_its_clock
from tests.tiny_heads import tiny_head
from tests.tiny_models import tiny_checkpoint

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "seed": 3}
DRAFTERS: dict[str, dict[str, Any]] = {
    "random": {"speculative_algorithm": "DRAFT", "speculative_draft_model_path": "draft"},
    "equal": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "target"},
    "eagle": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "head"},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["alpha", "beta"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
CONSTRAINTS: list[dict[str, Any]] = [{}, {}, {"json_schema": SCHEMA}, {"regex": "(ab|cd){3,9}[0-9]+"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts")
    tiny_checkpoint(path / "target", with_tokenizer=True)
    tiny_checkpoint(path / "draft", with_tokenizer=True, **SMALL)
    tiny_head(path / "head")
    return path


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of engines that must draft, however busy this machine is."""
    stop_its_clock(monkeypatch)


def engine(folder: Path, drafter: str | None, **options: Any) -> Engine:
    chosen = dict(DRAFTERS[drafter]) if drafter else {"speculative_algorithm": "off"}
    if drafter:
        chosen["speculative_draft_model_path"] = str(folder / chosen["speculative_draft_model_path"])
    return Engine(model_path=str(folder / "target"), check_ledger=True, random_seed=0, **{**chosen, **options})


def requests(rng: random.Random, count: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Some prompts begin alike."""
    common = [rng.randrange(3, 250) for _ in range(40)]
    prompts, params = [], []
    for number in range(count):
        own = [rng.randrange(3, 250) for _ in range(rng.randint(1, 30))]
        prompts.append(common[: rng.choice([0, 16, 24, 40])] + own)
        params.append(
            {
                "temperature": rng.choice([0.0, 0.0, 0.8, 1.5]),
                "top_p": rng.choice([1.0, 0.9]),
                "top_k": rng.choice([-1, 12]),
                "seed": rng.randrange(1 << 30),
                "max_new_tokens": rng.randint(1, 40),
                "ignore_eos": rng.random() < 0.5,
                "repetition_penalty": 1.3 if number % 5 == 4 else 1.0,
                "logit_bias": {"7": 2.0} if rng.random() < 0.2 else None,
                "min_new_tokens": rng.choice([0, 0, 1]),
                "stop": rng.choice([None, None, ["e", "qu"]]),
                **rng.choice(CONSTRAINTS),
            }
        )
    return prompts, params


def answers(its: Engine, prompts: list[list[int]], params: list[dict[str, Any]], **options: Any) -> list[Any]:
    results = its.generate(input_ids=prompts, sampling_params=params, **options)
    return [(result["output_ids"], result["text"], result["meta_info"]["finish_reason"]) for result in results]


def accepted(its: Engine) -> float:
    counters = its._loop.scheduler.counters
    return counters.verified_tokens / max(1, counters.drafted_tokens)


@pytest.mark.usefixtures("still_clock")
@pytest.mark.costly
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 7, "page_size": 4, "max_total_tokens": 288}])
def test_outputs_are_those_of_plain_decoding(drafter: str, options: dict[str, Any], folder: Path) -> None:
    """Also in a few pages, where requests are retracted, and for prompts in parts."""
    prompts, params = requests(random.Random(len(options)), 10)
    with engine(folder, None, **options) as plain:
        expected = [answers(plain, prompts, params) for _ in range(2)]
    assert expected[0] == expected[1]
    with engine(folder, drafter, **options) as its:
        assert answers(its, prompts, params) == expected[0]
        assert answers(its, prompts, params) == expected[0]  # from the cache
        assert its._loop.scheduler.counters.drafted_tokens


@pytest.mark.usefixtures("still_clock")
def test_a_head_without_an_embedding_drafts_for_a_model_that_is_cut_among_ranks(folder: Path) -> None:
    prompts, params = requests(random.Random(8), 4)
    params = [{**each, "max_new_tokens": 20} for each in params]
    with engine(folder, "eagle") as alone:
        expected = answers(alone, prompts, params)
    with engine(folder, "eagle", tp_size=2) as its:
        assert answers(its, prompts, params) == expected
        assert its._loop.scheduler.counters.drafted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", range(2))
def test_outputs_are_those_of_plain_decoding_for_any_options(drafter: str, seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "chunked_prefill_size": rng.choice([1, 7, 64]),
        "page_size": rng.choice([1, 4, 16]),
        "max_total_tokens": rng.choice([256, 320, 4096]),
        "disable_overlap_schedule": rng.random() < 0.5,
        "disable_radix_cache": rng.random() < 0.3,
        "disable_jump_forward": rng.random() < 0.3,
        "attention_backend": rng.choice(["torch", "cpu"]),
    }
    more = {"return_logprob": True, "top_logprobs_num": 2} if rng.random() < 0.5 else {}
    drafts = {"speculative_num_draft_tokens": rng.choice([3, 5, 12]), "speculative_num_steps": rng.choice([1, 2])}
    prompts, params = requests(rng, 16)
    with engine(folder, None, **options) as plain:
        expected = answers(plain, prompts, params, **more)
    with engine(folder, drafter, **options, **drafts) as its:
        for _ in range(2):
            assert answers(its, prompts, params, **more) == expected


@pytest.mark.usefixtures("still_clock")
def test_a_model_that_drafts_for_itself_is_always_right(folder: Path) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 250) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    params = [
        {"temperature": rng.choice([0.0, 0.7, 1.0]), "seed": i, "max_new_tokens": 60, "ignore_eos": True}
        for i in range(6)
    ]
    with engine(folder, "equal", chunked_prefill_size=16) as its:
        for _ in range(2):
            answers(its, prompts, params)
        assert accepted(its) == 1.0
        counters = its._loop.scheduler.counters
        assert counters.generated_tokens > 4 * counters.steps


@pytest.mark.usefixtures("still_clock")
def test_a_head_forgets_what_it_read_of_weights_that_are_gone(folder: Path, tmp_path: Path) -> None:
    prompts, params = requests(random.Random(4), 6)
    tiny_checkpoint(tmp_path, with_tokenizer=True, seed=7)
    with Engine(str(tmp_path), speculative_algorithm="off", random_seed=0) as plain:
        expected = answers(plain, prompts, params)
    with engine(folder, "eagle") as its:
        assert answers(its, prompts, params) != expected
        [model] = its._loop._speculator._models
        epochs = [model._epoch]
        its.update_weights_from_disk(str(tmp_path))
        epochs.append(model._epoch)
        assert answers(its, prompts, params) == expected
        assert its.flush_cache()
        assert epochs[0] < epochs[1] < model._epoch


@pytest.mark.usefixtures("still_clock")
def test_a_draft_model_of_random_weights_needs_no_files(folder: Path, tmp_path: Path) -> None:
    """As its target; the same shape has the same."""
    (tmp_path / "config.json").write_bytes((folder / "target" / "config.json").read_bytes())
    options = {"model_path": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True}
    drafts = {"speculative_algorithm": "DRAFT", "speculative_draft_model_path": str(tmp_path)}
    with Engine(**options, **drafts) as its:
        its.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 30, "ignore_eos": True, "seed": 1})
        assert accepted(its) == 1.0


@pytest.mark.parametrize("drafter", ["random", "eagle"])
def test_where_other_rows_left_no_page_nothing_is_drafted(
    drafter: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a row's last token: what drafts would read there is no page of its own."""
    monkeypatch.setattr(Budget, "divide", lambda self, num_rows, drafts, **others: [number for _, number in drafts])
    prompts, params = [[5, 6, 7, 8]], [{"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True}]
    with engine(folder, None, page_size=1) as plain:
        expected = answers(plain, prompts, params)
    with engine(folder, drafter, page_size=1) as its:
        speculator, memory = its._loop._speculator, its._scheduler.memory
        draft, looks = speculator.draft, list[bool]()

        def draft_among_others(hinted: Any) -> None:
            taken = memory.cache.alloc(memory.available_pages)
            assert taken is not None
            looks.append(speculator.wants_results)
            draft(hinted)
            memory.pool.free(taken)

        monkeypatch.setattr(speculator, "draft", draft_among_others)
        assert answers(its, prompts, params) == expected
        assert any(looks)
        assert its._loop.scheduler.counters.drafted_tokens == 0


@pytest.mark.usefixtures("still_clock")
@pytest.mark.parametrize("drafter", ["random", "eagle"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_drafter_that_does_not_pay_leaves_steps_as_they_are(
    drafter: str, run_ahead: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No passes of its own, no hidden states, no looks: until it is tried again, with requests that begin then."""
    prompts = [[5, 6, 7, 8], list(range(20, 60))]
    params: list[dict[str, Any]] = [{"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True}] * 2
    with engine(folder, None) as plain:
        expected = answers(plain, prompts, params)
    with engine(folder, drafter, disable_overlap_schedule=not run_ahead) as its:
        speculator, runner, counters = its._loop._speculator, its._started.runner, its._loop.scheduler.counters
        [model] = speculator._models
        batches: list[Any] = []
        looks: list[bool] = []
        forward = runner.forward

        def noted(batch: Any) -> Any:
            batches.append(batch)
            looks.append(speculator.wants_results)
            return forward(batch)

        with monkeypatch.context() as patch:
            patch.setattr(Budget, "divide", lambda self, num_rows, drafts, **others: [0] * len(drafts))
            answers(its, prompts, params)
            assert not speculator._trials.follows
            patch.setattr(runner, "forward", noted)
            patch.setattr(model, "_runner", None)
            patch.setattr(model, "propose", None)
            patch.setattr(model, "observe", None)
            drafted = counters.drafted_tokens
            assert answers(its, prompts, params) == expected
            assert counters.drafted_tokens == drafted
        assert len(batches) == 30
        assert not any(batch.is_observed for batch in batches)
        assert not any(looks), "steps may run ahead"
        its._loop.call(lambda: speculator._trials._rests.update({1: 0, 2: 0}))  # a trial is due
        for _ in range(8):
            assert answers(its, prompts, params) == expected
        assert counters.drafted_tokens > drafted
        assert its.check_ledger() == []


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_programs_fork_and_select_alike(drafter: str, folder: Path) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "Once upon a time" * 2
        branches = s.fork(3)
        for number, branch in enumerate(branches):
            branch += f" {number}:" + sgl.gen("x", max_tokens=20, temperature=0.9, ignore_eos=True)
        s += (
            branches[0]["x"]
            + sgl.select("y", ["one", "two", "three"])
            + sgl.gen("z", max_tokens=15, temperature=0.0)
        )

    found = []
    for name in (None, drafter):
        with engine(folder, name) as its:
            state = program.run(seed=3, backend=its)
            found.append((state["y"], state["z"], state.text()))
    assert found[0] == found[1]


@pytest.mark.parametrize("drafter", ["random", "eagle"])
def test_requests_may_be_aborted_between_drafts(drafter: str, folder: Path) -> None:
    prompts, params = requests(random.Random(9), 6)
    with engine(folder, None) as plain:
        expected = answers(plain, prompts, params)
    with engine(folder, drafter) as its:
        for _ in range(3):
            stream: Generator[Any] = its.generate(
                input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 200, "ignore_eos": True}, stream=True
            )
            next(stream)
            stream.close()
            assert answers(its, prompts, params) == expected


@pytest.mark.parametrize(
    ("path", "algorithm", "says"),
    [
        ("other", "DRAFT", "as token 200, which the target's has as .*smaller models of the same family"),
        ("fewer", "DRAFT", "has 300 token ids, the target has 384.*needs the target's tokenizer"),
        ("target", "EAGLE3", "LlamaForCausalLM as an EAGLE-3 head"),
        ("head", "DRAFT", "Eagle3"),
        ("wide", "EAGLE3", "a hidden_size of 128, and .* has one of 64"),
        ("draft", "NGRAM", "a speculative_algorithm that asks a model, not 'NGRAM'"),
    ],
)
def test_what_cannot_draft_for_the_model_is_refused_by_name(
    path: str, algorithm: str, says: str, folder: Path
) -> None:
    if path == "wide" and not (folder / path).exists():
        tiny_head(folder / path, target_hidden_size=128)
    if path == "fewer":
        tiny_checkpoint(folder / path, vocab_size=300, **SMALL)
    if path == "other":
        tiny_checkpoint(folder / path, with_tokenizer=True, **SMALL)
        tokens = json.loads((folder / path / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = tokens["model"]["vocab"]
        first, second = sorted(vocabulary, key=vocabulary.get)[200:202]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (folder / path / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    with pytest.raises((ConfigError, sgl.errors.ModelError), match=f"(?s){says}"):
        Engine(
            model_path=str(folder / "target"),
            speculative_algorithm=algorithm,
            speculative_draft_model_path=str(folder / path),
        )
