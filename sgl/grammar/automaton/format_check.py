"""Which formats a structural tag may be made of, and whether a given one is well-formed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

from sgl.errors import GrammarError
from sgl.grammar.automaton.styles import STYLES
from sgl.grammar.ebnf.linear import regular_of
from sgl.grammar.ebnf.reader import read_ebnf
from sgl.grammar.regular.expr import Expr
from sgl.grammar.regular.regex import compile_regex
from sgl.time_limit import check_size, check_time

MAX_DEPTH = 32
MAX_FORMATS = 100_000
"""How many formats a structural tag may hold, each as often as it is repeated."""
MAX_CHARS = 4096
"""The most that `max_chars` may be: states count them."""
_FLAGS = {"at_least_one", "stop_after_first", "loop"}
_FIELDS: dict[str, tuple[set[str], set[str]]] = {  # needed, and known besides
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, {"style", "any_order", "max_whitespace_cnt", "excludes"}),
    "qwen_xml_parameter": ({"json_schema"}, set()),
    "regex": ({"pattern"}, set()),
    "grammar": ({"grammar"}, set()),
    "any_text": (set(), {"excludes", "max_chars", "max_tokens"}),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "optional": ({"content"}, set()),
    "star": ({"content"}, set()),
    "plus": ({"content"}, set()),
    "repeat": ({"content", "min", "max"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
    "dispatch": ({"rules"}, {"loop", "excludes"}),
    "token": ({"token"}, set()),
    "token_triggered_tags": ({"trigger_tokens", "tags"}, {"at_least_one", "stop_after_first", "exclude_tokens"}),
    "token_dispatch": ({"rules"}, {"loop", "exclude_tokens"}),
}
_ENDLESS = {"any_text", "triggered_tags", "token_triggered_tags", "dispatch", "token_dispatch"}
_BRANCHING = {"or", "optional", "star", "plus", "repeat", "dispatch", "token_dispatch"}
_JSON = {"json_schema", "qwen_xml_parameter"}


def check_format(source: Any) -> bool:
    """Whether a byte may be text in one reading of the format and a bracket of JSON in another; False is certain.
    Raises GrammarError where the format is malformed or not known."""
    _Check().check(source, 0, 1)
    kinds = {each["type"] for each in _formats(source, in_triggered=True)}
    if not kinds & _JSON:
        return False
    return bool(kinds & {*_BRANCHING, "regex", "grammar"}) or any(map(_is_loose, _formats(source)))


@lru_cache(maxsize=256)
def grammar_expr(source: str) -> Expr:
    """The texts of a grammar in EBNF. Raises GrammarError where a regular expression cannot say them."""
    rules = read_ebnf(source)
    rules.drop_useless()
    return regular_of(rules)


def name_of(given: Any) -> str:
    """The text or token that a tag is given as."""
    return str(given["token"] if isinstance(given, dict) else given)


def ends_of(tag: Any) -> list[str]:
    """A tag's ends, one of which must come."""
    end = tag["end"]
    return list(map(name_of, end if isinstance(end, list) else [end]))


def bounds_of(source: Any) -> tuple[int, int | None]:
    """How often a format is repeated."""
    if source["type"] == "repeat":
        return source["min"], None if source["max"] == -1 else source["max"]
    return int(source["type"] == "plus"), None


