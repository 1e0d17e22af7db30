"""A client: asks, counts what it gets, and knows what it should get. Asks again only where its router has gone."""

import asyncio
from typing import TYPE_CHECKING

import grpc

from cluster.rpc_errors import REASON
from cluster.wire import pack_ids, unpack_ids
from router.validation import _choice_seed
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos.simulated.calls import Channel
from tests.chaos.simulated.engine import serial_tokens
from tests.chaos.simulated.loop import Process
from tests.chaos.simulated.machine import vocab_size
from tests.chaos.simulated.schedule import Ask

if TYPE_CHECKING:
    from tests.chaos.simulated.world import World

_TIMEOUT_S = 90.0
_AGAIN_S = 0.5
_known: dict[tuple[tuple[int, ...], int, int], tuple[int, ...]] = {}


class Client:
    def __init__(self, world: "World", number: int, ask: Ask) -> None:
        self.process = Process(f"client{number}")
        self.number, self.ask = number, ask
        self._world = world
        size = vocab_size()
        shared = [(ask.family * 7919 + place * 31 + 5) % size for place in range(min(ask.num_shared, ask.num_tokens))]
        own = [(number * 104_729 + place * 37 + 11) % size for place in range(ask.num_tokens - len(shared))]
        self._prompt = tuple(shared + own)
        self._seed = number + 1
        self._got: list[list[int]] = []
        self._is_wrong = False

    async def run(self) -> str:
        """How it ended."""
        await asyncio.sleep(self.ask.at_s)
        router, deadline_s = self.ask.router, asyncio.get_running_loop().time() + _TIMEOUT_S
        attempt = 0
        while True:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0.5:
                self._world.wrong(f"request {self.number} found no router in time")
                return "no router"
            attempt += 1
            outcome = await self._try(f"request{self.number}.{attempt}", f"router{router}", left_s)
            if outcome != "again":
                return outcome
            router = (router + 1) % self._world.schedule.num_routers
            await asyncio.sleep(_AGAIN_S)

    async def _try(self, request_id: str, router: str, timeout_s: float) -> str:
        world, num_choices = self._world, self.ask.n
        before, self._got = self._got, [[] for _ in range(num_choices)]
        ended: set[int] = set()
        world.say(self.process, f"asks {router} for {self.ask.max_tokens} tokens after {self.ask.num_tokens}")
        channel = Channel(world.network, world.members[router].address, world.watch)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(self._request(request_id), timeout=timeout_s)
        try:
            async for message in call:
                for delta in message.deltas:
                    self._take(delta, ended)
                if self._wants_no_more():
                    call.cancel()
                    world.say(self.process, "has enough, and cancels")
                    return "cancelled"
        except grpc.aio.AioRpcError as error:
            return self._on_error(error, before)
        if len(ended) < num_choices:
            world.wrong(f"request {self.number} ended without all of its {num_choices} choices' ends")
        self._compare(is_whole=True)
        world.say(self.process, "has everything")
        return "ok"

    def _on_error(self, error: grpc.aio.AioRpcError, before: list[list[int]]) -> str:
        trailing = dict(error.trailing_metadata() or ())
        reason = str(trailing.get(REASON, ""))
        self._world.say(self.process, f"hears {error.code().name} {reason}: {error.details()}")
        self._compare(is_whole=False)
        is_routers = not reason and error.code() is grpc.StatusCode.UNAVAILABLE
        if is_routers or reason in ("draining", "cancelled") or error.code() is grpc.StatusCode.CANCELLED:
            return "again"
        self._world.wrong(f"request {self.number} is lost: {error.code().name} {reason}: {error.details()}")
        return reason or error.code().name

    def _take(self, delta: inference_pb2.ChoiceDelta, ended: set[int]) -> None:
        tokens = self._got[delta.choice]
        if delta.choice in ended:
            self._wrong(f"choice {delta.choice} goes on after its end")
        if delta.first_index != len(tokens):
            self._wrong(f"choice {delta.choice} has {len(tokens)} tokens, and gets one with index {delta.first_index}")
        tokens.extend(unpack_ids(delta.token_ids))
        if delta.finish_reason:
            ended.add(delta.choice)

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
        key = (self._prompt, _choice_seed(self._seed, choice), self.ask.max_tokens)
        if key not in _known:
            _known[key] = serial_tokens(*key, vocab_size())
        return _known[key]

    def _wants_no_more(self) -> bool:
        return self.ask.cancel_after is not None and sum(map(len, self._got)) >= self.ask.cancel_after

    def _request(self, request_id: str) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=pack_ids(self._prompt),
            sampling=inference_pb2.SamplingParams(seed=self._seed),
            stop=inference_pb2.StopConditions(max_tokens=self.ask.max_tokens, ignore_eos=True),
            n=self.ask.n,
        )
