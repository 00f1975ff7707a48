"""What a model wrote, told apart: calls of tools, reasoning and the rest. For callers of /generate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from aiohttp import web
from typing_extensions import TypedDict

from sgl.errors import InvalidRequest
from sgl.formats.call_format import BlockKind, CallFormat
from sgl.formats.calls import channels_of, formats_of
from sgl.lang.ir.reasoning import ReasoningSplitter
from sgl.runtime.server.fields import Lenient
from sgl.runtime.server.protocol import Tool
from sgl.runtime.server.routes import Api, endpoint
from sgl.runtime.server.texts import MAX_TOKENIZED, checked_size, pool_for
from sgl.runtime.server.tool_calls import AnswerSplitter, Piece, Reading, merged

T = TypeVar("T")


class CallsBody(Lenient):
    """A text, the tools that it may call, and the format of calls; null: the server's, or any that can be told."""

    text: str
    tools: list[Tool] | None = None
    tool_call_parser: str | None = None


class ReasoningBody(Lenient):
    """A text, and the model family that wrote it."""

    text: str
    reasoning_parser: str


class ParsedCall(TypedDict):
    """A call: its number, the tool's name, and the arguments as JSON text."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(TypedDict):
    """The calls in a text, and what it says beside them."""

    normal_text: str
    calls: list[ParsedCall]


class SeparatedReasoning(TypedDict):
    """A text's reasoning, and the rest."""

    reasoning_text: str
    text: str


class TextsApi(Api):
    """SGLang's endpoints."""

    @endpoint(
        "POST /parse_function_call",
        example={"text": 'Hi<tool_call>{"name": "f", "arguments": {}}</tool_call>', "tool_call_parser": "hermes"},
    )
    async def calls(self, request: web.Request, body: CallsBody) -> ParsedCalls:
        """The calls of tools in a text that is whole, and what it says beside them."""
        name = body.tool_call_parser or self._service.config.tool_call_parser
        with _named("tool_call_parser"):
            formats: tuple[CallFormat | None, ...] = (None,) if name is None else formats_of(name)
        schemas = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}

        def read() -> Piece:
            for format in reversed(formats):  # of one family, the later has more marks
                reading = Reading(has_tools=True, format=format, schemas=schemas, begun=_begun(format, body.text))
                splitter = AnswerSplitter(None, reading)
                if (found := merged(splitter.feed(body.text, final=True))).calls:
                    break
            return found

        found = await _read(body.text, read)
        functions = [call["function"] for call in found.calls]
        calls: list[ParsedCall] = [
            {"tool_index": i, "name": its["name"], "parameters": its["arguments"]}
            for i, its in enumerate(functions)
        ]
        return {"normal_text": found.content, "calls": calls}

    @endpoint(
        "POST /separate_reasoning",
        example={"text": "<think>2 and 2</think>4", "reasoning_parser": "qwen3"},
    )
    async def reasoning(self, request: web.Request, body: ReasoningBody) -> SeparatedReasoning:
        """The reasoning in a text that is whole, and the rest."""
        with _named("reasoning_parser"):
            splitter = ReasoningSplitter(body.reasoning_parser, only_leading=True)
        channels = channels_of(body.reasoning_parser)

        def read() -> tuple[str, str]:
            if channels is None:
                return splitter.feed(body.text, final=True)
            reader = AnswerSplitter(None, Reading(format=channels, begun=_begun(channels, body.text)))
            found = merged(reader.feed(body.text, final=True))
            return found.reasoning, found.content

        thought, said = await _read(body.text, read)
        return {"reasoning_text": thought, "text": said}


def _begun(format: CallFormat | None, text: str) -> BlockKind:
    """The block that a whole text goes on in, of a format that has some."""
    return (
        ""
        if format is None or format.blocks is None
        else format.blocks.begun_before(text, format.trigger or format.begin)
    )


async def _read(text: str, function: Callable[[], T]) -> T:
    """Call what reads a text, in a thread: a long one takes seconds. Raises InvalidRequest for one that is too long."""
    size = checked_size([text], MAX_TOKENIZED, "characters are to be read, {} more for each text", "text")
    return await asyncio.get_running_loop().run_in_executor(pool_for(size), function)


@contextlib.contextmanager
def _named(param: str) -> Iterator[None]:
    """Around what is wrong with this field alone."""
    try:
        yield
    except InvalidRequest as error:
        error.param = param
        raise
