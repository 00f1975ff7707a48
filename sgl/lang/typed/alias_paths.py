"""Where pydantic reads a model's fields: names, aliases, paths into inner objects and lists (`AliasPath`), or the first
present of several (`AliasChoices`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
MOST_ITEMS = 1000
"""Of a list that a path enters."""


class Unclear(ValueError):
    """Why no JSON Schema can describe the places."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A field's place to be written, and all places where it is read, in order."""

    name: str
    written: Path
    choices: tuple[Path, ...]

    @property
    def key(self) -> str:
        """A key for the place while the object's schema is made; pydantic titles it."""
        return " ".join(map(str, self.written))

    def read(self, is_required: bool) -> tuple[Path, ...]:
        """Where the field may be read; if required, up to the written place."""
        return self.choices[: self.choices.index(self.written) + 1] if is_required else self.choices


class Places:
    """Places of all fields of a model, TypedDict or dataclass; none overlap."""

    def __init__(self, schema: Any, config: Mapping[str, Any]) -> None:
        """`config`: the core config. Raises Unclear."""
        self._is_open = "allow" in (schema.get("extra_behavior"), config.get("extra_fields_behavior"))
        self._fields = [_field(name, field, config) for name, field in _named(schema)]

    def plain(self, schema: Any) -> Any:
        """The core schema with one key per field."""
        pairs = zip(self._fields, _named(schema), strict=True)
        fields = {field.name: {**given, "validation_alias": field.key} for field, (_, given) in pairs}
        return {**schema, "fields": fields if isinstance(schema["fields"], Mapping) else [*fields.values()]}

    def nested(self, found: dict[str, Any]) -> dict[str, Any]:
        """A `plain` one's JSON Schema, with fields at their places. Raises Unclear."""
        properties, required = found["properties"], {*found.get("required", ())}
        self._check_apart(required)
        placed = {
            field.written: (properties[field.key], field.key in required)
            for field in self._fields
            if field.key in properties  # its constructor may not take the field
        }
        if not placed:
            return found
        held = _holding(placed)
        if self._is_open:  # extra keys must not be read as fields
            for field in self._fields:
                for step, *_ in field.read(field.key in required):
                    held["properties"].setdefault(step, False)
        return {key: value for key, value in found.items() if key not in ("properties", "required")} | held

    def _check_apart(self, required: set[str]) -> None:
        """No field may read what another writes, or part of it."""
        for field in self._fields:
            read = field.read(field.key in required)
            for other in self._fields:
                if field is not other:
                    _check_apart(field, read, other)


def has_aliases(schema: Any) -> bool:
    """Whether any field has an alias."""
    return any("validation_alias" in field for _, field in _named(schema))


def _named(schema: Any) -> list[tuple[str, Any]]:
    fields = schema["fields"]
    return [*fields.items()] if isinstance(fields, Mapping) else [(field["name"], field) for field in fields]


def _field(name: str, field: Any, config: Mapping[str, Any]) -> _Field:
    choices: list[Path] = [*_choices(field.get("validation_alias", name))]
    if not config.get("validate_by_alias", True):
        choices = [(name,)]
    elif config.get("validate_by_name"):
        choices.append((name,))
    plain = [path for path in choices if len(path) == 1]
    written = plain[0] if plain else choices[0]  # pydantic's JSON Schemas choose the same
    if any(isinstance(step, int) and not 0 <= step < MOST_ITEMS for step in written):
        message = (
            f"the field {name!r} is read from the place {_told(written)}: AliasPath may count the items of a list"
        )
        raise Unclear(f"{message} from 0 to {MOST_ITEMS - 1}")
    return _Field(name, written, tuple(choices))


def _choices(alias: str | list[Any]) -> Iterator[Path]:
    if isinstance(alias, str):
        yield (alias,)
    elif isinstance(alias[0], list):
        yield from map(tuple, alias)
    else:
        yield tuple(alias)


def _check_apart(field: _Field, read: tuple[Path, ...], other: _Field) -> None:
    for path in read:
        shared = min(len(path), len(other.written))
        if path[:shared] == other.written[:shared] or field.key == other.key:
            message = f"the fields {field.name!r} and {other.name!r} are both read from {_told(path[:shared])}"
            raise Unclear(f"{message}: give each a validation_alias of its own")


def _holding(placed: Mapping[Path, tuple[dict[str, Any], bool]]) -> dict[str, Any]:
    """The schema of an object or list with values at paths, each with whether it is required."""
    inner: dict[str | int, dict[Path, tuple[dict[str, Any], bool]]] = {}
    for (step, *rest), value in placed.items():
        inner.setdefault(step, {})[tuple(rest)] = value
    held = {step: values[()][0] if () in values else _holding(values) for step, values in inner.items()}
    needed = [step for step, values in inner.items() if any(is_required for _, is_required in values.values())]
    names = {step: value for step, value in held.items() if isinstance(step, str)}
    if len(names) == len(held):
        return {"type": "object", "properties": names} | ({"required": needed} if needed else {})
    items = {step: value for step, value in held.items() if isinstance(step, int)}
    if names:
        raise Unclear(f"by validation_alias one value is a list and an object, which has {next(iter(names))!r}")
    num_items = max(items) + 1
    return {
        "type": "array",
        "prefixItems": [items.get(index, {}) for index in range(num_items)],
        "minItems": max((step + 1 for step in needed if isinstance(step, int)), default=0),
        "maxItems": num_items,
    }


def _told(path: Path) -> str:
    return repr(".".join(map(str, path)))
