"""The grammar of arguments that a format writes one by one between tags. The types in the schema decide how
`arguments.py` converts such a value: if they include text, every text that the schema admits is written as it is;
otherwise the value is JSON.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidGrammar
from router.tools.arguments import schema_types
from router.tools.lark import Lark

_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "$comment",
    "$schema",
    "$id",
    *_DEFINITIONS,
}
_ROOT = "arguments"  # the name of the tool's schema among the definitions of an argument's
_DATA = {"const", "enum", "default", "examples"}  # keywords whose values are no schemas
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", *_ANNOTATIONS}
_ANY = "(?s:.*)"
_NO_JSON = r"([^\s\[{](?s:.*))?"  # a text that begins as JSON would be read as that where the schema admits it
_OF_TEXTS = {"type", "enum", "const", "minLength", "maxLength", *_ANNOTATIONS}


@dataclass(frozen=True, slots=True)
class TagValue:
    """The tags of one argument. `excluded`: words that end a value beside its end tag; empty: no others."""

    before_key: str
    after_key: str
    end: str
    excluded: tuple[str, ...] = ()

    @property
    def without(self) -> tuple[str, ...]:
        return self.excluded or (self.end.strip(),)


def tagged_arguments(lark: Lark, schema: Mapping[str, Any], tags: TagValue, *, is_strict: bool) -> str:
    """Return an expression for the arguments in the order of the schema, the required ones always. Raises
    InvalidGrammar, where `is_strict` also for keywords that cannot be enforced in this form."""
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        raise InvalidGrammar("properties must be an object, and required a list")
    if is_strict:
        _refuse_others(schema, _OF_OBJECTS)
        if missing := [key for key in required if key not in properties]:
            raise InvalidGrammar(f"{missing[0]!r} is required, but properties do not have it")
    parts = []
    for key, inner in properties.items():
        if set(str(key)) & set("<>\n") or str(key).strip() != key:
            raise InvalidGrammar(f"this model's format of tool calls cannot express an argument {key!r}")
        value = _value(lark, inner if isinstance(inner, Mapping) else {}, schema, tags, is_strict=is_strict)
        part = f"{lark.literal(tags.before_key + key + tags.after_key)} {value} {lark.literal(tags.end)}"
        parts.append(part if key in required else f"({part})?")
    return lark.rule(" ".join(parts)) if parts else '""'


def _value(lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any], tags: TagValue, *, is_strict: bool) -> str:
    types = schema_types(schema)
    if "string" not in types:
        return lark.json(_standalone(schema, root), is_lenient=not is_strict)
    if is_strict:
        _refuse_others(schema, _OF_TEXTS | {"anyOf", "oneOf"})
    pattern = _NO_JSON if types & {"object", "array"} else _ANY
    texts = [_text(lark, each, tags, pattern, is_strict=is_strict) for each in _texts(schema)]
    texts += ['"null"'] if "null" in types else []
    if not any(texts):
        raise InvalidGrammar("an argument admits strings, but none that this model's format of tool calls can express")
    return lark.rule(" | ".join(text for text in texts if text))


def _standalone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of one argument as a document of its own: its references lead into the tool's schema, `root`,
    which becomes a definition."""
    moved = _moved(schema)
    if moved == schema:
        return schema
    return {**moved, "$defs": {_ROOT: _moved({key: value for key, value in root.items() if key != "$id"})}}


def _moved(part: Any) -> Any:
    """Return a part of a schema with its references into the document changed to those into the definition."""
    if isinstance(part, list):
        return [_moved(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    moved = {key: value if key in _DATA else _moved(value) for key, value in part.items()}
    reference = part.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
    return moved


def _texts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the alternatives of a schema that admit texts."""
    alternatives = [each for name in ("anyOf", "oneOf") for each in schema.get(name) or ()]
    for each in alternatives:
        if isinstance(each, Mapping):
            yield from _texts(each)
    if not alternatives and "string" in schema_types(schema):
        yield schema


def _text(lark: Lark, schema: Mapping[str, Any], tags: TagValue, pattern: str, *, is_strict: bool) -> str:
    """Return an expression for the texts that a schema admits; empty for none."""
    if is_strict:
        _refuse_others(schema, _OF_TEXTS)
    if "enum" in schema or "const" in schema:
        words = schema.get("enum", [schema.get("const")])
        return lark.one_of([word for word in words if isinstance(word, str) and not _ends(word, tags)], tags.end)
    patterns = [pattern]
    if "minLength" in schema or "maxLength" in schema:
        patterns.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    return lark.text(tags.without, patterns)


def _ends(word: str, tags: TagValue) -> bool:
    return any(end in word for end in tags.without)


def _refuse_others(schema: Mapping[str, Any], allowed: set[str]) -> None:
    if others := sorted(set(schema) - allowed):
        raise InvalidGrammar(f"{others[0]} of a strict tool cannot be enforced in this model's format of tool calls")
