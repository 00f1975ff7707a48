"""How a json_schema's values may be written in a structural tag, unless as JSON, by the names of its `style`."""

from __future__ import annotations

from typing import Final

from sgl.grammar.automaton.literal_arguments import STYLES as LITERAL_STYLES
from sgl.grammar.automaton.parameters import Style
from sgl.grammar.automaton.xml_arguments import STYLES as XML_STYLES

STYLES: Final[dict[str, Style]] = {**XML_STYLES, **LITERAL_STYLES}
