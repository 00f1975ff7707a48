"""The engine that users hold: text or token ids in, results out. Safe from several threads and event loops at once."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, Unpack

from sgl.errors import EngineDead, InvalidRequest, RequestTimeout
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate
from sgl.lang.ir.interpreter import SharedQuota
from sgl.options import EngineOptions
from sgl.runtime import startup
from sgl.runtime.cache.keys import key_of
from sgl.runtime.config import EngineConfig
from sgl.runtime.loop.copies import drain
from sgl.runtime.loop.loop import EngineLoop
from sgl.runtime.loop.owner_process import OwnerProcess
from sgl.runtime.loop.thread import EngineThread
from sgl.runtime.model.choice import media_of
from sgl.runtime.occupation import MemoryOccupation
from sgl.runtime.profile import StepProfiler
from sgl.runtime.program.machine import Services
from sgl.runtime.program.session import ProgramSession
from sgl.runtime.program.tokens import Encoder, model_template
from sgl.runtime.requests.adapters import Adapters, LoraUpdate
from sgl.runtime.requests.arguments import GenerateOptions, Params, check_options, has_list_of_prompts
from sgl.runtime.requests.builder import RequestBuilder
from sgl.runtime.requests.calls import Calls
from sgl.runtime.requests.candidates import CandidateScore, candidate_ids
from sgl.runtime.requests.embeddings import check_dimensions, embedding_arguments, embeddings
from sgl.runtime.requests.events import Events
from sgl.runtime.requests.images import pool_for
from sgl.runtime.requests.results import PreparedCall, check_all
from sgl.runtime.requests.router import AsyncSink, OutputRouter, Sink, ThreadSink
from sgl.runtime.requests.transfers import end
from sgl.runtime.requests.waiting import check, settled
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.leases import HeldPrefixes
from sgl.runtime.scheduler.request import Pooling
from sgl.runtime.training import Trainable

Result = dict[str, Any]
_JUMP_COST = 0.45
"""By how many steps a step without CUDA graph is longer: 5.9 ms to 4.1 on an H200 (4 rows, Llama-3.1-8B)."""


class Engine(Trainable):
    """A loaded model.

    `Engine(model_path=…, **options)` takes the fields of EngineConfig. Close it with `shutdown`, or use it as a
    context manager. Raises ConfigError and ModelError. In a forked child, closing does nothing and all else raises
    EngineDead.
    """

    def __init__(self, model_path: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]) -> None:
        given: dict[str, Any] = {**options} if model_path is None else {**options, "model_path": model_path}
        paths = {name: os.fspath(value) for name, value in given.items() if isinstance(value, os.PathLike)}
        config = EngineConfig.from_options(given | paths)
        self._process = OwnerProcess.of_engine()
        thread = EngineThread()
        started = thread.call(lambda: startup.start(config))
        self.config = started.config
        self.tokenizer = started.tokenizer
        self._started = started
        self._scheduler = started.scheduler
        self._router = OutputRouter()
        self._loop = EngineLoop(
            thread,
            started.scheduler,
            started.runner,
            self._router.deliver,
            run_ahead=not self.config.disable_overlap_schedule,
            depth=self.config.pp_size,
            jump_forward=not self.config.disable_jump_forward,
            pins=self.config.deterministic,
            jump_cost=_JUMP_COST if self.config.cuda_graph_max_bs else 0.0,
            stream_interval=self.config.stream_interval,
            check_ledger=self.config.check_ledger,
            speculator=started.speculator,
            spending=None if started.group is None else started.group.spending,
        )
        self._memory = MemoryOccupation(self.config, started.runner, self._loop)  # here: callers share its lock
        self._adapters = Adapters(self.config, started.runner, started.scheduler, self._loop)
        started.name_adapters(self._adapters.name_of)
        self._builder = RequestBuilder(
            self.config,
            started.tokenizer,
            vocab_size=started.model_config.vocab_size,
            eos_ids=started.eos_ids,
            media=media_of(started.model_config),
            is_launching=started.runner.is_launching,
            adapters=self._adapters,
            transfers=started.scheduler.memory.transfers,
        )
        if self._builder.masks_on_device:
            try:
                thread.call(lambda: started.runner.enable_device_masks(*self._builder.warm_up_masks()))
            except BaseException:
                self._builder.close()
                raise
        is_frozen, self._profiler = startup.freeze(started), StepProfiler()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="sgl-tokenize")
        self._calls = Calls(self._loop, self._router)
        self._loop.start()
        if started.group is not None:
            started.group.on_failure(self._loop.fail)
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._pool, self._builder, started, is_frozen)
        try:
            self._adapters.load_all(self.config.lora_paths or ())
        except BaseException:
            self.shutdown()
            raise

    # ── generation ──────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """Generate for one prompt (text, or token ids) or a list of them.

        Returns a result {"text", "output_ids", "meta_info"}; for several prompts or n > 1 a list, ordered by
        prompt, then sample. GenerateOptions lists the options.

        stream: returns an iterator of events. An event is a result with all text and output_ids so far, the new output
        logprobs, and an "index" if there are several requests. Closing the iterator aborts what is unfinished.

        Raises InvalidRequest, QueueFull and EngineDead. All prompts are checked before any is queued: if one is
        wrong, none runs.
        """
        check_options(options)
        call = self.prepare(prompt=prompt, sampling_params=sampling_params, input_ids=input_ids, **options)
        if options.get("stream"):
            began = time.monotonic()
            settled(call.compiling, call.deadline).result()
            check(call.compiling)
            if not all(map(Future.done, call.compiling)):
                seconds = time.monotonic() - began
                message = f"the request timed out after {seconds:.3g} s, while its constraint was being compiled"
                raise RequestTimeout(message, seconds=seconds)
            sink = ThreadSink(self._loop)
            self.submit(call, sink)
            return Events(call, sink, self.abandon)
        return self._collected(call)

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:
        """`generate` for event loops. With stream, awaiting it returns an asynchronous iterator. Cancelling aborts."""
        check_options(options)
        self._process.check()
        if not self._finalizer.alive:
            raise EngineDead("the engine is shut down")
        given = {"prompt": prompt, "sampling_params": sampling_params, "input_ids": input_ids, **options}
        prepare = partial(self.prepare, arrived=time.monotonic(), **given)
        loop = asyncio.get_running_loop()
        call = await loop.run_in_executor(pool_for(given, self._pool), prepare)
        sink = AsyncSink(loop)
        if options.get("stream"):
            await asyncio.wrap_future(settled(call.compiling, call.deadline))
            check(call.compiling)
            return self._async_events(call, sink)
        self.submit(call, sink)
        try:
            while call.unfinished:
                call.absorb(await sink.get())
            return await call.async_result()
        finally:
            self.abandon(call)

    def score(
        self, prefix: str | Sequence[int], candidates: Sequence[str] | Sequence[Sequence[int]]
    ) -> list[CandidateScore]:
        """Exact log-probabilities of every candidate's tokens after the prefix, in order of candidates.

        The prefix is computed once and shared. Texts are tokenised together with it; if a token spans the border,
        all candidates are scored from their last common token boundary with the prefix.
        """
        self._process.check()
        full, start = candidate_ids(self._builder.encode, prefix, candidates)
        params = SamplingParams(max_new_tokens=0, temperature=0.0)
        options: GenerateOptions = {"return_logprob": True, "logprob_start_len": max(start - 1, 0)}
        results = self.generate(input_ids=full, sampling_params=params, **options)
        check_all(results)
        scores = []
        for ids, result in zip(full, results, strict=True):
            logprobs = [entry[0] for entry in result["meta_info"]["input_token_logprobs"]]
            scores.append(CandidateScore(ids[start:], logprobs[1:] if start else logprobs))
        return scores

    def encode(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        timeout: float | None = None,
        priority: int = 0,
        lora_path: str | Sequence[str | None] | None = None,
    ) -> Any:
        """Embed one prompt (text, or token ids) or a list of them.

        Returns {"embedding", "meta_info"}, or a list of these; an embedding is a list of `hidden_size` floats, or of
        its first `dimensions`. It comes from the hidden states behind the last norm: "last" takes that of the
        prompt's last token, "mean" the mean of all, which uses no cached prefix. normalize: to length 1. timeout,
        priority and lora_path as in `generate`. Raises InvalidRequest, QueueFull and EngineDead.
        """
        width = check_dimensions(dimensions, self._started.model_config.hidden_size)
        prompts = {"prompt": prompt, "input_ids": input_ids, "timeout": timeout, "priority": priority}
        arguments = embedding_arguments(pooling, prompts | {"lora_path": lora_path})
        results = self._collected(self.prepare(**arguments))
        listed = results if isinstance(results, list) else [results]
        found = embeddings(listed, normalize=normalize, dimensions=width)
        return found if isinstance(results, list) else found[0]

    def abort(self, rid: str | None, owner: str | None = None) -> None:
        """Abort the requests with this rid (None: all, also programs'), of the owner if given, and ignore unknown ones.
        On return, their pages are free and no token follows. Callers get what there was with finish_reason "abort"; a
        gen of a program fails with RequestAborted."""
        self._process.check()
        self._calls.abort(rid, owner)

    def open_program(self, program: ir.Program, sink: ir.Sink) -> ProgramSession:
        """Start a program next to the scheduler: segments in, events out (`sgl.lang.ir.nodes`). The sink runs on
        the engine's thread and must not block. Raises InvalidRequest."""
        self._process.check()
        return ProgramSession(self._program_services, program, sink)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template that came with the model, if any."""
        return None if self.tokenizer is None else model_template(self.tokenizer)

    @cached_property
    def _program_services(self) -> Services:
        if self.tokenizer is None:
            raise InvalidRequest("programs need text, and this engine runs without a tokenizer")
        return Services(
            loop=self._loop,
            router=self._router,
            builder=self._builder,
            encoder=Encoder(self.tokenizer, self.config.context_length),
            leases=self._scheduler.memory.leases,
            tiers=self._scheduler.memory.tiers,
            pool=self._pool,
            template=self.chat_template,
            lease_ttl=self.config.program_lease_ttl,
            quota=SharedQuota(),
        )

    # ── the rest of the surface ─────────────────────────────────────────────────────────────────────────────────

    def flush_cache(self) -> bool:
        """Forget earlier outputs, and prefixes that no running request holds; returns whether the cache is empty."""

        def flush() -> int:
            self._prefixes.clear()
            return self._scheduler.memory.flush()

        return self._loop.call(flush) == 0

    def hold_prefix(
        self, name: str, input_ids: Sequence[int], extra_key: str | None = None, lora_path: str | None = None
    ) -> None:
        """Keep what is cached of these tokens for `program_lease_ttl` seconds, unless requests need them. All names
        hold at most a quarter of the cache; the oldest make room."""
        key, namespace = key_of(input_ids), self._adapters.namespace(lora_path, extra_key)
        self._loop.post(lambda: self._prefixes.hold(name, key, namespace, time.monotonic()))

    def release_prefix(self, name: str) -> None:
        """Let a name's prefix be evicted again."""
        self._loop.post(lambda: self._prefixes.release(name))

    def end_kv_transfer(self, kv_transfer_params: Any) -> int:
        """Offer these pages, or a list's, no longer; how many still were. Raises InvalidRequest."""
        return end(kv_transfer_params, self._scheduler.memory.transfers)

    @cached_property
    def _prefixes(self) -> HeldPrefixes:
        memory = self._scheduler.memory
        return HeldPrefixes(memory.leases, memory.pool.num_pages // 4, self.config.program_lease_ttl)

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> LoraUpdate:
        """Load a LoRA adapter from a folder as peft saves it; requests name it by lora_path=lora_name. pinned: once on
        the device, it stays there. Raises InvalidRequest for a name in use, and AdapterError."""
        self._process.check()
        self._adapters.load(lora_name, lora_path, pinned=pinned)
        return self._adapters.update()

    def unload_lora_adapter(self, lora_name: str) -> LoraUpdate:
        """Refuse new requests with this adapter, wait until those that have it end, and free it with all that is cached
        of it. Raises InvalidRequest for an unknown name, and EngineDead."""
        self._process.check()
        self._adapters.unload(lora_name)
        return self._adapters.update()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises InvalidRequest without one."""
        if self.tokenizer is None:
            raise InvalidRequest("this engine runs without a tokenizer (skip_tokenizer_init)")
        return self.tokenizer.hf

    def get_server_info(self) -> dict[str, Any]:
        """The resolved options, counters and current state."""

        def look() -> dict[str, Any]:
            scheduler, counters = self._scheduler, dataclasses.asdict(self._scheduler.counters)
            return {
                "num_running_reqs": scheduler.num_running,
                "num_queue_reqs": len(scheduler.queue),
                **self._halts(),
                **scheduler.memory.state(),
                **self._started.state(),
                "cache_hit_rate": counters["cached_tokens"] / max(1, counters["prompt_tokens"]),
                **counters,
            }

        return {
            **dataclasses.asdict(self.config),
            **self._started.facts(),
            "weight_version": self.weight_version,
            "lora_paths": [dataclasses.asdict(its) for its in self._adapters.listed()],
            "internal_states": [self._loop.call(look)],
        }

    def start_profile(self) -> None:
        """Record steps until `stop_profile`. Raises InvalidRequest while recording."""
        self._loop.call(self._profiler.start)

    def stop_profile(self) -> str:
        """Returns the path of a trace for Chrome or Perfetto. Raises InvalidRequest if nothing was recorded."""
        return self._loop.call(self._profiler.stop)

    def heartbeat_age(self) -> float:
        """Seconds since the present step began: 0 when idle, infinite when dead."""
        return self._loop.heartbeat_age()

    def check_ledger(self) -> list[str]:
        """Breaches of KV page ownership; empty if each page has one owner."""
        return self._loop.call(self._scheduler.memory.check)

    def shutdown(self) -> None:
        """Stop the engine: whoever still waits gets EngineDead. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # ── from arguments to submissions ───────────────────────────────────────────────────────────────────────────

    def prepare(self, **arguments: Any) -> PreparedCall:
        """Check and tokenise the arguments of `generate` into requests for `submit`."""
        self._process.check()
        call = PreparedCall(has_list_of_prompts(arguments))
        for wanted in self._builder.requests(arguments):
            call.add_prompt(wanted, self._builder.submissions(wanted))
        return call

    def submit(self, call: PreparedCall, sink: Sink) -> None:
        """Queue requests; outputs go to the sink. Always `abandon` it in the end. Raises InvalidRequest, EngineDead."""
        self._calls.submit(call, sink)

    def abandon(self, call: PreparedCall) -> None:
        """Forget a call and abort its unfinished requests."""
        self._calls.abandon(call)

    def _collected(self, call: PreparedCall) -> Any:
        sink = ThreadSink(self._loop)
        self.submit(call, sink)
        try:
            while call.unfinished:
                call.absorb(sink.get())
            return call.result()
        finally:
            self.abandon(call)

    async def _async_events(self, call: PreparedCall, sink: AsyncSink) -> AsyncIterator[Result]:
        self.submit(call, sink)
        try:
            while call.unfinished:
                output = await sink.get()
                call.absorb(output)
                yield await call.async_event(output.uid)
        finally:
            self.abandon(call)


def _stop(
    loop: EngineLoop, pool: ThreadPoolExecutor, builder: RequestBuilder, started: startup.Started, is_frozen: bool
) -> None:
    if loop.process.was_forked:  # it belongs to the parent process
        return
    builder.close()
    drain(started.scheduler.memory.tiers, loop.call)
    loop.stop()
    started.close()
    pool.shutdown(wait=False)
    if is_frozen:
        gc.unfreeze()  # what start-up froze may be garbage now
