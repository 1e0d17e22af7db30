"""The responses of the OpenAI endpoint to the real `openai` package over a real server."""

import json
from typing import Any, Literal

import openai
import pytest

from router.requests import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from router.text.tokenization import Tokenization
from tests.unit.router.openai_api.endpoint import SCRIPT, USER, Endpoint, endpoint, events_of


def test_a_completion_carries_text_reason_and_usage(shared: Endpoint) -> None:
    answer = shared.client.completions.create(model="demo_model", prompt="def f", max_tokens=64)
    assert answer.choices[0].text == SCRIPT
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("text_completion", "demo_model", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_a_chat_completion_carries_a_message(shared: Endpoint) -> None:
    answer = shared.client.chat.completions.create(model="demo_model", messages=USER)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", SCRIPT)
    assert (answer.object, answer.choices[0].finish_reason) == ("chat.completion", "stop")
    assert answer.id.startswith("chatcmpl-")


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_streamed_parts_add_up_to_the_whole_answer(shared: Endpoint, kind: str) -> None:
    parts: list[Any]
    if kind == "chat":
        parts = list(shared.client.chat.completions.create(model="", messages=USER, stream=True, n=2))
        texts = [(part.choices[0].index, part.choices[0].delta.content or "") for part in parts]
        assert [part.choices[0].delta.role for part in parts].count("assistant") == 2
        assert {part.object for part in parts} == {"chat.completion.chunk"}
    else:
        parts = list(shared.client.completions.create(model="", prompt="x", stream=True, n=2, max_tokens=64))
        texts = [(part.choices[0].index, part.choices[0].text) for part in parts]
    assert "".join(text for index, text in texts if index == 0) == SCRIPT
    assert "".join(text for index, text in texts if index == 1) == SCRIPT[::-1]
    reasons = [
        (part.choices[0].index, part.choices[0].finish_reason) for part in parts if part.choices[0].finish_reason
    ]
    assert sorted(reasons) == [(0, "stop"), (1, "stop")]
    assert len({part.id for part in parts}) == 1
    assert all(part.usage is None for part in parts)


def test_usage_comes_last_in_a_stream_with_include_usage(shared: Endpoint) -> None:
    options: Any = {"include_usage": True}
    create = shared.client.completions.create
    parts: list[Any] = list(create(model="", prompt=["a", "b"], stream=True, stream_options=options))
    assert parts[-1].choices == []
    assert parts[-1].usage.prompt_tokens == 2
    assert parts[-1].usage.completion_tokens == 24
    assert all(part.usage is None for part in parts[:-1])


def test_events_are_framed_as_server_sentevents_of(shared: Endpoint) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])


async def test_the_async_client_streams(shared: Endpoint) -> None:
    async with openai.AsyncOpenAI(base_url=shared.url + "/v1", api_key="sk-test", max_retries=0) as client:
        stream = await client.chat.completions.create(model="", messages=USER, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in stream]) == SCRIPT


def test_prompts_may_be_text_or_tokens_or_lists_of_both(shared: Endpoint) -> None:
    create, seen = shared.client.completions.create, shared.pipeline.seen
    num_before = len(seen)  # other tests may have chosen their labels
    create(model="", prompt="ab")
    create(model="", prompt=[5, 6])
    assert [request.prompt for request in seen[-2:]] == [TextPrompt("ab"), TokenPrompt((5, 6))]
    answer = create(model="", prompt=["ab", "cd"], n=2, max_tokens=64)
    assert sorted(request.prompt.text for request in seen[-2:] if isinstance(request.prompt, TextPrompt)) == [
        "ab",
        "cd",
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [SCRIPT, SCRIPT[::-1]] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(shared.pipeline._tokens(i)) - 200 for i in (0, 1)) * 2
    create(model="", prompt=[[5, 6], [7]])
    assert {request.prompt for request in seen[-2:]} == {TokenPrompt((5, 6)), TokenPrompt((7,))}
    made = seen[num_before:]
    assert len({request.label for request in made}) == len(made)
    assert {request.request_id for request in made} == {""}


def test_sampling_and_stop_fields_arrive(shared: Endpoint) -> None:
    extensions = {"top_k": 5, "min_p": 0.1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9]}
    extensions |= {"cache_salt": "tenant", "priority": -3}
    extensions |= {"repetition_penalty": 1.5, "allowed_token_ids": [9, 4], "bad_words": ["no"]}
    shared.client.completions.create(
        model="demo_model",
        prompt="x",
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["\n"],
        max_tokens=9,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={"12": -100, "7": 2},
        extra_body=extensions,
    )
    request = shared.pipeline.seen[-1]
    sampling, stop = request.sampling, request.stop
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        7,
        5,
        0.1,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.25, 1.5)
    assert sampling.logit_bias == ((7, 2.0), (12, -100.0))
    assert (sampling.allowed_token_ids, sampling.bad_words) == ((9, 4), ("no",))
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos) == (9, 2, True)
    assert (stop.stop, stop.stop_token_ids) == (("\n",), (9,))
    assert (request.cache_salt, request.priority, request.is_batch) == ("tenant", -3, False)


