"""Drafters that compute: what they propose equals oracles' drafts, however their KV came about."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sgl.errors import ConfigError, ModelError, UnsupportedModel, WeightsError
from sgl.kernels.attention.base import AttentionStep
from sgl.kernels.attention.torch import TorchAttention
from sgl.runtime.batch import FROM_DEVICE, Batch, RowSetup
from sgl.runtime.model.config import ModelConfig
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.draft import DraftDecoder
from sgl.runtime.model.eagle.config import EagleConfig, is_head
from sgl.runtime.model.eagle.loader import load_head
from sgl.runtime.model.kv_cache import KVCache
from sgl.runtime.model.loader import load_decoder
from sgl.runtime.model.tokens import Tokens
from sgl.runtime.runner.drafts import DraftRunner, HeadRunner
from sgl.runtime.runner.runner import ModelRunner
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.request import Request
from sgl.runtime.scheduler.step import Step
from sgl.runtime.speculate.drafter import DraftRequest
from sgl.runtime.speculate.eagle import EagleDrafter
from sgl.runtime.speculate.models import ModelDrafter
from tests.tiny_heads import HeadOracle, tiny_head
from tests.tiny_models import edit_json, tiny_checkpoint

PAGE_SIZE, PAGES, ROWS = 4, 16, 4
NUM_PAGES = ROWS * PAGES + 1


def target(path: Path, **overrides: Any) -> Decoder:
    return load_decoder(ModelConfig.from_pretrained(tiny_checkpoint(path, **overrides)), dtype="float32")


class Served:
    """A target with a drafter, step by step, without a scheduler."""

    def __init__(self, model: Decoder, drafter: ModelDrafter) -> None:
        self.drafter = drafter
        kv = KVCache(model.config, NUM_PAGES, PAGE_SIZE, model.dtype, model.device)
        attention = TorchAttention(model.attention_shape(PAGE_SIZE))
        bounds = {"max_rows": ROWS, "max_pages": PAGES}
        self.runner = ModelRunner(model, kv, attention, device=model.device, observer=drafter, **bounds)
        self.requests: dict[int, Request] = {}
        self.done: dict[int, int] = {}
        self.pages: dict[int, np.ndarray[Any, Any]] = {}

    def enter(
        self, row: int, prompt: Sequence[int], pages: Sequence[int], cached_len: int = 0, **params: Any
    ) -> None:
        ids = np.array(prompt, np.int32)
        self.requests[row] = request = Request(
            100 + row, ids, SamplingParams(**{"temperature": 0.0, **params}), seed=7 + row, max_new_tokens=64
        )
        request.row, self.done[row] = row, cached_len
        self.pages[row] = np.array(pages, np.int32)

    def leave(self, row: int) -> None:
        self.drafter.ended(self.requests[row])

    def step(self, rows: dict[int, int], *, drawn: bool = False) -> None:
        """Compute so many known tokens of each row; what is sampled behind the last known one is appended. drawn: the
        only token comes from the device."""
        ids, setups = [], []
        for row, count in rows.items():
            request = self.requests[row]
            start = self.done[row]
            if not hasattr(request, "_seen") and start == request.cached_len and not request.output_ids:
                setups.append(
                    RowSetup(row, request.params, request.seed, request.prompt_ids, np.empty(0, np.int32))
                )
            ids += [FROM_DEVICE] if drawn else request.known_ids()[start : start + count].tolist()
            self.done[row] = start + count
        writes = [(row, i, page) for row in rows for i, page in enumerate(self.pages[row].tolist())]
        ends = [self.done[row] == self.requests[row].num_known for row in rows]
        size = len(rows)
        batch = Batch(
            rows=np.array(list(rows), np.int32),
            q_lens=np.array(list(rows.values()), np.int32),
            kv_lens=np.array([self.done[row] for row in rows], np.int32),
            token_ids=np.array(ids, np.int32),
            page_writes=np.array(writes, np.int32),
            samples=np.array(ends),
            score_from=np.full(size, -1, np.int32),
            top_logprobs=np.full(size, -1, np.int32),
            setups=setups,
        )
        batch.is_observed = self.drafter.wants(Step(batch, [self.requests[row] for row in rows], 0))
        result = self.runner.launch(batch).wait()
        for row, is_end, token in zip(rows, ends, result.next_tokens.tolist(), strict=True):
            if is_end:
                self.requests[row].output_ids.append(token)

    def propose(self, most: dict[int, int]) -> dict[int, list[int]]:
        wanted = [
            DraftRequest(self.requests[row], count, self.done[row], self.pages[row]) for row, count in most.items()
        ]
        drafts = self.drafter.propose(wanted)
        return {row: list(draft.token_ids) for row, draft in zip(most, drafts, strict=True)}

    def known(self, row: int) -> list[int]:
        ids: list[int] = self.requests[row].known_ids().tolist()
        return ids


def warmed_up(runner: DraftRunner) -> DraftRunner:
    """As on a GPU."""
    runner.prepare(40)
    runner.warm_up(40)
    return runner


def draft_model(
    path: Path, as_many: int = 384, max_positions: int = 64, chain_rows: int = 0, **overrides: Any
) -> ModelDrafter:
    config = ModelConfig.from_pretrained(tiny_checkpoint(path, **overrides))
    weights = load_decoder(config, dtype="float32").weights
    model = DraftDecoder(config, weights, as_many, max_positions)
    kv = KVCache(model.config, NUM_PAGES, PAGE_SIZE, model.dtype, model.device)
    attention = TorchAttention(model.attention_shape(PAGE_SIZE))
    bounds = {"max_rows": ROWS, "max_pages": PAGES, "max_chain_rows": chain_rows, "num_steps": 9}
    runner = DraftRunner(model, kv, attention, device=model.device, **bounds)
    return ModelDrafter(
        runner, num_slots=NUM_PAGES * PAGE_SIZE, page_size=PAGE_SIZE, max_positions=max_positions, num_steps=9
    )


@pytest.mark.parametrize("computed", [1, 5])
def test_what_a_cached_prefix_lacks_is_filled_in_by_some_in_each_step(computed: int, tmp_path: Path) -> None:
    """All of it at once might take more memory than there is, and everybody would wait. computed: tokens of the
    model's step."""
    model = target(tmp_path / "target")
    prompt = [3 + 7 * i % 200 for i in range(41)]

    def served(most_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
        """Drafts in each of seven steps, and tokens of the passes that the drafter made in each."""
        made = draft_model(tmp_path / "draft")
        made._most_tokens = most_tokens
        its = Served(model, made)
        its.enter(0, prompt, range(1, 16), cached_len=41 - computed)
        its.requests[0].cached_len = 41 - computed
        its.enter(1, [9, 8, 7], range(16, 31))
        passes: list[list[int]] = []
        forward = made._runner.forward

        def counted(batch: Batch) -> Any:
            passes[-1].append(int(batch.q_lens.sum()))
            return forward(batch)

        drafts: list[list[int]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(made._runner, "forward", counted)
            for step in range(7):
                passes.append([])
                its.step({0: 1, 1: 1} if step else {0: computed, 1: 3})
                drafts.append((proposed := its.propose({0: 3, 1: 3}))[0])
                assert len(proposed[1]) == 3, "a row that lacks nothing does not wait"
        return drafts, passes

    (drafts, together), (parts, bounded) = served(1000), served(8)
    assert drafts[-1] == parts[-1]
    assert len(drafts[0]) == len(parts[-1]) == 3
    assert parts[0] == []
    assert max(map(sum, together)) > 30
    assert max(map(max, filter(None, bounded))) <= 8
    assert max(map(sum, bounded[1:])) <= 8 + 1 + 2 * 3, "and the step's own token, and drafts of two rows"


def test_rows_of_one_cached_prefix_do_not_fill_it_in_twice(tmp_path: Path) -> None:
    prompt = [3 + 7 * i % 200 for i in range(41)]
    its = Served(target(tmp_path / "target"), made := draft_model(tmp_path / "draft"))
    made._most_tokens = 8
    for row in (0, 1):
        its.enter(row, prompt, [*range(1, 11), *range(20 + 5 * row, 25 + 5 * row)], cached_len=40)
        its.requests[row].cached_len = 40
    drafted = []
    for _ in range(7):  # by 8 of 40 tokens and a few of their own
        its.step({0: 1, 1: 1})
        drafted.append([bool(draft) for draft in its.propose({0: 3, 1: 3}).values()])
    assert drafted == [[False, False]] * 5 + [[True, False], [True, True]]


def eagle(path: Path, model: Decoder, **changes: Any) -> EagleDrafter:
    config = EagleConfig.from_pretrained(tiny_head(path, **changes))
    head = load_head(config, model)
    num_slots = NUM_PAGES * PAGE_SIZE
    attention = TorchAttention(head.attention_shape(1))
    bounds = {"max_rows": ROWS, "max_pages": PAGES}
    runner: Any = HeadRunner(head, num_slots, PAGE_SIZE, attention, kv_dtype=head.dtype, **bounds)
    layers = config.layers_of(model.config.num_layers)
    return EagleDrafter(
        warmed_up(runner), layers, num_slots=num_slots, page_size=PAGE_SIZE, max_positions=64, num_steps=9
    )


def test_a_draft_model_does_nothing_before_it_is_asked(tmp_path: Path) -> None:
    its = Served(target(tmp_path / "target"), made := draft_model(tmp_path / "draft"))
    its.enter(0, [3 + 7 * i % 200 for i in range(20)], range(1, 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made._runner, "forward", None)
        its.step({0: 20})
        for drawn in (True, False, True):
            its.step({0: 1}, drawn=drawn)
    assert not made._rows
    assert not made._setups
    assert len(its.propose({0: 3})[0]) == 3


class ModelOracle:
    """The likeliest tokens by transformers."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()

    @torch.inference_mode()
    def drafts(self, ids: list[int], most: int, computed: int, holes: Sequence[int]) -> list[int]:
        assert not holes
        ids = list(ids)
        for _ in range(most):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(ids) - most :]


class EagleOracle:
    """The likeliest tokens by a head on transformers' hidden states behind layers."""

    def __init__(self, target_path: Path, head_path: Path, layers: Sequence[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target_path, torch_dtype=torch.float32).eval()
        self.head = HeadOracle(head_path, self.model.get_input_embeddings().weight.detach())
        self.layers = layers

    @torch.inference_mode()
    def drafts(self, ids: list[int], most: int, computed: int, holes: Sequence[int] = ()) -> list[int]:
        """holes: entries that nothing attends to."""
        states = self.model(torch.tensor([ids[:computed]]), output_hidden_states=True).hidden_states
        return self.head.drafts(torch.cat([states[its + 1][0] for its in self.layers], -1), ids, most, holes)


@pytest.fixture
def headed(tmp_path: Path) -> tuple[Served, EagleOracle]:
    model = target(tmp_path / "target")
    drafter = eagle(tmp_path / "head", model)
    return Served(model, drafter), EagleOracle(tmp_path / "target", tmp_path / "head", drafter.layers)


def entries_of(its: Served, row: int) -> tuple[list[int], list[int]]:
    """Drafts of a row, and its holes."""
    drafts = its.propose({row: 3})[row]
    found: Any = its.drafter._rows[its.requests[row].uid]
    return drafts, found.holes.tolist()


def half_seen(its: Served) -> Any:
    """The head, which followed neither request 0 nor the 8 tokens of it that request 1 finds cached."""
    drafter: Any = its.drafter
    prompt = drawn(random.Random(4), 19)
    drafter.follow(is_on=False)
    its.enter(0, prompt[:9], range(1, 17))
    its.step({0: 9})
    assert its.propose({0: 3})[0] == []
    drafter.follow(is_on=True)
    its.enter(1, prompt, [1, 2, *range(20, 34)], cached_len=8)
    its.requests[1].cached_len = 8
    return drafter


def test_a_head_attends_to_no_token_whose_hidden_states_it_has_not_seen(headed: tuple[Served, EagleOracle]) -> None:
    """Neither in a cached prefix, nor where it rested; and it drafts from none."""
    its, oracle = headed
    drafter = half_seen(its)
    its.step({1: 11})
    drafts, holes = entries_of(its, 1)
    assert holes == [1, 2, 3, 4, 5, 6, 7, 8], "entry 8 needs the hidden states of token 7"
    assert drafts == oracle.drafts(its.known(1), 3, 19, holes)
    assert drafts != oracle.drafts(its.known(1), 3, 19)
    drafter.is_resting = True
    for _ in range(2):
        its.step({1: 1})
    assert its.propose({1: 3})[1] == [], "its last token has none"
    drafter.is_resting = False
    its.step({1: 1})
    drafts, holes = entries_of(its, 1)
    assert holes == [*range(1, 9), 20, 21]
    assert drafts == oracle.drafts(its.known(1), 3, 22, holes)
    # another row of the same prefix finds the entries that the first has
    its.enter(2, [*its.known(1)[:16], 7, 8], [1, 2, 20, 21, *range(40, 52)], cached_len=16)
    its.requests[2].cached_len = 16
    its.step({2: 2})
    drafts, holes = entries_of(its, 2)
    assert holes == [1, 2, 3, 4, 5, 6, 7, 8, 16], "the other's token 16 is another"
    assert drafts == oracle.drafts(its.known(2), 3, 18, holes)


def test_drafts_behind_what_a_head_never_saw_are_judged_apart(headed: tuple[Served, EagleOracle]) -> None:
    """What stands of them tells little of requests that it follows from their first token on."""
    its, _ = headed
    drafter = half_seen(its)
    its.enter(2, drawn(random.Random(5), 9), range(40, 56))
    its.step({1: 11, 2: 9})
    wanted = [DraftRequest(its.requests[row], 3, its.done[row], its.pages[row]) for row in (1, 2)]
    assert [draft.grade for draft in drafter.propose(wanted)] == [1, 0]
    assert [drafter.grade(its.requests[row]) for row in (0, 1, 2)] == [None, 1, 0]


def test_a_page_of_another_in_place_of_ones_own_is_used_when_it_was_seen(
    headed: tuple[Served, EagleOracle],
) -> None:
    """Two rows with one prompt, of which the second is given the first's pages while it runs."""
    its, oracle = headed
    prompt = drawn(random.Random(8), 10)
    its.enter(1, prompt, range(20, 36))
    its.enter(0, prompt, range(1, 17))
    its.step({1: 10, 0: 10})
    its.pages[1][:2] = [1, 2]
    drafts, holes = entries_of(its, 1)
    assert holes == [1, 2, 3, 4, 5, 6, 7, 8]
    assert drafts == oracle.drafts(its.known(1), 3, 10, holes)
    check(its, oracle, {0: 3})
    check(its, oracle, {1: 3})


@pytest.mark.parametrize(
    "other", ["tokens", "weights", "weights while it is asked", "weights before it is asked", "adapter", None]
)
def test_pages_of_others_are_not_taken_for_ones_own(headed: tuple[Served, EagleOracle], other: str | None) -> None:
    """Computed while the head rested, at slots where it knew other tokens, or these by other weights."""
    its, oracle = headed
    drafter: Any = its.drafter
    rng = random.Random(6)
    before, prompt = drawn(rng, 12), drawn(rng, 12)
    its.enter(0, before if other == "tokens" else prompt, range(1, 17))
    its.requests[0].adapter = int(other == "adapter")
    its.step({0: 7})
    if other == "weights while it is asked":
        check(its, oracle, {0: 3})
    if other in ("weights while it is asked", "weights before it is asked"):
        drafter.outdate()
    its.step({0: 5})
    check(its, oracle, {0: 3})
    its.leave(0)
    if other == "weights":
        drafter.outdate()
    drafter.follow(is_on=False)
    its.enter(0, prompt, range(1, 17))
    its.step({0: 12})
    its.leave(0)
    drafter.follow(is_on=True)
    its.enter(1, [*prompt, 5, 6, 7], [1, 2, 3, *range(20, 33)], cached_len=12)
    its.requests[1].cached_len = 12
    its.step({1: 3})
    drafts, holes = entries_of(its, 1)
    assert holes == ([12] if other is None else list(range(1, 13)))  # what followed was another token
    assert drafts == oracle.drafts(its.known(1), 3, 15, holes)


def test_a_request_with_too_many_holes_is_followed_no_more(
    headed: tuple[Served, EagleOracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked at before each step; and once a look, not a pass, slots are listed without them."""
    its, _ = headed
    drafter: Any = its.drafter
    prompt = drawn(random.Random(4), 12)
    drafter.follow(is_on=False)
    its.enter(0, prompt[:8], range(1, 17))
    its.step({0: 8})
    drafter.follow(is_on=True)
    deleted, delete = list[int](), np.delete
    monkeypatch.setattr(np, "delete", lambda slots, holes: deleted.append(len(holes)) or delete(slots, holes))
    for row, most in ((1, 8), (2, 7)):
        monkeypatch.setattr("sgl.runtime.speculate.eagle._MOST_HOLES", most)
        its.enter(row, prompt, [1, 2, *range(4 + 16 * row, 18 + 16 * row)], cached_len=8)
        its.requests[row].cached_len = 8
        its.step({row: 4})
        assert len(its.propose({row: 3})[row]) == (3 if most == 8 else 0)
    assert deleted[:1] == [8]
    assert len(deleted) <= 2
    assert list(drafter._followed) == [101]


def test_a_request_that_is_back_in_a_row_between_two_looks_is_followed(headed: tuple[Served, EagleOracle]) -> None:
    its, oracle = headed
    drafter: Any = its.drafter
    its.enter(0, drawn(random.Random(4), 12), range(1, 17))
    its.step({0: 12})
    check(its, oracle, {0: 3})
    its.requests[2] = request = its.requests.pop(0)
    request.row, its.done[2], its.pages[2] = 2, 0, np.arange(20, 36, dtype=np.int32)
    request.num_retractions += 1
    request.output_ids.clear()
    its.step({2: 12})
    check(its, oracle, {2: 3})
    request.row = -1
    drafter.ended(request)
    assert not drafter.is_ready


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2])
def test_requests_too_short_for_drafts_are_not_followed(
    max_new_tokens: int, headed: tuple[Served, EagleOracle]
) -> None:
    its, _ = headed
    its.enter(0, drawn(random.Random(4), 9), range(1, 17))
    its.requests[0].max_new_tokens = max_new_tokens
    its.step({0: 9})
    assert its.drafter.is_ready == (max_new_tokens > 1)


def test_heads_are_warmed_up_with_what_they_do_in_steps_that_they_see(tmp_path: Path) -> None:
    runner: Any = eagle(tmp_path / "head", target(tmp_path / "target"))._runner
    fused, seen = runner._head.fused, list[int]()
    runner._head.fused = lambda hidden: seen.append(len(hidden[0])) or fused(hidden)
    runner.warm_up(40)
    assert seen == [40, 1]


def test_a_head_that_is_not_asked_costs_no_step_anything(headed: tuple[Served, EagleOracle]) -> None:
    its, oracle = headed
    drafter: Any = its.drafter
    its.enter(0, drawn(random.Random(5), 12), range(1, 17))
    its.step({0: 12})
    check(its, oracle, {0: 2})
    drafter.follow(is_on=False)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "read", "place"):
            patch.setattr(drafter._runner, name, None)
        patch.setattr(drafter, "observe", None)
        patch.setattr("sgl.runtime.model.aux_hidden_states.AuxHiddenStates.hidden", None)
        its.enter(1, drawn(random.Random(6), 9), range(20, 36))
        its.step({0: 1, 1: 9})
        its.step({0: 1, 1: 1}, drawn=True)
        assert its.propose({0: 2, 1: 2}) == {0: [], 1: []}
    drafter.follow(is_on=True)
    its.step({0: 1, 1: 1})
    assert len(its.propose({0: 2})[0]) == 2, "it goes on"
    assert its.propose({1: 2})[1] == [], "this one it does not follow"


@pytest.fixture(params=["model", "eagle"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Served, Any]:
    model = target(tmp_path / "target")
    if request.param == "model":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "seed": 3}
        return Served(model, draft_model(tmp_path / "draft", **sizes)), ModelOracle(tmp_path / "draft")
    drafter = eagle(tmp_path / "head", model)
    return Served(model, drafter), EagleOracle(tmp_path / "target", tmp_path / "head", drafter.layers)


def check(served: Served, oracle: Any, most: dict[int, int]) -> None:
    proposed = served.propose(most)
    for row, count in most.items():
        holes = served.drafter._rows[served.requests[row].uid].holes.tolist()
        assert proposed[row] == oracle.drafts(served.known(row), count, served.done[row], holes), row
        assert len(holes) <= 1, "a fork's first own entry needs the hidden states of another's token"


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(384) for _ in range(count)]


def test_drafts_equal_the_oracles_after_chunks_decodes_and_forks(served: tuple[Served, Any]) -> None:
    its, oracle = served
    rng = random.Random(0)
    prompts = [drawn(rng, count) for count in (21, 2, 30)]
    its.enter(0, prompts[0], range(1, 17))
    its.enter(1, prompts[1], range(17, 33))
    its.step({0: 7})
    its.step({1: 2, 0: 1})
    its.step({0: 13})
    check(its, oracle, {0: 4, 1: 3})
    for _ in range(3):  # without drafts
        its.step({0: 1, 1: 1}, drawn=True)
    check(its, oracle, {1: 1, 0: 5})
    check(its, oracle, {0: 2})  # again, from the same place
    its.requests[0].output_ids += drawn(rng, 3)  # forced
    check(its, oracle, {0: 3})
    its.step({0: 4})
    check(its, oracle, {0: 3, 1: 2})
    # a fork: its prompt is cached in pages of others, decodes among them, then an own end
    shared = its.known(0)[: its.done[0] // PAGE_SIZE * PAGE_SIZE]
    pages = [*range(1, 1 + len(shared) // PAGE_SIZE), *range(40, 50)][:PAGES]
    its.enter(2, shared + prompts[2], pages, cached_len=len(shared))
    its.requests[2].cached_len = len(shared)
    its.step({2: len(prompts[2]), 1: 1})
    check(its, oracle, {0: 2, 2: 4, 1: 2})


def test_a_retracted_request_is_drafted_for_anew_in_the_same_row_and_pages(served: tuple[Served, Any]) -> None:
    """Meanwhile they were another's, with other tokens."""
    its, oracle = served
    rng = random.Random(3)
    its.enter(0, drawn(rng, 13), range(1, 17))
    its.step({0: 13})
    check(its, oracle, {0: 3})
    retracted = its.requests[0]
    its.enter(0, drawn(rng, 13), range(1, 17))
    its.requests[0].uid = 1
    its.step({0: 13})
    check(its, oracle, {0: 3})
    its.leave(0)
    its.requests[0], its.done[0] = retracted, 0
    retracted.num_retractions += 1
    retracted.output_ids.clear()
    its.step({0: 13})
    check(its, oracle, {0: 3})


def test_what_stood_is_not_computed_again(tmp_path: Path) -> None:
    model = target(tmp_path / "target")
    drafter = draft_model(tmp_path / "target")
    its = Served(model, drafter)
    its.enter(0, [5, 6, 7], range(1, 17))
    its.step({0: 3})
    first = its.propose({0: 5})[0]
    its.requests[0].output_ids += first[:3]
    passes: list[int] = []
    forward = drafter._runner.forward

    def counted(batch: Batch) -> Any:
        passes.append(int(batch.q_lens.sum()))
        return forward(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter._runner, "forward", counted)
        assert its.propose({0: 2})[0] == first[3:]
        its.requests[0].output_ids += [first[3] ^ 1, 5]  # others than were drafted
        its.propose({0: 1})
        its.leave(0)
        its.enter(1, [*its.known(0), 9], range(1, 17), cached_len=9)  # finds all of it
        its.requests[1].cached_len = 9
        its.step({1: 1})
        its.propose({1: 1})
    assert passes == [1, 1, 2, 2]


def check_drawn(its: Served, params: Sequence[dict[str, Any]]) -> None:
    """For rows of these parameters, equal weights draft what is drawn."""
    rng = random.Random(1)
    for row, its_params in enumerate(params):
        its.enter(row, drawn(rng, 5 + row), range(1 + PAGES * row, 1 + PAGES * (row + 1)), **its_params)
    its.step({row: 5 + row for row in range(ROWS)})
    for _ in range(4):
        proposed = its.propose(dict.fromkeys(range(ROWS), 3))
        for _ in range(3):
            its.step(dict.fromkeys(range(ROWS), 1), drawn=True)
        for row in range(ROWS):
            assert its.requests[row].output_ids[-3:] == proposed[row]


def test_equal_weights_draft_what_is_drawn(tmp_path: Path) -> None:
    """Greedy, and with seeds, top-k, top-p and biases."""
    model = target(tmp_path / "target")
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 2.0, "logit_bias": {3: 8.0}, "min_new_tokens": 9},
    ]
    check_drawn(Served(model, draft_model(tmp_path / "target")), params)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix": "layers.0.", "has_embedding": True, "norm_before_residual": True},
        {"biases": True, "draft_vocab_size": ..., "logit_scale": 0.5, "head_dim": 8},
        {"num_key_value_heads": 4, "rope_theta": 500000.0, "seed": 4},
        {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
        {"fc_norm": True, "norm_output": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}},
        {"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}},
        {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True},
        {"draft_vocab_size": ..., "tie_word_embeddings": True, "has_embedding": True},
        {"model_type": "llama4_text", "intermediate_size": 48, "intermediate_size_mlp": 80},
        {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}},
    ],
    ids=[
        "vLLM's names",
        "biases",
        "heads",
        "one norm",
        "a norm each",
        "NVIDIA's norm",
        "window",
        "tied",
        "Llama 4",
        "mrope",
    ],
)
def test_heads_draft_what_the_oracle_does(changes: dict[str, Any], tmp_path: Path) -> None:
    model = target(tmp_path / "target")
    drafter = eagle(tmp_path / "head", model, **changes)
    its, oracle = Served(model, drafter), EagleOracle(tmp_path / "target", tmp_path / "head", drafter.layers)
    its.enter(0, drawn(random.Random(2), 11), range(1, 17))
    its.step({0: 11})
    check(its, oracle, {0: 6})
    its.step({0: 1}, drawn=True)
    check(its, oracle, {0: 4})


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True}}, None),
        ({"eagle_config": None, "target_hidden_size": None}, None),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, (-1, 0, 1)),
        ({"architectures": ["LlamaForCausalLM"]}, (-1, 0, 1)),
    ],
    ids=["no layers", "null", "vLLM's architecture", "its target's architecture"],
)
def test_configs_of_published_heads_are_read(
    changes: dict[str, Any], layers: tuple[int, ...] | None, tmp_path: Path
) -> None:
    folder = tiny_head(tmp_path / "head", **changes)
    config = EagleConfig.from_pretrained(folder)
    assert config.layers == layers
    assert config.window is None
    assert is_head(folder)
    load_head(config, target(tmp_path / "target"))


