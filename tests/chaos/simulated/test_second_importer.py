"""Schedules in which a decode worker dies before its sequences run: another one imports the prefilled KV."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from unittest import mock

from cluster.auth.keys import ClusterKeys
from cluster.messages import MemberId, Ticket
from cluster.protocol import tickets
from tests.chaos.simulated.machine import simulated_machine
from tests.chaos.simulated.schedule import Ask, Kind, Mishap, Phase, Schedule, plain_schedule
from tests.chaos.simulated.world import run_schedule

_FIXED = range(16)
_NUM_ASKS = 4
_BEFORE_IT_RUNS = (Phase.QUEUED, Phase.PREFILLING, Phase.FIRST_TOKEN, Phase.PULLING)


def importer_dies(seed: int) -> Schedule:
    """Return a schedule in which one of two decode workers dies before some of its sequences run."""
    dice = Random(f"{seed} importer dies")
    asks = tuple(
        Ask(dice.random() / 4, 0, number % 2, 8, dice.randint(8, 40), dice.randint(5, 20), n=dice.choice((1, 1, 2)))
        for number in range(_NUM_ASKS)
    )
    phase = dice.choice(_BEFORE_IT_RUNS)
    death = Mishap(Kind.KILL, "decode", 0, dice.random() / 50, for_s=1.0, phase=phase, occurrence=dice.choice((0, 1)))
    return replace(
        plain_schedule(seed),
        num_routers=1,
        num_prefills=1,
        num_decodes=2,
        step_s=0.1,
        asks=asks,
        mishaps=(death,),
    )


def test_a_prompt_prefilled_for_a_dead_decode_worker_is_imported_by_another() -> None:
    num_reissued, num_without_a_prefill_more = 0, 0
    with simulated_machine():
        for seed in _FIXED:
            reissued: list[tuple[Ticket, Ticket]] = []
            with mock.patch.object(tickets, "reissue", _noting(reissued)):
                result = run_schedule(importer_dies(seed))
            assert not result.violations, f"seed {seed}: {result.violations}"
            assert result.outcomes == Counter(ok=_NUM_ASKS)
            for before, after in reissued:
                _assert_same_but_for_another(before, after)
            num_prefills = sum(kind == "PrefillRequest" for *_, kind in result.trace)
            num_reissued += len(reissued)
            num_without_a_prefill_more += bool(reissued) and num_prefills == _NUM_ASKS
    assert num_reissued >= len(_FIXED)
    assert num_without_a_prefill_more >= len(_FIXED) // 2  # in the others some sequences ran already


_REISSUE = tickets.reissue


def _noting(reissued: list[tuple[Ticket, Ticket]]) -> Callable[..., bytes]:
    """Return the real `reissue`, which also keeps each ticket before and after it."""

    def reissue(signed: bytes, keys: ClusterKeys, *, attempt: int, importer: MemberId) -> bytes:
        again = _REISSUE(signed, keys, attempt=attempt, importer=importer)
        reissued.append((tickets.read(signed, keys), tickets.read(again, keys)))
        return again

    return reissue


def _assert_same_but_for_another(before: Ticket, after: Ticket) -> None:
    assert after.attempt > before.attempt
    assert after.importer != before.importer
    assert replace(after, attempt=before.attempt, importer=before.importer) == before
