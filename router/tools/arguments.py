"""Converts arguments that a model writes one by one as text to JSON, by the types in the tool's schema.

`tagged.py` names what the formats were compared with.
"""

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from router.tools.source import Emit, Source, TextEnded, Waiting

_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_CONTAINERS = {"object", "array"}
_NULLS = ("null", "none")  # in lower case: templates show the model null as JSON does or as Python does


class CallArguments:
    """Begins a call, and emits its arguments as a JSON object."""

    def __init__(self, source: Source, name: str, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._source = source
        properties = tools.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._given: set[str] = set()
        source.begin_call(name)

    def missing(self) -> list[str]:
        """Return the parameters of the schema that the call has not yet given."""
        return [key for key in self._properties if key not in self._given]

    def argument(self, key: str, ends: Sequence[str], implicit: Sequence[str] = ()) -> Waiting[None]:
        """Read the value of one argument up to its end tag. Text is emitted as it comes. Raises TextEnded.

        `implicit`: texts that end the value too where its end tag is missing; they stay unread.
        """
        emit = self._source.arguments
        emit((", " if self._given else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._given.add(key)
        types = schema_types(self._properties.get(key))
        if types == {"string"}:
            emit('"')
            yield from self._value(ends, implicit, lambda text: emit(_escaped(text)))
            emit('"')
        else:
            parts: list[str] = []
            yield from self._value(ends, implicit, parts.append)
            emit(_as_json("".join(parts), types))

    def end(self) -> None:
        self._source.arguments("}" if self._given else "{}")

    def _value(self, ends: Sequence[str], implicit: Sequence[str], emit: Emit) -> Waiting[None]:
        marker = yield from self._source.until((*ends, *implicit), emit)
        if not marker:
            raise TextEnded
        if marker in implicit:
            self._source.unread(marker)


def schema_types(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema names, in its alternatives too; empty if it names none."""
    return frozenset(_types(schema))


def _types(schema: object) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (each for each in named if isinstance(each, str))
    elif isinstance(schema.get("enum"), list):
        yield from (_TYPES_OF_VALUES.get(type(value), "object") for value in schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            yield from _types(alternative)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value. If the schema allows a string, the text becomes one, except null, lists and objects
    that the schema allows too. Otherwise the value is the JSON or the Python literal in the text, or a string if it is
    neither.
    """
    bare = text.strip()
    if "null" in types and bare.lower() in _NULLS:
        return "null"
    is_text = "string" in types and not (types & _CONTAINERS and bare.startswith(("{", "[")))
    parsers: list[Callable[[str], object]] = [] if is_text else [json.loads]
    for parse in [*parsers, ast.literal_eval] if types and not is_text else parsers:
        try:
            return json.dumps(parse(bare), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)
