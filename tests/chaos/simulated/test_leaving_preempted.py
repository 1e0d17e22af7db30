"""Schedules in which a decode worker leaves whose pool is too small for what it has: some of it has no KV to move."""

from dataclasses import replace
from random import Random

import pytest

from router.fleet.decode_stream import DecodeStream
from tests.chaos.simulated.machine import simulated_machine
from tests.chaos.simulated.schedule import Ask, Kind, Mishap, Phase, Schedule, plain_schedule
from tests.chaos.simulated.world import run_schedule

_SEEDS = range(1, 24)  # a third of them has one


def _crowded(seed: int) -> Schedule:
    """Pools of 24 blocks, ten sequences of up to 24 at two workers, one of which is to leave within a second."""
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


def test_what_is_preempted_where_it_leaves_goes_on_elsewhere_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_up: list[int] = []
    give_up = DecodeStream.give_up

    def noted(stream: DecodeStream, handle: int) -> None:
        given_up.extend({handle} & {*stream.preempted()})
        give_up(stream, handle)

    monkeypatch.setattr(DecodeStream, "give_up", noted)
    with simulated_machine():
        for seed in _SEEDS:
            result = run_schedule(_crowded(seed))
            assert not result.violations, f"seed {seed}: {result.violations}"
            if given_up:
                return
    raise AssertionError("nobody was preempted when it was to move")
