"""The log-probabilities of tokens and of prompts in responses of the OpenAI endpoint."""

from typing import Any

import pytest

from router.text.tokenization import Tokenization
from tests.unit.router.openai_api.endpoint import SCRIPT, USER, Endpoint, endpoint, events_of

_PROMPT_IDS = [7, 8, 9]


def test_chat_logprobs_name_each_token_and_its_alternatives(shared: Endpoint) -> None:
    answer = shared.client.chat.completions.create(
        model="",
        messages=USER,
        logprobs=True,
        top_logprobs=2,
        max_tokens=3,
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert content[0].bytes == list(b"The")
    assert [(len(token.top_logprobs), token.logprob) for token in content] == [(2, -0.5)] * 3


def test_completion_logprobs_give_the_text_offset_of_each_token(shared: Endpoint) -> None:
    answer = shared.client.completions.create(model="", prompt="x", logprobs=2, max_tokens=5)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    begins = [len("".join(logprobs.tokens[:i])) for i in range(5)]
    assert logprobs.text_offset == begins
    assert logprobs.token_logprobs == [-0.5] * 5
    assert all(token in rivals for token, rivals in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


def test_streamed_logprobs_equal_those_of_a_whole_answer(shared: Endpoint) -> None:
    ask: dict[str, Any] = {"model": "", "prompt": "x", "logprobs": 1, "max_tokens": 6, "n": 2}
    whole = shared.client.completions.create(**ask)
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for part in shared.client.completions.create(**ask, stream=True):
        if part.choices[0].logprobs:
            offsets[part.choices[0].index] += part.choices[0].logprobs.text_offset
    assert [choice.logprobs.text_offset for choice in whole.choices] == [offsets[0], offsets[1]]


def test_tokens_of_half_a_character_are_shown_as_bytes(demo: Tokenization) -> None:
    with endpoint(demo, script="€") as running:
        answer = running.client.completions.create(model="", prompt="x", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<|endoftext|>"]
    assert logprobs.text_offset == [0, 0, 0, 1]
    assert answer.choices[0].text == "€"


def test_tokens_of_logprobs_may_be_named_by_their_ids(shared: Endpoint) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    create = shared.client.completions.create
    answer = create(model="", prompt="x", max_tokens=3, logprobs=1, extra_body=extra)
    assert answer.choices[0].logprobs is not None
    token_ids: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    assert answer.choices[0].logprobs.tokens == [f"token_id:{token_id}" for token_id in token_ids]


def _expected_prompt(tokenization: Tokenization, num_top: int) -> list[Any]:
    """Return the scripted scores: place p has log-probability -p, rank p and the likeliest tokens p, p + 1, ..."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": tokenization.token_name(token_id)}

    return [
        None,
        *(
            {str(place + more): entry(place + more, -more, more + 1) for more in range(num_top)}
            | {str(token_id): entry(token_id, -place, place)}
            for place, token_id in enumerate(_PROMPT_IDS[1:], start=1)
        ),
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 2])
def test_every_choice_of_a_completion_has_the_log_probabilities_of_its_prompt_once(
    shared: Endpoint, num_top: int, stream: bool
) -> None:
    body = {"prompt": [_PROMPT_IDS, [7]], "prompt_logprobs": num_top, "n": 2, "stream": stream}
    answer = shared.post("/v1/completions", body)
    bodies = [answer.json()] if not stream else events_of(answer.text)
    expected = _expected_prompt(shared.pipeline.tokenization, num_top)
    for number in range(4):
        choices = [choice for body in bodies for choice in body["choices"] if choice["index"] == number]
        assert choices[0].pop("prompt_logprobs") == (expected if number < 2 else [None])
        assert not any("prompt_logprobs" in choice for choice in choices)
        assert "".join(choice["text"] for choice in choices) == SCRIPT[:: -1 if number % 2 else 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_the_log_probabilities_of_its_prompt_beside_the_choices_once(shared: Endpoint, stream: bool) -> None:
    body = {"messages": USER, "prompt_logprobs": 1, "n": 2, "stream": stream}
    answer = shared.post("/v1/chat/completions", body)
    bodies = [answer.json()] if not stream else events_of(answer.text)
    first = bodies[0].pop("prompt_logprobs")
    assert first[0] is None
    assert [position["1"]["rank"] for position in first[1:2]] == [1]
    assert not any("prompt_logprobs" in body for body in bodies)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 2])
def test_echoed_tokens_are_the_first_of_the_log_probabilities(shared: Endpoint, num_top: int, stream: bool) -> None:
    prompt = list(shared.pipeline.tokenization.encode("def f(x): return"))[:3]
    body = {"prompt": prompt, "echo": True, "logprobs": num_top, "n": 2, "stream": stream}
    plain = shared.post("/v1/completions", body | {"echo": False, "stream": False}).json()
    answer = shared.post("/v1/completions", body)
    bodies = [answer.json()] if not stream else events_of(answer.text)
    name = shared.pipeline.tokenization.token_name
    for number in range(2):
        choices = [choice for body in bodies for choice in body["choices"] if choice["index"] == number]
        assert not any("prompt_logprobs" in choice for choice in choices)
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        found = {field: [value for part in parts for value in part[field]] for field in parts[0]}
        generated = plain["choices"][number]["logprobs"]
        assert found["tokens"] == [*map(name, prompt), *generated["tokens"]]
        assert found["token_logprobs"] == [None, -1.0, -2.0, *generated["token_logprobs"]]
        assert found["top_logprobs"][0] is None
        assert found["top_logprobs"][1] == {name(1 + more): -more for more in range(num_top)} | {name(prompt[1]): -1.0}
        assert found["top_logprobs"][3:] == generated["top_logprobs"]
        assert found["text_offset"][:4] == [sum(map(len, map(name, prompt[:place]))) for place in range(4)]
        assert "".join(choice["text"] for choice in choices).startswith("".join(map(name, prompt)))


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_with_echo_score_the_prompt_and_generate_nothing(shared: Endpoint, stream: bool) -> None:
    prompts = [list(shared.pipeline.tokenization.encode("def f(x): return"))[:3], [5, 6]]
    body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2, "stream": stream}
    answer = shared.post("/v1/completions", body | {"stream_options": {"include_usage": True}} if stream else body)
    bodies = [answer.json()] if not stream else events_of(answer.text)
    name = shared.pipeline.tokenization.token_name
    for number in range(4):
        prompt = prompts[number // 2]
        choices = [choice for body in bodies for choice in body["choices"] if choice["index"] == number]
        assert "".join(choice["text"] for choice in choices) == "".join(map(name, prompt))
        assert [choice["finish_reason"] for choice in choices][-1] == "length"
        (found,) = (choice["logprobs"] for choice in choices if choice["logprobs"] is not None)
        assert found["tokens"] == list(map(name, prompt))
        assert found["token_logprobs"] == [None, -1.0, -2.0][: len(prompt)]
    assert bodies[-1]["usage"]["completion_tokens"] == 0
    assert bodies[-1]["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_no_tokens_without_echo_are_an_empty_answer(shared: Endpoint) -> None:
    (choice,) = shared.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 0}).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)