def test_draft_models_of_other_kinds_are_no_heads(tmp_path: Path) -> None:
    for changes in ({"architectures": ["PEagleDraftModel"], "draft_vocab_size": 8}, {"draft_vocab_size": None}):
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **changes}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert not is_head(tmp_path)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 512}, None),
        ({"sliding_window": 512, "use_sliding_window": False}, None),
        ({"sliding_window": 512, "use_sliding_window": True}, 512),
        ({"sliding_window": 512, "layer_types": ["sliding_attention"]}, 512),
        ({"sliding_window": None, "use_sliding_window": True}, None),
        ({"sliding_window": 512, "layer_types": ["full_attention"]}, None),
    ],
)
def test_a_heads_layer_sees_what_its_config_says(
    changes: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    assert EagleConfig.from_pretrained(tiny_head(tmp_path, **changes)).window == window


def test_a_head_as_speculators_writes_it(tmp_path: Path) -> None:
    model = target(tmp_path / "target", num_hidden_layers=4)
    flat = tiny_head(tmp_path / "flat", norm_before_residual=True, eagle_config=..., architectures=["X Eagle3"])
    fields = json.loads((flat / "config.json").read_text(encoding="utf-8"))
    layer = {key: value for key, value in fields.items() if key != "draft_vocab_size"}
    wrapped = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
        "norm_before_residual": True,
    }
    others = dict.fromkeys(layer, ...)
    folder = tiny_head(tmp_path / "head", **{**others, "eagle_config": ..., **wrapped})
    config = EagleConfig.from_pretrained(folder)
    assert config.layers == (-1, 0, 2)
    assert config.norm_before_residual
    head = load_head(config, model)
    assert head.weights.lm_head is not None


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": ...},
            UnsupportedModel,
            "LlamaForCausalLM as an EAGLE-3 head",
        ),
        ({"norm_before_fc": True}, WeightsError, "lacks 1 tensor .*input_norm.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, ModelError, "'norm_before_fc' and 'fc_norm' are both true"),
        ({"layer_types": ["sliding_attention"]}, ModelError, "no 'sliding_window'"),
        ({"layer_types": ["linear_attention"]}, UnsupportedModel, "a head's layer of 'linear_attention'"),
        ({"eagle_config": [1]}, ModelError, "'eagle_config' is .* not an object"),
        ({"num_hidden_layers": 2}, UnsupportedModel, "a head of 2 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModel, "use_aux_hidden_state"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
            ModelError,
            "layer 2, and the target has 3",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, ModelError, "must be three, ascending"),
        ({"eagle_aux_hidden_state_layer_ids": "0", "eagle_config": {}}, ModelError, "not a list of numbers"),
        ({"target_hidden_size": 128}, ConfigError, "a hidden_size of 128.*has one of 64.*trained for it"),
        ({"vocab_size": 500}, ConfigError, "a vocab_size of 500.*has one of 384"),
        ({"hidden_size": 32, "target_hidden_size": 64}, WeightsError, "lacks embed_tokens.weight.*of width 32"),
        ({"draft_vocab_size": 385}, ModelError, "draft_vocab_size 385 is more than vocab_size 384"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_what_would(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    model = target(tmp_path / "target", num_hidden_layers=3)
    folder = tiny_head(tmp_path / "head")
    if changes.get("hidden_size"):
        tiny_head(folder, **changes)
    else:
        edit_json(folder / "config.json", **changes)
    with pytest.raises(error, match=f"(?s){says}"):
        _load(folder, model)


def _load(folder: Path, model: Decoder) -> None:
    config = EagleConfig.from_pretrained(folder)
    load_head(config, model)
    config.layers_of(model.config.num_layers)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda its: its.pop("d2t"), "lacks d2t: which 200 tokens"),
        (lambda its: its.pop("lm_head.weight"), "lacks lm_head.weight of its 200"),
        (lambda its: its["d2t"].add_(300), "d2t .* names tokens"),
        (lambda its: its["d2t"].copy_(-torch.arange(200)), "names a token twice"),
        (lambda its: its.update(t2d=torch.zeros(384, dtype=torch.bool)), "names other tokens than t2d"),
        (lambda its: its.update(d2t=torch.zeros(3)), "not integers"),
        (lambda its: its["fc.weight"][3].fill_(math.nan), "fc.weight in .* is not finite as float32"),
        (lambda its: its.update({"input_norm.weight": torch.ones(192)}), "has no place for: input_norm"),
        (lambda its: its.pop("fc.weight"), "lacks 1 tensor .* fc.weight"),
        (lambda its: its.update({"midlayer.odd.weight": torch.zeros(3)}), "has no place for: midlayer.odd"),
        (lambda its: its.update({"midlayer.self_attn.q_proj.bias": torch.zeros(64)}), "k_proj.bias"),
    ],
)
def test_a_head_whose_file_is_wrong_is_refused(change: Callable[[Any], Any], says: str, tmp_path: Path) -> None:
    model, folder = target(tmp_path / "target"), tiny_head(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=says):
        load_head(EagleConfig.from_pretrained(folder), model)


