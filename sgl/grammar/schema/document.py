"""A schema document: drafts, resources with base addresses, anchors, references.

It knows the keywords of each draft and the places of subschemas, not their meaning. Nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from sgl.grammar.text.pointer import member

LATEST: Final = 2020
_DRAFTS: Final = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "http://json-schema.org/schema": LATEST,
    "https://json-schema.org/schema": LATEST,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": LATEST,
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keywords whose value is a schema, a list of schemas, or an object of schemas. Some may be of two kinds.
ONE_SCHEMA: Final = _names(
    "additionalItems additionalProperties contains contentSchema else if items not propertyNames then "
    "unevaluatedItems unevaluatedProperties"
)
LIST_OF_SCHEMAS: Final = _names("allOf anyOf items oneOf prefixItems")
NAMED_SCHEMAS: Final = _names("$defs definitions dependencies dependentSchemas patternProperties properties")

IN_PLACE: Final = (
    "oneOf", "anyOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies", "allOf", "$ref",
    "$dynamicRef", "$recursiveRef", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
"""The keywords that apply schemas to the same value; those likely to multiply alternatives come first."""

# A schema with one of these equals no other.
_OF_ITS_OWN: Final = _names("$id id $anchor $dynamicAnchor $recursiveAnchor $schema")

_SINCE_4: Final = _names(
    "$ref additionalItems additionalProperties allOf anyOf dependencies enum exclusiveMaximum exclusiveMinimum "
    "format items maxItems maxLength maxProperties maximum minItems minLength minProperties minimum multipleOf not "
    "nullable oneOf pattern patternProperties properties required type uniqueItems"
)
_SINCE_6: Final = _SINCE_4 | _names("const contains propertyNames")
_SINCE_7: Final = _SINCE_6 | _names("if then else")
_SINCE_2019: Final = _SINCE_7 | _names(
    "dependentRequired dependentSchemas maxContains minContains unevaluatedItems unevaluatedProperties"
)
_KEYWORDS: Final = {
    4: _SINCE_4,
    6: _SINCE_6,
    7: _SINCE_7,
    2019: _SINCE_2019 | _names("$recursiveRef"),
    2020: _SINCE_2019 | _names("$dynamicRef prefixItems"),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The draft of a schema. `is_declared`: by its $schema, not by default."""

    draft: int = LATEST
    is_declared: bool = False

    @property
    def keywords(self) -> frozenset[str]:
        """The keywords that assert or refer; all others are annotations. Drafts from 2019 on keep the older
        `dependencies`, `additionalItems` and lists of `items`, which real schemas use."""
        return _KEYWORDS[self.draft]

    @property
    def id_keyword(self) -> str:
        """The keyword of a schema's own address."""
        return "id" if self.draft == 4 else "$id"

    @property
    def ref_hides_siblings(self) -> bool:
        """Whether keywords beside $ref are ignored."""
        return self.draft <= 7

    @property
    def asserts_formats(self) -> bool:
        """Whether `format` asserts: not in drafts from 2019 on, if the schema declares one of them."""
        return not (self.is_declared and self.draft >= 2019)


def dialect_of(schema: object) -> Dialect | None:
    """The dialect of `$schema`, the latest draft without one, None for an unknown one."""
    if not isinstance(schema, dict) or not isinstance(schema.get("$schema"), str):
        return Dialect()
    draft = _DRAFTS.get(schema["$schema"].rstrip("#"))
    return None if draft is None else Dialect(draft, True)


@dataclass(slots=True, eq=False)
class Resource:
    """A schema with its own address, and its anchors."""

    uri: str
    root: Location = field(init=False)
    dialect: Dialect
    anchors: dict[str, Location] = field(default_factory=dict)
    dynamic_anchors: dict[str, Location] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """A schema within a document, its resource, and the keys that lead to it."""

    schema: object
    resource: Resource
    parent: Location | None = None
    tokens: tuple[str | int, ...] = ()

    def path(self) -> str:
        """The JSON pointer of the schema."""
        steps = []
        here: Location | None = self
        while here is not None:
            steps.append(here.tokens)
            here = here.parent
        tokens = [str(token) for step in reversed(steps) for token in step]
        return "".join("/" + token.replace("~", "~0").replace("/", "~1") for token in tokens)


