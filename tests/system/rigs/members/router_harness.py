"""A router and scripted workers in this process; everything between them is real."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from cluster.auth.keys import ClusterKeys
from cluster.clock import Clock, MonotonicClock
from cluster.grammar.engine import grammar_engine_id
from cluster.member import Capacity, Member
from cluster.messages import LayoutFingerprint, MemberId, Role
from cluster.observe.telemetry import Telemetry
from cluster.serving.serving import MAX_MESSAGE_BYTES
from router.fleet.fleet import Fleet
from router.fleet.prefix_locator import CacheEventFollower, PrefixLocator
from router.fleet.supervision import WorkerTimeouts
from router.grammars.checker import GrammarChecker
from router.pipeline.migration import Evacuation, Migrations
from router.pipeline.pipeline import Pipeline, PipelineSettings
from router.policies.breakers import BreakerPolicy
from router.policies.candidates import NO_TARGETS, SloTargets
from router.policies.placement import Policy
from router.policies.prefix_index import PrefixIndex
from router.policies.slo_aware import policy
from router.request.live_requests import LiveRequests
from router.request.traces import Traces
from router.request.validation import MessageLimits, resolve
from router.requests import GenerateRequest, Output, SamplingParams, ScoredPrompt, StopConditions, Summary, TokenPrompt
from router.running import running
from router.text.tokenization import Tokenization
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import (
    FINGERPRINT,
    KEYS,
    ScriptedPrefill,
    ScriptedWorker,
    Store,
    connect,
    scripted_token,
)

DEMO_MODEL = Path(__file__).parents[4] / "examples" / "demo_model"
PROMPT = (5, 6, 7, 8)
_DEADLINE_S = 60.0


class Membership:
    """A registry whose members the test sets."""

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
        absence_s: float = 0.0,
        placement: str = "least-loaded",
        targets: SloTargets = NO_TARGETS,
        explore: float = 0.0,
        migration_timeout_s: float = 10.0,
        breakers: BreakerPolicy | None = None,
        tokenization: Tokenization | None = None,
        wall_clock: Callable[[], float] = time.time,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        traces: Traces | None = None,
        keys: ClusterKeys = KEYS,
    ) -> None:
        self.store = Store()
        self.keys = keys
        self.telemetry = Telemetry()
        self.membership = Membership()
        self.workers: list[ScriptedWorker] = []  # registered
        self.made: list[ScriptedWorker] = []  # a server that is not stopped would hang the process at its end
        self.tokenization = tokenization or Tokenization.load(str(DEMO_MODEL))
        self.member = Member(id=MemberId("router", "r1"), role=Role.ROUTER, address="", model="demo_model")
        self.live_requests = LiveRequests(
            max_live_requests=max_live_requests,
            max_buffered_tokens=max_buffered_tokens,
            clock=outbox_clock or MonotonicClock(),
            telemetry=self.telemetry,
            traces=traces,
        )
        index = PrefixIndex()
        timeouts = WorkerTimeouts(heartbeat_timeout_s=silence_s, recovery_timeout_s=grace_s, absence_s=absence_s)
        self.fleet = self._new_fleet(index, timeouts)
        chooser = policy(placement, targets, random.random, explore)
        self.migrations = Migrations(
            router=self.member.id,
            fleet=self.fleet,
            telemetry=self.telemetry,
            timeout_s=migration_timeout_s,
        )
        self.evacuation = Evacuation(fleet=self.fleet, migrations=self.migrations)
        self.grammars = GrammarChecker(DEMO_MODEL, grammar_engine_id(DEMO_MODEL))
        settings = PipelineSettings(
            request_timeout_s=request_timeout_s,
            max_attempts=max_attempts,
            breakers=breakers or BreakerPolicy(),
            messages=MessageLimits(max_message_bytes, MAX_MESSAGE_BYTES),
        )
        self.pipeline = self._new_pipeline(chooser, PrefixLocator(self.fleet, index, b"key"), settings, wall_clock)

    def _new_fleet(self, index: PrefixIndex, timeouts: WorkerTimeouts) -> Fleet:
        return Fleet(
            router=self.member,
            membership=self.membership,
            connect=connect,
            timeouts=timeouts,
            clock=MonotonicClock(),
            telemetry=self.telemetry,
            follow_cache_events=CacheEventFollower(index).follow,
        )

    def _new_pipeline(
        self, chooser: Policy, prefixes: PrefixLocator, settings: PipelineSettings, wall_clock: Callable[[], float]
    ) -> Pipeline:
        return Pipeline(
            router=self.member.id,
            tokenization=self.tokenization,
            live_requests=self.live_requests,
            policy=chooser,
            fleet=self.fleet,
            migrations=self.migrations,
            prefixes=prefixes,
            grammars=self.grammars,
            keys=self.keys,
            settings=settings,
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
        role: Role = Role.DECODE,
    ) -> ScriptedDecode:
        worker = ScriptedDecode(name, self.store, incarnation, role)
        worker.capacity = capacity
        worker.fingerprint = fingerprint
        await self._add(worker, port)
        return worker

    def register(self) -> None:
        """Publish the present workers to the router."""
        self.membership.tell(tuple(worker.member for worker in self.workers))

    async def connected(self) -> None:
        """Wait until the router is connected to every registered worker that fits."""
        for worker in self.workers:
            await self.connected_to(worker)

    async def connected_to(self, worker: ScriptedWorker) -> None:
        await self._until(lambda: worker.id in self._connected(), f"connected to {worker.id}")

    async def knows_speeds(self) -> None:
        """Wait until the router has the service times that the registered workers send now."""
        for worker in self.workers:
            peer = self.fleet.peer(worker.id)
            assert peer is not None
            async with asyncio.timeout(_DEADLINE_S):
                while peer.service_times != worker.service_times:
                    await peer.inspect()  # heartbeats arrive in this time

    async def has_refused(self, worker: ScriptedDecode) -> None:
        """Wait until the worker has refused as many calls as it should."""
        peer = self.fleet.peer(worker.id)
        assert peer is not None
        async with asyncio.timeout(_DEADLINE_S):
            while worker.refusals:
                await peer.inspect()  # calls arrive in this time

    async def until_gone(self, worker: ScriptedWorker) -> None:
        await self._until(lambda: worker.id not in self._connected(), f"no longer connected to {worker.id}")

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                while not holds():
                    await self.fleet.changed()
        except TimeoutError:
            registered = [str(worker.id) for worker in self.workers]
            state = f"{registered=}, connected={sorted(map(str, self._connected()))}"
            raise AssertionError(f"the router is not {what} within {_DEADLINE_S:g} s: {state}") from None

    def _connected(self) -> set[MemberId]:
        return {load.member for load in (*self.fleet.prefill_loads(), *self.fleet.decode_loads())}

    async def _add(self, worker: ScriptedWorker, port: int) -> None:
        self.made.append(worker)
        await worker.start(port)
        self.workers = [other for other in self.workers if other.id.id != worker.id.id] + [worker]
        self.register()


@asynccontextmanager
async def router_under_test(**settings: object) -> AsyncIterator[RouterUnderTest]:
    """Run a router. On exit all workers are stopped and every invariant is checked."""
    router = RouterUnderTest(**settings)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.grammars.close)
        await stack.enter_async_context(running(router.fleet.run()))
        await stack.enter_async_context(running(router.evacuation.run()))
        try:
            yield router
        finally:
            for worker in router.made:
                await worker.die()
        router.live_requests.check()
        assert router.live_requests.num_served == 0
        assert len(router.live_requests) == 0


def pass_time(duration_s: float) -> None:
    """Advance the clock of the event loop: timers that are due within this time fire at once. A test lets a deadline
    pass with it in the state that it has waited for; on a slow machine a short deadline would pass before. Durations up
    to 15 s lose no worker, because workers may be silent for 20 s."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + duration_s  # type: ignore[method-assign]


