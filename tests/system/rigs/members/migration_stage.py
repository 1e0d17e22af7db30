"""The parties of a migration: a real router, a scripted prefill worker, and two scripted decode workers, of which the
second one joins when a test lets it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.pipeline.migration import MigrationCount
from router.requests import GenerateRequest
from tests.system.rigs.members.router_harness import Answer, RouterUnderTest, expected_tokens, router_under_test
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import ScriptedPrefill

MOVED, KEPT, NOTHING = MigrationCount(1, 0), MigrationCount(0, 1), MigrationCount(0, 0)


class Stage:
    """A router, a prefill worker and two decode workers. Requests begin at the first decode worker, which pauses at
    token 5."""

    def __init__(
        self, router: RouterUnderTest, prefill: ScriptedPrefill, source: ScriptedDecode, target: ScriptedDecode
    ) -> None:
        self.router, self.prefill, self.source, self.target = router, prefill, source, target

    async def migrate(self, source: str = "d0", target: str = "", max_sequences: int = 0) -> MigrationCount:
        async with asyncio.timeout(10):
            return await self.router.migrations.migrate(source, target, max_sequences)

    async def joined(self) -> None:
        """Register the target. The requests have begun, so they run at the source."""
        self.router.workers.append(self.target)
        self.router.register()
        await self.router.connected_to(self.target)

    def migrating(self) -> "asyncio.Task[MigrationCount]":
        return asyncio.create_task(self.migrate())

    def count(self, outcome: str, reason: str = "") -> float:
        return self.router.telemetry.value("tandem_migrations_total", outcome=outcome, reason=reason)

    @asynccontextmanager
    async def streaming(self, request: GenerateRequest) -> AsyncIterator["asyncio.Task[Answer]"]:
        """Send a request and wait until the source has drawn five tokens of each of its sequences."""
        self.source.pause_at = 5
        answer, has_five = Answer(), asyncio.Event()

        async def read() -> Answer:
            async for output in self.router.pipeline.generate(request):
                answer.take(output)
                if len(answer.token_ids) == request.n and all(len(ids) >= 5 for ids in answer.token_ids.values()):
                    has_five.set()
            return answer

        answering = asyncio.create_task(read())
        async with asyncio.timeout(10):
            await has_five.wait()
        try:
            yield answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def complete(self, answering: "asyncio.Task[Answer]", request: GenerateRequest) -> Answer:
        """Wait for the client's whole answer and compare it with the undisturbed one."""
        async with asyncio.timeout(20):
            answer = await answering
        expected = [expected_tokens(self.router, request, choice) for choice in range(request.n)]
        assert [answer.token_ids[choice] for choice in range(request.n)] == expected
        ledger = answer.summary.ledger
        assert sum(phase.duration_s for phase in ledger.phases) == pytest.approx(ledger.wall_s, rel=0.02)
        return answer


@asynccontextmanager
async def stage(**settings: object) -> AsyncIterator[Stage]:
    async with router_under_test(**settings) as router:
        prefill, source = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        target = ScriptedDecode("d1", router.store)
        on_stage = Stage(router, prefill, source, target)
        router.made.append(target)
        await target.start()
        try:
            yield on_stage
        finally:
            stream_handles = [peer.stream.num_sequences for peer in router.fleet._peers.values()]
            assert not any(stream_handles), "a handle outlives its request"


async def none_frozen(decode: ScriptedDecode) -> None:
    await decode.until(lambda: not decode.frozen)


async def all_cancelled(decode: ScriptedDecode) -> None:
    handles = {start.handle for job in decode.jobs for start in job.sequences}
    await decode.until(lambda: handles <= decode.cancelled_handles)
