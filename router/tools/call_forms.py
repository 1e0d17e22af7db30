"""The form in which each family of models writes calls, as parts of a grammar. formats.py reads the same forms.

Some formats write arguments one by one between tags. The types in the schema decide how `tagged.py` converts such a
value: if they include text, every text that the schema admits is written as it is; otherwise the value is JSON.

Sources: the templates that tagged.py and marked.py name.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidGrammar
from router.tools.lark import Lark
from router.tools.tagged import schema_types

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
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that an answer may call. `is_strict`: its arguments follow its schema wherever it is called."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the arguments, which are an object."""
        schema = self.parameters or _NO_PARAMETERS
        return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}

    def arguments(self, lark: Lark) -> str:
        return lark.json(self.schema, is_lenient=not self.is_strict)

    @property
    def plain_name(self) -> str:
        """The name, where a format writes it without quotes. Raises InvalidGrammar."""
        if self.name.split() != [self.name] or set(self.name) & set("<>[]{}"):
            raise InvalidGrammar(f"this model's format of tool calls cannot express the name {self.name!r}")
        return self.name


@dataclass(frozen=True, slots=True)
class CallForm:
    """The calls of an answer: `trigger opening call (separator call)* closing`."""

    call: Callable[[Lark, CallableTool], str]
    trigger: str = ""  # no other text of an answer holds it; empty: calls begin without a marker
    opening: str = ""
    separator: str = ""
    closing: str = ""
    calls_too: tuple[str, ...] = ()  # other words by which the format's parser finds a call

    def after_trigger(self, lark: Lark, tools: Sequence[CallableTool], max_calls: int) -> str:
        """Return the expression for 1 to `max_calls` calls of these tools, without the trigger of the first one.

        Raises InvalidGrammar."""
        call = lark.rule(" | ".join(lark.rule(self.call(lark, tool)) for tool in tools))
        expression = f"{lark.literal(self.opening)} {call}"
        if max_calls > 1:
            expression += f" ({lark.literal(self.separator)} {call}){{0,{max_calls - 1}}}"
        return f"{expression} {lark.literal(self.closing)}"


@dataclass(frozen=True, slots=True)
class _TagValue:
    """The tags of one argument. `excluded`: words that end a value beside its end tag; empty: no others."""

    before_key: str
    after_key: str
    end: str
    excluded: tuple[str, ...] = ()

    @property
    def without(self) -> tuple[str, ...]:
        return self.excluded or (self.end.strip(),)


def _json_call(key: str, before: str = "", after: str = "") -> Callable[[Lark, CallableTool], str]:
    """Return an expression for an object with the name and, as `key`, the arguments."""

    def call(lark: Lark, tool: CallableTool) -> str:
        head = f'{before}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        return f"{lark.literal(head)} {tool.arguments(lark)} {lark.literal('}' + after)}"

    return call


def _named_call(before: str, between: str, after: str = "") -> Callable[[Lark, CallableTool], str]:
    """Return an expression for the name without quotes and the arguments."""

    def call(lark: Lark, tool: CallableTool) -> str:
        head = lark.literal(before + tool.plain_name + between)
        return f"{head} {tool.arguments(lark)} {lark.literal(after)}"

    return call


def _tagged_call(before: str, after_name: str, value: _TagValue, after: str) -> Callable[[Lark, CallableTool], str]:
    """Return an expression for the name and each argument between tags of its own."""

    def call(lark: Lark, tool: CallableTool) -> str:
        arguments = _tagged_arguments(lark, tool.schema, value, is_strict=tool.is_strict)
        return f"{lark.literal(before + tool.plain_name + after_name)} {arguments} {lark.literal(after)}"

    return call


_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_DEEPSEEK, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_CODER_VALUE = _TagValue("<parameter=", ">\n", "\n</parameter>\n", ("</parameter>", "<parameter=", "</function>"))

HERMES = CallForm(_json_call("arguments", "\n", f"\n{_TAG_END}"), _TAG, separator=f"\n{_TAG}")
QWEN3_CODER = CallForm(
    _tagged_call("\n<function=", ">\n", _CODER_VALUE, f"</function>\n{_TAG_END}"),
    _TAG,
    separator=f"\n{_TAG}",
    calls_too=("<function=",),
)
GLM45 = CallForm(
    _tagged_call("", "\n", _TagValue("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), _TAG_END),
    _TAG,
    separator=f"\n{_TAG}",
)
GLM47 = CallForm(
    _tagged_call("", "", _TagValue("<arg_key>", "</arg_key><arg_value>", "</arg_value>"), _TAG_END),
    _TAG,
    separator=_TAG,
)
LLAMA3 = CallForm(_json_call("parameters"), separator="; ")
MISTRAL_LIST = CallForm(_json_call("arguments"), "[TOOL_CALLS]", "[", ", ", "]")
MISTRAL_NAMED = CallForm(_named_call("", "[ARGS]"), "[TOOL_CALLS]", separator="[TOOL_CALLS]")
DEEPSEEK_V3 = CallForm(
    _named_call(f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_CALL_END}"),
    _DEEPSEEK,
    separator="\n",
    closing=_DEEPSEEK_END,
)
DEEPSEEK_V31 = CallForm(_named_call(_CALL, _SEPARATOR, _CALL_END), _DEEPSEEK, closing=_DEEPSEEK_END)


def _tagged_arguments(lark: Lark, schema: Mapping[str, Any], tags: _TagValue, *, is_strict: bool) -> str:
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


def _value(lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any], tags: _TagValue, *, is_strict: bool) -> str:
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


def _text(lark: Lark, schema: Mapping[str, Any], tags: _TagValue, pattern: str, *, is_strict: bool) -> str:
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


def _ends(word: str, tags: _TagValue) -> bool:
    return any(end in word for end in tags.without)


def _refuse_others(schema: Mapping[str, Any], allowed: set[str]) -> None:
    if others := sorted(set(schema) - allowed):
        raise InvalidGrammar(f"{others[0]} of a strict tool cannot be enforced in this model's format of tool calls")
