"""Formats that put each call between tags: Hermes and Qwen, Qwen3-Coder, GLM.

Compared with, in vllm-project/vllm: examples/tool_chat_template_{hermes,qwen3coder}.jinja,
tests/tool_parsers/test_{hermes,qwen3coder,glm47_moe}_tool_parser.py and vllm/tool_parsers/{qwen3coder,
glm4_moe}_tool_parser.py; in sgl-project/sglang: python/sglang/srt/function_call/{qwen3_coder,glm47_moe}_detector.py;
in ggml-org/llama.cpp: models/templates/glm_4_5.jinja and GLM-4.6.jinja.
"""

from collections.abc import Mapping
from typing import Any

from router.tools.arguments import CallArguments
from router.tools.json_text import json_call
from router.tools.source import HeldSpace, Source, Waiting

CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END, _PARAMETER = "<function=", "</function>", "<parameter="
Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's parameters, by the tool's name


def hermes(source: Source, _tools: Tools) -> Waiting[None]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    while (yield from source.until((CALL,), source.content, trims=True)):
        yield from source.skip_space()
        is_call = yield from json_call(source)
        if not is_call:
            source.content(CALL)
        if (yield from source.until((_CALL_END,), source.nowhere if is_call else source.content)) and not is_call:
            source.content(_CALL_END)
        yield from source.skip_space()


def qwen3_coder(source: Source, tools: Tools) -> Waiting[None]:
    """Read `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    Models leave out `<tool_call>`: a function tag with the name of a tool begins a call too.
    """
    content = HeldSpace(source.content)
    openings = [f"{_FUNCTION}{name}>" for name in tools]
    while marker := (yield from source.until((CALL, _FUNCTION), content)):
        if marker == CALL:
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
    while (yield from source.until((CALL,), source.content, trims=True)):
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
