"""A program on an engine: gens and selects become requests, constants join the next prompt.
`sgl.lang.ir.interpreter` executes the other nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from sgl.errors import InvalidRequest, nearest_name
from sgl.formats.call_format import CallFormat
from sgl.formats.constraint import calls_tag
from sgl.formats.reading import calls_in
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import as_template
from sgl.lang.ir.check import Checker, Limits, program_from_wire
from sgl.lang.ir.choices import Scores, method_named
from sgl.lang.ir.encoding import to_json
from sgl.lang.ir.interpreter import Interpreter, Steps
from sgl.lang.ir.media import is_elsewhere
from sgl.lang.ir.sampling import DEFAULTS, logprob_options, native_sampling
from sgl.runtime.cache.keys import Namespace
from sgl.runtime.loop.submission import Submission
from sgl.runtime.media.item import MediaItem
from sgl.runtime.media.layout import Layout
from sgl.runtime.media.read import from_base64
from sgl.runtime.program.machine import Machine, Services
from sgl.runtime.program.sender import current_sender
from sgl.runtime.program.stream import NodeRequests, Stream
from sgl.runtime.program.tokens import NO_TOKENS, StreamTokens, merged
from sgl.runtime.program.trie import CandidateTrie
from sgl.runtime.requests.arguments import GenerateRequest
from sgl.runtime.requests.builder import check_num_logprobs, no_images, num_logprobs
from sgl.runtime.requests.images import THREADS
from sgl.runtime.requests.results import NativeResult
from sgl.runtime.requests.threads import FEW
from sgl.runtime.sampling_params import SamplingParams
from sgl.runtime.scheduler.programs import MOST_GENERATED

INLINE_CHARACTERS = 512
"""Longest text to encode on the loop's thread (0.2 ms)."""

_MAX_LOGPROBS = 1 << 16
"""Of one gen: they travel in one event."""
_FEW_SAMPLES = 8  # of a gen, handled on the loop's thread

_DIGITS = re.compile(r"[0-9]+")
_EXTRA_OPTIONS = ("extra_key", "lora_path", "token_ids_logprob")
_SCORE = SamplingParams(max_new_tokens=0, temperature=0.0)

Pairs: TypeAlias = list[tuple[Submission, NativeResult]]
T = TypeVar("T")


