"""Tests of all reachable states of two hand-offs with every fault, and of what each guard prevents.

Covered exhaustively, each by itself: two tickets of one to three blocks on one pair of workers, with room for both or
for only one, on either side; two attempts on one ticket, by the same decode worker or by another. In each, control
messages arrive in any order and each of them up to twice, except with renewals. Up to two faults in all, of any kind,
with one block each; one fault with two blocks each, or with renewals. Corrupted reads and broken calls have a scenario
of their own. The long tests add two faults with two blocks each, three blocks, and duplicates of renewals.
"""

import dataclasses

import pytest

from kvtransfer.protocol.handoff import GUARDS
from kvtransfer.protocol.leases import LEASE_GUARDS
from tests.unit.kvtransfer.handoff_model.explore import Report, explore
from tests.unit.kvtransfer.handoff_model.scenario import Scenario
from tests.unit.kvtransfer.protocol.removed_guards import REMOVALS, Removal

_EVERY_KIND = Scenario("").kinds
SCENARIOS = (
    Scenario("one block each, room for both, one fault", faults=1),
    Scenario("one block each, room for one, two faults", prefill_pool=1, decode_pool=1),
    Scenario("two blocks each, room for one, one fault", blocks=(2, 2), faults=1),
    Scenario(
        "two blocks each, room for one above the watermark, one fault",
        blocks=(2, 2),
        decode_pool=3,
        watermark=1,
        faults=1,
    ),
    Scenario(
        "renewals, room for one, one fault, no duplicates",
        prefill_pool=1,
        decode_pool=1,
        renewals=True,
        faults=1,
        duplicates=False,
    ),
    Scenario("second try by the same worker, one fault", blocks=(1,), faults=1),
    Scenario("second importer, two faults", blocks=(1,), workers=(1, 2), prefill_pool=1, decode_pool=1),
    Scenario("corrupted reads and broken calls, two faults", kinds=frozenset({"corrupt", "break"})),
    Scenario(
        "a second transport, reads and channels that fail, two faults",
        alternatives=1,
        prefill_pool=1,
        decode_pool=1,
        kinds=frozenset({"report", "unopened", "cancel", "expiry"}),
    ),
    Scenario("two blocks each, the first cached, one fault", blocks=(2, 2), decode_pool=1, cached=True, faults=1),
    Scenario("choices that end with their first token, one fault", blocks=(2, 2), ended=True, faults=1),
    Scenario("nothing is verified, one fault but no damage", prefill_pool=1, verified=0, faults=1),
    Scenario("a sample is verified, one fault but no damage", blocks=(2, 2), verified=1, faults=1),
    Scenario("finished before an importer attaches, one fault", finished=True, decode_pool=1, faults=1),
    Scenario("several messages as one, one fault", blocks=(2, 2), decode_pool=2, together=True, faults=1),
    Scenario(
        "second importer while the first one reads, one fault", blocks=(2,), workers=(1, 2), hedged=True, faults=1
    ),
)
LONG_SCENARIOS = (
    Scenario("second try by the same worker, two faults", blocks=(1,)),
    Scenario("one block each, room for both, two faults"),
    Scenario("two blocks each, room for one, two faults", blocks=(2, 2)),
    Scenario("two blocks each, the first cached, two faults", blocks=(2, 2), decode_pool=1, cached=True),
    Scenario("second importer while the first one reads, two faults", blocks=(1,), workers=(1, 2), hedged=True),
    Scenario(
        "a second transport, every fault, two faults",
        alternatives=1,
        kinds=frozenset({*_EVERY_KIND, "report", "unopened"}),
    ),
    Scenario("two blocks each, room for one and a half, two faults", blocks=(2, 2), prefill_pool=3, decode_pool=3),
    Scenario("renewals, room for one, one fault", prefill_pool=1, decode_pool=1, renewals=True, faults=1),
    Scenario("renewals, room for both, one fault", renewals=True, faults=1),
    Scenario("nothing is verified, two faults but no damage", prefill_pool=1, verified=0),
    Scenario("finished before an importer attaches, two faults", finished=True, decode_pool=1),
    Scenario(
        "three blocks each, room for one above the watermark, one fault",
        blocks=(3, 3),
        prefill_pool=3,
        decode_pool=4,
        watermark=1,
        faults=1,
    ),
    Scenario(
        "three blocks and one, two faults, no duplicates",
        blocks=(3, 1),
        prefill_pool=3,
        decode_pool=3,
        duplicates=False,
    ),
)


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return []


def _assert_safe(scenario: Scenario, reports: list[Report], capsys: pytest.CaptureFixture[str]) -> None:
    report = explore(scenario)

    reports.append(report)
    with capsys.disabled():
        print(f"\n{report}; {sum(each.num_states for each in reports):,} states in {len(reports)} scenarios")
    assert not report.story, "\n".join(report.story)
    assert report.num_ends > 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_two_hand_offs_are_safe_and_end_with_everything_free(
    scenario: Scenario, reports: list[Report], capsys: pytest.CaptureFixture[str]
) -> None:
    _assert_safe(scenario, reports, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LONG_SCENARIOS, ids=lambda scenario: scenario.name)
def test_larger_hand_offs_are_safe_and_end_with_everything_free(
    scenario: Scenario, reports: list[Report], capsys: pytest.CaptureFixture[str]
) -> None:
    _assert_safe(scenario, reports, capsys)


@pytest.mark.parametrize("removal", REMOVALS, ids=lambda removal: removal.guard)
def test_removing_any_one_guard_gives_a_counterexample(removal: Removal) -> None:
    intact = explore(removal.scenario)
    broken = explore(removal.scenario, removal.guards)

    print(f"without {removal.guard}:", *broken.story, sep="\n    ")
    assert not intact.story
    assert broken.story


def test_every_guard_has_its_removal() -> None:
    names = {field.name for field in dataclasses.fields(GUARDS)} | {
        field.name for field in dataclasses.fields(LEASE_GUARDS)
    }

    assert names - {"leases"} == {removal.guard for removal in REMOVALS}
