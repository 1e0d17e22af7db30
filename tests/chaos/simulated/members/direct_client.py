"""A client that sends a direct request to the workers' own services, as a router does, and compares the tokens with the
right ones.

It makes one attempt: a fault may end the request by name, but no token may be wrong, and the request must end.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from cluster.auth.member_channel import MemberChannel
from cluster.errors import HandOffReason
from cluster.messages import DecodeJob, MemberId, PrefillJob, Sampling, SequenceStart, TenantShare, TokenStops
from cluster.protocol import wire
from router.fleet.decode_events import tokens_of
from tandem.errors import error_from_rpc
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.chaos.simulated.machine.loop import Process
from tests.chaos.simulated.members.clients import expected_scores, expected_tokens, prompt_of
from tests.chaos.simulated.members.engine import Scores
from tests.chaos.simulated.members.tenants import share_of
from tests.chaos.simulated.schedules.mix import DirectAsk

if TYPE_CHECKING:
    from tests.chaos.simulated.world import World

_TIMEOUT_S = 40.0
_FIRST_NUMBER = 500  # prompts of clients have lower numbers
# Ends of a request that no fault has caused: the worker is too small or is asked for too much.
_REFUSALS = frozenset({"worker_too_small", "queue_full"})


class _Ended(Exception):
    """The request ended early; the message says how."""


class DirectClient:
    def __init__(self, world: "World", number: int, ask: DirectAsk) -> None:
        self.process = Process(f"direct{number}")
        self.number, self.ask = number, ask
        self._world = world
        self._router = MemberId(f"direct-router{number}", "1")
        self._prompt = prompt_of(_FIRST_NUMBER + number, ask.family, ask.num_shared, ask.num_tokens)
        self._got: list[list[int]] = [[] for _ in range(ask.n)]
        self._whole: set[int] = set()  # choices

    async def run(self) -> str:
        """Send the request and return how it ended."""
        await asyncio.sleep(self.ask.at_s)
        way = f"{self.ask.prefill or 'nobody'} and {self.ask.decode}"
        self._world.say(self.process, f"asks {way}: {self.ask.max_tokens} tokens, {self.ask.n} times")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                outcome = await self._serve()
        except TimeoutError:
            outcome = "deadline_exceeded"
        except grpc.aio.AioRpcError as error:
            outcome = error_from_rpc(error).reason
        except _Ended as ended:
            outcome = str(ended)
        self._world.say(self.process, f"ends: {outcome}")
        refusals = _REFUSALS | {HandOffReason.NOT_ENOUGH_BLOCKS} if self._may_be_in_cycle else _REFUSALS
        if not self._may_fail and outcome not in {"ok", "cancelled"} | refusals:
            self._world.wrong(f"direct request {self.number} ended without a fault: {outcome}")
        return outcome

    @property
    def _may_fail(self) -> bool:
        schedule = self._world.schedule
        return bool(schedule.mishaps or schedule.mutations or schedule.read_faults or schedule.mix.rotation)

    @property
    def _may_be_in_cycle(self) -> bool:
        """Return whether its workers may wait for each other's imports: the importer exports too, to any worker."""
        mix = self._world.schedule.mix
        does_both = self.ask.decode.startswith("prefill") or mix.of_both or mix.flips or mix.is_colocated
        return bool(does_both) or any(ask.prefill == self.ask.decode for ask in mix.direct_asks)

    async def _serve(self) -> str:
        call = worker_pb2_grpc.DecodeWorkerStub(self._channel(self.ask.decode)).Connect()
        prefill: Any = None
        try:
            hello = worker_pb2.RouterHello(router=str(self._router), has_no_sequences=True)
            await call.write(worker_pb2.RouterMessage(hello=hello))
            importer = wire.member_from_wire((await self._message(call)).hello.worker)
            ticket = None
            if self.ask.prefill:
                prefill = worker_pb2_grpc.PrefillWorkerStub(self._channel(self.ask.prefill)).Prefill(
                    wire.prefill_job_to_wire(self._export(importer)), timeout=_TIMEOUT_S
                )
                ticket = (await self._message(prefill)).accepted.ticket
            start = worker_pb2_grpc.DecodeWorkerStub(self._channel(self.ask.decode)).Start
            await start(wire.decode_job_to_wire(self._job(ticket)), timeout=_TIMEOUT_S)
            if prefill is not None:
                await self._read_scores(prefill)
                await self._message(prefill)  # the first tokens
            return await self._read(call)
        finally:
            call.cancel()
            if prefill is not None:
                prefill.cancel()

    async def _read_scores(self, prefill: Any) -> None:
        """Read the log-probabilities of the prompt, which come before the first tokens."""
        num_top = self.ask.prompt_logprobs
        if num_top is None:
            return
        expected, got = expected_scores(self._world.schedule, self._prompt, num_top), list[Scores]()
        while len(got) < len(expected):
            part = wire.prompt_logprobs_from_wire((await self._message(prefill)).prompt_logprobs)
            is_next = part.first_position == 1 + len(got)
            got += part.values()
            if not is_next or not part.num_tokens or tuple(got) != expected[: len(got)]:
                self._world.wrong(f"direct request {self.number}: other log-probabilities of its prompt: {got}")
                raise _Ended("wrong")
        self._world.reached["scored prompt: direct"] += 1

    async def _read(self, call: Any) -> str:
        while len(self._whole) < self.ask.n:
            if self.ask.cancel_after is not None and sum(map(len, self._got)) >= self.ask.cancel_after:
                return "cancelled"
            message = await self._message(call)
            match message.WhichOneof("message"):
                case "started":
                    firsts = wire.unpack_ids(message.started.first_token_ids)
                    for handle, token_id in zip(message.started.handles, firsts, strict=bool(firsts)):
                        self._take(handle, 0, token_id, is_last=False)
                case "step":
                    for token in tokens_of(message.step, received_s=0.0):
                        is_last = token.token.finish_reason is not None
                        self._take(token.handle, token.index, token.token.token_id, is_last=is_last)
                case "failed":
                    raise _Ended(message.failed.reason)
        return "ok"

    def _take(self, choice: int, index: int, token_id: int, *, is_last: bool) -> None:
        tokens = self._got[choice]
        expected = expected_tokens(self._world.schedule, self._prompt, self._seed(choice), self.ask.max_tokens)
        if choice in self._whole or index != len(tokens) or token_id != expected[index]:
            wrong = f"direct request {self.number}: choice {choice} is {tokens} and gets {token_id} with index {index}"
            self._world.wrong(f"{wrong}, where a run without faults says {list(expected)}")
            raise _Ended("wrong")
        tokens.append(token_id)
        if is_last:
            self._whole.add(choice)
        if is_last != (len(tokens) == self.ask.max_tokens):
            self._world.wrong(f"direct request {self.number}: choice {choice} ends after {len(tokens)} tokens")
            raise _Ended("wrong")

    async def _message(self, call: Any) -> Any:
        message = await call.read()
        if message is grpc.aio.EOF:
            raise _Ended("stream ended")
        return message

    def _channel(self, place: str) -> MemberChannel:
        return self._world.channel_to(self._world.members[place])

    def _seed(self, choice: int) -> int:
        return 1000 * (self.number + 1) + choice

    def _export(self, importer: MemberId) -> PrefillJob:
        return PrefillJob(
            request_id=self._request_id,
            attempt=1,
            token_ids=self._prompt,
            sampling=Sampling(),
            stops=TokenStops(self.ask.max_tokens),
            seeds=tuple(map(self._seed, range(self.ask.n))),
            num_committed=0,
            importer=importer,
            timeout_s=_TIMEOUT_S,
            num_prompt_logprobs=self.ask.prompt_logprobs,
            tenant=self._tenant,
        )

    def _job(self, ticket: bytes | None) -> DecodeJob:
        return DecodeJob(
            request_id=self._request_id,
            attempt=1,
            router=self._router,
            prompt_token_ids=self._prompt,
            sampling=Sampling(),
            stops=TokenStops(self.ask.max_tokens),
            sequences=tuple(SequenceStart(choice, self._seed(choice)) for choice in range(self.ask.n)),
            signed_ticket=ticket,
            timeout_s=_TIMEOUT_S,
            tenant=self._tenant,
        )

    @property
    def _tenant(self) -> TenantShare:
        return share_of(self._world.schedule.tenants, self.ask.tenant)

    @property
    def _request_id(self) -> str:
        return f"direct{self.number}"