class UnresolvedReference(Exception):
    """A reference to nothing in this document."""


class Document:
    """A schema document and the targets of its references."""

    def __init__(self, schema: object, dialect: Dialect) -> None:
        resource = Resource("", dialect)
        resource.root = Location(schema, resource)
        own = _own_address(schema, dialect)
        if own is not None:
            resource.uri = urldefrag(own)[0]
        self.root = resource.root
        self._indexed = False
        self._contents: dict[tuple[int, Dialect], int] = {}
        self._numbers: dict[object, int] = {}
        self._resources: dict[str, Resource] = {resource.uri: resource}
        self._by_schema: dict[int, Resource] = {id(schema): resource}

    def child(self, location: Location, *tokens: str | int) -> Location:
        """The subschema under some keys of a schema."""
        value: object = location.schema
        for token in tokens:
            value = value[token]  # type: ignore[index]
        return self._at(value, location, tokens)

    def _at(self, schema: object, parent: Location, tokens: tuple[str | int, ...]) -> Location:
        """A schema below another, in its own resource or in that around it."""
        resource = parent.resource
        if isinstance(schema, dict) and resource.dialect.id_keyword in schema:
            own = _own_address(schema, resource.dialect)
            if own is not None:
                return self._open(schema, own, parent, tokens).root
        return Location(schema, resource, parent, tokens)

    def _open(
        self, schema: dict[str, object], own: str, parent: Location, tokens: tuple[str | int, ...]
    ) -> Resource:
        known = self._by_schema.get(id(schema))
        if known is not None:
            return known
        uri = urldefrag(_join(parent.resource.uri, own))[0]
        dialect = parent.resource.dialect
        if "$schema" in schema:
            dialect = dialect_of(schema) or dialect
        resource = Resource(uri, dialect)
        resource.root = Location(schema, resource, parent, tokens)
        self._by_schema[id(schema)] = resource
        self._resources.setdefault(uri, resource)
        return resource

    def resolve(self, reference: str, location: Location) -> Location:
        """The target of a reference. Raises UnresolvedReference."""
        if reference.startswith("#"):
            resource, fragment = location.resource, reference[1:]
        else:
            uri, fragment = urldefrag(_join(location.resource.uri, reference))
            self._index()
            found = self._resources.get(uri)
            if found is None:
                raise UnresolvedReference(f"{uri!r} is not part of this schema, and nothing is ever fetched")
            resource = found
        fragment = unquote(fragment)
        if not fragment:
            return resource.root
        if fragment.startswith("/"):
            try:
                return self._follow(resource.root, fragment)
            except UnresolvedReference:
                if not reference.startswith("#") or resource is self.root.resource:
                    raise
                return self._follow(self.root, fragment)  # written as if embedded $ids did not change the base
        self._index()
        anchor = resource.anchors.get(fragment)
        if anchor is None:
            raise UnresolvedReference(f"there is no anchor {fragment!r}")
        return anchor

    def content(self, schema: object, resource: Resource) -> object:
        """A key that subschemas of a resource share if they differ in annotations only."""
        key = (id(schema), resource.dialect)
        found = self._contents.get(key)
        if found is None:
            form = self._form(schema, resource)
            found = self._contents[key] = self._numbers.setdefault(form, len(self._numbers))
        return found

    def _form(self, schema: object, resource: Resource) -> object:
        """The assertions of a schema, its subschemas replaced by their numbers."""
        if not isinstance(schema, dict) or not _OF_ITS_OWN.isdisjoint(schema):
            return ("id", id(schema)) if isinstance(schema, dict | list) else (type(schema), schema)
        form = []
        for keyword in resource.dialect.keywords.intersection(schema):
            value = schema[keyword]
            inner: object
            if isinstance(value, dict) and keyword in NAMED_SCHEMAS:
                inner = tuple((name, self._part(member, resource)) for name, member in value.items())
            elif isinstance(value, list) and keyword in LIST_OF_SCHEMAS:
                inner = tuple(self.content(member, resource) for member in value)
            elif keyword in ONE_SCHEMA:
                inner = self.content(value, resource)
            else:
                inner = _plain(value)
            form.append((keyword, inner))
        return frozenset(form)

    def _part(self, member: object, resource: Resource) -> object:
        return _plain(member) if isinstance(member, list | str) else self.content(member, resource)

    def dynamic_anchors(self, resource: Resource) -> dict[str, Location]:
        """The $dynamicAnchors of a resource by name ("": its $recursiveAnchor)."""
        self._index()
        return resource.dynamic_anchors

    def _follow(self, start: Location, pointer: str) -> Location:
        here = start
        for part in pointer[1:].split("/"):
            value: Any = here.schema
            token = member(value, part)
            if token is None:
                raise UnresolvedReference(f"nothing stands at {pointer!r}")
            here = self._at(value[token], here, (token,))
        return here

    def _index(self) -> None:
        """Find all embedded resources and anchors, when a reference first needs one."""
        if self._indexed:
            return
        self._indexed = True
        stack = [self.root]
        while stack:
            here = stack.pop()
            schema = here.schema
            if not isinstance(schema, dict):
                continue
            resource = here.resource
            own = schema.get(resource.dialect.id_keyword)
            if resource.dialect.draft <= 7 and isinstance(own, str) and own.startswith("#"):
                resource.anchors.setdefault(own[1:], here)
            for keyword in ("$anchor", "$dynamicAnchor"):
                name = schema.get(keyword)
                if isinstance(name, str) and resource.dialect.draft >= 2019:
                    resource.anchors.setdefault(name, here)
                    if keyword == "$dynamicAnchor":
                        resource.dynamic_anchors.setdefault(name, here)
            if schema.get("$recursiveAnchor") is True and here is resource.root:
                resource.dynamic_anchors[""] = here
            stack.extend(self.child(here, *tokens) for tokens in subschemas(schema))


