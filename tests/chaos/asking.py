"""Sends a request to the cluster over one of its three APIs, and records its outcome.

Owns the judgement of one answer: complete, lost, or with repeated, missing or wrong tokens. Sends once; the client
library resumes by itself.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc
import httpx
import openai

from tandem.client import AsyncClient
from tandem.enum_words import FINISH_REASONS
from tandem.errors import TandemError
from tandem.options import GenerateOptions
from tandem.results import Ledger, ledger_from_wire
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos.questions import ChoiceAnswer, Question, RightAnswer

TIMEOUT_S = 60.0


class Way(StrEnum):
    LIBRARY = "library"  # knows every router
    GRPC = "grpc"
    HTTP = "http"


class Outcome(StrEnum):
    OK = "ok"
    LOST = "lost"
    REPEATED = "repeated"
    MISSING = "missing"
    MISMATCH = "mismatch"


class Wrong(Exception):
    def __init__(self, outcome: Outcome, what: str) -> None:
        super().__init__(what)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Doors:
    """The addresses of one router."""

    name: str
    library: AsyncClient  # asks this one first
    grpc: inference_pb2_grpc.InferenceStub
    http: openai.AsyncOpenAI


@dataclass
class Asked:
    """A question that is in progress or answered. Times are the loop's."""

    request_id: str
    question: Question
    way: Way
    router: str  # that was asked first
    salt: str
    began_s: float
    last_token_s: float = 0.0
    fault_s: float | None = None  # what worked on it was hit then
    waited: tuple[float, float] = (0.0, 0.0)  # the longest wait for a token from then on: from when until when
    arrived_s: float = 0.0  # at its router, by the ledger
    ledger: Ledger | None = None  # None: this API does not return it, or the answer was cut
    outcome: Outcome | None = None
    told: str = ""  # what went wrong
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def hit(self, now_s: float) -> None:
        self.fault_s = now_s

    def note_wait(self, now_s: float) -> None:
        if self.fault_s is not None:
            wait = (max(self.fault_s, self.last_token_s), now_s)
            self.waited = max(self.waited, wait, key=lambda each: each[1] - each[0])
        self.last_token_s = now_s

    @property
    def wait_s(self) -> float:
        return self.waited[1] - self.waited[0]

    @property
    def worked(self) -> tuple[tuple[float, float], ...]:
        """Return the intervals in which workers queued and computed the request."""
        spent = self.ledger.worker_times if self.ledger is not None else ()
        return tuple(
            (self.arrived_s + one.ended_s - one.queue_s - one.compute_s, self.arrived_s + one.ended_s) for one in spent
        )

    @property
    def handover_s(self) -> float | None:
        """Return the part of the longest wait in which no worker queued or computed: detection and hand-over. None: the
        ledger is not known."""
        return None if self.ledger is None else self.wait_s - _overlap_s(self.waited, self.worked)

    def note_ledger(self, ledger: Ledger, now_s: float) -> None:
        """Record the ledger. It arrived with the end of the answer, so its times count from `wall_s` ago."""
        self.arrived_s, self.ledger = now_s - ledger.wall_s, ledger

    def course(self) -> str:
        """Return where the time of the longest wait went, by the ledger. Times count from the fault."""
        assert self.ledger is not None and self.fault_s is not None
        from_s, to_s = (at_s - self.fault_s for at_s in self.waited)
        spent = [
            f"{one.member} queued it {one.queue_s:.2f} s and computed {one.compute_s:.2f} s until "
            f"{self.arrived_s + one.ended_s - self.fault_s:.2f} s"
            for one in self.ledger.worker_times
        ]
        phases = ", ".join(f"{phase.name} {phase.duration_s:.2f} s" for phase in self.ledger.phases)
        return (
            f"{self.request_id}, a prompt of {len(self.question.prompt)} tokens, waited from {from_s:.2f} to "
            f"{to_s:.2f} s, of which detection and hand-over took {self.handover_s:.2f} s; {'; '.join(spent)}; "
            f"{phases}; reasons: {', '.join(self.ledger.reasons)}"
        )

    def take(self, choice: int, first_index: int | None, token_ids: tuple[int, ...], text: str, end: str) -> None:
        """Raises Wrong."""
        self.note_wait(asyncio.get_running_loop().time())
        tokens = self.tokens.setdefault(choice, [])
        if choice in self.ends:
            raise Wrong(Outcome.REPEATED, f"choice {choice} goes on after its end")
        if first_index is not None and first_index != len(tokens):
            outcome = Outcome.REPEATED if first_index < len(tokens) else Outcome.MISSING
            raise Wrong(outcome, f"choice {choice} has {len(tokens)} tokens and gets number {first_index}")
        tokens.extend(token_ids)
        self.texts[choice] = self.texts.get(choice, "") + text
        if end:
            self.ends[choice] = end

    def answer(self) -> RightAnswer:
        """Raises Wrong."""
        if len(self.ends) != self.question.n:
            raise Wrong(Outcome.MISSING, f"{len(self.ends)} of {self.question.n} choices have ended")
        return tuple(
            ChoiceAnswer(tuple(self.tokens[choice]), self.texts[choice], self.ends[choice])
            for choice in sorted(self.tokens)
        )


