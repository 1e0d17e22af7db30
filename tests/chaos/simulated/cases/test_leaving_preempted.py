"""Schedules in which a draining decode worker has preempted some sequences, which therefore have no KV to move."""

from dataclasses import replace
from random import Random

import pytest

from router.fleet.worker_stream import WorkerStream
from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import run_schedule

_SEEDS = range(6, 24)  # the first has one, and a fourth of the others


def _crowded(seed: int) -> Schedule:
    """Return a schedule with pools of 24 blocks and ten sequences of up to 24 blocks at two workers, one of which
    drains within a second."""
    dice = Random(f"{seed} preempted")
    asks = tuple(Ask(dice.random() / 4, 0, n % 2, 8, dice.randint(1, 40), dice.randint(30, 55)) for n in range(10))
    at_s = dice.random() * 3
    leaves = Mishap(Kind.DRAIN, "decode", 0, at_s=at_s, for_s=8.0, phase=Phase.DECODING, occurrence=4)
    return replace(
        plain_schedule(seed),
        num_routers=1,
        num_prefills=1,
        num_decodes=2,
        decode_blocks=(24,),
        step_s=0.1,
        launches=False,
        asks=asks,
        mishaps=(leaves,),
        drain_grace_s=1.0,
    )


def test_a_sequence_preempted_on_a_leaving_worker_continues_elsewhere_without_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[int] = []
    fail_sequence = WorkerStream.fail_sequence

    def noted(stream: WorkerStream, handle: int) -> None:
        failed.extend({handle} & {*stream.preempted()})
        fail_sequence(stream, handle)

    monkeypatch.setattr(WorkerStream, "fail_sequence", noted)
    with simulated_machine():
        for seed in _SEEDS:
            result = run_schedule(_crowded(seed))
            assert not result.violations, f"seed {seed}: {result.violations}"
            if failed:
                return
    raise AssertionError("no sequence was preempted when it had to move")
