"""Formats that announce calls by a token of their own, or by nothing: Llama 3, Mistral, DeepSeek.

Sources: the chat templates of Llama 3.1, Mistral's and DeepSeek V3 and V3.1, which show the model earlier calls; the
cases in vLLM's tests/tool_parsers/ of the parsers of the same names.
"""

from router.tools.json_text import json_call, json_value
from router.tools.source import Source, Waiting
from router.tools.tagged import Tools

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_MARKERS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
MISTRAL_MARKERS = (TOOL_CALLS, _ARGS, _CALL_ID)


def llama3_json(source: Source, tools: Tools) -> Waiting[None]:
    """Read `{"name": ..., "parameters": {...}}` where the whole answer is one, or several separated by semicolons.

    An answer in JSON that names no tool of the request is content.
    """
    source.mark()
    yield from source.skip_space()
    yield from source.starts_with(PYTHON_TAG)
    if (yield from source.skip_space()) != "{":
        source.back_to_mark()
    else:
        source.unmark()
        while (yield from json_call(source, tools)):
            yield from source.skip_space()
            if not ((yield from source.starts_with(";")) or (yield from source.starts_with(","))):
                break
            yield from source.skip_space()
    yield from source.until((), source.content)


def mistral(source: Source, _tools: Tools) -> Waiting[None]:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` once per call."""
    while (yield from source.until((TOOL_CALLS,), source.content, trims=True)):
        first = yield from source.skip_space()
        if first == "[":
            yield from source.read()
            while (yield from source.skip_space()) == "{":
                yield from json_call(source)
                if (yield from source.skip_space()) == ",":
                    yield from source.read()
            yield from source.starts_with("]")
        elif first == "{":
            yield from json_call(source)
        elif first:
            yield from _named_call(source)
        yield from source.skip_space()


def _named_call(source: Source) -> Waiting[None]:
    """Read a name, perhaps an id, and arguments. The arguments may follow without a marker."""
    name = ""
    while (character := (yield from source.next_character())) and character not in "{[":
        name += yield from source.read()
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
                yield from source.until(("```json",), source.nowhere)
                yield from source.skip_space()
            yield from json_value(source, source.arguments)
            yield from source.until((_CALL_END,), source.nowhere)
        yield from source.skip_space()
