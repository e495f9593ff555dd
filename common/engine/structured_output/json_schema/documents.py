"""A JSON schema document: its schemas, and what `$ref` and `$dynamicRef` point to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from pagoda.common.engine.structured_output.grammar import DATA, NAME_MAPS, GrammarError

Schema = Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True, order=True)
class Literal:
    """A schema that a value must match, or must not match if `negated`."""

    number: int  # of the schema in its document
    base: str  # URI of the resource that the schema belongs to
    scope: tuple[str, ...]  # the resources entered on the way here, where `$dynamicRef` looks; () without any
    negated: bool = False

    def __invert__(self) -> Literal:
        return replace(self, negated=not self.negated)


Node = frozenset[Literal]
"""Schemas that a value must match all at once. The empty one allows any value."""

ANY: Final[Node] = frozenset()


class Document:
    """All schemas of one document. Raises GrammarError for a reference that points to none of them."""

    def __init__(self, root: Schema) -> None:
        self._schemas: list[Schema] = []
        self._numbers: dict[int, int] = {}  # id of a schema object -> its number
        self._resources: dict[str, tuple[Schema, str]] = {}  # URI -> schema and its base
        self._anchors: dict[tuple[str, str], Schema] = {}
        self._dynamic: set[tuple[str, str]] = set()
        self._is_dynamic = False
        self.has_unevaluated = False  # a schema has unevaluatedItems or unevaluatedProperties
        base = self._index(root, "")
        self._resources.setdefault("", (root, base))
        self._never = self.number(False)
        self.root = Literal(self.number(root), base, (base,) if self._is_dynamic else ())

    @property
    def never(self) -> Node:
        """The node that allows no value."""
        return frozenset({Literal(self._never, "", ())})

    def number(self, schema: Schema) -> int:
        """Return the number of a schema object."""
        if isinstance(schema, bool):
            key = int(schema)
        elif isinstance(schema, Mapping):
            key = id(schema)
        else:
            raise GrammarError(f"a JSON schema must be an object, true or false, not {str(schema)[:80]!r}")
        if key not in self._numbers:
            self._numbers[key] = len(self._schemas)
            self._schemas.append(schema)  # it is kept, so that its id stays its own
        return self._numbers[key]

    def schema(self, literal: Literal) -> Schema:
        """Return the schema of a literal."""
        return self._schemas[literal.number]

    def child(self, parent: Literal, schema: Schema, negated: bool = False) -> Literal:
        """Return a subschema of a literal's schema."""
        return self._entered(parent, schema, _base_of(schema, parent.base), negated)

    def node(self, parent: Literal, schema: Schema, negated: bool = False) -> Node:
        """Return the node of one subschema."""
        if isinstance(schema, bool):
            return ANY if schema is not negated else self.never
        return frozenset({self.child(parent, schema, negated)})

    def referred(self, literal: Literal, reference: object, dynamic: bool = False) -> Literal:
        """Return what a reference in a literal's schema points to. `dynamic`: it is a `$dynamicRef`."""
        if not isinstance(reference, str):
            raise GrammarError("$ref must be a string")
        uri, fragment = urldefrag(_join(literal.base, reference))
        fragment = unquote(fragment)
        if dynamic and (uri, fragment) in self._dynamic:
            uri = next((scope for scope in literal.scope if (scope, fragment) in self._dynamic), uri)
        if uri not in self._resources:
            raise GrammarError(f"$ref {reference[:120]!r} points to another document; add it to $defs")
        schema, base = self._resources[uri]
        if fragment.startswith("/"):
            schema, base = _pointed(schema, base, fragment, reference)
        elif fragment:
            if (base, fragment) not in self._anchors:
                raise GrammarError(f"$ref {reference[:120]!r} points to no schema")
            schema = self._anchors[base, fragment]
        return self._entered(literal, schema, base, literal.negated)

    def _entered(self, parent: Literal, schema: Schema, base: str, negated: bool) -> Literal:
        scope = parent.scope
        if self._is_dynamic and base not in scope:
            scope = (*scope, base)
        return Literal(self.number(schema), base, scope, negated)

    def _index(self, root: Schema, base: str) -> str:
        """Note the identifiers of all schemas. Return the root's base."""
        root_base = _base_of(root, base)
        waiting: list[tuple[Any, str]] = [(root, base)]
        while waiting:
            schema, parent = waiting.pop()
            if not isinstance(schema, Mapping):
                continue
            own = _base_of(schema, parent)
            if own != parent or schema is root:
                self._resources.setdefault(own, (schema, own))
            self._is_dynamic |= "$dynamicRef" in schema
            self.has_unevaluated |= not schema.keys().isdisjoint(("unevaluatedItems", "unevaluatedProperties"))
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(keyword), str):
                    self._anchors.setdefault((own, anchor), schema)
                    if keyword == "$dynamicAnchor":
                        self._dynamic.add((own, anchor))
            waiting += [(child, own) for child in subschemas(schema)]
        return root_base


def subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what stands where schemas may stand, directly below one."""
    for key, value in schema.items():
        if key in DATA:
            continue
        if key in NAME_MAPS:
            yield from value.values() if isinstance(value, Mapping) else ()
        elif isinstance(value, list):
            yield from value
        else:
            yield value


def _base_of(schema: Schema, base: str) -> str:
    """Return the URI of the resource that a schema in the resource `base` belongs to."""
    own = schema.get("$id") if isinstance(schema, Mapping) else None
    return urldefrag(_join(base, own))[0] if isinstance(own, str) and not own.startswith("#") else base


def _join(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return base + reference
    return urljoin(base, reference) or reference


def _pointed(schema: Any, base: str, pointer: str, reference: str) -> tuple[Schema, str]:
    """Return the schema at a JSON pointer, and the resource that it belongs to."""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping) and part in schema:
            schema = schema[part]
        elif isinstance(schema, list) and part.isdecimal() and int(part) < len(schema):
            schema = schema[int(part)]
        else:
            raise GrammarError(f"$ref {reference[:120]!r} points to no schema")
        base = _base_of(schema, base)
    return schema, base
