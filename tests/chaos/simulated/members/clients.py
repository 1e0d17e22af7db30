"""A client that sends requests and compares the answers with the right ones.

When its router dies it resumes by the client library's own decisions (tandem/progress.py); the calls are made here.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from router.request.validation import _choice_seed
from tandem.enum_words import GRAMMAR_KINDS
from tandem.errors import InternalError, TandemError, Unavailable, error_from_rpc
from tandem.progress import Progress
from tandem.results import Delta
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos.simulated.machine.calls import Channel
from tests.chaos.simulated.machine.loop import Process
from tests.chaos.simulated.machine.machine import vocab_size
from tests.chaos.simulated.members.engine import Scores, serial_scores, serial_tokens
from tests.chaos.simulated.members.grammars import GRAMMARS
from tests.chaos.simulated.members.tenants import as_tenant
from tests.chaos.simulated.schedules.schedule import Ask, Schedule

if TYPE_CHECKING:
    from tests.chaos.simulated.world import World

_TIMEOUT_S = 90.0
_AGAIN_S = 0.5
_AGAIN = "again"
_known_scores: dict[tuple[tuple[int, ...], int, int], tuple[Scores, ...]] = {}
_known: dict[tuple[tuple[int, ...], int, int, int, str], tuple[int, ...]] = {}


def prompt_of(number: int, family: int, num_shared: int, num_tokens: int) -> tuple[int, ...]:
    """Return a request's prompt. Prompts of one family share their first `num_shared` tokens."""
    size = vocab_size()
    shared = [(family * 7919 + place * 31 + 5) % size for place in range(min(num_shared, num_tokens))]
    own = [(number * 104_729 + place * 37 + 11) % size for place in range(num_tokens - len(shared))]
    return tuple(shared + own)


def expected_tokens(
    schedule: Schedule, prompt: tuple[int, ...], seed: int, max_tokens: int, grammar: str = ""
) -> tuple[int, ...]:
    """Return the tokens of a choice that runs alone, without faults. `grammar`: its name; empty: none."""
    key = (prompt, seed, max_tokens, schedule.block_size, grammar)
    if key not in _known:
        _known[key] = serial_tokens(
            *key[:3],
            block_size=schedule.block_size,
            vocab_size=vocab_size(),
            grammar=GRAMMARS[grammar] if grammar else None,
        )
    return _known[key]


def expected_scores(schedule: Schedule, prompt: tuple[int, ...], num_top: int) -> tuple[Scores, ...]:
    """Return the scores of all tokens but the first of a prompt that is computed alone, without faults."""
    key = (prompt, num_top, schedule.block_size)
    if key not in _known_scores:
        _known_scores[key] = serial_scores(*key[:2], block_size=schedule.block_size, vocab_size=vocab_size())
    return _known_scores[key]


