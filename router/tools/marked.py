"""Formats that announce calls by tokens of their own, or by nothing: Llama 3, Mistral, DeepSeek, and gpt-oss, whose
messages on channels hold reasoning, content and calls (openai/harmony, docs/format.md).

Compared with, in vllm-project/vllm: examples/tool_chat_template_{llama3.1_json,mistral3,deepseekv3,deepseekv31,
deepseekr1}.jinja, tests/tool_parsers/test_{llama3_json,mistral,deepseekv3,deepseekv31,openai}_tool_parser.py and
vllm/tool_parsers/{mistral,openai}_tool_parser.py; in sgl-project/sglang: python/sglang/srt/parser/harmony_parser.py and
python/sglang/srt/function_call/{llama32,mistral,gpt_oss}_detector.py; in mistralai/mistral-common:
src/mistral_common/tokens/tokenizers/instruct.py; in openai/harmony: src/encoding.rs.
"""

import re

from router.tools.json_text import json_call, json_value
from router.tools.source import HeldSpace, Source, Waiting
from router.tools.tagged import Tools

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_MARKERS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
MISTRAL_MARKERS = (TOOL_CALLS, _ARGS, _CALL_ID)
_MESSAGE, _END, _CALLED, _RETURN, _START = "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>"
_NEXT = (_START, "<|channel|>")
HARMONY_MARKERS = (_MESSAGE, _END, _CALLED, _RETURN, *_NEXT, "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")


def llama3_json(source: Source, tools: Tools) -> Waiting[None]:
    """Read `{"name": ..., "parameters": {...}}`, perhaps after a tag or text, and more of them after a semicolon or a
    new line.

    An object that names no tool of the request is content, and so are the objects in it.
    """
    content = HeldSpace(source.content)
    while marker := (yield from source.until((PYTHON_TAG, "{"), content)):
        source.unread(marker)
        source.mark()
        yield from source.starts_with(PYTHON_TAG)
        has_object = (yield from source.skip_space()) == "{"
        source.back_to_mark()
        if marker == PYTHON_TAG:
            yield from source.expect(marker)
            if has_object:
                yield from source.skip_space()
        if has_object and (yield from json_call(source, tools)):
            content.drop()
            yield from source.skip_space()
            yield from source.one_of(";,")
            yield from source.skip_space()
            continue
        content.release()
        if marker == PYTHON_TAG:
            source.content(marker)
        if has_object:
            yield from json_value(source, source.content)
    content.release()


def mistral(source: Source, _tools: Tools) -> Waiting[None]:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` once per call."""
    while (yield from source.until((TOOL_CALLS,), source.content, trims=True)):
        first = yield from source.skip_space()
        if first == "[":
            yield from source.read()
            while (yield from source.skip_space()) == "{":
                if not (yield from json_call(source)):
                    yield from json_value(source, source.content)
                if (yield from source.skip_space()) == ",":
                    yield from source.read()
            yield from source.starts_with("]")
        elif first == "{":
            if not (yield from json_call(source)):
                yield from json_value(source, source.content)
        elif first:
            yield from _named_call(source)
        yield from source.skip_space()


def _named_call(source: Source) -> Waiting[None]:
    """Read a name, perhaps an id, and arguments. The arguments may follow without a marker. A text that has
    no name is content."""
    name = ""
    while (character := (yield from source.next_character())) and character not in "{[":
        name += yield from source.read()
    if not character or len(name.split()) != 1:
        source.content(TOOL_CALLS + name)
        return
    if (yield from source.starts_with(_CALL_ID)):
        while (character := (yield from source.next_character())) and character not in "{[":
            yield from source.read()
    yield from source.starts_with(_ARGS)
    yield from source.skip_space()
    source.begin_call(name.strip())
    yield from json_value(source, source.arguments)


def deepseek(source: Source, _tools: Tools) -> Waiting[None]:
    """Read calls of DeepSeek V3, `function<sep>name` and fenced JSON, and of V3.1, `name<sep>` and JSON."""
    while (yield from source.until((_CALLS,), source.content, trims=True)):
        while (yield from source.text_until((_CALL, _CALLS_END)))[1] == _CALL:
            before, _ = yield from source.text_until((_SEPARATOR,))
            if (yield from source.skip_space()) == "{":
                source.begin_call(before.strip())
            else:
                name, _ = yield from source.text_until(("\n",))
                source.begin_call(name.strip())
                yield from source.skip_space()
                yield from source.one_of(("```json", "```"))
                yield from source.skip_space()
            yield from json_value(source, source.arguments)
            yield from source.until((_CALL_END,), source.nowhere)
        yield from source.skip_space()


def harmony(source: Source, tools: Tools) -> Waiting[None]:
    """Read messages: `<|channel|>analysis<|message|>...<|end|>`. A message to a function is a call; those on the
    channel analysis or to another recipient, such as the model's own browser, are reasoning, the others content."""
    while True:
        header: list[str] = []
        if not (yield from source.until((_MESSAGE,), header.append)):
            source.content("" if header[:1] == [_START] else _text_of("".join(header)))
            return
        head = "".join(header)
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        emit = source.content
        if recipient is not None and (recipient[1] or recipient[2] in tools):
            source.begin_call(recipient[2])
            emit = source.arguments
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            emit = source.reasoning
        marker = yield from source.until((_END, _CALLED, _RETURN, *_NEXT), emit)
        if marker in _NEXT:
            source.unread(marker)  # the message has no end of its own


def _text_of(header: str) -> str:
    """Return the text as content if it has no message; an unfinished header is dropped."""
    return "" if header.lstrip().startswith("<|") else header
