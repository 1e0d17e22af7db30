"""Formats that put reasoning or each call between tags: reasoning of DeepSeek R1, Qwen3, GLM and Mistral; calls of
Hermes and Qwen, Qwen3-Coder, and GLM.

The chat template may already have opened the reasoning, at the end of the prompt; then the text begins inside of it.
Qwen3-Coder and GLM write the arguments of a call one by one as text; `CallArguments` converts them to JSON, by the
types in the tool's schema.

Compared with, in vllm-project/vllm: examples/tool_chat_template_{hermes,qwen3coder}.jinja,
tests/tool_parsers/test_{hermes,qwen3coder,glm47_moe}_tool_parser.py, vllm/tool_parsers/{qwen3coder,
glm4_moe}_tool_parser.py and vllm/reasoning/{qwen3,deepseek_r1,glm4_moe,mistral}_reasoning_parser.py; in
sgl-project/sglang: python/sglang/srt/function_call/{qwen3_coder,glm47_moe}_detector.py and
python/sglang/srt/parser/reasoning_parser.py; in ggml-org/llama.cpp: models/templates/glm_4_5.jinja, GLM-4.6.jinja and
deepseek-ai-DeepSeek-V3.1.jinja.
"""

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.tools.json_text import json_call
from router.tools.source import Emit, HeldSpace, Source, TextEnded, Waiting

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END, _PARAMETER = "<function=", "</function>", "<parameter="
Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's parameters, by the tool's name
_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_CONTAINERS = {"object", "array"}
_NULLS = ("null", "none")  # in lower case: templates show the model null as JSON does or as Python does


@dataclass(frozen=True, slots=True)
class Tags:
    opening: str
    closing: str

    def are_open_in(self, prompt_end: str) -> bool:
        """Return whether the prompt ends inside of reasoning."""
        return prompt_end.rfind(self.opening) > prompt_end.rfind(self.closing)


THINK = Tags("<think>", "</think>")
BRACKET_THINK = Tags("[THINK]", "[/THINK]")


def thinking(source: Source, tags: Tags, beginnings: Sequence[str] = (), *, is_open: bool) -> Waiting[None]:
    """Read the reasoning with which the text begins, if it does. `is_open`: the prompt has opened it.

    `beginnings`: what follows a call's tag where a call ends the reasoning without its end tag. Empty: no call does.
    """
    source.mark()
    yield from source.skip_space()
    has_opening = yield from source.starts_with(tags.opening)
    if not (has_opening or is_open):
        source.back_to_mark()
        return
    source.unmark()
    yield from source.skip_space()
    reasoning = HeldSpace(source.reasoning)
    markers = (tags.closing, _CALL) if beginnings else (tags.closing,)
    while (marker := (yield from source.until(markers, reasoning))) == _CALL:
        source.unread(_CALL)
        source.mark()
        yield from source.expect(_CALL)
        yield from source.skip_space()
        is_call = bool((yield from source.one_of(beginnings)))
        source.back_to_mark()
        if is_call:
            return
        yield from source.expect(_CALL)
        reasoning(_CALL)
    if not marker:
        reasoning.release()
    yield from source.skip_space()


def hermes(source: Source, _tools: Tools) -> Waiting[None]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    while (yield from source.until((_CALL,), source.content, trims=True)):
        yield from source.skip_space()
        is_call = yield from json_call(source)
        if not is_call:
            source.content(_CALL)
        if (yield from source.until((_CALL_END,), source.nowhere if is_call else source.content)) and not is_call:
            source.content(_CALL_END)
        yield from source.skip_space()


def qwen3_coder(source: Source, tools: Tools) -> Waiting[None]:
    """Read `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    Models leave out `<tool_call>`: a function tag with the name of a tool begins a call too.
    """
    content = HeldSpace(source.content)
    openings = [f"{_FUNCTION}{name}>" for name in tools]
    while marker := (yield from source.until((_CALL, _FUNCTION), content)):
        if marker == _CALL:
            content.drop()
            while (yield from source.text_until((_FUNCTION, _CALL_END)))[1] == _FUNCTION:
                name, _ = yield from source.text_until((">",))
                yield from _coder_call(source, name.strip(), tools)
        else:
            source.unread(marker)
            if not (opening := (yield from source.one_of(openings))):
                yield from source.expect(marker)
                content(marker)
                continue
            content.drop()
            yield from _coder_call(source, opening[len(_FUNCTION) : -1], tools)
            yield from source.skip_space()
            yield from source.starts_with(_CALL_END)
        yield from source.skip_space()
    content.release()


def coder_beginnings(_tools: Tools) -> list[str]:
    return [_FUNCTION]


def _coder_call(source: Source, name: str, tools: Tools) -> Waiting[None]:
    """Read the parameters of a call. A value ends at its end tag, or where the next parameter or the call's end follows
    on a line of its own."""
    call = CallArguments(source, name, tools)
    while (yield from source.text_until((_PARAMETER, _FUNCTION_END)))[1] == _PARAMETER:
        key, _ = yield from source.text_until((">",))
        yield from source.starts_with("\n")
        others = [f"\n{_PARAMETER}{other}>" for other in call.missing() if other != key.strip()]
        ends = [f"\n{_FUNCTION_END}\n{_CALL_END}", f"\n{_FUNCTION_END}{_CALL_END}"]
        yield from call.argument(key.strip(), ("\n</parameter>", "</parameter>"), (*others, *ends))
    call.end()


def glm45(source: Source, tools: Tools) -> Waiting[None]:
    """Read `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""
    while (yield from source.until((_CALL,), source.content, trims=True)):
        name, marker = yield from source.text_until(("<arg_key>", _CALL_END))
        call = CallArguments(source, name.strip(), tools)
        while marker == "<arg_key>":
            key, _ = yield from source.text_until(("</arg_key>",))
            yield from source.until(("<arg_value>",), source.nowhere)
            yield from call.argument(key.strip(), ("</arg_value>",))
            _, marker = yield from source.text_until(("<arg_key>", _CALL_END))
        call.end()
        yield from source.skip_space()


def glm_beginnings(tools: Tools) -> list[str]:
    return list(tools)


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
