"""The KV pages of programs' beginnings, between a prefill and a decode engine: see docs/disaggregation.md."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

from sgl.errors import InvalidRequest
from sgl.lang.ir import nodes as ir
from sgl.lang.ir.chat_template import ChatTemplate, as_template
from sgl.runtime.program.first_prompt import FirstPrompt, first_prompt_of
from sgl.runtime.program.tokens import Encoder, model_template
from sgl.runtime.server.replies import ProgramPages
from sgl.runtime.server.service import Service
from sgl.runtime.transfer.params import PARAM

MOST_ROWS: Final = 64
"""Of a batch whose beginnings are computed apart: the others share theirs with these, or compute it."""
_NO_OUTPUT: Final = {"max_new_tokens": 0}


class Pages:
    """Of one service's programs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def offered(self, programs: Sequence[ir.Program], segment: ir.Segment | None) -> ProgramPages:
        """Compute the beginnings of rows, for a decode engine. Raises what `Service.generate` does."""
        found = await self._beginnings(programs, segment, f"return_{PARAM}")
        first = {tuple(its.ids): row for row, its in reversed(list(enumerate(found))) if its is not None}
        asked = {row: its for row, its in enumerate(found) if its is not None and first[tuple(its.ids)] == row}
        results = await self._computed(list(asked.values()), programs[0], **{f"return_{PARAM}": True})
        offers = dict(zip(asked, (result.get(PARAM) for result in results), strict=True))
        return {PARAM: [offers.get(row) for row in range(len(found))] if any(offers.values()) else None}

    async def pull(
        self,
        programs: Sequence[ir.Program],
        segment: ir.Segment | None,
        given: Sequence[dict[str, Any] | None],
    ) -> None:
        """Have the pages that a prefill engine offers for rows' beginnings in the cache, before the rows begin.
        Raises InvalidRequest for what is offered to others."""
        if len(given) > len(programs):
            raise InvalidRequest(f"{PARAM} are one for each row, at most: not {len(given)}", param=PARAM)
        found = await self._beginnings(programs, segment, PARAM)
        asked = [(its, params) for its, params in zip(found, given, strict=False) if its and params]
        offers = [params for _, params in asked]
        await self._computed([its for its, _ in asked], programs[0], **{PARAM: offers})

    async def _beginnings(
        self, programs: Sequence[ir.Program], segment: ir.Segment | None, param: str
    ) -> list[FirstPrompt | None]:
        if segment is None:
            raise InvalidRequest(f"{param} needs a segment: of nothing recorded there are no pages", param=param)

        def read() -> list[FirstPrompt | None]:
            chosen = programs[0].chat_template
            template = self._template if chosen is None else as_template(chosen)
            return [first_prompt_of(program, segment, template, self._encoder) for program in programs[:MOST_ROWS]]

        return await self._service.in_thread(read)

    async def _computed(
        self, beginnings: Sequence[FirstPrompt], program: ir.Program, **options: Any
    ) -> list[dict[str, Any]]:
        if not beginnings:
            return []
        more = {"extra_key": beginnings[0].extra_key, "timeout": program.deadline_s}
        results: list[dict[str, Any]] = await self._service.generate(
            input_ids=[its.ids for its in beginnings], sampling_params=_NO_OUTPUT, **more, **options
        )
        return results

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self._service.tokenizer, self._service.context_length)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return model_template(self._service.tokenizer)
