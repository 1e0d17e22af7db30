"""The fault suite for every transport: the reason is named, the answer is correct nevertheless, and no resource leaks.

Two prefill workers, and per transport a decode worker that has only this one and injects faults on order; nixl has one
where tests of nixl were selected. With FAULTS_REPORT set, a table of the cost of each fault is written to it.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from kvtransfer.transports.nixl.agent import why_not_loadable
from tests.faults.control import FaultControl
from tests.faults.faulty_transport import Fault
from tests.system.rigs.members.asking import Answer, ask, asked, question
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_TRANSPORTS = ("shm", "tcp", "nixl")
_QUESTION = question([20 + i % 700 for i in range(200)], max_tokens=6, ignore_eos=True)  # twelve blocks and a tail
_FLAGS = ("--dtype", "float32", "--max-prefill-tokens", "64", "--num-blocks", "96", "--prefix-caching", "off")
# No lease and no read of these ends before the fault under test has happened, however long a busy machine lets it wait.
_PATIENT = ("--lease-s", "20", "--read-timeout-s", "60")
# A lease ends while a read is stalled or late. No other deadline ends such a read before.
_IMPATIENT = ("--lease-s", "1", "--max-lease-s", "2", "--quarantine-s", "5", "--read-timeout-s", "60")
_LATE_S = 2.5  # past the longest lease of these
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Held:
    """A request that is in progress while a read of the importer is held."""

    asking: "asyncio.Task[tuple[Answer, float]]"
    exporter: str
    importer: str


@dataclass
class Suite:
    cluster: LocalCluster
    control: FaultControl
    transports: tuple[str, ...]
    tokens: tuple[int, ...]  # the answer, undisturbed
    undisturbed_s: float
    costs: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)  # (fault, transport): reasons, time

    async def provoke(self, transport: str, fault: Fault) -> Answer:
        """Send requests until the fault has been injected, and return the disturbed answer. Every answer must be
        right."""
        worker = await self.control.worker(f"decode-{transport}")
        await worker.order(fault)
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                answer, seconds = await self.ask()
                if await worker.has_injected():
                    self.note(fault, transport, answer, seconds)
                    return answer

    async def provoke_all(self, fault: Fault) -> list[Answer]:
        """Order the fault of all decode workers, send requests until each has injected it, and return all answers.
        Every answer must be right."""
        workers = [await self.control.worker(f"decode-{name}") for name in self.transports]
        for worker in workers:
            await worker.order(fault)
        answers = []
        async with asyncio.timeout(_DEADLINE_S):
            while workers:
                for answer, seconds in await asyncio.gather(*(self.ask() for _ in workers)):
                    answers.append(answer)
                    self.note(fault, answer.ledger.transport, answer, seconds)
                workers = [worker for worker in workers if not await worker.has_injected()]
        return answers

    async def disturb(self, what: str, transport: str, strike: Callable[[Held], Awaitable[None]]) -> None:
        """Hold a read while `strike` ends or stops a worker, until an answer has a reason for it. Every answer must be
        right. The held read may be one that its request does not need, such as that of a hedge: then another request
        is sent.
        """
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                asking = await self.hold(transport)
                await strike(Held(asking, await self.exporter_of_the_held_read(), f"decode-{transport}"))
                answer, seconds = await asking
                if answer.ledger.reasons:
                    self.note(what, transport, answer, seconds)
                    return
                await self.cluster.mend()

    async def hold(self, transport: str) -> "asyncio.Task[tuple[Answer, float]]":
        """Send requests until a read is held, and return the request that is in progress then."""
        worker = await self.control.worker(f"decode-{transport}")
        await worker.order(Fault.HELD)
        injected = asyncio.create_task(worker.injected())
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                asking = asyncio.create_task(self.ask())
                await asyncio.wait((asking, injected), return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    return asking
                await asking  # it was answered, and right

    async def ask(self) -> tuple[Answer, float]:
        began_s = time.monotonic()
        answer = await ask(self.cluster, _QUESTION)
        assert answer.token_ids == self.tokens, answer.ledger
        return answer, time.monotonic() - began_s

    async def exporter_of_the_held_read(self) -> str:
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                for name in self.cluster.workers("prefill"):
                    if (await self.cluster.inspect(name)).figures["live_tickets"]:
                        return name

    async def digest_failures(self, transport: str) -> float:
        return (await self.cluster.inspect(f"decode-{transport}")).figures.get("digest_failures", 0.0)

    def note(self, fault: str, transport: str, answer: Answer, seconds: float) -> None:
        self.costs[fault, transport] = (", ".join(answer.ledger.reasons) or "none", seconds)

    def append_report(self, path: Path) -> None:
        lines = [
            "# What a fault costs",
            "",
            f"The answer was right every time; undisturbed it takes {self.undisturbed_s * 1000:.0f} ms.",
            "",
            "| fault | transport | reasons in the ledger | answer after |",
            "|---|---|---|---|",
        ]
        for (fault, transport), (reasons, seconds) in sorted(self.costs.items()):
            lines.append(f"| {fault} | {transport} | {reasons} | {seconds:.2f} s |")
        with path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def suite(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Suite]:
    directory = tmp_path_factory.mktemp("faults")
    async with _suite(redis_url, directory, (*_FLAGS, *_PATIENT), _transports(request.session), num_prefill=2) as suite:
        yield suite


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def impatient(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Suite]:
    directory = tmp_path_factory.mktemp("impatient")
    async with _suite(
        redis_url, directory, (*_FLAGS, *_IMPATIENT), _transports(request.session), num_prefill=1
    ) as suite:
        yield suite


def _transports(session: pytest.Session) -> tuple[str, ...]:
    """Return the transports under test. A decode worker of nixl only is not started for the tests of the others."""
    is_selected = any("[nixl" in item.nodeid for item in session.items)
    return tuple(name for name in _TRANSPORTS if name != "nixl" or (is_selected and _is_installed(name)))


@asynccontextmanager
async def _suite(
    redis_url: str, directory: Path, workers: tuple[str, ...], names: tuple[str, ...], *, num_prefill: int
) -> AsyncIterator[Suite]:
    """`workers`: the flags of all of them. `names`: of the transports."""
    control = FaultControl(directory)
    environment = {"FAULT_CONTROL": str(control.path), "FAULT_LATE_S": str(_LATE_S)}
    cluster = LocalCluster(redis_url, directory, flags=workers, environment=environment)
    await control.start()
    everything = (*workers, "--kv-transports", ",".join(names))
    try:
        starts = [cluster.start_member(f"prefill{i}", "prefill_worker", everything) for i in range(num_prefill)]
        for name in names:
            flags = (*workers, "--kv-transports", name)
            starts.append(cluster.start_member(f"decode-{name}", "tests.faults.faulty_decode", flags))
        await asyncio.gather(*starts)
        # By turns, and whatever failed before: the question is always the same one, and what a fault has slowed or
        # broken would else be passed over.
        ports = ("--port", "0", "--grpc-port", "0", "--max-attempts", "4", "--placement", "round-robin")
        await cluster.start_member("router0", "router", (*ports, "--breaker-failures", "0"))
        await ask(cluster, _QUESTION)
        began_s = time.monotonic()
        answer = await ask(cluster, _QUESTION)
        suite = Suite(cluster, control, names, answer.token_ids, time.monotonic() - began_s)
        yield suite
        if report := os.environ.get("FAULTS_REPORT"):
            suite.append_report(Path(report))
    finally:
        await cluster.stop()
        await control.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def whole(suite: Suite) -> AsyncIterator[Suite]:
    """Check that every member is alive before the test, and afterwards that every block is free and every pool's
    accounts agree."""
    await suite.cluster.mend()
    yield suite
    await suite.cluster.until_free()


@pytest.fixture(params=["shm", "tcp", pytest.param("nixl", marks=pytest.mark.slow)])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not _is_installed(name):
        pytest.skip(f"{name} is not installed")
    return name


def _is_installed(name: str) -> bool:
    return name != "nixl" or not why_not_loadable()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.TRUNCATED, "handoff_read_failed"),
        (Fault.BROKEN, "handoff_read_failed"),
        (Fault.REFUSED, "handoff_read_failed"),
    ],
)
async def test_a_failed_read_is_named_and_repeated(whole: Suite, transport: str, fault: Fault, reason: str) -> None:
    answer = await whole.provoke(transport, fault)
    assert reason in answer.ledger.reasons, answer.ledger


@pytest.mark.slow
async def test_reads_that_outlive_their_leases_are_named_and_repeated(impatient: Suite) -> None:
    """Each fault is ordered of every transport at once, because it takes as long as a lease lasts."""
    for fault in (Fault.STALLED, Fault.LATE):
        answers = await impatient.provoke_all(fault)
        reasons = [reason for answer in answers for reason in answer.ledger.reasons]
        assert reasons.count("handoff_lease_lapsed") >= len(impatient.transports), reasons
    await impatient.cluster.until_free()


@pytest.mark.parametrize("fault", [Fault.FLIPPED, Fault.MIXED_UP])
async def test_damaged_blocks_are_detected_and_read_again(whole: Suite, transport: str, fault: Fault) -> None:
    before = await whole.digest_failures(transport)
    answer = await whole.provoke(transport, fault)
    assert not answer.ledger.reasons and answer.ledger.transport == transport
    assert await whole.digest_failures(transport) > before


async def test_duplicated_bytes_change_nothing(whole: Suite, transport: str) -> None:
    answer = await whole.provoke(transport, Fault.DOUBLED)
    assert not answer.ledger.reasons and answer.ledger.transport == transport


async def test_an_exporter_killed_in_mid_read(whole: Suite, transport: str) -> None:
    async def kill(held: Held) -> None:
        whole.cluster.members[held.exporter].send_signal(signal.SIGKILL)
        (await whole.control.worker(held.importer)).let_go()

    await whole.disturb("exporter killed", transport, kill)


async def test_an_exporter_stopped_in_mid_read_and_woken_later(whole: Suite, transport: str) -> None:
    async def stop(held: Held) -> None:
        with whole.cluster.members[held.exporter].stopped():
            (await whole.control.worker(held.importer)).let_go()
            await held.asking

    await whole.disturb("exporter stopped", transport, stop)
    await whole.ask()  # it runs again, and its answer is right


async def test_an_importer_killed_in_mid_read(whole: Suite, transport: str) -> None:
    async def kill(held: Held) -> None:
        whole.control.forget(held.importer)
        whole.cluster.members[held.importer].send_signal(signal.SIGKILL)

    await whole.disturb("importer killed", transport, kill)


async def test_hand_offs_wait_while_either_pool_is_full(redis_url: str, tmp_path: Path) -> None:
    """Each hand-off needs thirteen blocks; both pools have ninety-six."""
    cluster = LocalCluster(redis_url, tmp_path, flags=(*_FLAGS, *_PATIENT))
    try:
        await cluster.start()
        answers = await asyncio.gather(*(ask(cluster, _QUESTION) for _ in range(24)))
        await cluster.until_free()
    finally:
        codes = await cluster.stop()
    assert set(codes.values()) == {0}, cluster.output()[-4000:]
    assert {answer.token_ids for answer in answers} == {answers[0].token_ids}
    assert not any(answer.ledger.reasons for answer in answers)


async def test_a_sequence_that_cannot_move_continues_at_its_worker(whole: Suite) -> None:
    """Each decode worker has a different transport here, so neither can read from the other. If an answer is complete
    before its sequences were to move three times, another one is asked for."""
    request = question(range(30, 90), max_tokens=140, n=2, ignore_eos=True)
    undisturbed = await ask(whole.cluster, request)
    num_kept = 0
    async with asyncio.timeout(_DEADLINE_S):
        while num_kept < 6:
            async with asked(whole.cluster, request) as answer:
                await answer.until(5)
                names = whole.cluster.workers("decode") * 3
                moves = [await whole.cluster.migrate(name) for name in names]
                await answer.end()
            assert answer.choices == undisturbed.choices
            assert not answer.ledger.reasons
            assert not any(move.num_moved for move in moves)
            num_kept = sum(move.num_kept for move in moves)
    assert num_kept == 6
