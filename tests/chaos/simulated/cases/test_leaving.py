"""Schedules in which members drain while they work: two of a pool at once, and together with other faults."""

from collections import Counter
from dataclasses import replace
from random import Random

from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import run_schedule

_FIXED = range(8)


def leaving(seed: int) -> Schedule:
    """Return a schedule of long sequences in which at least one decode worker drains while it runs some."""
    dice = Random(f"{seed} leaving")
    asks = tuple(
        Ask(dice.random() / 4, 0, number % 2, 8, dice.randint(1, 40), dice.randint(5, 40), n=dice.choice((1, 1, 2)))
        for number in range(6)
    )
    roles = ["decode", *dice.choice(((), (), ("decode",), ("decode",), ("prefill",), ("router",)))]
    mishaps = [_mishap(dice, Kind.DRAIN, role, number) for number, role in enumerate(roles)]
    if dice.random() < 0.3:
        kind = dice.choice((Kind.KILL, Kind.STOP, Kind.RESET, Kind.MOVE, Kind.PAIR))
        mishaps.append(_mishap(dice, kind, "decode", 1))
    return replace(
        plain_schedule(seed),
        num_routers=dice.choice((1, 2)),
        num_prefills=dice.choice((1, 2)),
        num_decodes=dice.choice((1, 2, 2, 3)),
        decode_blocks=(dice.choice((48, 96)),),
        step_s=0.1,
        asks=asks,
        mishaps=tuple(mishaps),
        drain_grace_s=dice.choice((0.05, 0.5, 1.0, 3.0, 30.0)),
    )


def _mishap(dice: Random, kind: Kind, role: str, number: int) -> Mishap:
    phase = dice.choice(tuple(Phase))
    return Mishap(
        kind, role, number, at_s=dice.random() / 50, for_s=1.0, phase=phase, occurrence=dice.choice((0, 2, 5))
    )


def test_any_member_leaving_at_any_time_loses_repeats_and_leaks_nothing() -> None:
    calls: Counter[object] = Counter()
    with simulated_machine():
        for seed in _FIXED:
            result = run_schedule(leaving(seed))
            assert not result.violations, f"seed {seed}: {result.violations}"
            calls.update(kind for _, _, _, _, kind in result.trace)
    assert calls["leaving"] and calls["FreezeResponse"]


def test_a_member_that_two_faults_have_ended_is_started_by_one_of_them_while_redis_is_away() -> None:
    """Two processes of one name would register when Redis is back, and one of them would be fenced."""
    schedule = replace(
        plain_schedule(1),
        asks=(Ask(0.0, 0, 1, 8, 4, 4), Ask(3.0, 0, 1, 8, 4, 4)),  # the second one keeps the faults coming
        mishaps=(
            Mishap(Kind.KILL, "redis", 0, at_s=0.3, for_s=8.0),
            Mishap(Kind.HANG, "decode", 0, at_s=0.5, for_s=1.5),
            Mishap(Kind.DRAIN, "decode", 0, at_s=0.6, for_s=1.0),
        ),
    )
    with simulated_machine():
        result = run_schedule(schedule)
    assert not result.violations
    told = [what for _, who, what in result.happened if who.startswith("decode0")]
    assert told.count("starts") == told.count("finds no Redis, and ends") + 2 > 4, "the first one, and the last one"