class ProgramSession(Interpreter[Stream]):
    """One program on one engine. Segments are checked when sent. `cancel` is idempotent and acknowledged by `Done`."""

    def __init__(self, services: Services, program: ir.Program, sink: ir.Sink) -> None:
        """Raises InvalidRequest."""
        is_text = isinstance(program.chat_template, str | None)  # in-process programs may pass an object
        checked = program_from_wire(to_json(program if is_text else replace(program, chat_template=None)))
        chosen = program.chat_template or services.template
        self._machine = Machine(services, checked, sink)
        super().__init__(
            checked, None if chosen is None else as_template(chosen), self._machine, self._machine.quota
        )
        self._checker = Checker(self._program, Limits(requests=services.builder.max_requests))
        self._services = services
        self._tenant = current_sender.get().tenant

    def cancel(self) -> None:
        """Abort the program and release its resources. Never blocks."""
        self._machine.cancel()

    def send(self, segment: ir.Segment) -> None:
        """Take the next nodes or answers; never blocks. Raises InvalidRequest and EngineDead."""
        checked = self._checker.segment(to_json(segment))
        self._machine.post(partial(self._receive, checked))

    # ── on the loop's thread ────────────────────────────────────────────────────────────────────────────────────

    def _new_stream(self, stream_id: int, path: str, parent: Stream | None) -> Stream:
        if parent is not None:
            parent.unencoded = merged(parent.unencoded)
        return Stream(stream_id, path, parent)

    def _media(self, stream: Stream, node: ir.Media) -> Steps[None]:
        builder = self._services.builder
        reader = builder.reader
        if reader is None:
            raise no_images(node.kind, "media")

        def read() -> MediaItem:
            return reader.item(node.kind, node.data if is_elsewhere(node) else from_base64(node.data), node.fps)

        item = yield from self._machine.elsewhere(stream, read, THREADS.of(self._machine.tenant))
        stream.items = (*stream.items, item)
        reader.check(stream.items)
        self._quota.charge(item.num_tokens, "tokens")
        self._write(stream, builder.placeholder(node.kind), is_template=True)

    def _receive(self, segment: ir.Segment) -> None:
        self._machine.order.expect(sum(map(self._most_generated, segment.nodes)))
        super()._receive(segment)
        for stream_id in {stream_id for stream_id, _ in segment.nodes} & self._streams.keys():
            self._machine.bring_back(self._streams[stream_id])

    def _most_generated(self, recorded: tuple[int, ir.Node]) -> int:
        _, node = recorded
        if not isinstance(node, ir.Gen):
            return 0
        limit = node.params.get("max_tokens", self._program.defaults.get("max_tokens", DEFAULTS["max_tokens"]))
        return self._samples(node) * min(int(limit), MOST_GENERATED)

    def _ref(self, stream: Stream, node: ir.Ref) -> Steps[None]:
        self._machine.order.want(node.stream, node.index)
        yield from super()._ref(stream, node)

    def _gen(self, stream: Stream, node: ir.Gen) -> Steps[None]:
        is_wide = self._samples(node) > _FEW_SAMPLES
        if is_wide:
            arguments = yield from self._machine.elsewhere(stream, partial(self._arguments, stream, node))
        else:
            arguments = self._arguments(stream, node)

        def prepare() -> tuple[StreamTokens, Layout | None, Pairs]:
            tokens = self._services.encoder.extend(stream.tokens, [*stream.unencoded, (stream.thought, True)])
            layout = self._services.builder.lay_out(tokens.ids, stream.items)
            pairs = self._submissions(tokens.ids, arguments, layout)
            check_num_logprobs(sum(num_logprobs(submission.request) for submission, _ in pairs), _MAX_LOGPROBS)
            return tokens, layout, pairs

        is_heavy = is_wide or ir.constraint_of(node) is not None or bool(node.tools) or bool(stream.items)
        tokens, layout, pairs = yield from self._prepared(stream, prepare, is_heavy=is_heavy)
        self._count_tokens(stream, tokens)
        listener = self._listener(self._emitter(stream, node)) if arguments[0]["stream"] else None
        call = NodeRequests(stream, pairs, listener)
        yield from self._machine.call(call)
        results = yield from self._results(stream, call)
        for result, request in zip(results, call.requests, strict=True):
            if runs := self._services.encoder.spelled_by(request.output_ids, request.forced):
                result["meta_info"]["forced_bytes"] = runs
        texts = [result["text"] for result in results]
        value, meta = self._outcome(stream, node, texts, [result["meta_info"] for result in results])
        text = value if isinstance(value, str) else value[0]
        if node.tools and (format := self._call_format(stream)) is not None and isinstance(value, str):
            schemas = {tool["name"]: tool.get("parameters", {}) for tool in node.tools}
            meta["tool_calls"] = calls_in(text, format, schemas)
        if stream.thought:  # what follows was not thought about
            tokens = self._services.encoder.extend(stream.tokens, stream.unencoded)
            layout = self._services.builder.lay_out(tokens.ids, stream.items)
        if text == results[0]["text"] and not stream.thought:
            kept, rest = self._kept(call)
            stream.tokens = tokens.generated(kept)
        else:  # only the answer stays, without its reasoning
            stream.tokens, rest = tokens, text
        self._quota.charge(len(text))
        stream.written.append((text, False))
        stream.num_written += len(text)
        stream.unencoded = [(rest, False)] if rest else []
        usage = call.usage()
        self._lease(stream, len(tokens.ids), layout, call.requests[0].namespace)
        self._done(stream, text, value, {**meta, "usage": usage})

    def _lease(self, stream: Stream, num_before: int, layout: Layout | None, namespace: Namespace) -> None:
        """Lease the pages of the stream's tokens: those before the node, perhaps with images, and the node's."""
        ids = stream.tokens.ids
        stream.num_first = stream.num_first or num_before
        before = ids[:num_before] if layout is None else layout.key_ids
        self._machine.lease(stream, before.tobytes() + ids[num_before:].tobytes(), namespace)

    def _results(self, stream: Stream, call: NodeRequests) -> Steps[list[dict[str, Any]]]:
        def results() -> list[dict[str, Any]]:
            return [result.result() for result in call.results]

        if sum(result.num_logprobs() for result in call.results) > FEW:
            return (yield from self._machine.elsewhere(stream, results))
        return results()

    def _count_tokens(self, stream: Stream, tokens: StreamTokens) -> None:
        """Streams do not share arrays: each is charged for all its tokens."""
        self._quota.charge(max(0, len(tokens.ids) - stream.num_counted), "tokens")
        stream.num_counted = max(stream.num_counted, len(tokens.ids))

    def _samples(self, node: ir.Gen) -> int:
        return int(node.params.get("n", self._program.defaults.get("n", 1)))

    def _arguments(self, stream: Stream, node: ir.Gen) -> list[dict[str, Any]]:
        given, seeds = self._params_and_seeds(stream, node)
        constraint, tag = ir.constraint_of(node), None
        if constraint is None and node.tools and (format := self._call_format(stream)) is not None:
            tag = calls_tag(node.tools, format)
        extra = given["extra"] or {}
        for name in extra:
            if name not in _EXTRA_OPTIONS:
                known = ", ".join(_EXTRA_OPTIONS)
                hint = nearest_name(name, _EXTRA_OPTIONS) or f"; there are {known}"
                raise InvalidRequest(f"there is no extra option {name!r}{hint}", param="extra")
        options = logprob_options(given) | extra
        options |= {"priority": given["priority"], "timeout": given["timeout"]}
        options["stream"] = self._program.stream and len(seeds) == 1
        options["origin"] = self._program.name, _DIGITS.sub("", node.name or "")
        options["owner"] = self._tenant
        samplings = [{**native_sampling(given, constraint, seed), "structural_tag": tag} for seed in seeds]
        return [{**options, "sampling_params": SamplingParams.from_dict(sampling)} for sampling in samplings]

    def _call_format(self, stream: Stream) -> CallFormat | None:
        """How the model's own template writes calls; other templates may stop at text that the constraint forbids."""
        is_own = self._template is not None and self._template is self._services.template
        return self._services.encoder.call_format if is_own and stream.role is not None else None

    def _submissions(self, ids: Any, arguments: Sequence[dict[str, Any]], layout: Layout | None = None) -> Pairs:
        submissions = self._services.builder.submissions
        return [
            pair
            for each in arguments
            for pair in submissions(GenerateRequest(input_ids=ids, layout=layout, **each))
        ]

    def _prepared(self, stream: Stream, prepare: Callable[[], T], *, is_heavy: bool) -> Steps[T]:
        if is_heavy or sum(len(text) for text, _ in stream.unencoded) > INLINE_CHARACTERS:
            return (yield from self._machine.elsewhere(stream, prepare))
        return prepare()

    def _listener(self, emit: Callable[[str, dict[str, Any]], None]) -> Callable[[NativeResult], None]:
        num_sent = 0

        def listen(result: NativeResult) -> None:
            nonlocal num_sent
            if result.finish_reason is not None and result.finish_reason.error is not None:
                return
            piece, num_sent = result.text[num_sent:], len(result.text)
            emit(piece, result.event()["meta_info"])

        return listen

    def _kept(self, call: NodeRequests) -> tuple[list[int], str]:
        """Generated tokens that the stream keeps, and trailing text to encode again."""
        ids, reason = call.results[0].output_ids, call.results[0].finish_reason
        matched = None if reason is None else reason.matched
        if isinstance(matched, int):
            return ids[:-1], ""
        if matched is None:
            return ids, ""
        count, rest = self._services.encoder.num_kept(call.requests[0].prompt_ids, ids, call.results[0].text)
        return ids[:count], rest

    def _select(self, stream: Stream, node: ir.Select) -> Steps[None]:
        method = method_named(node.method)

        def prepare() -> tuple[StreamTokens, Layout | None, list[tuple[int, ...]], list[CandidateTrie], Pairs]:
            tokens, layout, start, candidates = self._candidates(stream, node.choices)
            prefix = tokens.ids[:start]
            before = self._services.builder.lay_out(prefix, stream.items)
            tries = [CandidateTrie(prefix if before is None else before.ids, candidates)]
            if method.requires_unconditional_logprobs:
                tries.append(CandidateTrie(NO_TOKENS.ids, candidates))
            rows = [pair for trie in tries for pair in self._rows(trie, before if trie is tries[0] else None)]
            return tokens, layout, candidates, tries, rows

        is_heavy = bool(stream.items) or sum(64 + len(choice) for choice in node.choices) > INLINE_CHARACTERS
        tokens, layout, candidates, tries, pairs = yield from self._prepared(stream, prepare, is_heavy=is_heavy)
        self._count_tokens(stream, tokens)
        call = NodeRequests(stream, pairs)
        yield from self._machine.call(call)
        given = tries[0].logprobs(call.requests)
        alone = tries[1].logprobs(call.requests[len(tries[0].rows) :]) if len(tries) > 1 else [None] * len(given)
        scores = [Scores(row, ids, free) for row, ids, free in zip(given, candidates, alone, strict=True)]
        decision = method(node.choices, scores)
        choice = decision.decision
        num_tokens = len(candidates[node.choices.index(choice)])
        stream.tokens, stream.unencoded = tokens, []
        usage = call.usage(forced_tokens=num_tokens)
        self._lease(stream, len(tokens.ids), layout, call.requests[0].namespace)
        self._append(stream, choice)
        self._done(stream, choice, choice, {**decision.meta_info, "usage": usage})

    def _candidates(
        self, stream: Stream, choices: Sequence[str]
    ) -> tuple[StreamTokens, Layout | None, int, list[tuple[int, ...]]]:
        """The stream's tokens, with images; how many of them no choice changes; and each choice's tokens from there."""
        extend = self._services.encoder.extend
        tokens = extend(stream.tokens, stream.unencoded)
        layout = self._services.builder.lay_out(tokens.ids, stream.items)
        whole = GenerateRequest(input_ids=tokens.ids, layout=layout, sampling_params=_SCORE)
        self._services.builder.prompt(whole)  # it fits, or raises now
        wholes = [extend(tokens, [(choice, False)]).ids for choice in choices]
        start = min(_common_len(tokens.ids, ids) for ids in wholes)
        if not start:
            raise InvalidRequest("a select needs text before it", param="choices")
        for i, ids in enumerate(wholes):
            if len(ids) <= start:
                raise InvalidRequest(f"the tokenizer drops all of choice {i}", param="choices")
        return tokens, layout, start, [tuple(ids[start:].tolist()) for ids in wholes]

    def _rows(self, trie: CandidateTrie, before: Layout | None) -> Pairs:
        options = {
            "sampling_params": _SCORE,
            "return_logprob": True,
            "logprob_start_len": trie.logprob_start,
            "limits_logprobs": False,
            "priority": self._program.defaults.get("priority", 0),
            "lora_path": (self._program.defaults.get("extra") or {}).get("lora_path"),
        }
        pairs: Pairs = []
        for row, prompt in zip(trie.rows, trie.prompts(), strict=True):
            layout = None if before is None else before.followed_by(np.array(row.path, np.int32))
            pairs += self._submissions(prompt, [{**options, "token_ids_logprob": row.last_tokens}], layout)
        return pairs


def _common_len(left: Any, right: Any) -> int:
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
