"""Tests of random migrations among workers that refuse, fail, restart and die at random: the client gets every token
once, in order, and the right one, and no worker keeps a sequence.
"""

import asyncio
import random
from collections.abc import Callable

import pytest

from cluster.errors import HandOffReason, NotFound, QueueFull
from tests.system.rigs.members.router_harness import Answer, RouterUnderTest, ask, expected_tokens, router_under_test
from tests.system.rigs.members.scripted_decode import ScriptedDecode

_NUM_RUNS = 8  # of each seed
_NUM_ROUNDS = 14
_MAX_TOKENS = 40


class Chaos:
    """A request in progress, which advances a few tokens per round."""

    def __init__(self, router: RouterUnderTest, workers: list[ScriptedDecode], chance: random.Random) -> None:
        self.router, self.workers, self._chance = router, workers, chance
        self._moves: list[asyncio.Task[None]] = []

    @property
    def num_moved(self) -> float:
        return self.router.telemetry.value("tandem_migrations_total", outcome="moved", reason="")

    @property
    def living(self) -> list[ScriptedDecode]:
        return [worker for worker in self.workers if worker in self.router.workers]

    async def round(self) -> None:
        if self._chance.random() < 0.6:
            self._chance.choice(self._actions())()
        if len(self.living) > 1 and self._chance.random() < 0.04:
            await self._kill(self._chance.choice(self.living))
        await self._move()
        self._advance(self._chance.randint(0, 2))
        await asyncio.gather(*(self.router.fleet.connected_peer(w.id).inspect() for w in self._connected()))

    async def settle(self, answering: "asyncio.Task[Answer]") -> Answer:
        """Let every worker continue, wait for the answer, and check that no worker keeps any resource of the
        request.
        """
        for worker in self.living:
            worker.transfer.open()
            worker.after_freezing.open()
            worker.pause_at = None
            worker.resumed.set()
        async with asyncio.timeout(20):
            answer = await answering
            await asyncio.gather(*self._moves)
        for worker in self.living:
            await _nothing_is_left(worker)
        return answer

    def _actions(self) -> list[Callable[[], None]]:
        worker = self._chance.choice(self.living)
        return [
            lambda: worker.refusals.append(QueueFull("told to")),
            lambda: worker.handoff_failures.append(str(HandOffReason.DIGEST_MISMATCH)),
            lambda: worker.thaw_refusals.append(NotFound("told to")),
            lambda: setattr(worker, "first_token_offset", 1),
            worker.transfer.close,
            worker.transfer.open,
            worker.after_freezing.close,
            worker.after_freezing.open,
            worker.break_streams,
        ]

    async def _move(self) -> None:
        source = self._chance.choice([worker for worker in self.living if worker.progress] or self.living)
        others = [worker.id.id for worker in self.living if worker is not source]
        target = self._chance.choice(["", *others])
        task = asyncio.create_task(self._migrate(source.id.id, target))
        self._moves.append(task)
        if self._chance.random() < 0.7:
            await asyncio.wait([task], timeout=0.1)

    async def _migrate(self, source: str, target: str) -> None:
        try:
            await self.router.migrations.migrate(source, target, 0)
        except NotFound:
            assert {source, target} - {"", *(worker.id.id for worker in self._connected())}

    async def _kill(self, worker: ScriptedDecode) -> None:
        self.router.workers.remove(worker)
        await worker.die()

    def _advance(self, num_tokens: int) -> None:
        for worker in self.living:
            worker.pause_at = (worker.pause_at or 0) + num_tokens
            before, worker.resumed = worker.resumed, asyncio.Event()
            before.set()

    def _connected(self) -> list[ScriptedDecode]:
        present = {load.member for load in self.router.fleet.decode_loads()}
        return [worker for worker in self.living if worker.id in present]


async def _nothing_is_left(worker: ScriptedDecode) -> None:
    await worker.until(lambda: not worker.frozen and not worker.progress)


@pytest.mark.parametrize("seed", range(3))
async def test_random_moves_and_failures_change_no_token(seed: int) -> None:
    chance = random.Random(seed)
    num_moved = 0.0
    for _ in range(_NUM_RUNS):
        async with router_under_test(max_attempts=50, grace_s=0.3, migration_timeout_s=0.2) as router:
            await router.add_prefill("p0")
            workers = [await router.add_decode(f"d{i}") for i in range(3)]
            await router.connected()
            chaos = Chaos(router, workers, chance)
            for worker in workers:
                worker.pause_at = 3
            request = ask(max_tokens=_MAX_TOKENS, n=chance.randint(1, 3))
            answer = Answer()

            async def read(answer: Answer = answer, router: RouterUnderTest = router) -> Answer:
                async for output in router.pipeline.generate(request):  # noqa: B023 -- ends within the loop's turn
                    answer.take(output)
                return answer

            answering = asyncio.create_task(read())
            await asyncio.wait(
                [asyncio.create_task(worker.paused.wait()) for worker in workers],
                return_when=asyncio.FIRST_COMPLETED,
                timeout=10,
            )
            for _ in range(_NUM_ROUNDS):
                await chaos.round()
            await chaos.settle(answering)
            num_moved += chaos.num_moved
            for choice in range(request.n):
                assert answer.token_ids[choice] == expected_tokens(router, request, choice)
            ledger = answer.summary.ledger
            assert sum(phase.duration_s for phase in ledger.phases) == pytest.approx(ledger.wall_s, rel=0.02)
    assert num_moved > _NUM_RUNS, "too little was moved to prove anything"
