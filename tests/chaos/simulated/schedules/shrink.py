"""Find the smallest schedule that still fails in the same way: fewer requests and faults, shorter, rounder values."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.chaos.simulated.schedules.mishaps import Mishap
from tests.chaos.simulated.schedules.mix import SEPARATE, Wires
from tests.chaos.simulated.schedules.schedule import Ask, Schedule
from tests.chaos.simulated.world import Result

_MAX_RUNS = 200


def shrink(schedule: Schedule, result: Result, run: Callable[[Schedule], Result]) -> Schedule:
    """Return the smallest schedule that fails in the same way. `run` returns the result of a schedule; `result` is that
    of this one."""
    wanted, num_runs = signs(result), 0
    while True:
        for smaller in _smaller(schedule):
            num_runs += 1
            if signs(run(smaller)) & wanted:
                schedule = smaller
                break
            if num_runs >= _MAX_RUNS:
                return schedule
        else:
            return schedule


def signs(result: Result) -> frozenset[str]:
    """Return the kinds of failures, without members and times."""
    return frozenset(re.sub(r"[\d.]+|\[.*|@\w+", "", violation)[:60] for violation in result.violations)


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Yield every schedule that is one step simpler, the largest steps first."""
    asks, mishaps = schedule.asks, schedule.mishaps
    if len(asks) > 2:
        yield replace(schedule, asks=asks[: len(asks) // 2])
        yield replace(schedule, asks=asks[len(asks) // 2 :])
    for place in range(len(mishaps)):
        yield replace(schedule, mishaps=mishaps[:place] + mishaps[place + 1 :])
    if len(asks) > 1:
        for place in range(len(asks)):
            yield replace(schedule, asks=asks[:place] + asks[place + 1 :])
    for place in range(len(schedule.mutations)):
        yield replace(schedule, mutations=schedule.mutations[:place] + schedule.mutations[place + 1 :])
    yield from _less_mixed(schedule)
    for name in ("read_faults", "speculates", "launches", "disk_blocks", "host_blocks", "swap_blocks", "tenants"):
        if getattr(schedule, name):
            without: Any = {name: type(getattr(schedule, name))()}
            yield replace(schedule, **without)
    yield from _fewer_members(schedule)
    for place, ask in enumerate(asks):
        for simpler in _simpler_asks(ask):
            yield replace(schedule, asks=(*asks[:place], simpler, *asks[place + 1 :]))
    for place, mishap in enumerate(mishaps):
        for shorter in _simpler_mishaps(mishap):
            yield replace(schedule, mishaps=(*mishaps[:place], shorter, *mishaps[place + 1 :]))


def _less_mixed(schedule: Schedule) -> Iterator[Schedule]:
    mix = schedule.mix
    for place in range(len(mix.direct_asks)):
        fewer = mix.direct_asks[:place] + mix.direct_asks[place + 1 :]
        yield replace(schedule, mix=replace(mix, direct_asks=fewer))
    for place in range(len(mix.flips)):
        yield replace(schedule, mix=replace(mix, flips=mix.flips[:place] + mix.flips[place + 1 :]))
    for simpler in (
        replace(mix, of_both=()),
        replace(mix, placement=SEPARATE.placement),
        replace(mix, slo_ttft_ms=0.0),
        replace(mix, slo_tpot_ms=0.0),
        replace(mix, warm_up_s=0.0),
        replace(mix, rotation=None),
        replace(mix, proofs=None),
        replace(mix, wires=None),
        replace(mix, wires=mix.wires and Wires()),
    ):
        if simpler != mix:
            yield replace(schedule, mix=simpler)


def _fewer_members(schedule: Schedule) -> Iterator[Schedule]:
    for role in ("router", "prefill", "decode"):
        is_named = any(ask.prefill == f"{role}1" or ask.decode == f"{role}1" for ask in schedule.mix.direct_asks)
        if getattr(schedule, f"num_{role}s") > 1 and not is_named:
            mishaps = tuple(replace(m, number=0) if m.role == role else m for m in schedule.mishaps)
            asks = tuple(replace(ask, router=0) for ask in schedule.asks) if role == "router" else schedule.asks
            fewer: Any = {f"num_{role}s": 1, "mishaps": mishaps, "asks": asks}
            yield replace(schedule, **fewer)


def _simpler_asks(ask: Ask) -> Iterator[Ask]:
    if ask.cancel_after is not None:
        yield replace(ask, cancel_after=None)
    if ask.reconnect_after is not None:
        yield replace(ask, reconnect_after=None)
    if ask.prompt_logprobs is not None:
        yield replace(ask, prompt_logprobs=None)
    if ask.grammar:
        yield replace(ask, grammar="")
    if ask.n > 1:
        yield replace(ask, n=1)
    if ask.at_s:
        yield replace(ask, at_s=0.0)
    if ask.num_shared:
        yield replace(ask, num_shared=0)
    if ask.max_tokens > 2:
        yield replace(ask, max_tokens=max(2, ask.max_tokens // 2))
    if ask.num_tokens > 4:
        yield replace(ask, num_tokens=max(4, ask.num_tokens // 2))


def _simpler_mishaps(mishap: Mishap) -> Iterator[Mishap]:
    if mishap.occurrence:
        yield replace(mishap, occurrence=0)
    for digits in (0, 1, 2, 3):
        if (at_s := round(mishap.at_s, digits)) != mishap.at_s:
            yield replace(mishap, at_s=at_s)
            break
    if mishap.for_s > 0.5:
        yield replace(mishap, for_s=mishap.for_s / 2)
