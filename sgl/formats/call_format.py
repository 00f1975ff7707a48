"""How a model family writes calls of tools: one description, from which the constraint, the parser and the stream
parser all follow.

A call is `begin`, the tool's name, `middle`, the arguments, `end`. Several stand between `opening` and `closing`, with
`separator` between them. White space in these texts, and around JSON's punctuation, is what models are held to; what
is read may have any.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sgl.errors import InvalidRequest
from sgl.formats.arguments import XML_STYLES
from sgl.formats.literals import LITERAL_STYLES
from sgl.formats.marks import parts_of

Arguments = Literal[
    "json",
    "qwen_xml",
    "glm_xml",
    "minimax_xml",
    "step_xml",
    "deepseek_xml",
    "hy_xml",
    "gcml_xml",
    "ifm_xml",
    "solar_xml",
    "minicpm_xml",
    "kimi_xml",
    "pythonic",
    "gemma4",
    "functiongemma",
]
BlockKind = Literal["", "thought", "said"]
_NAME = re.compile(r"[\w./-]+")


class Blocks(NamedTuple):
    """Marks of an answer that stands in blocks: what is thought, then what is said or calls."""

    thought: tuple[str, str]
    said: tuple[str, str]
    end: str = ""
    """May stand behind the last."""
    says_first: bool = False
    """Something may be said before calls, too."""

    def begun_by(self, prompt: str) -> BlockKind:
        """Which block the end of a prompt has begun."""
        end = prompt.rstrip()
        return "thought" if end.endswith(self.thought[0]) else "said" if end.endswith(self.said[0]) else ""

    def begun_before(self, answer: str, calls: str) -> BlockKind:
        """Which block a whole answer goes on in, since it ends it first. calls: what they begin with."""
        before, ended, _ = answer.partition(self.thought[1])
        begins = self.thought[0], self.said[0], calls
        return "thought" if ended and not any(mark in before for mark in begins) else ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The calls of one family."""

    name: str
    begin: str
    middle: str
    end: str
    arguments: Arguments = "json"
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    """What free text is interrupted by: the first mark, unless given. There is none before a bracket, as texts begin
    with too: such calls are the whole answer or none of it."""
    prefix: str = ""
    """May stand before an answer that is calls."""
    number_mark: str = ""
    """Stands behind the call's number, which comes first, and before the name."""
    id_mark: str = ""
    """Stands behind the name, before the call's id: nine letters and digits, or its number."""
    has_number: bool = False
    """The id is only a number, and none that others know."""
    writes_id: bool = False
    """The name is written as the call's id: functions.NAME:NUMBER."""
    has_channels: bool = False
    """All of an answer is in channels: `blocks`, or those that `harmony.py` knows."""
    blocks: Blocks | None = None
    parsers: str = ""
    """The names of the parsers that read it, if not its own alone."""

    def __post_init__(self) -> None:
        if not self.trigger:
            first = (*parts_of(self.opening + self.begin), "[")[0]
            object.__setattr__(self, "trigger", "" if first in "[{" else first)

    @property
    def parser_names(self) -> list[str]:
        """As `--tool-call-parser` has them."""
        return (self.parsers or self.name).split()

    @property
    def quotes_name(self) -> bool:
        """Whether a name is a JSON string."""
        return self.arguments == "json" and self.middle.startswith('"')

    def written_name(self, name: str) -> str:
        """A tool's name as calls have it. Raises InvalidRequest where it would be read as something else."""
        if self.quotes_name:
            return json.dumps(name, ensure_ascii=False)[1:-1]
        if not _NAME.fullmatch(name):
            message = f"the name of the tool {name!r:.80} cannot be written in calls as the model writes them"
            raise InvalidRequest(f"{message}: letters, digits, '_', '-', '.' and '/' can", param="tools")
        return name

    def marks(self) -> tuple[str, ...]:
        """Everything written around names and arguments."""
        around: tuple[str, ...] = (self.prefix, self.opening, self.begin, self.id_mark, self.middle)
        around += (self.end, self.separator, self.number_mark)
        if self.blocks is not None:
            around += (*self.blocks.thought, *self.blocks.said, self.blocks.end)
        inside: tuple[str, ...] = ()
        if (xml := XML_STYLES.get(self.arguments)) is not None:
            inside = (xml.begin, xml.middle, *xml.more_middles, xml.string_middle, xml.end)
        elif (literal := LITERAL_STYLES.get(self.arguments)) is not None:
            inside = literal.quotes
        return (*around, self.closing, *inside)