@pytest.mark.parametrize(("tier", "is_batch"), [("flex", True), ("default", False), ("auto", False)])
def test_the_flex_tier_is_the_batch_class(
    shared: Endpoint, tier: Literal["flex", "default", "auto"], is_batch: bool
) -> None:
    shared.client.chat.completions.create(model="", messages=USER, service_tier=tier)
    request = shared.pipeline.seen[-1]
    assert (request.is_batch, request.priority) == (is_batch, 0)


def test_latency_targets_in_headers_reach_every_prompt_of_the_request(shared: Endpoint) -> None:
    targets = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5"}
    num_seen = len(shared.pipeline.seen)
    shared.client.completions.create(model="", prompt=["x", "y"], extra_headers=targets)
    shared.client.chat.completions.create(model="", messages=USER, extra_headers=targets)
    seen = shared.pipeline.seen[num_seen:]
    assert [(request.slo_ttft_s, request.slo_tpot_s) for request in seen] == [(0.25, 0.0125)] * 3
    paths = shared.http.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert set(targets) <= {parameter["name"] for parameter in paths[path]["post"]["parameters"]}


def test_omitted_fields_are_left_to_the_model(shared: Endpoint) -> None:
    shared.client.chat.completions.create(model="", messages=USER, user="me", extra_body={"top_k": -1})
    request = shared.pipeline.seen[-1]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (None, None, None)
    assert request.sampling.top_k == 0
    assert (request.slo_ttft_s, request.slo_tpot_s) == (None, None)
    assert (request.stop.max_tokens, request.logprobs, request.n) == (None, None, 1)


