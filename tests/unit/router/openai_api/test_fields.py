"""Every field of the published protocols is supported, accepted without effect or refused by name;
router/http/fields.md has the same table."""

import re
from pathlib import Path
from typing import Any

import pytest

from router.http.anthropic.bodies import CountTokensRequest, MessagesRequest
from router.http.bodies.strict_body import StrictBody
from router.http.endpoints import TokenizeRequest
from router.http.openai_schema import ChatCompletionRequest, CompletionRequest
from tests.unit.router.openai_api.endpoint import USER, Endpoint, refused


def _names(words: str) -> list[str]:
    return words.split()


# The fields of vLLM's CompletionRequest and ChatCompletionRequest, looked up in vllm/entrypoints/openai/completion/
# protocol.py and chat_completion/protocol.py of vLLM 0.33.0.
_VLLM_BOTH = _names(
    """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
    logprob_token_ids bad_words add_special_tokens response_format structured_outputs priority request_id
    session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    thinking_token_budget stream_interval echo mm_payload return_weight_versions
    """
)
_VLLM_COMPLETION = [*_VLLM_BOTH, *["prompt", "suffix", "prompt_embeds"]]
_VLLM_CHAT = _VLLM_BOTH + _names(
    """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
    parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    """
)
# Those of the package `openai` 3.57, types/completion_create_params.py and types/chat/completion_create_params.py.
_OPENAI_COMPLETION = ["best_of"]
_OPENAI_CHAT = _names(
    """
    audio function_call functions metadata modalities moderation prediction prompt_cache_key prompt_cache_options
    prompt_cache_retention safety_identifier service_tier store verbosity web_search_options
    """
)
# Anthropic's, of the package `anthropic` 2.14, types/message_create_params.py and types/beta/message_create_params.py,
# with those of vLLM's AnthropicMessagesRequest.
_ANTHROPIC = _names(
    """
    max_tokens messages model cache_control container diagnostics inference_geo metadata output_config service_tier
    speed stop_sequences system thinking tool_choice tools user_profile_id workspace_id stream temperature top_k top_p
    billing_policy compaction context_management fallback_credit_token fallbacks mcp_servers thread
    mm_payload return_mm_kwargs cache_salt watermarking kv_transfer_params ec_transfer_params vllm_xargs
    chat_template_kwargs
    """
)
_ANTHROPIC_COUNT = _names(
    """
    messages model billing_policy cache_control output_config speed system thinking tool_choice tools user_profile_id
    workspace_id compaction context_management mcp_servers chat_template_kwargs
    """
)
_VLLM_TOKENIZE = _names(
    """
    model prompt messages add_generation_prompt return_token_strs continue_final_message add_special_tokens
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools
    """
)
_PATHS: dict[str, tuple[type[CompletionRequest | ChatCompletionRequest], list[str], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, _VLLM_COMPLETION + _OPENAI_COMPLETION, {"prompt": "x"}),
    "/v1/chat/completions": (ChatCompletionRequest, _VLLM_CHAT + _OPENAI_CHAT, {"messages": USER}),
}
_WITHOUT_EFFECT = "accepted; changes nothing"


def _kind(body: type[StrictBody], name: str) -> str:
    if name in body.model_fields:
        return "no effect" if body.model_fields[name].description == _WITHOUT_EFFECT else "supported"
    return "refused" if name in body.asks_for_nothing else "unknown"


def _documented(section: int = 0) -> dict[str, str]:
    page = (Path(__file__).parents[4] / "router" / "http" / "fields.md").read_text()
    table = page.split("\n## ")[section]
    kinds: dict[str, str] = {}
    for line in re.findall(r"^\| `.*$", table, re.MULTILINE):
        fields, meaning = line.strip("| ").split(" | ")[:2]
        kind = "refused" if meaning.startswith("refused") else "supported"
        kind = "no effect" if meaning.startswith("accepted, no effect") else kind
        named = re.findall(r"`(\w+)`", fields) + re.findall(r"`(max_completion_tokens|top_logprobs)`", meaning)
        assert not set(named) & set(kinds), f"twice: {named}"
        kinds |= dict.fromkeys(named, kind)
    return kinds


@pytest.mark.parametrize("path", _PATHS)
def test_every_published_field_is_in_the_table_as_it_is_handled(path: str) -> None:
    body, published, _ = _PATHS[path]
    documented = _documented()
    names = {*published, *body.model_fields, *body.asks_for_nothing}
    assert {name: _kind(body, name) for name in names} == {name: documented.get(name) for name in names}


def test_the_table_names_no_field_that_does_not_exist() -> None:
    known = {name for body, _, _ in _PATHS.values() for name in (*body.model_fields, *body.asks_for_nothing)}
    assert set(_documented()) <= known


@pytest.mark.parametrize(("body", "published"), [(MessagesRequest, _ANTHROPIC), (CountTokensRequest, _ANTHROPIC_COUNT)])
def test_every_field_of_anthropics_protocol_is_in_its_table(body: type[StrictBody], published: list[str]) -> None:
    documented = _documented(1)
    assert {*body.model_fields, *body.asks_for_nothing} == set(published)
    assert {name: _kind(body, name) for name in published} == {name: documented.get(name) for name in published}
    assert set(documented) == set(_ANTHROPIC)


def test_every_published_field_of_tokenize_is_handled() -> None:
    assert {*TokenizeRequest.model_fields, *TokenizeRequest.asks_for_nothing} == set(_VLLM_TOKENIZE)


@pytest.mark.parametrize("path", _PATHS)
def test_a_field_that_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(
    shared: Endpoint, path: str
) -> None:
    body, _, least = _PATHS[path]
    for name, neutral in body.asks_for_nothing.items():
        refused(shared.post(path, least | {name: "what is this"}), 400, "unsupported_field", name, f"'{name}'")
        for value in (None, *neutral):
            answer = shared.post(path, least | {name: value})
            assert answer.status_code == 200, (name, value, answer.text)


@pytest.mark.parametrize("path", _PATHS)
def test_fields_without_effect_leave_the_request_as_it_is(shared: Endpoint, path: str) -> None:
    body, _, least = _PATHS[path]
    values: dict[str, Any] = {
        "user": "me",
        "safety_identifier": "me",
        "session_id": "7",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
        "metadata": {"trace": "7"},
        "store": False,
        "return_mm_kwargs": False,
        "mm_payload": "none",
    }
    names = [name for name in body.model_fields if _kind(body, name) == "no effect"]
    plain = least | {"request_id": "the same"}
    for sent in (plain, plain | {name: values[name] for name in names}):
        assert shared.post(path, sent).status_code == 200
    assert shared.pipeline.seen[-1] == shared.pipeline.seen[-2]


def test_best_of_one_and_other_values_of_load_tools_are_accepted(shared: Endpoint) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    sent = {"prompt": "x", "best_of": 1, "stream": True, "stream_options": options}
    assert shared.post("/v1/completions", sent).status_code == 200
    assert shared.post("/v1/completions", {"prompt": "x", "stream_options": options}).status_code == 200


def test_a_request_id_in_the_body_names_the_answer(shared: Endpoint) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x", "request_id": "mine-7"})
    assert answer.json()["id"] == "cmpl-mine-7"
    assert shared.pipeline.seen[-1].label == "mine-7"
    answer = shared.post("/v1/completions", {"prompt": "x", "request_id": "é"})
    refused(answer, 400, "invalid_request", "request_id", "ASCII")
