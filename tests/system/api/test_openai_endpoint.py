"""Tests that the OpenAI endpoint and the client library give the same answers from one cluster of real workers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from tandem.client import AsyncClient
from tandem.errors import InvalidRequest
from tests.system.rigs.processes.local_cluster import DEMO_MODEL, LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

_PROMPT = "def read_lines(path):\n"
_CHAT: Any = [{"role": "user", "content": "Write a function that reads a file."}]
_TIMEOUT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """One prefill and one decode worker in float32, so that greedy answers are the same for every client."""
    directory: Path = tmp_path_factory.mktemp("openai")
    cluster = LocalCluster(redis_url, directory, flags=("--dtype", "float32", "--num-blocks", "256"))
    try:
        yield await cluster.start()
    finally:
        await cluster.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=f"http://{_http_address(cluster)}/v1", api_key="-", max_retries=0, timeout=_TIMEOUT_S, http_client=http
    ) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def tandem(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.members["router0"].grpc_address, timeout_s=_TIMEOUT_S) as client:
        yield client


def _http_address(cluster: LocalCluster) -> str:
    return cluster.members["router0"].ready["http"]


async def test_http_and_grpc_streamed_or_whole_give_the_same_answer(
    client: openai.AsyncOpenAI, tandem: AsyncClient
) -> None:
    greedy: Any = {"model": DEMO_MODEL.name, "prompt": _PROMPT, "temperature": 0, "max_tokens": 40}
    whole = await client.completions.create(**greedy)
    streamed = [part async for part in await client.completions.create(**greedy, stream=True)]
    result = await tandem.generate(_PROMPT, temperature=0, max_tokens=40).result()

    assert whole.choices[0].text == "".join(part.choices[0].text for part in streamed) == result.text
    assert whole.choices[0].finish_reason == streamed[-1].choices[0].finish_reason == result.choices[0].finish_reason
    assert whole.usage is not None
    assert whole.usage.completion_tokens == result.usage.completion_tokens == len(result.token_ids)
    assert len(streamed) > 10, "tokens came in lumps"
    assert result.ledger.transport in ("shm", "tcp")
    assert [phase.name for phase in result.ledger.phases][:1] == ["tokenize"]


async def test_chats_go_through_the_models_own_template(client: openai.AsyncOpenAI, tandem: AsyncClient) -> None:
    greedy: Any = {"model": DEMO_MODEL.name, "messages": _CHAT, "temperature": 0, "max_completion_tokens": 12}
    answer = await client.chat.completions.create(**greedy, logprobs=True, top_logprobs=3)
    token_ids = await tandem.tokenize(messages=_CHAT)
    result = await tandem.generate(token_ids=token_ids, temperature=0, max_tokens=12).result()

    assert answer.choices[0].message.content == result.text
    assert answer.usage.prompt_tokens == len(token_ids) == result.usage.prompt_tokens
    content = answer.choices[0].logprobs.content
    assert len(content) == len(result.token_ids)
    for token in content:
        assert token.token == token.top_logprobs[0].token, "greedy takes the likeliest"
        assert [rival.logprob for rival in token.top_logprobs] == sorted(
            (r.logprob for r in token.top_logprobs), reverse=True
        )


async def test_a_seed_fixes_every_choice(client: openai.AsyncOpenAI) -> None:
    ask: Any = {"model": "", "prompt": _PROMPT, "n": 3, "seed": 7, "temperature": 1, "max_tokens": 24}
    first, second = await asyncio.gather(client.completions.create(**ask), client.completions.create(**ask))
    other = await client.completions.create(**ask | {"seed": 8})
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len({*texts, *(choice.text for choice in other.choices)}) == 6


async def test_stop_strings_end_the_text_on_both_surfaces(client: openai.AsyncOpenAI, tandem: AsyncClient) -> None:
    whole = await tandem.generate(_PROMPT, temperature=0, max_tokens=40).result()
    stop = whole.text[10:13]
    expected = whole.text[: whole.text.index(stop)]
    answer = await client.completions.create(model="", prompt=_PROMPT, temperature=0, max_tokens=40, stop=stop)
    result = await tandem.generate(_PROMPT, temperature=0, max_tokens=40, stop=stop).result()
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    assert (result.text, result.choices[0].stop_cause) == (expected, stop)


async def test_a_batch_of_prompts_equals_its_prompts_alone(client: openai.AsyncOpenAI) -> None:
    prompts = [_PROMPT, "import os\n", "class A:\n"]
    ask: Any = {"model": "", "temperature": 0, "max_tokens": 12}
    batch = await client.completions.create(prompt=prompts, **ask)
    alone = [await client.completions.create(prompt=prompt, **ask) for prompt in prompts]
    assert [choice.text for choice in batch.choices] == [answer.choices[0].text for answer in alone]


async def test_refusals_carry_the_same_reason_on_both_surfaces(client: openai.AsyncOpenAI, tandem: AsyncClient) -> None:
    too_long = [5] * 2000
    with pytest.raises(openai.BadRequestError, match="2000") as over_http:
        await client.completions.create(model="", prompt=too_long)
    with pytest.raises(InvalidRequest, match="2000") as over_grpc:
        await tandem.generate(token_ids=too_long).result()
    assert over_http.value.code == over_grpc.value.reason == "context_length_exceeded"


async def test_names_at_the_limit_are_served_by_every_worker(client: openai.AsyncOpenAI, tandem: AsyncClient) -> None:
    label = "l" * 128
    batch = await client.completions.create(
        model="", prompt=[_PROMPT, "import os"], n=2, max_tokens=3, extra_headers={"x-request-id": label}
    )
    assert len(batch.choices) == 4
    result = await tandem.generate(_PROMPT, n=3, max_tokens=3, request_id="é" * 128, label=label).result()
    assert (result.request_id, result.ledger.label, len(result.choices)) == ("é" * 128, label, 3)


async def test_two_live_requests_with_one_label_are_both_served(
    cluster: LocalCluster, client: openai.AsyncOpenAI
) -> None:
    """A second client's requests under a label never affect the first client's stream."""
    ask: Any = {"model": "", "prompt": _PROMPT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    async with await client.completions.create(**ask, stream=True, extra_headers={"x-request-id": "twice"}) as stream:
        parts = aiter(stream)
        await anext(parts)
        ask["max_tokens"] = 8
        for _ in range(2):
            answer = await client.completions.create(**ask, extra_headers={"x-request-id": "twice"})
            assert answer.usage is not None and answer.usage.completion_tokens == 8
        last = [part async for part in parts][-1]
        assert last.choices[0].finish_reason == "length"


async def test_a_client_that_disconnects_leaves_no_block(cluster: LocalCluster, client: openai.AsyncOpenAI) -> None:
    ask: Any = {"model": "", "prompt": _PROMPT, "n": 2, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    async with await client.completions.create(**ask, stream=True) as stream:
        parts = aiter(stream)
        for _ in range(8):  # more than prefill's first tokens: decode is at work
            await anext(parts)
        assert await _blocks_in_use(cluster, "decode0")
    async with asyncio.timeout(_TIMEOUT_S):
        for name in cluster.workers():
            while in_use := await _blocks_in_use(cluster, name):
                print(f"{name} still has {in_use}")


async def _blocks_in_use(cluster: LocalCluster, name: str) -> dict[str, int]:
    report = await cluster.inspect(name)
    assert report.violation == ""
    return {state: count for state, count in report.blocks.items() if state not in ("free", "cached") and count}


async def test_metrics_and_health_show_the_requests(cluster: LocalCluster, client: openai.AsyncOpenAI) -> None:
    await client.completions.create(model="", prompt=_PROMPT, max_tokens=4)
    async with httpx.AsyncClient(base_url=f"http://{_http_address(cluster)}", verify=False) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        figures = (await http.get("/metrics")).text
    lines = [line for line in figures.splitlines() if line.startswith('tandem_requests_total{outcome="ok"}')]
    assert float(lines[0].split()[-1]) >= 1


async def test_every_member_serves_its_metrics_on_a_port_of_its_own(
    cluster: LocalCluster, client: openai.AsyncOpenAI
) -> None:
    await client.completions.create(model="", prompt=_PROMPT, max_tokens=4)
    texts = {}
    async with httpx.AsyncClient() as http:
        for name, member in cluster.members.items():
            texts[name] = (await http.get(f"http://{member.ready['metrics']}/metrics")).text
    assert 'tandem_requests_total{outcome="ok"}' in texts["router0"]
    for name in cluster.workers():
        for metric in ("tandem_step_seconds_count", "tandem_handoffs_total{", "process_cpu_seconds_total"):
            assert f"\n{metric}" in texts[name], f"{name} has no {metric}"


async def test_a_prompt_is_scored_without_a_generated_token(client: openai.AsyncOpenAI) -> None:
    """Tools that evaluate models send this: the log-probabilities are those of the same prompt with an answer."""
    plain = await client.completions.create(model="", prompt=_PROMPT, max_tokens=1, echo=True, logprobs=1)
    answer = await client.completions.create(model="", prompt=_PROMPT, max_tokens=0, echo=True, logprobs=1)
    (choice,), (whole,) = answer.choices, plain.choices
    assert (choice.text, choice.finish_reason) == (_PROMPT, "length")
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    num_tokens = answer.usage.prompt_tokens
    assert choice.logprobs is not None and whole.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == num_tokens == len(whole.logprobs.token_logprobs or ()) - 1
    assert choice.logprobs.token_logprobs[1:] == pytest.approx((whole.logprobs.token_logprobs or [])[1:num_tokens])
