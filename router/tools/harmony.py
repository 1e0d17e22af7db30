"""The format of gpt-oss: messages on channels, which hold reasoning, content and calls.

Source: OpenAI's description of harmony (openai/harmony, docs/format.md) and the chat template of gpt-oss.
"""

import re

from router.tools.source import Source, Waiting
from router.tools.tagged import Tools

_MESSAGE, _END, _CALL, _RETURN, _START = "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>"
MARKERS = (_MESSAGE, _END, _CALL, _RETURN, _START, "<|channel|>", "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


def harmony(source: Source, _tools: Tools) -> Waiting[None]:
    """Read messages: `<|channel|>analysis<|message|>...<|end|>`. A message to a recipient is a call; those on the
    channel analysis are reasoning, the others content."""
    while True:
        header: list[str] = []
        if not (yield from source.until((_MESSAGE,), header.append)):
            source.content("" if header[:1] == [_START] else _text_of("".join(header)))
            return
        head = "".join(header)
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        emit = source.content
        if recipient is not None:
            source.begin_call(recipient[1])
            emit = source.arguments
        elif channel is not None and channel[1] == "analysis":
            emit = source.reasoning
        yield from source.until((_END, _CALL, _RETURN), emit)


def _text_of(header: str) -> str:
    """A text without any message is content; an unfinished header is nothing."""
    return "" if header.lstrip().startswith("<|") else header