class Client:
    def __init__(self, world: "World", number: int, ask: Ask) -> None:
        self.process = Process(f"client{number}")
        self.number, self.ask = number, ask
        self._world = world
        self._prompt = prompt_of(number, ask.family, ask.num_shared, ask.num_tokens)
        self._seed = number + 1
        self._got: list[list[int]] = []
        self._ended: set[int] = set()
        self._num_scored = 0  # tokens of the prompt whose log-probabilities have come
        self._is_wrong = self._has_reconnected = False

    async def run(self) -> str:
        """Run the request and return how it ended. A stream that has begun continues at any reachable router, by the
        client library's rules; a request that no router has accepted is sent again."""
        await asyncio.sleep(self.ask.at_s)
        loop, router, attempt = asyncio.get_running_loop(), self.ask.router, 0
        deadline_s = loop.time() + _TIMEOUT_S
        while deadline_s - loop.time() > _AGAIN_S:
            attempt += 1
            outcome = await self._generate(f"request{self.number}.{attempt}", router, deadline_s)
            if outcome != _AGAIN:
                return outcome
            router += 1
            await asyncio.sleep(_AGAIN_S)
        self._world.wrong(f"request {self.number} found no router in time")
        return "no router"

    async def _generate(self, request_id: str, router: int, deadline_s: float) -> str:
        world = self._world
        known = world.router_addresses()
        progress = Progress(
            self._request(request_id),
            known=world.router_addresses,
            router=known[router % len(known)],
            deadline_s=deadline_s,
            draw=world.dice.random,
        )
        self._got, self._ended, self._num_scored = [[] for _ in range(self.ask.n)], set(), 0
        while True:
            channel = Channel(world.network, progress.router, world.watch)
            left_s = progress.time_left_s(asyncio.get_running_loop().time())
            num_tokens = sum(map(len, self._got))
            goes_on = f"goes on after {num_tokens} tokens at" if num_tokens else "asks"
            world.say(self.process, f"{goes_on} {progress.router}: {self.ask.max_tokens} tokens, {self.ask.n} times")
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                progress.request, timeout=left_s, metadata=as_tenant(self.ask.tenant)
            )
            try:
                return await self._read(call, progress)
            except grpc.aio.AioRpcError as rpc_error:
                next_step = self._lost(error_from_rpc(rpc_error), progress)
            except InternalError as error:  # the library's error for a stream that breaks the protocol
                self._wrong(error.message)
                return "wrong"
            if isinstance(next_step, str):
                return next_step
            await asyncio.sleep(next_step)

    async def _read(self, call: Any, progress: Progress) -> str:
        """Read the stream to its end. Raises AioRpcError, InternalError."""
        num_scored = 0  # by this stream
        async for message in call:
            if message.HasField("prompt_logprobs"):
                num_scored = self._take_scores(message.prompt_logprobs, num_scored)
            for delta in progress.add(message):
                self._take(delta)
            self._reconnect_if_due(progress.router)
            if self._wants_no_more():
                call.cancel()
                self._world.say(self.process, "has enough, and cancels")
                return "cancelled"
        scored = progress.result().prompt_logprobs
        if tuple(token.token.token_id for token in scored) != self._prompt[1:] * (self.ask.prompt_logprobs is not None):
            self._wrong(f"{len(scored)} log-probabilities are not those of the prompt's tokens")
        if len(self._ended) < self.ask.n:
            self._wrong(f"ended without all of its {self.ask.n} choices' ends")
        self._compare(is_whole=True)
        if self.ask.grammar:
            self._world.reached[f"constrained request: {self.ask.grammar}"] += 1
        if scored:
            self._world.reached["scored prompt: ok"] += 1
        self._world.say(self.process, "has everything")
        return "ok"

    def _lost(self, error: TandemError, progress: Progress) -> float | str:
        """Return how long the library waits before it continues, or how the request ended."""
        self._world.say(self.process, f"hears {type(error).__name__} {error.reason}: {error.message}")
        self._compare(is_whole=False)
        try:
            return progress.on_lost(error, asyncio.get_running_loop().time())
        except TandemError as final:
            if not any(self._got) and (error.is_lost or error.reason == "draining"):
                return _AGAIN
            if self._world.schedule.may_use_up_attempts and isinstance(final, Unavailable):
                return f"given up: {final.reason}"
            if final.reason == "acceptance_invalid" and self._world.key_files.may_have_dropped:
                return "resumed after its secret was dropped"
            waited = final.reason in ("no_worker_large_enough", "deadline_exceeded")  # either clock may be first
            if waited and not self._world.has_large_decode_worker(self.ask):
                return final.reason
            self._world.wrong(f"request {self.number} is lost: {type(final).__name__} {final.reason}: {final.message}")
            return final.reason

    def _take_scores(self, message: inference_pb2.PromptLogprobs, num_before: int) -> int:
        """Compare log-probabilities of the prompt with the right ones. `num_before`: those of the same stream before
        them. Return how many it has sent. A stream that continues after tokens must send none."""
        num_scored = num_before + len(message.tokens)
        got = tuple(
            (scored.token.logprob, scored.rank, tuple((top.token_id, top.logprob) for top in scored.top))
            for scored in message.tokens
        )
        is_next = message.first_position == 1 + num_before and not any(self._got)
        if not is_next or got != self._expected_scores()[num_before:num_scored]:
            self._wrong(
                f"the prompt's log-probabilities from {message.first_position} on are other ones or late: {got}"
            )
        self._num_scored = max(self._num_scored, num_scored)
        return num_scored

    def _take(self, delta: Delta) -> None:
        tokens = self._got[delta.choice]
        if delta.choice in self._ended:
            self._wrong(f"choice {delta.choice} goes on after its end")
        if delta.first_index != len(tokens):
            self._wrong(f"choice {delta.choice} has {len(tokens)} tokens, and gets one with index {delta.first_index}")
        if self._num_scored < len(self._expected_scores()):
            self._wrong(f"tokens came before the prompt's log-probabilities, of which {self._num_scored} have come")
        tokens.extend(delta.token_ids)
        if delta.finish_reason:
            self._ended.add(delta.choice)

    def _reconnect_if_due(self, router: str) -> None:
        """Break the connection if the schedule orders it. One end may detect it long before the other."""
        after = self.ask.reconnect_after
        if not self._has_reconnected and after is not None and sum(map(len, self._got)) >= after:
            self._has_reconnected = True
            self._world.say(self.process, f"loses its connection to {router}")
            self._world.network.reset(frozenset({self.process.place, self._world.network.place_of(router)}))

    def _compare(self, *, is_whole: bool) -> None:
        for choice, tokens in enumerate(self._got):
            expected = self._expected(choice)
            if tuple(tokens) != (expected if is_whole else expected[: len(tokens)]):
                self._wrong(f"choice {choice} is {tokens}, where a run without faults says {list(expected)}")

    def _wrong(self, what: str) -> None:
        if not self._is_wrong:
            self._is_wrong = True
            self._world.wrong(f"request {self.number}: {what}")

    def _expected(self, choice: int) -> tuple[int, ...]:
        return self._alone(_choice_seed(self._seed, choice))

    def _alone(self, seed: int) -> tuple[int, ...]:
        """Return the tokens of a choice with this seed that runs alone."""
        return expected_tokens(self._world.schedule, self._prompt, seed, self.ask.max_tokens, self.ask.grammar)

    def _expected_scores(self) -> tuple[Scores, ...]:
        num_top = self.ask.prompt_logprobs
        return () if num_top is None else expected_scores(self._world.schedule, self._prompt, num_top)

    def _wants_no_more(self) -> bool:
        return self.ask.cancel_after is not None and sum(map(len, self._got)) >= self.ask.cancel_after

    def _request(self, request_id: str) -> inference_pb2.GenerateRequest:
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=inference_pb2.TokenIds(ids=self._prompt),
            sampling=inference_pb2.SamplingParams(seed=self._seed),
            stop=inference_pb2.StopConditions(max_tokens=self.ask.max_tokens, ignore_eos=not self.ask.grammar),
            n=self.ask.n,
            prompt_logprobs=self.ask.prompt_logprobs,
        )
        if self.ask.grammar:
            grammar = GRAMMARS[self.ask.grammar]
            request.grammar.CopyFrom(inference_pb2.Grammar(kind=GRAMMAR_KINDS.number(grammar.kind), text=grammar.text))
        return request