def subschemas(schema: dict[str, object]) -> Iterator[tuple[str | int, ...]]:
    """The keys of the subschemas of a schema."""
    for keyword, value in schema.items():
        if isinstance(value, dict):
            if keyword in NAMED_SCHEMAS:
                yield from ((keyword, name) for name, member in value.items() if isinstance(member, dict | bool))
            elif keyword in ONE_SCHEMA:
                yield (keyword,)
        elif isinstance(value, list) and keyword in LIST_OF_SCHEMAS:
            yield from ((keyword, index) for index in range(len(value)))


def _plain(value: object) -> object:
    """A hashable form of plain data; long lists are compared by identity."""
    if isinstance(value, list):
        return tuple(map(_plain, value)) if len(value) <= 64 else ("id", id(value))
    return ("id", id(value)) if isinstance(value, dict) else (type(value), value)


def _own_address(schema: object, dialect: Dialect) -> str | None:
    """The address that a schema gives itself, unless it is an anchor's name."""
    if not isinstance(schema, dict):
        return None
    own = schema.get(dialect.id_keyword)
    if not isinstance(own, str) or not own or own.startswith("#"):
        return None
    if dialect.ref_hides_siblings and "$ref" in schema:
        return None
    return own


def _join(base: str, reference: str) -> str:
    """The absolute address of a reference; names (urn:…) are kept."""
    try:
        if base.startswith("urn:") and ":" not in reference.split("/")[0]:
            return reference if reference else base
        return urljoin(base, reference)
    except ValueError:
        return reference
