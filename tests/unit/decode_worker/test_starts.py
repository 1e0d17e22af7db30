"""A Start whose handles are in use, as only a broken router sends it, is refused; the live sequences continue."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.errors import DuplicateRequest
from cluster.messages import DecodeJob, SequenceStart
from cluster.protocol import wire
from tests.unit.decode_worker.frozen_worker import NO_CONTEXT, FrozenWorker


@pytest.fixture
async def worker() -> AsyncIterator[FrozenWorker]:
    """A decode worker with a stream of the router and one live sequence."""
    made = FrozenWorker()
    listening = await made.connect(has_no_sequences=False)
    yield made
    listening.cancel()


def _job(worker: FrozenWorker, *handles: int) -> DecodeJob:
    sequences = tuple(SequenceStart(handle, seed=handle) for handle in handles)
    return replace(worker.bench.job(range(7, 20), max_tokens=5), sequences=sequences)


async def _start(worker: FrozenWorker, job: DecodeJob) -> None:
    await worker.service.Start(wire.decode_job_to_wire(job), NO_CONTEXT)


async def test_a_start_with_the_handle_of_a_live_sequence_is_refused_and_that_sequence_continues(
    worker: FrozenWorker,
) -> None:
    unused = worker.handle + 100
    with pytest.raises(DuplicateRequest, match=f"handle {worker.handle} is in use"):
        await _start(worker, _job(worker, unused, worker.handle))
    assert worker.posted == [] and worker.handles() == {worker.handle}
    assert worker.bench.inspect().figures["running"] == 1
    await _start(worker, _job(worker, unused))
    worker.pass_commands()
    assert worker.handles() == {worker.handle, unused}


async def test_the_handle_of_an_ended_sequence_is_free_again(worker: FrozenWorker) -> None:
    worker.cancel()
    worker.pass_commands()
    await _start(worker, _job(worker, worker.handle))
    assert worker.handles() == {worker.handle}