def test_completions_without_max_tokens_get_sixteen_tokens_or_the_rest_of_the_context(shared: Endpoint) -> None:
    answer = shared.client.completions.create(model="", prompt="x", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")
    answer = shared.client.completions.create(model="", prompt=[5] * 1020, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_ends_a_chat_with_reason_length(shared: Endpoint, field: str) -> None:
    limit: Any = {field: 2}
    answer = shared.client.chat.completions.create(model="", messages=USER, **limit)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "length")


@pytest.mark.parametrize("stop", ["brown", ["zebra", "brown", " fox", "."]])
def test_stop_strings_cut_the_text(shared: Endpoint, stop: str | list[str]) -> None:
    answer = shared.client.completions.create(model="", prompt="x", stop=stop, max_tokens=64)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("The quick ", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_choice_has_its_stop_reason(shared: Endpoint, stream: bool) -> None:
    for path, least in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": USER})):
        for stop, reason in (({"stop": ["own"]}, "own"), ({"stop_token_ids": [5], "ignore_eos": True}, 5), ({}, None)):
            answer = shared.post(path, {**least, "max_tokens": 200, "stream": stream, **stop})
            bodies = [answer.json()] if not stream else events_of(answer.text)
            last = [choice for body in bodies for choice in body["choices"]][-1]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_a_completion_begins_with_the_prompt_on_request(shared: Endpoint, stream: bool) -> None:
    token_ids = list(shared.pipeline.tokenization.encode("self.x"))
    for prompt, shown in (("def f():", "def f():"), (token_ids, "self.x")):
        answer = shared.post("/v1/completions", {"prompt": prompt, "echo": True, "n": 2, "stream": stream})
        plain = shared.post("/v1/completions", {"prompt": prompt, "n": 2})
        bodies = [answer.json()] if not stream else events_of(answer.text)
        for number, choice in enumerate(plain.json()["choices"]):
            parts = [c["text"] for body in bodies for c in body["choices"] if c["index"] == number]
            assert "".join(parts) == shown + choice["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_echoes_the_message_that_it_continues(shared: Endpoint, stream: bool) -> None:
    for messages, shown in (([*USER, {"role": "assistant", "content": "Well: "}], "Well: "), (USER, "")):
        body = {"messages": messages, "echo": True, "stream": stream, "max_tokens": 40}
        answer = shared.post("/v1/chat/completions", body)
        if stream:
            parts = [
                choice["delta"].get("content", "") for body in events_of(answer.text) for choice in body["choices"]
            ]
        else:
            parts = [answer.json()["choices"][0]["message"]["content"]]
        assert "".join(parts) == shown + SCRIPT


def test_only_the_last_tokens_of_a_truncated_prompt_are_kept(shared: Endpoint) -> None:
    for kept, num_prompt in ((2, 2), (500, 5), (-1, 5)):
        body = {"prompt": [7, 8, 9, 10, 11], "truncate_prompt_tokens": kept, "max_tokens": 3}
        assert shared.post("/v1/completions", body).json()["usage"]["prompt_tokens"] == num_prompt
    long = {"prompt": [7] * 2000, "truncate_prompt_tokens": -1, "max_tokens": 24}
    assert shared.post("/v1/completions", long).json()["usage"]["prompt_tokens"] == 1000
    refused = shared.post("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 0})
    assert "truncate_prompt_tokens must be -1 or from 1" in refused.json()["error"]["message"]


def test_text_parts_are_joined_and_developers_are_the_system(shared: Endpoint) -> None:
    parts: Any = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: Any = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    shared.client.chat.completions.create(model="", messages=messages)
    expected = ChatPrompt((ChatMessage("system", "be brief"), ChatMessage("user", "one\ntwo")))
    assert shared.pipeline.seen[-1].prompt == expected


def test_an_assistants_message_can_be_sent_back_unchanged(shared: Endpoint) -> None:
    answer = shared.client.chat.completions.create(model="", messages=USER)
    history: Any = [*USER, answer.choices[0].message.model_dump(), *USER]
    shared.client.chat.completions.create(model="", messages=history)
    prompt = shared.pipeline.seen[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == ChatMessage("assistant", SCRIPT)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_with_return_token_ids(shared: Endpoint, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 3, "return_token_ids": True, "stream": stream}
    answer = shared.post("/v1/completions", body)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        token_ids = [token_id for event in events for token_id in event["choices"][0]["token_ids"]]
    else:
        token_ids = answer.json()["choices"][0]["token_ids"]
    assert token_ids == shared.pipeline._tokens(0)[:3]


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_prompts_come_once_with_return_token_ids(shared: Endpoint, stream: bool) -> None:
    wanted: dict[str, Any] = {"max_tokens": 3, "n": 2, "stream": stream, "return_token_ids": True}
    texts = ["def f():", "import os\n"]
    answer = shared.post("/v1/completions", wanted | {"prompt": texts, "truncate_prompt_tokens": 2})
    bodies = events_of(answer.text) if stream else [answer.json()]
    choices = [choice for body in bodies for choice in body["choices"] if "prompt_token_ids" in choice]
    kept = [list(shared.pipeline.tokenization.encode(text))[-2:] for text in texts for _ in range(2)]
    assert sorted((choice["index"], choice["prompt_token_ids"]) for choice in choices) == list(enumerate(kept))

    rendered = shared.post("/tokenize", {"messages": USER}).json()["tokens"]
    answer = shared.post("/v1/chat/completions", wanted | {"messages": USER})
    bodies = events_of(answer.text) if stream else [answer.json()]
    assert [body["prompt_token_ids"] for body in bodies if "prompt_token_ids" in body] == [rendered]


def test_models_are_listed_and_found(shared: Endpoint) -> None:
    assert [model.id for model in shared.client.models.list()] == ["demo_model"]
    assert shared.client.models.retrieve("demo_model").owned_by == "tandem"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        shared.client.models.retrieve("gpt")


def test_operators_see_health_readiness_figures_and_the_api(demo: Tokenization) -> None:
    with endpoint(demo, ready=False) as running:
        assert running.http.get("/health").json() == {"status": "alive"}
        assert running.http.get("/ready").status_code == 503
        assert "tandem_http_responses_total" in running.http.get("/metrics").text
        paths = running.http.get("/openapi.json").json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/ready", "/metrics"} <= set(paths)
    assert running.telemetry.value("tandem_http_responses_total", route="/ready", status="503") == 1


def test_a_ready_router_answers_ready_with_200(shared: Endpoint) -> None:
    assert shared.http.get("/ready").status_code == 200


def test_a_label_at_the_limit_serves_several_prompts(shared: Endpoint) -> None:
    label = "a" * 128
    answer = shared.post("/v1/completions", {"prompt": ["x", "y"]}, **{"x-request-id": label})
    assert (answer.status_code, answer.headers["x-request-id"], len(answer.json()["choices"])) == (200, label, 2)
    assert {seen.label for seen in shared.pipeline.seen[-2:]} == {f"{label}-0", f"{label}-1"}
    many = shared.post("/v1/completions", {"prompt": ["x"] * 128}, **{"x-request-id": label})
    assert (many.status_code, len(many.json()["choices"])) == (200, 128)


def test_the_request_id_is_sent_and_returned(shared: Endpoint) -> None:
    answer = shared.post("/v1/completions", {"prompt": "x"}, **{"x-request-id": "trace-7"})
    assert answer.headers["x-request-id"] == "trace-7"
    assert answer.json()["id"] == "cmpl-trace-7"
    seen = shared.pipeline.seen[-1]
    assert (seen.label, seen.request_id) == ("trace-7", ""), "a label is never the id of a stream"
    assert shared.http.get("/health").headers["x-request-id"]


def test_every_chunk_has_the_usage_so_far_with_continuous_usage_stats(shared: Endpoint) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    create = shared.client.chat.completions.create
    parts: list[Any] = list(create(model="", messages=USER, n=2, stream=True, stream_options=options))
    last = parts[-1].usage
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == last.completion_tokens
    assert {part.usage.prompt_tokens for part in parts} == {last.prompt_tokens}
    assert all(part.usage.total_tokens == last.prompt_tokens + part.usage.completion_tokens for part in parts)
