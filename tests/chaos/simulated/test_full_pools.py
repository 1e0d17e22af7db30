"""Schedules in which more prompts arrive at once than the pools of both sides hold: hand-offs wait, but not for each
other.

A decode worker that gave all its blocks to hand-offs whose prompts wait for blocks at the prefill worker, which is full
of other finished prompts, would wait for ever.
"""

from collections import Counter
from dataclasses import replace
from random import Random

from tests.chaos.simulated.machine import simulated_machine
from tests.chaos.simulated.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import run_schedule

_NUM_ASKS = 24
_FIXED = (0, 1, 4)
_ALL_S = 10.0  # of simulated time: twice what all answers take. Waits for each other lasted 14 s and more


def crowded(seed: int) -> Schedule:
    """Return a schedule whose requests arrive nearly at once and overtake each other on their way to the workers."""
    dice = Random(f"{seed} crowded")
    asks = tuple(Ask(dice.random() / 100, 0, 0, 0, dice.randint(60, 70), 4) for _ in range(_NUM_ASKS))
    return replace(
        plain_schedule(seed),
        num_routers=1,
        num_prefills=1,
        num_decodes=dice.choice((1, 2)),
        prefill_blocks=(72,),
        decode_blocks=(72,),
        latency_s=0.05,
        asks=asks,
        mishaps=(),
    )


def test_hand_offs_that_wait_at_both_sides_do_not_wait_for_each_other() -> None:
    with simulated_machine():
        for seed in _FIXED:
            result = run_schedule(crowded(seed))
            assert not result.violations, f"seed {seed}: {result.violations}"
            assert result.outcomes == Counter(ok=_NUM_ASKS)
            assert result.simulated_s < _ALL_S, f"seed {seed}: {result.simulated_s:.1f} s"
            assert not [name for name in result.reached if name.startswith("counted: retries")]