def ask(
    *,
    max_tokens: int = 8,
    prompt: tuple[int, ...] = PROMPT,
    request_id: str = "",
    n: int = 1,
    timeout_s: float | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
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
        prompt_logprobs=prompt_logprobs,
    )


class Answer:
    """An assembled stream. It asserts that every choice receives each token exactly once and in order."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.finish_reasons: dict[int, str] = {}
        self.stop_causes: dict[int, str | int | None] = {}
        self.outputs: list[Output] = []
        self.prompts: list[ScoredPrompt] = []  # at most one

    def take(self, output: Output) -> None:
        self.outputs.append(output)
        if output.prompt is not None:
            assert not self.prompts and not self.token_ids, "the prompt was sent twice, or after a token"
            self.prompts.append(output.prompt)
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
    """Return the tokens that every scripted worker produces for this request."""
    assert isinstance(request.prompt, TokenPrompt) and request.stop.max_tokens is not None
    prompt = request.prompt.token_ids
    seed = resolve(request, prompt, router.tokenization.model_info).seeds[choice]
    return [scripted_token(prompt, seed, index) for index in range(request.stop.max_tokens)]


async def ask_and_hold(
    router: RouterUnderTest, request: GenerateRequest, decode: ScriptedDecode
) -> "asyncio.Task[Answer]":
    """Send a request, and stop the tokens of its decode worker."""
    task = asyncio.create_task(answer_to(router, request))
    async with asyncio.timeout(_DEADLINE_S):
        await decode.paused.wait()
    return task
