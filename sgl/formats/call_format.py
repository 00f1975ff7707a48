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
from typing import Literal

from sgl.errors import InvalidRequest
from sgl.formats.arguments import XML_STYLES
from sgl.formats.literals import LITERAL_STYLES

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
    "pythonic",
    "gemma4",
    "functiongemma",
]
_NAME = re.compile(r"[\w./-]+")


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
    """What free text is interrupted by. Without one, calls are the whole answer or none of it: they begin as a text
    might."""
    prefix: str = ""
    """May stand before an answer that is calls."""
    id_mark: str = ""
    """Stands behind the name, before the call's id: nine letters and digits."""
    writes_id: bool = False
    """The name is written as the call's id: functions.NAME:NUMBER."""
    has_channels: bool = False
    """All of an answer is in channels, which `harmony.py` knows."""

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
        around = (self.prefix, self.opening, self.begin, self.id_mark, self.middle, self.end, self.separator)
        inside: tuple[str, ...] = ()
        if (xml := XML_STYLES.get(self.arguments)) is not None:
            inside = (xml.begin, xml.middle, xml.string_middle, xml.end)
        elif (literal := LITERAL_STYLES.get(self.arguments)) is not None:
            inside = literal.quotes
        return (*around, self.closing, *inside)
