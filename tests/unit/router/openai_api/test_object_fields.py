"""Every field of an object within a request, of the published protocols, is supported, accepted without effect or
refused by name; router/http/fields.md has the same table."""

import re
from pathlib import Path
from typing import Any

import pytest

from router.http.anthropic import bodies as anthropic
from router.http.bodies import generation_fields, messages
from router.http.bodies.strict_body import StrictBody, all_bodies
from router.http.endpoints import DetokenizeRequest, TokenizeRequest
from router.http.openai_schema import ChatCompletionRequest, CompletionRequest, PromptCacheOptions
from tests.unit.router.openai_api.endpoint import USER, Endpoint, refused

_WITHOUT_EFFECT = "accepted; changes nothing"
# The name of an object in the table, its body, and its fields in the published protocols: vLLM 0.33.0's
# vllm/entrypoints/generate/base/protocol.py, chat_utils.py and sampling_params.py, and the types of the packages
# `openai` 3.57 and `anthropic` 2.14.
_OBJECTS: dict[str, tuple[type[StrictBody], str]] = {
    "stream_options": (
        generation_fields.StreamOptions,
        "include_usage continuous_usage_stats include_obfuscation",
    ),
    "response_format": (generation_fields.ResponseFormat, "type json_schema format structures triggers"),
    "response_format.json_schema": (generation_fields.JsonSchemaFormat, "name description schema strict"),
    "structured_outputs": (
        generation_fields.StructuredOutputs,
        "json regex choice grammar json_object disable_any_whitespace disable_additional_properties"
        " whitespace_pattern structural_tag disable_fallback",
    ),
    "prompt_cache_options": (PromptCacheOptions, "mode ttl"),
    "messages: system, developer": (messages.SystemMessage, "role content name tools task"),
    "messages: user": (messages.UserMessage, "role content name tools task"),
    "messages: tool": (messages.ToolMessage, "role content name tool_call_id tools task"),
    "messages: assistant": (
        messages.AssistantMessage,
        "role content name tools task tool_calls reasoning reasoning_content refusal audio annotations function_call"
        " parsed",
    ),
    "messages.content": (messages.TextPart, "type text cache_control prompt_cache_breakpoint"),
    "messages.tool_calls": (messages.AssistantToolCall, "id type function index"),
    "messages.tool_calls.function": (messages.CalledFunction, "name arguments parsed_arguments"),
    "tools": (messages.Tool, "type function defer_loading cache_control"),
    "tools.function": (messages.Function, "name description parameters strict defer_loading"),
    "tool_choice: a tool": (messages.NamedTool, "type function"),
    "tool_choice.function": (messages.FunctionName, "name"),
    "tool_choice: several": (messages.AllowedToolsChoice, "type allowed_tools"),
    "tool_choice.allowed_tools": (messages.AllowedTools, "mode tools"),
    "cache_control": (messages.CacheControl, "type ttl"),
    "prompt_cache_breakpoint": (messages.CacheBreakpoint, "mode ttl"),
    "/tokenize": (
        TokenizeRequest,
        "model prompt messages add_generation_prompt return_token_strs continue_final_message add_special_tokens"
        " chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools",
    ),
    "/detokenize": (DetokenizeRequest, "model tokens"),
    "/v1/messages: messages of user": (anthropic.UserTurn, "role content"),
    "/v1/messages: messages of assistant": (anthropic.AssistantTurn, "role content"),
    "/v1/messages: messages of system": (anthropic.SystemTurn, "role content"),
    "/v1/messages: text": (anthropic.TextBlock, "type text cache_control citations"),
    "/v1/messages: thinking": (anthropic.ThinkingBlock, "type thinking signature"),
    "/v1/messages: redacted_thinking": (anthropic.RedactedThinkingBlock, "type data"),
    "/v1/messages: tool_use": (anthropic.ToolUseBlock, "type id name input cache_control caller toolset_name"),
    "/v1/messages: tool_result": (
        anthropic.ToolResultBlock,
        "type tool_use_id content is_error cache_control toolset_name",
    ),
    "/v1/messages: tools": (
        anthropic.ToolDefinition,
        "type name description input_schema strict cache_control defer_loading eager_input_streaming input_examples"
        " allowed_callers",
    ),
    "/v1/messages: tool_choice": (anthropic.ToolChoice, "type name disable_parallel_tool_use"),
    "/v1/messages: thinking of the request": (anthropic.Thinking, "type budget_tokens display block_binding"),
    "/v1/messages: output_config": (anthropic.OutputConfig, "effort format task_budget"),
    "/v1/messages: output_config.format": (anthropic.OutputFormat, "type schema"),
    "/v1/messages: metadata": (anthropic.Metadata, "user_id"),
}
# Whole bodies, which tests/unit/router/openai_api/test_fields.py compares, and a choice of tools by a word, which has
# no field of its own.
_ELSEWHERE = {
    *(CompletionRequest, ChatCompletionRequest, anthropic.MessagesRequest, anthropic.CountTokensRequest),
    messages.WordChoice,
}
Kinds = tuple[frozenset[str], frozenset[str], frozenset[str]]  # supported, accepted without effect, refused


def _kinds(body: type[StrictBody]) -> Kinds:
    fields = {field.alias or name: field.description for name, field in body.model_fields.items()}
    no_effect = frozenset(name for name, description in fields.items() if description == _WITHOUT_EFFECT)
    return frozenset(fields) - no_effect, no_effect, frozenset(body.asks_for_nothing)


def _documented() -> dict[str, Kinds]:
    page = (Path(__file__).parents[4] / "router" / "http" / "fields.md").read_text()
    rows = re.findall(r"^\| `.*$", page.partition("## Objects")[2], re.MULTILINE)
    kinds: dict[str, Kinds] = {}
    for row in rows:
        name, *cells = row.removesuffix("|").split("|")[1:]
        supported, no_effect, refusals = (frozenset(re.findall(r"`(\w+)`", cell)) for cell in cells)
        kinds[name.strip().replace("`", "")] = (supported, no_effect, refusals)
    return kinds


def test_the_table_of_objects_equals_the_code() -> None:
    assert _documented() == {name: _kinds(body) for name, (body, _) in _OBJECTS.items()}


@pytest.mark.parametrize("name", _OBJECTS)
def test_every_published_field_of_an_object_is_handled(name: str) -> None:
    body, published = _OBJECTS[name]
    assert frozenset().union(*_kinds(body)) == frozenset(published.split())


def test_every_object_that_a_client_may_send_is_in_the_table() -> None:
    listed = {body for body, _ in _OBJECTS.values()} | _ELSEWHERE
    bases = {base for body in listed for base in body.__mro__[1:]}
    assert {body.__name__ for body in all_bodies() if body.__module__.startswith("router.")} - {
        body.__name__ for body in listed | bases
    } == set()


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("response_format", {"type": "json_object", "structures": []}, "response_format.structures"),
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ("messages", [*USER, {"role": "system", "content": "x", "task": "title"}], "messages[1].task"),
        ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ("stream_options", {"chunk_size": 4}, "stream_options.chunk_size"),
    ],
)
def test_a_field_of_an_object_that_is_not_supported_is_refused_by_its_path(
    shared: Endpoint, field: str, value: Any, param: str
) -> None:
    refused(shared.post("/v1/chat/completions", {"messages": USER, field: value}), 400, "unsupported_field", param)
