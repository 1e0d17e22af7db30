"""Formats that put each call between tags: Hermes and Qwen, Qwen3-Coder, GLM.

Sources: the chat templates of Qwen2.5, Qwen3, Qwen3-Coder and GLM-4.5, which tell the model how to write a call; the
cases in vLLM's tests/tool_parsers/ of the parsers of the same names.
"""

import json
from collections.abc import Mapping
from typing import Any

from router.tools.json_text import json_call
from router.tools.source import Source, TextEnded, Waiting

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's parameters, by the tool's name


def hermes(source: Source, _tools: Tools) -> Waiting[None]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    while (yield from source.until((_CALL,), source.content, trims=True)):
        yield from source.skip_space()
        is_call = yield from json_call(source, before=_CALL)
        if (yield from source.until((_CALL_END,), source.nowhere if is_call else source.content)) and not is_call:
            source.content(_CALL_END)
        yield from source.skip_space()


def qwen3_coder(source: Source, tools: Tools) -> Waiting[None]:
    """Read `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""
    while (yield from source.until((_CALL,), source.content, trims=True)):
        _, marker = yield from source.text_until(("<function=", _CALL_END))
        if marker == "<function=":
            name, _ = yield from source.text_until((">",))
            call = _Arguments(source, name.strip(), tools)
            while (yield from source.text_until(("<parameter=", "</function>")))[1] == "<parameter=":
                key, _ = yield from source.text_until((">",))
                yield from source.starts_with("\n")
                yield from call.argument(key.strip(), ("\n</parameter>", "</parameter>"))
            call.end()
            yield from source.until((_CALL_END,), source.nowhere)
        yield from source.skip_space()


def glm45(source: Source, tools: Tools) -> Waiting[None]:
    """Read `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""
    while (yield from source.until((_CALL,), source.content, trims=True)):
        name, marker = yield from source.text_until(("<arg_key>", _CALL_END))
        call = _Arguments(source, name.strip(), tools)
        while marker == "<arg_key>":
            key, _ = yield from source.text_until(("</arg_key>",))
            yield from source.until(("<arg_value>",), source.nowhere)
            yield from call.argument(key.strip(), ("</arg_value>",))
            _, marker = yield from source.text_until(("<arg_key>", _CALL_END))
        call.end()
        yield from source.skip_space()


class _Arguments:
    """Emits the arguments of one call as a JSON object. The tool's schema says which of them are text."""

    def __init__(self, source: Source, name: str, tools: Tools) -> None:
        self._source = source
        properties = tools.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._begun = False
        source.begin_call(name)

    def argument(self, key: str, ends: tuple[str, ...]) -> Waiting[None]:
        """Read the value of one argument up to its end tag. Text is emitted as it comes. Raises TextEnded."""
        emit = self._source.arguments
        emit((", " if self._begun else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._begun = True
        if self._is_text(key):
            emit('"')
            marker = yield from self._source.until(ends, lambda text: emit(_escaped(text)))
            if not marker:
                raise TextEnded
            emit('"')
        else:
            value, _ = yield from self._source.text_until(ends)
            emit(_as_json(value))

    def end(self) -> None:
        self._source.arguments("}" if self._begun else "{}")

    def _is_text(self, key: str) -> bool:
        schema = self._properties.get(key)
        return isinstance(schema, Mapping) and schema.get("type") == "string"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(value: str) -> str:
    """Return the value's own JSON, or the text as a JSON string."""
    try:
        return json.dumps(json.loads(value), ensure_ascii=False)
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
