"""Schedules in which more prompts arrive at once than the pools of both sides hold: hand-offs wait, but not for each
other.

A decode worker that gave all its blocks to hand-offs whose prompts wait for blocks at the prefill worker, which is full
of other finished prompts, would wait for ever. So would two workers that are full of exports to each other.
"""

from collections import Counter
from dataclasses import replace
from random import Random

from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mix import DirectAsk, Flip, Mix
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import run_schedule

_NUM_ASKS = 24
_FIXED = (0, 1, 4)
_ALL_S = 10.0  # of simulated time: twice what all answers take. Waits for each other lasted 14 s and more


def crowded(seed: int) -> Schedule:
    """Return a schedule whose requests arrive nearly at once and overtake each other on their way to the workers."""
    dice = Random(f"{seed} crowded")
    asks = tuple(Ask(dice.random() / 100, 0, 0, 0, dice.randint(60, 70), 4) for _ in range(_NUM_ASKS))
    return _with_small_pools(replace(plain_schedule(seed), num_decodes=dice.choice((1, 2)), asks=asks))


def crossed(seed: int, one: str, other: str, *, flips: tuple[Flip, ...] = (), from_s: float = 0.0) -> Schedule:
    """Return a schedule in which two workers of both roles export prompts to each other, from `from_s` on."""
    dice, ways = Random(f"{seed} crossed"), ((one, other), (other, one))
    asks = tuple(
        DirectAsk(from_s + dice.random() / 100, *ways[number % 2], 0, 0, dice.randint(60, 70), 4)
        for number in range(_NUM_ASKS)
    )
    mix = Mix(direct_asks=asks, of_both=() if flips else (one, other), flips=flips)
    return _with_small_pools(replace(plain_schedule(seed), num_decodes=1, asks=(Ask(0.0, 0, 0, 0, 8, 4),), mix=mix))


def _with_small_pools(schedule: Schedule) -> Schedule:
    """Give each pool room for four of the prompts."""
    blocks = (72,)
    return replace(
        schedule, num_routers=1, num_prefills=1, prefill_blocks=blocks, decode_blocks=blocks, latency_s=0.05, mishaps=()
    )


def _reached(schedule: Schedule, outcomes: "Counter[str]") -> "Counter[str]":
    """Run the schedule and return what it reached. Its requests have these outcomes, without a wait for a lease."""
    result = run_schedule(schedule)
    assert not result.violations, f"seed {schedule.seed}: {result.violations}"
    assert result.outcomes == outcomes
    assert result.simulated_s < _ALL_S, f"seed {schedule.seed}: {result.simulated_s:.1f} s"
    return result.reached


def test_hand_offs_that_wait_at_both_sides_do_not_wait_for_each_other() -> None:
    with simulated_machine():
        for seed in _FIXED:
            reached = _reached(crowded(seed), Counter(ok=_NUM_ASKS))
            assert not [name for name in reached if name.startswith("counted: retries")]


def test_workers_that_export_to_each_other_do_not_wait_for_each_other() -> None:
    with simulated_machine():
        for seed in _FIXED:
            schedule = crossed(seed, "prefill0", "decode0")
            assert _reached(schedule, Counter(ok=1))["direct request: ok"] == _NUM_ASKS


def test_workers_that_were_given_both_roles_do_not_wait_for_each_other() -> None:
    places = ("prefill0", "prefill1")
    flips = tuple(Flip(at_s=0.0, place=place, role="both", for_s=5.0) for place in places)
    with simulated_machine():
        schedule = replace(crossed(_FIXED[0], *places, flips=flips, from_s=1.0), num_prefills=2)
        assert _reached(schedule, Counter(ok=1))["direct request: ok"] == _NUM_ASKS