def test_a_head_without_embedding_and_output_has_its_targets(tmp_path: Path) -> None:
    model, folder = target(tmp_path / "target"), tiny_head(tmp_path / "head", draft_vocab_size=...)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    weights = load_head(EagleConfig.from_pretrained(folder), model).weights
    assert weights.embedding is model.weights.embedding
    assert weights.borrowed == {"embedding", "lm_head"}
    assert all(its is not weights.embedding for its in weights.tensors())


@pytest.mark.parametrize("own", [380, 400])
def test_a_vocabulary_padded_to_another_size_is_the_same(own: int, tmp_path: Path) -> None:
    """Token 383 exists in one of them at most, and does no harm as input."""
    model = draft_model(tmp_path, vocab_size=own)._runner._model
    plain = load_decoder(ModelConfig.from_pretrained(tmp_path), dtype="float32")
    hidden = torch.randn(2, 64)
    logits, expected = model.logits(hidden), plain.logits(hidden)
    common = min(own, 384)
    assert torch.equal(logits[:, :common], expected[:, :common])
    assert bool((logits[:, common:] == -math.inf).all())
    assert torch.equal(model.logits(hidden, torch.empty(2, 384)), logits)
    kv = KVCache(model.config, 2, 4, torch.float32, model.device)
    attention = TorchAttention(model.attention_shape(4))
    attention.plan(AttentionStep(np.array([2], np.int32), np.array([2], np.int32), np.array([[1]], np.int32)))
    places = torch.arange(2)
    assert model.forward(Tokens(torch.tensor([5, 383]), places, places + 4), kv, attention).isfinite().all()
