"""Executes batches on one device: packs them, runs the model over the paged KV cache, samples.

On a GPU `forward` and `sample` only enqueue and never wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any, cast

import numpy as np
import torch

from sgl.grammar.automaton.finished import Configuration
from sgl.grammar.vocabulary.tokens import Vocabulary
from sgl.kernels.attention.base import AttentionBackend, AttentionStep, GraphAttention
from sgl.kernels.cpu import TILE
from sgl.kernels.staging import Uploader
from sgl.runtime.batch import Batch, Int32Array, PageMoves, PendingMoves, TokenMask, TokenMasks
from sgl.runtime.batch import PendingStep as AnyStep
from sgl.runtime.model.aux_hidden_states import AuxHiddenStates
from sgl.runtime.model.base import Model, RecurrentModel
from sgl.runtime.model.choice import vision_of
from sgl.runtime.model.decoder import Decoder
from sgl.runtime.model.gdn.model import Hybrid
from sgl.runtime.model.image_features import ImageFeatures
from sgl.runtime.model.kv_cache import Arrivals, KVCache
from sgl.runtime.model.lora import Adapter, LoraSlots
from sgl.runtime.model.mla.model import LatentDecoder
from sgl.runtime.model.update.ranks import hashed
from sgl.runtime.runner.adapters import Adapters
from sgl.runtime.runner.capture import MAX_QUERIES
from sgl.runtime.runner.current import current
from sgl.runtime.runner.cut_vocabulary import CutVocabulary
from sgl.runtime.runner.graphs import DecodeGraphs
from sgl.runtime.runner.host_pages import HostPages
from sgl.runtime.runner.hybrid_host_memory import HybridHostMemory
from sgl.runtime.runner.idle import idle_batch
from sgl.runtime.runner.inputs import Inputs
from sgl.runtime.runner.observer import Observer, observed
from sgl.runtime.runner.occupation import Graphs, Occupation
from sgl.runtime.runner.pack import pack, pack_places, windowed_step
from sgl.runtime.runner.prompt_graphs import PromptGraphs
from sgl.runtime.runner.results import DeviceLogprobs, Downloader, PendingStep, pool, score_inputs
from sgl.runtime.runner.sampler import Sampler
from sgl.runtime.runner.shared_rows import SharedHost
from sgl.runtime.runner.states import RowStates
from sgl.runtime.runner.threads import StepThreads
from sgl.runtime.runner.verify_graphs import Verified, VerifyGraphs

_SHORT_PROMPTS = 2, 8, 64, 96  # tokens: attention picks a kernel by prompt length
_LONGEST_LAUNCH = 0.06  # seconds to launch a step's kernels on a slow host


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched forward pass."""

    batch: Batch
    logits: torch.Tensor | None  # float32 [S, V], or of a part of the vocabulary; None if nothing is sampled
    inputs: DeviceLogprobs | None = None  # of scored input tokens
    placed: tuple[torch.Tensor, torch.Tensor] | None = None  # rows and positions to sample from, int64 [S]
    pooled: torch.Tensor | None = None  # float32 [P, H]
    awaited: tuple[int, torch.Tensor] | None = None  # hidden states under way: number, and which sample, int64 [S]
    computed: torch.Tensor | None = None  # of a batch that is ahead, `Ahead.tokens`


