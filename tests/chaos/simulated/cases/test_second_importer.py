"""Schedules in which one side of a hand-off dies.

If the decode worker dies before its sequences run, another one imports the prefilled KV. If the prefill worker dies, no
other decode worker is asked, and another prefill worker computes the prompt.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from unittest import mock

from cluster.auth.keys import ClusterKeys
from cluster.messages import MemberId, Ticket
from cluster.protocol import tickets
from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, plain_schedule
from tests.chaos.simulated.world import run_schedule

_FIXED = range(8)
_READ_FAILS_FIRST = (117, 136, 252)  # of `exporter_dies`: in some the failed read reaches the router before the death
_COARSE_TICK_S = 0.05
_NUM_ASKS = 4
_TROUBLE_S = 20.0
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
    return _with_two_decode_workers(seed, asks, death, num_prefills=1)


def _with_two_decode_workers(seed: int, asks: tuple[Ask, ...], death: Mishap, *, num_prefills: int) -> Schedule:
    return replace(
        plain_schedule(seed),
        num_routers=1,
        num_prefills=num_prefills,
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


def importer_cannot_read(seed: int) -> Schedule:
    """Return a schedule in which one of two decode workers cannot read the KV of a prefill worker that lives."""
    dice = Random(f"{seed} cannot read")
    asks = tuple(
        Ask(dice.random() / 4, 0, number % 2, 8, dice.randint(8, 40), dice.randint(5, 20))
        for number in range(_NUM_ASKS)
    )
    trouble = Mishap(Kind.UNREADABLE, "decode", 0, 0.0, for_s=_TROUBLE_S)
    return _with_two_decode_workers(seed, asks, trouble, num_prefills=1)


def test_a_ticket_is_reissued_as_soon_as_its_exporter_has_answered_a_health_check() -> None:
    """The exporter answers at the time at which the read failed, by the clock of the router."""
    with simulated_machine(), mock.patch("tests.chaos.simulated.members.member.UVLOOP_TICK_S", _COARSE_TICK_S):
        for seed in _FIXED[:4]:
            result = run_schedule(importer_cannot_read(seed))
            assert not result.violations, f"seed {seed}: {result.violations}"
            assert result.outcomes == Counter(ok=_NUM_ASKS)
            assert result.reached["counted: tickets_reissued handoff read_failed"] >= 2
            assert result.simulated_s < _TROUBLE_S + 2, f"seed {seed}: a request waited"


def exporter_dies(seed: int) -> Schedule:
    """Return a schedule in which one of two prefill workers dies while decode workers import from it."""
    dice = Random(f"{seed} exporter dies")
    asks = tuple(
        Ask(dice.random() / 4, 0, number % 2, 8, dice.randint(40, 70), dice.randint(5, 20))
        for number in range(_NUM_ASKS)
    )
    phase = dice.choice((Phase.PREFILLING, Phase.FIRST_TOKEN, Phase.PULLING))
    death = Mishap(Kind.KILL, "prefill", 0, dice.random() / 50, for_s=5.0, phase=phase, occurrence=dice.choice((0, 1)))
    return _with_two_decode_workers(seed, asks, death, num_prefills=2)


def test_the_death_of_a_prefill_worker_costs_one_attempt_and_no_prompt_is_prefilled_by_a_decode_worker() -> None:
    """A decode worker may see the failed read before the router sees the death."""
    reached: Counter[str] = Counter()
    with simulated_machine():
        for seed in (*_FIXED[:4], *_READ_FAILS_FIRST):
            result = run_schedule(exporter_dies(seed))
            assert not result.violations, f"seed {seed}: {result.violations}"
            assert result.outcomes == Counter(ok=_NUM_ASKS)
            reached.update(result.reached)
    assert reached["counted: decode_import_failed read_failed"]
    assert not [name for name in reached if name.startswith(("counted: tickets_reissued", "counted: local_prefills"))]


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