class _Check:
    def __init__(self) -> None:
        self._num_formats = 0

    def check(self, source: Any, depth: int, times: int) -> None:
        """A format, which comes so many times in the automaton."""
        check_time()
        self._num_formats += times
        check_size(self._num_formats, MAX_FORMATS, "the structural tag has more than {} formats")
        if depth > MAX_DEPTH:
            raise GrammarError(f"formats of a structural tag are nested more than {MAX_DEPTH} deep")
        kind = source.get("type") if isinstance(source, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise GrammarError(f"a format of a structural tag has a type of {', '.join(_FIELDS)}, not {kind!r}")
        needed, known = _FIELDS[kind]
        given = {name for name, value in source.items() if value is not None or name in needed} - {"type"}
        if not needed <= given or not given <= needed | known:
            raise GrammarError(f"a format of type {kind!r} has {', '.join(sorted(needed | known))}")
        for name in sorted(given):
            self._check_field(source, name, depth, times)
        if kind == "tag" and not all(ends_of(source)) and may_be_endless(source["content"]):
            raise GrammarError("a tag around text of no certain end has an end")
        if kind in ("triggered_tags", "token_triggered_tags"):
            _check_triggers(source)
        if kind == "tags_with_separator" and not source["separator"] and any(map(may_be_empty, source["tags"])):
            raise GrammarError("tags that may be empty have a separator")

    def _check_field(self, source: Any, name: str, depth: int, times: int) -> None:
        kind, value = source["type"], source[name]
        match name:
            case "value" | "pattern" | "separator" | "grammar":
                if not isinstance(value, str):
                    raise GrammarError(f"{name} of a format is a string, not {value!r}")
            case "token" | "begin" | "end":
                ends = value if name == "end" and isinstance(value, list) and value else [value]
                for each in ends:
                    self._check_name(name, each)
            case "elements":
                for each in _list(name, value):
                    self.check(each, depth + 1, times)
            case "tags":
                for number, each in enumerate(_list(name, value)):
                    if isinstance(each, dict):
                        value[number] = each = {"type": "tag", **each}
                    self.check(each, depth + 1, times if kind != "tags_with_separator" else 2 * times)
                    if each["type"] != "tag":
                        raise GrammarError(f"tags of {kind} are of type 'tag'")
                    _check_begin(kind, each["begin"])
            case "rules":
                for rule in _list(name, value):
                    if not isinstance(rule, list) or len(rule) != 2:
                        raise GrammarError("rules of a dispatch are pairs of a text and a format")
                    self._check_name("rules", rule[0])
                    if not rule[0]:
                        raise GrammarError("rules of a dispatch begin with a text that is not empty")
                    self.check(rule[1], depth + 1, times)
                    if may_be_endless(rule[1]):
                        raise GrammarError("the format behind a dispatch's text has no certain end")
            case "content":
                low, high = bounds_of(source) if kind in ("star", "plus", "repeat") else (0, 1)
                if kind == "repeat":
                    _check_count(source, "min", MAX_FORMATS)
                    if high is not None:
                        _check_count(source, "max", MAX_FORMATS)
                    if high is not None and high < low:
                        raise GrammarError(f"max of a repeat is at least its min, {low}, or -1, not {high}")
                self.check(value, depth + 1, times * max(1, low + 1 if high is None else high))
                if high is None and may_be_empty(value):
                    raise GrammarError(f"what a {kind} repeats may be empty, so that there is no end to it")
            case "triggers" | "trigger_tokens" | "excludes" | "exclude_tokens":
                _check_texts(name, value, may_be_empty=name.startswith("exclude"))
                if kind == "json_schema" and value:
                    raise GrammarError("excludes of a json_schema is not supported: let its schema have a pattern")
            case "max_chars" | "max_whitespace_cnt":
                _check_count(source, name, MAX_CHARS if name == "max_chars" else 1 << 31)
            case "max_tokens":
                raise GrammarError("max_tokens of any_text is not supported: max_chars is")
            case "any_order":
                if value is not False:
                    raise GrammarError("any_order of a json_schema is false here: keys come as the schema has them")
            case "style":
                if value != "json" and value not in STYLES:
                    names = " or ".join(map(repr, ("json", *STYLES)))
                    raise GrammarError(f"style of a json_schema is {names}, not {value!r}")
        if name in _FLAGS and not isinstance(value, bool):
            raise GrammarError(f"{name} of a format is true or false, not {value!r}")

    def _check_name(self, field: str, value: Any) -> None:
        if isinstance(value, dict) and value.keys() == {"type", "token"} and value["type"] == "token":
            value = value["token"] or None
        if not isinstance(value, str):
            raise GrammarError(f"{field} of a format is a text or a token, not {value!r}")


def may_be_endless(source: Any) -> bool:
    """Whether a checked format ends with text that has no certain end."""
    match source["type"]:
        case "sequence":
            return may_be_endless(source["elements"][-1])
        case "or":
            return any(map(may_be_endless, source["elements"]))
        case "optional" | "star" | "plus" | "repeat":
            return may_be_endless(source["content"])
        case "tag":
            return not all(ends_of(source)) and may_be_endless(source["content"])
        case kind:
            return kind in _ENDLESS


def may_be_empty(source: Any) -> bool:
    """Whether a checked format may have no text."""
    match source["type"]:
        case "const_string":
            return not source["value"]
        case "grammar":
            return bool(grammar_expr(source["grammar"]).nullable)
        case "regex":
            return bool(compile_regex(source["pattern"], dialect="python", search=False).nullable)
        case "json_schema":
            return bool(source.get("style", "json") != "json")
        case "token":
            return False
        case "sequence":
            return all(map(may_be_empty, source["elements"]))
        case "or":
            return any(map(may_be_empty, source["elements"]))
        case "plus" | "repeat":
            return bounds_of(source)[0] == 0 or may_be_empty(source["content"])
        case "tag":
            return not name_of(source["begin"]) and not all(ends_of(source)) and may_be_empty(source["content"])
        case "triggered_tags" | "token_triggered_tags" | "tags_with_separator":
            return not source.get("at_least_one") or any(map(may_be_empty, source["tags"]))
    return True


def _formats(source: Any, *, in_triggered: bool = False) -> Iterator[Any]:
    """All formats within one. in_triggered: without the regexes of triggered tags, whose ends are found."""
    yield source
    for each in source.get("elements", ()):
        yield from _formats(each, in_triggered=in_triggered)
    for each in source.get("tags", ()):
        is_found = in_triggered and source["type"] == "triggered_tags" and each["content"]["type"] == "regex"
        yield from () if is_found else _formats(each, in_triggered=in_triggered)
    for _, each in source.get("rules", ()):
        yield from _formats(each, in_triggered=in_triggered)
    if "content" in source:
        yield from _formats(source["content"], in_triggered=in_triggered)


def _is_loose(source: Any) -> bool:
    """Whether text of no certain end and JSON stand side by side, or tags that begin alike."""
    if source["type"] == "tags_with_separator":
        begins = sorted(name_of(tag["begin"]) for tag in source["tags"])
        return any(other.startswith(one) for one, other in pairwise(begins))
    if source["type"] != "sequence":
        return False
    *before, last = source["elements"]
    return any(map(may_be_endless, before)) or (may_be_endless(last) and any(map(_holds_json, before)))


def _holds_json(source: Any) -> bool:
    return any(part["type"] in _JSON for part in _formats(source))


def _check_begin(kind: str, begin: Any) -> None:
    if kind == "triggered_tags" and not isinstance(begin, str):
        raise GrammarError("tags of triggered_tags begin with a text: token_triggered_tags has those with a token")
    if kind == "token_triggered_tags" and isinstance(begin, str):
        raise GrammarError("tags of token_triggered_tags begin with a token: triggered_tags has those with a text")


def _check_triggers(source: Any) -> None:
    triggers = source.get("triggers") or source["trigger_tokens"]
    begins = [name_of(tag["begin"]) for tag in source["tags"]]
    for begin in begins:
        if not any(begin.startswith(trigger) for trigger in triggers):
            raise GrammarError(f"the begin tag {begin!r} starts with none of the triggers")
    for trigger in triggers:
        if not any(begin.startswith(trigger) for begin in begins):
            raise GrammarError(f"no begin tag starts with the trigger {trigger!r}")


def _check_count(source: Any, name: str, most: int) -> None:
    value = source[name]
    if type(value) is not int or not 0 <= value <= most:
        raise GrammarError(f"{name} of a format is an integer from 0 to {most}, not {value!r}")


def _check_texts(name: str, value: Any, *, may_be_empty: bool) -> None:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise GrammarError(f"{name} of a format is a list of strings, none of them empty")
    if not value and not may_be_empty:
        raise GrammarError(f"{name} of a format is a list of at least one")


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{name} of a format is a list of at least one")
    return value
