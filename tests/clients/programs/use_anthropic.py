"""Use the package `anthropic` as applications do. Arguments: the URL of a router."""

import asyncio
import json
import sys

import anthropic
import pytest

SETTINGS = {"base_url": sys.argv[1], "api_key": "-"}
QUESTION = [{"role": "user", "content": "Write a function that reads a file."}]
GREEDY = {"model": "demo_model", "messages": QUESTION, "max_tokens": 12, "system": "Be brief."}
GREEDY["extra_body"] = {"temperature": 0}


async def asynchronous() -> str:
    async with anthropic.AsyncAnthropic(**SETTINGS) as client, client.messages.stream(**GREEDY) as stream:
        return "".join([text async for text in stream.text_stream])


client = anthropic.Anthropic(**SETTINGS)
whole = client.messages.create(**GREEDY)
assert whole.content[0].type == "text"
assert whole.stop_reason in ("max_tokens", "end_turn")
with client.messages.stream(**GREEDY) as stream:
    final = stream.get_final_message()
assert final.content[0].text == whole.content[0].text == asyncio.run(asynchronous())
assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
CITY = {"type": "object", "properties": {"people": {"type": "integer", "minimum": 0, "maximum": 999}}}
CITY |= {"required": ["people"], "additionalProperties": False}
for choice in {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "city"}:
    forced = GREEDY | {"tools": [{"name": "city", "input_schema": CITY}], "tool_choice": choice, "max_tokens": 400}
    forced["thinking"] = {"type": "disabled"}
    (use,) = [block for block in client.messages.create(**forced).content if block.type == "tool_use"]
    assert use.name == "city" and 0 <= use.input["people"] <= 999
    with client.messages.stream(**forced) as stream:
        assert use.input in [block.input for block in stream.get_final_message().content if block.type == "tool_use"]


async def asynchronous_tools() -> None:
    """A tool's call, the conversation that goes on after it, and two streams of such calls at once."""
    tools = {"tools": [{"name": "city", "input_schema": CITY}]}
    asked = GREEDY | tools | {"max_tokens": 400, "thinking": {"type": "disabled"}}
    asked["tool_choice"] = {"type": "tool", "name": "city"}
    async with anthropic.AsyncAnthropic(**SETTINGS) as client:

        async def streamed() -> tuple[object, str]:
            async with client.messages.stream(**asked) as stream:
                parts = [event.partial_json async for event in stream if event.type == "input_json"]
                message = await stream.get_final_message()
            (use,) = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason == "tool_use"
            return use.input, "".join(parts)

        message = await client.messages.create(**asked)
        (use,) = [block for block in message.content if block.type == "tool_use"]
        for found, text in await asyncio.gather(streamed(), streamed()):
            assert found == use.input == json.loads(text)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "found"}
        turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        told = await client.messages.create(**GREEDY | tools | {"messages": QUESTION + turns})
        assert told.role == "assistant" and told.usage.output_tokens <= 12


asyncio.run(asynchronous_tools())


def as_claude_code() -> None:
    """The fields that Claude Code sends, through a call of a tool and its result; and an answer under a schema."""
    kept = {"type": "ephemeral"}
    told = ["x-anthropic-billing-header: cc_version=2.1;", "You are an agent.", "Be brief."]
    asked = {
        "model": "demo_model",
        "system": [{"type": "text", "text": text, "cache_control": kept} for text in told],
        "tools": [{"name": "city", "input_schema": CITY, "eager_input_streaming": True}],
        "tool_choice": {"type": "tool", "name": "city"},
        "metadata": {"user_id": "me"},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "betas": ["context-management-2025-06-27", "mid-conversation-system-2026-04-07"],
        "extra_body": {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}},
    }
    turns = [*QUESTION, {"role": "system", "content": "There is one tool."}]
    with client.beta.messages.stream(**asked, messages=turns) as stream:
        message = stream.get_final_message()
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and 0 <= use.input["people"] <= 999
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "found", "cache_control": kept}
    turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    told = client.beta.messages.create(**asked | {"tool_choice": {"type": "auto"}, "max_tokens": 8}, messages=turns)
    assert told.usage.input_tokens + told.usage.cache_read_input_tokens > message.usage.input_tokens
    format = {"format": {"type": "json_schema", "schema": CITY}}
    answer = client.messages.create(**GREEDY | {"max_tokens": 400}, output_config=format, thinking={"type": "disabled"})
    assert 0 <= json.loads(answer.content[0].text)["people"] <= 999


as_claude_code()
count = client.messages.count_tokens(model="demo_model", messages=QUESTION, system="Be brief.")
assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
LONG = {"model": "demo_model", "messages": [{"role": "user", "content": "import os\n" * 1_100}]}
num_tokens = client.messages.count_tokens(**LONG).input_tokens
with pytest.raises(anthropic.BadRequestError) as too_long:
    client.messages.create(**LONG, max_tokens=8)
with (
    pytest.raises(anthropic.BadRequestError, match=too_long.value.message),
    client.messages.stream(**LONG, max_tokens=8),
):
    pass
assert too_long.value.body["error"] == {
    "type": "invalid_request_error",
    "message": f"prompt is too long: {num_tokens} tokens > 1023 maximum",
}
with pytest.raises(anthropic.BadRequestError, match="temperature"):
    client.messages.create(**GREEDY | {"extra_body": {"temperature": 5}})
with pytest.raises(anthropic.NotFoundError):
    client.messages.create(**GREEDY | {"model": "claude"})
(model,) = client.models.list()
assert client.models.retrieve(model.id) == model
assert (model.id, model.type) == ("demo_model", "model")