async def ask(asked: Asked, doors: Doors, right: RightAnswer | None) -> None:
    """Ask, and record the outcome in `asked`; never raises for it. Without `right` nothing is compared."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _WAYS[asked.way](asked, doors)
        answer = asked.answer()
        if right is not None and answer != right:
            raise Wrong(Outcome.MISMATCH, _difference(answer, right))
        asked.outcome = Outcome.OK
    except Wrong as wrong:
        asked.outcome, asked.told = wrong.outcome, str(wrong)
    except (TandemError, grpc.RpcError, openai.OpenAIError, httpx.HTTPError, TimeoutError) as error:
        asked.outcome, asked.told = Outcome.LOST, _told(error)
    except asyncio.CancelledError:
        asked.outcome, asked.told = Outcome.LOST, "the run ended first"
        raise


async def _by_library(asked: Asked, doors: Doors) -> None:
    question = asked.question
    options = GenerateOptions(
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        seed=question.seed,
        n=question.n,
        ignore_eos=True,
        request_id=asked.request_id,
        cache_salt=asked.salt,
    )
    if question.logprobs is not None:
        options["logprobs"] = question.logprobs
    generation = doors.library.generate(token_ids=question.prompt, timeout_s=TIMEOUT_S, **options)
    async with generation:
        async for delta in generation:
            _check_logprobs(question, len(delta.token_ids), len(delta.logprobs))
            asked.take(delta.choice, delta.first_index, delta.token_ids, delta.text, delta.finish_reason)
        result = await generation.result()
        asked.note_ledger(result.ledger, asyncio.get_running_loop().time())


async def _by_grpc(asked: Asked, doors: Doors) -> None:
    question = asked.question
    request = inference_pb2.GenerateRequest(
        request_id=asked.request_id,
        token_ids=inference_pb2.TokenIds(ids=question.prompt),
        sampling=inference_pb2.SamplingParams(temperature=question.temperature, seed=question.seed),
        stop=inference_pb2.StopConditions(max_tokens=question.max_tokens, ignore_eos=True),
        n=question.n,
        logprobs=question.logprobs,
        cache_salt=asked.salt,
    )
    has_summary = False
    async for response in doors.grpc.Generate(request, timeout=TIMEOUT_S):
        for delta in response.deltas:
            token_ids = tuple(delta.token_ids)
            _check_logprobs(question, len(token_ids), len(delta.logprobs))
            finish_reason = FINISH_REASONS.word(delta.finish_reason)
            asked.take(delta.choice, delta.first_index, token_ids, delta.text, finish_reason)
        has_summary = response.HasField("summary")
        if has_summary:
            asked.note_ledger(ledger_from_wire(response.summary.ledger), asyncio.get_running_loop().time())
    if not has_summary:
        raise Wrong(Outcome.MISSING, "the stream ended without its summary")


async def _by_http(asked: Asked, doors: Doors) -> None:
    question = asked.question
    stream: AsyncIterator[Any] = await doors.http.completions.create(
        model="",
        prompt=list(question.prompt),
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        seed=question.seed,
        n=question.n,
        logprobs=question.logprobs,
        stream=True,
        extra_headers={"X-Request-Id": asked.request_id},
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": asked.salt},
    )
    async for part in stream:
        for choice in part.choices:
            token_ids = tuple((choice.model_extra or {}).get("token_ids") or ())
            asked.take(choice.index, None, token_ids, choice.text, choice.finish_reason or "")


_WAYS = {Way.LIBRARY: _by_library, Way.GRPC: _by_grpc, Way.HTTP: _by_http}


def _overlap_s(wait: tuple[float, float], worked: Iterable[tuple[float, float]]) -> float:
    """Return how much of the wait is within these intervals. Each moment counts once."""
    total_s, covered_to_s = 0.0, wait[0]
    for began_s, ended_s in sorted(worked):
        began_s, ended_s = max(began_s, covered_to_s), min(ended_s, wait[1])
        if ended_s > began_s:
            total_s += ended_s - began_s
            covered_to_s = ended_s
    return total_s


def _check_logprobs(question: Question, num_tokens: int, num_logprobs: int) -> None:
    if num_logprobs != (num_tokens if question.logprobs is not None else 0):
        raise Wrong(Outcome.MISSING, f"{num_logprobs} log-probabilities came with {num_tokens} tokens")


def _difference(answer: RightAnswer, right: RightAnswer) -> str:
    for number, (got, expected) in enumerate(zip(answer, right, strict=True)):
        for index, (one, other) in enumerate(zip(got.token_ids, expected.token_ids, strict=False)):
            if one != other:
                return f"choice {number}, token {index} of {len(expected.token_ids)}: {one} for {other}"
        if got != expected:
            return (
                f"choice {number}: {len(got.token_ids)} tokens, {len(got.text)} characters, {got.finish_reason}; for"
                f" {len(expected.token_ids)}, {len(expected.text)}, {expected.finish_reason}"
            )
    return "they differ"


def _told(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"[:300]
