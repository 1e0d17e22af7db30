"""A router in this process, over scripted workers in this process: everything between them is real."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from cluster.clock import Clock, MonotonicClock
from cluster.member import Capacity, Member
from cluster.messages import LayoutFingerprint, MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.serving.serving import MAX_MESSAGE_BYTES, open_channel
from router.drain.evacuation import Evacuation
from router.fleet.fleet import Fleet
from router.fleet.patience import Patience
from router.fleet.prefix_beliefs import PrefixBeliefs
from router.fleet.prefix_following import PrefixFollowing
from router.pipeline.migration import Migrations
from router.pipeline.pipeline import Pipeline, PipelineSettings
from router.policies.admission import Admission
from router.policies.breakers import BreakerPolicy
from router.policies.placement import policy
from router.policies.prefix_index import PrefixIndex
from router.policies.prefix_memory import PrefixMemory
from router.request.message_sizes import MessageLimits
from router.request.outbox import Outboxes
from router.request.validation import resolve
from router.requests import GenerateRequest, Output, SamplingParams, StopConditions, Summary, TokenPrompt
from router.running import running
from router.text.tokenization import Tokenization
from tests.system.scripted_workers import (
    FINGERPRINT,
    ScriptedDecode,
    ScriptedPrefill,
    ScriptedWorker,
    Store,
    scripted_token,
)

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
PROMPT = (5, 6, 7, 8)


class Membership:
    """A registry that says what it is told."""

    def __init__(self) -> None:
        self._members: tuple[Member, ...] = ()
        self._changed = asyncio.Event()

    def tell(self, members: tuple[Member, ...]) -> None:
        self._members = members
        self._changed.set()

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        while True:
            self._changed.clear()
            yield self._members
            await self._changed.wait()


class RouterUnderTest:
    def __init__(
        self,
        *,
        max_attempts: int = 3,
        max_live_requests: int = 64,
        max_buffered_tokens: int = 100_000,
        outbox_clock: Clock | None = None,  # None: the machine's
        request_timeout_s: float = 30.0,
        silence_s: float = 20.0,
        grace_s: float = 1.0,
        placement: str = "least-loaded",
        migration_patience_s: float = 10.0,
        breakers: BreakerPolicy | None = None,
        tokenization: Tokenization | None = None,
        wall_clock: Callable[[], float] = time.time,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.store = Store()
        self.telemetry = Telemetry()
        self.membership = Membership()
        self.workers: list[ScriptedWorker] = []  # registered
        self.made: list[ScriptedWorker] = []  # a server that nobody stops would hang the process at its end
        self.tokenization = tokenization or Tokenization.load(str(DEMO_MODEL))
        self.member = Member(id=MemberId("router", "r1"), role=Role.ROUTER, address="", model="demo_model")
        self.outboxes = Outboxes(max_tokens=max_buffered_tokens, clock=outbox_clock or MonotonicClock())
        self.admission = Admission(max_live_requests)
        memory, index = PrefixMemory(), PrefixIndex()
        self.fleet = Fleet(
            router=self.member,
            membership=self.membership,
            connect=open_channel,
            patience=Patience(silence_s=silence_s, grace_s=grace_s),
            telemetry=self.telemetry,
            follow_prefixes=PrefixFollowing(index, memory).follow,
        )
        chooser = policy(placement)
        self.migrations = Migrations(
            router=self.member.id,
            fleet=self.fleet,
            policy=chooser,
            telemetry=self.telemetry,
            patience_s=migration_patience_s,
        )
        self.evacuation = Evacuation(fleet=self.fleet, migrations=self.migrations)
        self.pipeline = Pipeline(
            router=self.member.id,
            tokenization=self.tokenization,
            admission=self.admission,
            policy=chooser,
            fleet=self.fleet,
            migrations=self.migrations,
            prefixes=PrefixBeliefs(self.fleet, memory, index, b"key"),
            outboxes=self.outboxes,
            key=b"key",
            settings=PipelineSettings(
                request_timeout_s=request_timeout_s,
                max_attempts=max_attempts,
                breakers=breakers or BreakerPolicy(),
                messages=MessageLimits(max_message_bytes, MAX_MESSAGE_BYTES),
            ),
            clock=MonotonicClock(),
            telemetry=self.telemetry,
            wall_clock=wall_clock,
        )

    async def add_prefill(
        self, name: str, *, incarnation: int = 1, port: int = 0, capacity: Capacity | None = None
    ) -> ScriptedPrefill:
        worker = ScriptedPrefill(name, self.store, incarnation)
        worker.capacity = capacity
        await self._add(worker, port)
        return worker

    async def add_decode(
        self,
        name: str,
        *,
        incarnation: int = 1,
        port: int = 0,
        fingerprint: LayoutFingerprint = FINGERPRINT,
        capacity: Capacity | None = None,
    ) -> ScriptedDecode:
        worker = ScriptedDecode(name, self.store, incarnation)
        worker.capacity = capacity
        worker.fingerprint = fingerprint
        await self._add(worker, port)
        return worker

    def register(self) -> None:
        """Tells the router who is there now."""
        self.membership.tell(tuple(worker.member for worker in self.workers))

    async def connected(self) -> None:
        """Until the router knows and reaches every worker that is registered and fits."""
        for worker in self.workers:
            await self.connected_to(worker)

    async def connected_to(self, worker: ScriptedWorker) -> None:
        async with asyncio.timeout(10):
            while worker.id not in self._connected():
                await self.fleet.changed()

    async def until_gone(self, worker: ScriptedWorker) -> None:
        async with asyncio.timeout(10):
            while worker.id in self._connected():
                await self.fleet.changed()

    def _connected(self) -> set[MemberId]:
        return {load.member for load in (*self.fleet.prefill_loads(), *self.fleet.decode_loads())}

    async def _add(self, worker: ScriptedWorker, port: int) -> None:
        self.made.append(worker)
        await worker.start(port)
        self.workers = [other for other in self.workers if other.id.id != worker.id.id] + [worker]
        self.register()


@asynccontextmanager
async def router_under_test(**settings: object) -> AsyncIterator[RouterUnderTest]:
    """Ends with every worker stopped and every invariant checked."""
    router = RouterUnderTest(**settings)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(router.fleet.run()))
        await stack.enter_async_context(running(router.evacuation.run()))
        try:
            yield router
        finally:
            for worker in router.made:
                await worker.die()
        router.outboxes.check()
        assert len(router.admission) == 0
        assert router.pipeline.num_live == 0


def ask(
    *,
    max_tokens: int = 8,
    prompt: tuple[int, ...] = PROMPT,
    request_id: str = "",
    n: int = 1,
    timeout_s: float | None = None,
    logprobs: int | None = None,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
) -> GenerateRequest:
    return GenerateRequest(
        prompt=TokenPrompt(prompt),
        request_id=request_id,
        sampling=SamplingParams(temperature=0.0, seed=1),
        stop=StopConditions(max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids),
        n=n,
        timeout_s=timeout_s,
        logprobs=logprobs,
    )


class Answer:
    """A stream put together: asserts exactly once and in order, for every choice."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.finish_reasons: dict[int, str] = {}
        self.stop_causes: dict[int, str | None] = {}
        self.outputs: list[Output] = []

    def take(self, output: Output) -> None:
        self.outputs.append(output)
        for delta in output.deltas:
            tokens = self.token_ids.setdefault(delta.choice, [])
            assert delta.choice not in self.finish_reasons, "a choice goes on after its end"
            assert delta.first_index == len(tokens), "a token is missing or repeated"
            tokens.extend(delta.token_ids)
            self.text[delta.choice] = self.text.get(delta.choice, "") + delta.text
            if delta.finish_reason is not None:
                self.finish_reasons[delta.choice] = delta.finish_reason
                self.stop_causes[delta.choice] = delta.stop_cause

    @property
    def summary(self) -> Summary:
        summary = self.outputs[-1].summary
        assert summary is not None, "the stream ended without its summary"
        return summary


async def answer_to(router: RouterUnderTest, request: GenerateRequest) -> Answer:
    answer = Answer()
    async for output in router.pipeline.generate(request):
        answer.take(output)
    return answer


def expected_tokens(router: RouterUnderTest, request: GenerateRequest, choice: int = 0) -> list[int]:
    """What the scripted workers say, whoever of them says it."""
    assert isinstance(request.prompt, TokenPrompt) and request.stop.max_tokens is not None
    prompt = request.prompt.token_ids
    seed = resolve(request, prompt, router.tokenization.model_info).seeds[choice]
    return [scripted_token(prompt, seed, index) for index in range(request.stop.max_tokens)]
