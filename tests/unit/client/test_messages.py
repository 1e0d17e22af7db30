"""Conversations that the client library sends: content in parts, and messages that are refused by the name of a key."""

from typing import Any

import pytest

from tandem.options import chat_prompt

_USER = {"role": "user", "content": "x"}


def test_parts_of_text_are_joined_as_over_http() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat_prompt([{"role": "user", "content": parts}], {}).messages[0].content == "a\nb"


def test_a_message_of_the_developer_is_one_of_the_system() -> None:
    prompts = [chat_prompt([{"role": role, "content": "be brief"}], {}) for role in ("developer", "system")]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": 5, "content": "x"}, "role of a message must be a str, not 5"),
        ({"role": "user", "content": 5}, "content of a message must be a str or"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content of a message must be a str or"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "text of a message must be a str, not 5"),
        ({"role": "user", "content": "x", "name": 5}, "name of a message must be a str, not 5"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id of a message must be a str, not 5"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls must be a list of"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls must be a list of"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
            "arguments.: JSON text",
        ),
    ],
)
def test_a_message_that_cannot_be_sent_is_refused_by_the_name_of_its_key(message: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        chat_prompt([message], {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": 5}, "tools must be a list of tools, not int"),
        ({"tools": [5]}, "a tool must be"),
        ({"tool_choice": 5}, "tool_choice must be a str or a list of tools' names, not 5"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be a str or a list"),
    ],
)
def test_tools_that_cannot_be_sent_are_refused_by_name(options: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        chat_prompt([_USER], options)