class ModelRunner:
    """Runs `model` for `max_rows` request rows of at most `max_pages` pages. With `max_graph_rows`, `attention` is
    a GraphAttention; decode steps of so many rows, and other steps of up to `max_graph_tokens`, are replayed."""

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        attention: AttentionBackend,
        *,
        max_rows: int,
        max_pages: int,
        device: torch.device,
        eos_ids: Collection[int] = (),
        max_graph_rows: int = 0,
        max_graph_tokens: int = 0,
        lora: LoraSlots | None = None,
        num_checkpoints: int = 0,
        host_pages: int = 0,
        mapped_rows: int = 0,
        host_states: int = 0,
        host_window_pages: int = 0,
        shared: SharedHost | None = None,
        observer: Observer | None = None,
        deterministic: bool = False,
    ) -> None:
        """num_checkpoints: of a RecurrentModel's states. host_pages, host_states, host_window_pages: of host memory for
        copies, which ranks may have `shared`. mapped_rows: see `HostPages`. observer: one with layers is for a Decoder.
        deterministic: rows do not depend on others."""
        self._model, self._observer, self._multiple = model, observer, TILE if deterministic else 1
        self._aux: AuxHiddenStates | None = None
        if observer is not None and observer.layers:
            assert isinstance(model, Decoder), "startup refuses others"
            most_tokens, hidden_size = max(max_rows * MAX_QUERIES, max_graph_tokens), model.config.hidden_size
            self._aux = AuxHiddenStates(observer.layers, most_tokens, hidden_size, model.dtype, device)
            model.aux_hidden_states = self._aux
        self._vision = vision_of(model)
        self._states: RowStates | None = None
        if isinstance(model, RecurrentModel):
            rows = None if shared is None else shared.states
            self._states = RowStates(model, max_rows, num_checkpoints, host_states, rows)
        self._kv = kv
        pages, windowed = (None, None) if shared is None else (shared.pages, shared.windowed)
        self.host: HostPages | None = None
        if host_pages or mapped_rows:
            waits = isinstance(model, Decoder)
            self.host = HostPages(kv.fragments(), host_pages, device, pages, mapped_rows, by_layer=waits)
        self.hybrid_host = HybridHostMemory(self._states, kv, host_window_pages, device, windowed)
        """Host memory for what a prefix has beside pages of all layers."""
        self._attention = attention
        self._current = current(device)
        self._launching_since: float | None = None  # monotonic seconds
        self._page_table: Int32Array = np.zeros((max_rows, max_pages), np.int32)
        self._window_table: Int32Array = np.zeros_like(self._page_table[:, : max_pages * (kv.windowed is not None)])
        self._uploader = Uploader(device)
        self._downloader = Downloader(device)
        cut = None
        if model.collectives is not None:
            cut = CutVocabulary(
                model.vocabulary, model.config.vocab_size, model.whole, model.collectives, self._uploader
            )
        self._sampler = Sampler(max_rows, model.config.vocab_size, device, eos_ids, cut, one_by_one=deterministic)
        self._threads: StepThreads | None = None
        if device.type == "cpu":
            self._threads = StepThreads(model.weights.num_multiplied, is_fixed=deterministic)
            self._threads.prepare(model.weights.prepare)
        self._adapters = None if lora is None else Adapters(lora, self._uploader)
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._verify_graphs: VerifyGraphs | None = None
        if max_graph_rows and model.captures:
            graph_attention = cast(GraphAttention, attention)
            samples = self._sampler.next_tokens
            self._graphs = DecodeGraphs(model, kv, graph_attention, samples, max_graph_rows, lora, self._states)
            if graph_attention.max_queries >= MAX_QUERIES and self._states is None:
                self._verify_graphs = VerifyGraphs(model, kv, graph_attention, samples, max_graph_rows)
            if model.collectives is not None:  # NCCL's own launches are too slow to replay in pieces
                max_graph_tokens = min(max_graph_tokens, model.collectives.fused_tokens)
            if max_graph_tokens > 1 and isinstance(model, Decoder):
                self._prompt_graphs = PromptGraphs(model, kv, graph_attention, max_graph_tokens)
        self.occupation = Occupation(model, kv, self._all_graphs())
        self._is_closed = False

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Launched:
        """Start the forward pass of a step; see `batch.Runner`."""
        with self._current, self._on_threads():
            self._choose_threads(batch)
            self._sampler.setup(batch.setups)
            self._write_adapters(batch)
            step, arrivals, states = self._step(batch), self._arrivals(batch), self._states
            if states is not None:
                states.load(batch)
            if self._aux is not None:
                self._aux.is_on = batch.is_observed
            replayed = None if self._graphs is None else self._graphs.run(batch, step)
            if replayed is not None:
                launched = Launched(batch, replayed.logits, placed=replayed[1:])
            else:
                self._launching_since = monotonic()
                try:
                    with self._kv.arriving(arrivals):
                        launched = self._verified(batch, step) or self._computed(batch, *self._forward(batch, step))
                finally:
                    self._launching_since = None
            if states is not None:
                states.save(batch)
            return launched

    @torch.inference_mode()
    def sample(self, launched: Launched, masks: TokenMasks | None = None) -> PendingStep:
        """Sample after a forward pass; see `batch.Runner`."""
        launched = self._arrived(launched)
        batch, logits = launched.batch, launched.logits
        with self._current, self._on_threads(is_last=True):
            if logits is None:
                nothing = torch.empty(0, dtype=torch.int64, device=self._model.device)
                return PendingStep(batch, nothing, None, launched.inputs, self._downloader, launched.pooled)
            observer = self._observer if batch.is_observed else None
            lands = None if observer or launched.inputs or launched.pooled is not None else self._downloader
            sampled = self._sampler.sample(logits, batch, masks, launched.placed, lands)
            if observer is not None and isinstance(sampled.ids, torch.Tensor):
                observer.sampled(sampled.ids)
            beside = launched.pooled, launched.computed
            return PendingStep(batch, sampled.ids, sampled.logprobs, launched.inputs, self._downloader, *beside)

    @torch.inference_mode()
    def follow(self, launched: Launched, masks: TokenMasks | None) -> None:
        """`sample`, on a rank whose results nobody reads. masks: the `outline` of rank 0's."""
        launched = self._arrived(launched)
        with self._current, self._on_threads(is_last=True):
            if launched.logits is not None:
                self._sampler.sample(launched.logits, launched.batch, masks, launched.placed)

    @torch.inference_mode()
    def enter(self, batch: Batch) -> Launched:
        """`forward` of the first of several stages; further steps may enter before this one is sampled."""
        inputs = self._through_stage(batch)
        return Launched(batch, None, awaited=(inputs.num_wanted, inputs.last))

    @torch.inference_mode()
    def relay(self, batch: Batch) -> None:
        """A step's part in a stage behind the first."""
        self._through_stage(batch)

    def _through_stage(self, batch: Batch) -> Inputs:
        links, model, states = self._model.links, self._model, self._states
        assert links is not None, "there are several stages"
        assert isinstance(model, Decoder | Hybrid | LatentDecoder), "other models are not cut"
        with self._current, self._on_threads(is_last=True):
            self._choose_threads(batch)
            self._write_adapters(batch)
            if states is not None:
                states.load(batch)
            arrivals, inputs = self._arrivals(batch), self._inputs(batch, self._step(batch))
            before = None
            if not model.is_first:
                shape = len(inputs.ids), model.config.hidden_size
                before = links.receive(torch.empty(shape, dtype=model.dtype, device=model.device))
            with self._kv.arriving(arrivals):
                done = model.forward_stage(inputs, self._kv, self._attention, before)
            if states is not None:
                states.save(batch)
            if len(done):
                links.send(done)
            return inputs

    def _arrived(self, launched: Launched) -> Launched:
        """With the hidden states that the last stage sends back."""
        if launched.awaited is None:
            return launched
        links, model, (num_wanted, last) = self._model.links, self._model, launched.awaited
        assert links is not None, "there are several stages"
        # Only now: rows may have had others in the steps before.
        self._sampler.setup(launched.batch.setups)
        hidden = torch.empty(num_wanted, model.config.hidden_size, dtype=model.dtype, device=model.device)
        if num_wanted:
            links.receive(hidden)
        sampling = hidden if len(last) == num_wanted else hidden.index_select(0, last)
        return self._computed(launched.batch, hidden, sampling)

    def _computed(self, batch: Batch, hidden: torch.Tensor, sampling: torch.Tensor) -> Launched:
        vocab_size = self._model.config.vocab_size
        inputs = score_inputs(batch, hidden, self._model.whole_logits, vocab_size, self._uploader)
        logits = self._model.logits(sampling) if len(sampling) else None
        return Launched(batch, logits, inputs, pooled=pool(batch, hidden))

    def _step(self, batch: Batch) -> AttentionStep:
        """The batch's rows and their pages, after its writes to the page table."""
        for writes, table in ((batch.page_writes, self._page_table), (batch.window_writes, self._window_table)):
            if writes is not None and len(writes):
                table[writes[:, 0], writes[:, 1]] = writes[:, 2]
        kv, windowed = self._kv, None
        if kv.windowed is not None:
            windowed = windowed_step(batch, self._window_table, kv.windowed.window, kv.page_size, self._multiple)
        num_pages = -(-int(batch.kv_lens.max()) // kv.page_size)
        return AttentionStep(batch.q_lens, batch.kv_lens, self._page_table[batch.rows, :num_pages], windowed)

    def _arrivals(self, batch: Batch) -> Arrivals | None:
        """What each layer has to wait for, if it can; else all that the step needs is waited for here."""
        if self.host is None:
            return None
        self.hybrid_host.wait(batch.moved)
        graphs = self._verify_graphs
        is_whole = batch.longest <= MAX_QUERIES or (graphs is not None and graphs.holds(batch))
        return self.host.arrivals(batch.moved, by_layer=not is_whole)

    def _write_adapters(self, batch: Batch) -> None:
        if self._adapters is not None:
            self._adapters.write(batch.adapter_writes)

    def _choose_threads(self, batch: Batch) -> None:
        if self._threads is not None:
            self._threads.choose(len(batch.token_ids), is_streamed=batch.is_streamed)

    def move(self, moves: PageMoves) -> PendingMoves:
        """Copy pages between the device and host memory; see `batch.Mover`."""
        assert self.host is not None, "there is host memory for copies"
        return self.hybrid_host.move(moves, self.host.move(moves))

    def measure(self, num_tokens: int, launch: Callable[[Batch], AnyStep] | None = None) -> tuple[float, float]:
        """Seconds of a step of one token, and of one with a prompt of num_tokens. launch: of all ranks."""
        seconds = []
        for q_len in (1, num_tokens):
            times = []
            for _ in range(3):
                began = monotonic()
                (launch or self.launch)(idle_batch([q_len], 0.0)).wait()
                times.append(monotonic() - began)
            seconds.append(min(times))
        return seconds[0], seconds[1]

    def weights_hash(self, hash_of: Callable[[Iterable[torch.Tensor]], bytes]) -> bytes:
        """A hash of all weights, of how each rank holds them."""
        return hashed(self._model, None, hash_of)

    def launch(self, batch: Batch, masks: TokenMasks | None = None) -> PendingStep:
        """Both phases of a step at once."""
        return self.sample(self.forward(batch), masks)

    def _on_threads(self, *, is_last: bool = False) -> AbstractContextManager[None]:
        """One phase of a step."""
        return nullcontext() if self._threads is None else self._threads.phase(is_last=is_last)

    def read_adapter(self, path: str) -> Adapter:
        """A LoRA adapter's folder. Raises AdapterError. Safe from any thread."""
        assert self._adapters is not None, "LoRA is enabled"
        return self._adapters.read(path)

    def add_adapter(self, number: int, adapter: Adapter) -> None:
        """Keep an adapter for later steps."""
        assert self._adapters is not None, "LoRA is enabled"
        self._adapters.add(number, adapter)

    def drop_adapter(self, number: int) -> None:
        """Free an adapter that no step needs any more."""
        assert self._adapters is not None, "LoRA is enabled"
        self._adapters.drop(number)

    def _all_graphs(self) -> list[Graphs]:
        return [its for its in (self._graphs, self._prompt_graphs, self._verify_graphs) if its is not None]

    def close(self) -> None:
        """Give the device's memory back after the last step, whoever still has the engine. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._observer is not None:
                self._observer.close()
            self.occupation.end()
            self._graphs = self._prompt_graphs = self._verify_graphs = None

    def is_launching(self) -> bool:
        """True while kernels are launched eagerly, unless it takes so long that the launch waits for the device.
        Every launch releases the GIL; busy background threads should stay idle, or the GPU starves. Safe from any
        thread."""
        since = self._launching_since
        return since is not None and monotonic() - since < _LONGEST_LAUNCH

    @property
    def num_encoded(self) -> int:
        """Images that the model's vision tower has embedded."""
        return 0 if self._vision is None else self._vision.num_runs

    def prepare(self, num_tokens: int) -> None:
        """Capture graphs and load the kernels of steps with prompts of num_tokens in all, with all ranks."""
        if self._states is not None:
            self._states.warm_up()
        for graphs in self._all_graphs():
            graphs.capture()
        self._model.warm_up_gemms(len(self._page_table), num_tokens)

    def warm_up(self, num_tokens: int, launch: Callable[[Batch], AnyStep] | None = None) -> None:
        """Compile and load what else steps need, on the dummy page, after `prepare` and before the first step. launch:
        of all ranks."""
        launch = launch or self.launch
        most = min(self._page_table.shape[1] * self._kv.page_size, self._model.max_positions)
        num_rows = len(self._page_table)
        first, *others = [most] * (num_tokens // most) + [num_tokens % most] * (num_tokens % most > 0)
        prompts = [1, *others, max(first - 1, 1)][:num_rows] if num_rows > 1 else [first]  # beside a decode
        for q_lens in ([1] * min(64, num_rows), prompts, [1]):
            for temperature in (0.0, 1.0):
                launch(idle_batch(q_lens, temperature)).wait()
            if self._adapters is not None:
                launch(idle_batch(q_lens, 0.0, adapter=0)).wait()
        for q_len in _SHORT_PROMPTS:
            if q_len <= min(most, num_tokens):
                launch(idle_batch([q_len] * min(num_rows, num_tokens // q_len, 8), 0.0)).wait()
        launch(idle_batch([1], 0.0, top_logprobs=0)).wait()  # is drawn otherwise

    def enable_device_masks(
        self, vocabulary: Vocabulary, example: Configuration, launch: Callable[..., AnyStep] | None = None
    ) -> None:
        """Accept places in finished automata as token masks, and warm that up. launch: of all ranks."""
        self._sampler.enable_device_masks(vocabulary)
        num_rows = min(2, len(self._page_table))
        masks: list[TokenMask | None] = [example, np.zeros(vocabulary.words, np.int32)]
        for temperature, top_logprobs in ((0.0, -1), (1.0, -1), (0.0, 0)):
            batch = idle_batch([1] * num_rows, temperature, top_logprobs=top_logprobs)
            (launch or self.launch)(batch, masks[:num_rows]).wait()

    def _verified(self, batch: Batch, step: AttentionStep) -> Launched | None:
        """A step that is replayed but for the logits of many drafts."""
        place = None if self._observer is None else self._observer.place
        verified = None if self._verify_graphs is None else self._verify_graphs.run(batch, step, place)
        if verified is None:
            return None
        if batch.is_observed:
            self._show(batch, step.page_table, verified.slots, verified)
        logits = self._model.logits(verified.sampling) if verified.logits is None else verified.logits
        if (ahead := verified.ahead) is None:
            return Launched(batch, logits)
        return Launched(batch, logits, placed=(ahead.rows, ahead.positions), computed=ahead.tokens)

    def _forward(self, batch: Batch, step: AttentionStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states after the last norm, of all tokens if any is scored or pooled, else of sampled ones; and those
        of sampled ones, [S, hidden_size]."""
        graphs, num_tokens = self._prompt_graphs, len(batch.token_ids)
        is_plain = not batch.places and batch.adapters is None
        if graphs is not None and not (is_plain and graphs.holds(num_tokens)):
            graphs = None
        inputs = self._inputs(batch, step, self._uploader.upload if graphs is None else graphs.place)
        if graphs is None:
            hidden = self._model.forward(inputs, self._kv, self._attention)
        else:
            hidden = graphs.run(num_tokens, inputs.wanted)
        self._show(batch, step.page_table, inputs.slots)
        if len(inputs.last) == len(hidden):
            return hidden, hidden
        return hidden, hidden.index_select(0, inputs.last)

    def _show(self, batch: Batch, pages: Int32Array, slots: torch.Tensor, verified: Verified | None = None) -> None:
        """Let the observer see a step, if it does. slots: perhaps padded behind the step's."""
        if batch.is_observed and self._observer is not None:
            slots = slots if self._kv.windowed is None else slots[0]
            self._observer.observe(observed(batch, pages, slots, self._aux, verified))

    def _inputs(self, batch: Batch, step: AttentionStep, upload: Callable[..., Any] | None = None) -> Inputs:
        """Upload a step and plan its attention."""
        packed = pack(batch, step, self._kv.page_size)
        token_ids, positions, slots, from_device, from_rows, last = (upload or self._uploader.upload)(*packed)
        if len(packed.from_device):
            token_ids.index_copy_(0, from_device, self._sampler.next_tokens.index_select(0, from_rows))
        self._attention.plan(step)
        slots = slots[..., : len(token_ids)]
        is_every_token_wanted = bool(batch.score_targets or batch.pool_from) or len(last) == len(token_ids)
        images = None
        if batch.places:
            (places,) = self._uploader.upload(pack_places(batch, packed.positions))
            assert self._vision is not None or not cast(Decoder, self._model).is_first, "no other is given images"
            images = ImageFeatures(places, []) if self._vision is None else self._vision.encode(places, batch.media)
        lora = None
        if self._adapters is not None and batch.adapters is not None:
            lora = self._adapters.step(batch, None if is_every_token_wanted else packed.last)
        states = None if self._states is None else self._states.step(batch)
        wanted = None if is_every_token_wanted else last
        return Inputs(token_ids, positions, slots, wanted, images, lora, states, last=last)
