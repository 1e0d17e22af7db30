"""A question to a running cluster over gRPC, and its answer: every stream is checked to be exactly once, in order."""

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc

from tandem.enum_words import FINISH_REASONS
from tandem.v1 import inference_pb2
from tests.polling import until
from tests.system.rigs.processes.local_cluster import LocalCluster

TIMEOUT_S = 90.0
GREEDY = inference_pb2.SamplingParams(temperature=0.0)


def question(
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    n: int = 1,
    sampling: inference_pb2.SamplingParams = GREEDY,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    request_id: str = "",
    cache_salt: str = "",
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling,
        stop=inference_pb2.StopConditions(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop=stop,
            stop_token_ids=stop_token_ids,
        ),
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        cache_salt=cache_salt,
    )


class Answer:
    """The part of an answer that the client has received so far."""

    def __init__(self) -> None:
        self.choices: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.finish_reasons: dict[int, str] = {}
        self.stop_causes: dict[int, str] = {}
        self.logprobs: list[inference_pb2.PositionLogprobs] = []  # of choice 0
        self.prompt: list[inference_pb2.PromptTokenLogprobs] = []  # all tokens but the first
        self.summary: inference_pb2.Summary | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the only choice."""
        assert len(self.choices) <= 1
        return tuple(self.choices.get(0, ()))

    @property
    def ledger(self) -> inference_pb2.Ledger:
        assert self.summary is not None, "the stream ended without its summary"
        return self.summary.ledger

    @property
    def usage(self) -> inference_pb2.Usage:
        assert self.summary is not None, "the stream ended without its summary"
        return self.summary.usage

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        if response.HasField("prompt_logprobs"):
            assert not self.choices, "the prompt's log-probabilities came after a token"
            assert response.prompt_logprobs.first_position == 1 + len(self.prompt), "one was repeated or is missing"
            self.prompt.extend(response.prompt_logprobs.tokens)
        for delta in response.deltas:
            tokens = self.choices.setdefault(delta.choice, [])
            assert delta.choice not in self.finish_reasons, "a choice went on after its end"
            assert delta.first_index == len(tokens), "a token was repeated or is missing"
            tokens.extend(delta.token_ids)
            self.texts[delta.choice] = self.texts.get(delta.choice, "") + delta.text
            if delta.choice == 0:
                self.logprobs.extend(delta.logprobs)
            if delta.finish_reason:
                self.finish_reasons[delta.choice] = FINISH_REASONS.word(delta.finish_reason)
                self.stop_causes[delta.choice] = delta.stop_cause
        if response.HasField("summary"):
            self.summary = response.summary


class Asked(Answer):
    """An answer whose stream has not ended."""

    def __init__(self, call: "grpc.aio.UnaryStreamCall[object, inference_pb2.GenerateResponse]") -> None:
        super().__init__()
        self._call = call
        self._responses = aiter(call)

    async def until(self, num_tokens: int) -> None:
        """Read until every choice that has begun has at least `num_tokens` tokens."""
        while not self.choices or min(map(len, self.choices.values())) < num_tokens:
            response = await anext(self._responses, None)
            assert response is not None, "the stream ended early"
            self.take(response)

    async def end(self) -> Answer:
        async for response in self._responses:
            self.take(response)
        assert self.summary is not None, "the stream ended without its summary"
        return self

    def go_away(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def asked(cluster: LocalCluster, request: inference_pb2.GenerateRequest) -> AsyncIterator[Asked]:
    """Send a request and yield its answer. Leaving the block early cancels the request, as a client that disconnects
    does."""
    async with cluster.channel() as channel:
        call = cluster.inference(channel).Generate(request, timeout=TIMEOUT_S)
        try:
            yield Asked(call)
        finally:
            call.cancel()


@dataclass(frozen=True, slots=True)
class HandOff:
    """A request whose KV is about to be handed over. `num_computed`: of prompts, in all prefill workers before it."""

    answer: Asked
    exporter: str
    importer: str
    num_computed: float


@asynccontextmanager
async def held_hand_off(cluster: LocalCluster, request: inference_pb2.GenerateRequest) -> AsyncIterator[HandOff]:
    """Send a request with a long prompt, and stop its prefill worker between its first chunk and the end of the
    hand-off, until the block is left. If the hand-off has ended before the worker is stopped, send another request.
    """
    while True:
        request.cache_salt = secrets.token_hex(8)
        before = {name: (await cluster.inspect(name)).figures for name in cluster.workers("prefill")}
        async with asked(cluster, request) as answer:
            exporter = await until(partial(_computing, cluster, before), what="a prefill worker computes the prompt")
            with cluster.members[exporter].stopped():
                for importer in cluster.workers("decode"):
                    if (await cluster.inspect(importer)).figures["imports"]:  # it is not settled, and stays so
                        num_computed = sum(figures["tokens_computed"] for figures in before.values())
                        yield HandOff(answer, exporter, importer, num_computed)
                        return
            await answer.end()


async def _computing(cluster: LocalCluster, before: Mapping[str, Mapping[str, float]]) -> str:
    """Return a prefill worker that has computed more tokens since the last look."""
    for name, figures in before.items():
        if (await cluster.inspect(name)).figures["tokens_computed"] > figures["tokens_computed"]:
            return name
    return ""


async def ask(cluster: LocalCluster, request: inference_pb2.GenerateRequest) -> Answer:
    async with asked(cluster, request) as answer:
        return await answer.end()
