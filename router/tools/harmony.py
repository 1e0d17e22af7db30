"""The format of gpt-oss: messages on channels, which hold reasoning, content and calls.

Source: openai/harmony, docs/format.md. Compared with, in openai/harmony: src/encoding.rs; in vllm-project/vllm:
vllm/tool_parsers/openai_tool_parser.py and tests/tool_parsers/test_openai_tool_parser.py; in sgl-project/sglang:
python/sglang/srt/parser/harmony_parser.py and python/sglang/srt/function_call/gpt_oss_detector.py.
"""

import re

from router.tools.source import Source, Waiting
from router.tools.tagged import Tools

_MESSAGE, _END, _CALL, _RETURN, _START = "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>"
_NEXT = (_START, "<|channel|>")
MARKERS = (_MESSAGE, _END, _CALL, _RETURN, *_NEXT, "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")


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
        marker = yield from source.until((_END, _CALL, _RETURN, *_NEXT), emit)
        if marker in _NEXT:
            source.unread(marker)  # the message has no end of its own


def _text_of(header: str) -> str:
    """Return the text as content if it has no message; an unfinished header is dropped."""
    return "" if header.lstrip().startswith("<|") else header
