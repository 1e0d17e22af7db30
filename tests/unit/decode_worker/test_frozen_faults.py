"""A freeze, an export of a frozen sequence or a thaw that fails at any await: the source worker's blocks come back, and
no sequence stays frozen."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from cluster.protocol import tickets, wire
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.wire.handoff_wire import IMPORTER_METADATA
from tandem.internal.v1 import kv_pb2
from tests.contract.rigs.handoff_calls import Calls
from tests.contract.rigs.handoff_parts import IMPORTER, KEY, LAYOUT
from tests.faults.injection import AwaitFaults, SubmitFaults, When, Where
from tests.unit.decode_worker.frozen_worker import FrozenWorker

_ERRORS = (MemoryError, OSError, asyncio.CancelledError)
_DIGESTS = "kvtransfer/exporter/exporter.py:Exporter._prepare"  # cancelled by `Exporter.close` only
_THAWED = 99
_OUTCOMES = {"finished": kv_pb2.Settle.OUTCOME_OK, "failed": kv_pb2.Settle.OUTCOME_FAILED}
_RIG = "tests/unit/decode_worker/frozen_worker.py:FrozenWorker"
_EXPORT = (
    "kvtransfer/exporter/service.py:KvTransferServicer._read",
    _DIGESTS,
    "tests/contract/rigs/handoff_calls.py:Call._serve",  # the call's own coroutine
)


@asynccontextmanager
async def _started(*, is_short: bool = True) -> AsyncIterator[FrozenWorker]:
    """Start a worker with a frozen sequence. `is_short` False: digests are computed on a thread."""
    worker = FrozenWorker()
    if not is_short:
        worker.wire.short_bytes = 0
    await worker.exporter.start()
    try:
        yield worker
    finally:
        worker.pass_commands()
        await worker.exporter.close()


async def _served(worker: FrozenWorker, task: "asyncio.Task[object]") -> None:
    """Wait until the call has ended, successfully or not."""
    await asyncio.sleep(0)
    worker.pass_commands()
    async with asyncio.timeout(10):
        await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
    worker.pass_commands()


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("error", _ERRORS)
@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "forgotten"])
async def test_a_freeze_that_fails_at_any_await_leaves_no_frozen_sequence(
    error: type[BaseException], when: When, is_cancelled: bool
) -> None:
    """The promise holds whether or not the router cancels the sequence."""
    num_points = at = 0
    while at <= num_points:
        async with _started() as worker:
            faults = AwaitFaults(f"{_RIG}.freeze", at - 1, error, when)
            faults.install()
            await _served(worker, asyncio.create_task(worker.freeze()))
            faults.disarm()
            if is_cancelled:
                worker.cancel()
                worker.pass_commands()
            await worker.until_nothing_is_held(lapsing=True)
            num_points, at = max(num_points, faults.num_awaits), at + 1
    assert num_points >= 1


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("error", _ERRORS)
async def test_a_thaw_that_fails_at_any_await_leaves_no_frozen_sequence(error: type[BaseException], when: When) -> None:
    num_points = at = 0
    while at <= num_points:
        async with _started() as worker:
            await worker.frozen()
            faults = AwaitFaults(f"{_RIG}.thaw", at - 1, error, when)
            faults.install()
            await _served(worker, asyncio.create_task(worker.thaw(_THAWED)))
            faults.disarm()
            assert worker.bench.inspect().figures["frozen"] == len(worker.exports) == 0
            worker.cancel(_THAWED)  # its router has seen the call fail, or ends the sequence later
            worker.pass_commands()
            await worker.until_nothing_is_held()
            num_points, at = max(num_points, faults.num_awaits), at + 1
    assert num_points >= 1


async def _export(worker: FrozenWorker) -> None:
    """Run a hand-off of the frozen sequence, up to its settlement or its failure."""
    ticket = (await worker.frozen()).signed_ticket
    epoch = wire.epoch_to_wire(tickets.verify(ticket, KEY, importer=str(IMPORTER)).epoch)
    attach = kv_pb2.Attach(
        ticket=kv_pb2.SignedTicket.FromString(ticket),
        transports=["loopback"],
        layout=wire.fingerprint_to_wire(LAYOUT),
        endpoints={"loopback": b""},
        digests=["folded-sums"],
    )
    calls = Calls(KvTransferServicer(exporter=worker.exporter))
    call = calls.stream_stream("HandOff")(timeout=10.0, metadata=((IMPORTER_METADATA, str(IMPORTER)),))
    await call.write(kv_pb2.ImporterMessage(attach=attach))
    async with asyncio.timeout(10):
        async for message in call:
            outcome = _OUTCOMES.get(message.WhichOneof("message") or "")
            if outcome is not None:
                settle = kv_pb2.Settle(epoch=epoch, outcome=outcome)
                with suppress(asyncio.InvalidStateError):  # the call is over
                    await call.write(kv_pb2.ImporterMessage(settle=settle))
        await asyncio.wait([call._serving])
    if not call._serving.cancelled():
        call._serving.exception()


@pytest.mark.parametrize("when", When)
@pytest.mark.parametrize("error", _ERRORS)
@pytest.mark.parametrize("coroutine", _EXPORT)
async def test_an_export_that_fails_at_any_await_gives_its_blocks_back(
    coroutine: str, error: type[BaseException], when: When
) -> None:
    """The router sends no command: the sequence ends within the grace after its ticket."""
    if coroutine == _DIGESTS and error is asyncio.CancelledError:
        return
    num_points = at = 0
    while at <= num_points:
        async with _started(is_short=False) as worker:
            faults = AwaitFaults(coroutine, at - 1, error, when)
            faults.install()
            await _export(worker)
            faults.disarm()
            await worker.until_nothing_is_held(lapsing=True)
            num_points, at = max(num_points, faults.num_awaits), at + 1
    assert num_points >= 1


@pytest.mark.parametrize("where", Where)
@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
async def test_an_exception_of_the_digest_thread_of_an_export_gives_its_blocks_back(
    error: type[Exception], where: Where
) -> None:
    num_points = at = 0
    while at <= num_points:
        async with _started(is_short=False) as worker:
            with pytest.MonkeyPatch.context() as patch:
                faults = SubmitFaults(at - 1, error, where)
                faults.install(patch)
                await _export(worker)
                faults.disarm()
            await worker.until_nothing_is_held(lapsing=True)
            num_points, at = max(num_points, faults.num_submitted), at + 1
    assert num_points >= 1
