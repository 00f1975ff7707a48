"""Structural tags' formats by brute force: which texts are of a format, read off the description of each, by looking at
every way to cut a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema


def is_of(source: Any, text: str) -> bool:
    """Whether a whole text is of a format."""
    return len(text) in ends(source, text, 0, ())


def ends(source: Any, text: str, start: int, around: tuple[str, ...]) -> set[int]:
    """Where texts of a format that begin at a place may end. `around`: the end tags around it."""
    found: set[int] = set()
    stack = list(_ends(source, text, start, around))
    found.update(stack)
    return found


def _ends(source: Any, text: str, start: int, around: tuple[str, ...]) -> Iterator[int]:
    places = range(start, len(text) + 1)
    match source["type"]:
        case "const_string" | "token":
            value = source.get("value", source.get("token"))
            if text.startswith(value, start):
                yield start + len(value)
        case "regex":
            yield from (end for end in places if re.fullmatch(source["pattern"], text[start:end]))
        case "json_schema":
            yield from (end for end in places if _is_json(text[start:end], source["json_schema"]))
        case "any_text":
            excludes = [*source.get("excludes", ()), *around]
            most = source.get("max_chars", len(text))
            for end in places:
                if end - start <= most and not any(each in text[start:end] for each in excludes):
                    yield end
        case "sequence":
            reached = {start}
            for element in source["elements"]:
                reached = {end for place in reached for end in ends(element, text, place, around)}
            yield from reached
        case "or":
            for element in source["elements"]:
                yield from ends(element, text, start, around)
        case "optional" | "star" | "plus" | "repeat":
            low, high = {"optional": (0, 1), "star": (0, None), "plus": (1, None)}.get(
                source["type"], (source.get("min"), None if source.get("max") == -1 else source.get("max"))
            )
            yield from _times(source["content"], low, high, text, start, around)
        case "tag":
            yield from _tag(source, text, start)
        case "tags_with_separator":
            yield from _separated(source, text, start)
        case "triggered_tags" | "token_triggered_tags":
            yield from _triggered(source, text, start, around)
        case "dispatch" | "token_dispatch":
            tags = [{"begin": begin, "content": content, "end": ""} for begin, content in source["rules"]]
            stop = not source.get("loop", True)
            triggers = [begin for begin, _ in source["rules"]]
            whole = {"triggers": triggers, "tags": tags, "stop_after_first": stop, **source}
            yield from _triggered(whole, text, start, ())


def _times(
    content: Any, low: int, high: int | None, text: str, start: int, around: tuple[str, ...]
) -> Iterator[int]:
    reached, known = {start}, {start}
    number = 0
    if low == 0:
        yield start
    while reached and (high is None or number < high) and number <= len(text) + 2:
        reached = {end for place in reached for end in ends(content, text, place, around)}
        number += 1
        if number >= low:
            yield from reached
            if high is None:
                reached -= known
                known |= reached


def _names(given: Any) -> list[str]:
    return [
        each["token"] if isinstance(each, dict) else each
        for each in (given if isinstance(given, list) else [given])
    ]


def _tag(source: Any, text: str, start: int) -> Iterator[int]:
    [begin] = _names(source["begin"])
    if not text.startswith(begin, start):
        return
    last = _names(source["end"])
    for place in ends(source["content"], text, start + len(begin), tuple(filter(None, last))):
        yield from (place + len(end) for end in last if text.startswith(end, place))


def _separated(source: Any, text: str, start: int) -> Iterator[int]:
    if not source.get("at_least_one"):
        yield start
    reached = {end for tag in source["tags"] for end in _tag(tag, text, start)}
    known: set[int] = set()
    while reached:
        yield from reached
        if source.get("stop_after_first"):
            return
        known |= reached
        separator = source["separator"]
        behind = [place + len(separator) for place in reached if text.startswith(separator, place)]
        reached = {end for place in behind for tag in source["tags"] for end in _tag(tag, text, place)} - known


def _triggered(source: Any, text: str, start: int, around: tuple[str, ...]) -> Iterator[int]:
    triggers = _names(source.get("triggers") or source["trigger_tokens"])
    excludes = [*source.get("excludes", ()), *source.get("exclude_tokens", ()), *around]

    def free(place: int) -> Iterator[int]:
        """Where text without triggers may end."""
        for end in range(place, len(text) + 1):
            if any(each in text[place:end] for each in (*triggers, *excludes)):
                return
            yield end

    def tagged(place: int) -> Iterator[int]:
        """Where a tag ends behind free text; the first trigger that is complete begins it."""
        for end in range(place, len(text) + 1):
            told = [each for each in triggers if text[place:end].endswith(each)]
            begun = text[place:end]
            if any(each in begun for each in excludes):
                return
            if told:
                for trigger in told:
                    at = end - len(trigger)
                    for tag in source["tags"]:
                        if _names(tag["begin"])[0].startswith(trigger):
                            yield from _tag({"type": "tag", **tag}, text, at)
                return

    if source.get("at_least_one"):
        reached = {end for tag in source["tags"] for end in _tag({"type": "tag", **tag}, text, start)}
    else:
        yield from free(start)
        reached = set(tagged(start))
    known: set[int] = set()
    while reached:
        if source.get("stop_after_first"):
            yield from reached
            return
        known |= reached
        for place in reached:
            yield from free(place)
        reached = {end for place in reached for end in tagged(place)} - known


def _is_json(text: str, schema: Any) -> bool:
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return json.dumps(value, separators=(",", ":")) == text
