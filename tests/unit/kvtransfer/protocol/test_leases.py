"""Leases on a ticket's blocks: when they start, how long they last, and the events that end them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import HandOffReason
from kvtransfer.protocol import leases as rules
from kvtransfer.protocol.leases import IllegalMove, Lease, LeasePhase, LeasePolicy, TicketLeases, offer

POLICY = LeasePolicy(lease_s=5.0, max_lease_s=12.0, attach_timeout_s=60.0)


def _attached(now_s: float = 0.0) -> TicketLeases:
    leases, refusal = rules.attach(offer(POLICY, 1), 1, now_s)
    assert refusal is None
    return leases


def _running(now_s: float = 0.0) -> TicketLeases:
    return rules.seal(_attached(now_s), now_s)


def _phase(leases: TicketLeases, attempt: int = 1) -> LeasePhase:
    lease = leases.find(attempt)
    assert lease is not None
    return lease.phase


def test_lease_starts_with_the_first_sealed_block() -> None:
    leases = _attached(now_s=0.0)
    assert leases.next_deadline_s is None

    leases = rules.seal(leases, 30.0)

    assert _phase(leases) is LeasePhase.RUNNING
    assert leases.next_deadline_s == 35.0


def test_lease_of_a_late_importer_starts_at_the_attach() -> None:
    leases, _ = rules.attach(rules.seal(offer(POLICY, 1), 0.0), 1, 40.0)

    assert leases.next_deadline_s == 45.0


def test_ticket_without_an_importer_ends_by_its_own_deadline_counted_from_its_first_block() -> None:
    leases = rules.seal(offer(POLICY, 1), 100.0)

    before, _ = rules.reap(leases, 159.9)
    after, lapsed = rules.reap(leases, 160.0)

    assert before.is_live
    assert not after.is_live
    assert lapsed == ()


def test_attaching_after_the_attach_deadline_is_refused_before_and_after_reaping() -> None:
    leases = rules.seal(offer(POLICY, 1), 0.0)
    reaped, _ = rules.reap(leases, 60.0)

    assert rules.attach(leases, 1, 60.0) == (leases, HandOffReason.LEASE_LAPSED)
    assert rules.attach(reaped, 1, 60.0) == (reaped, HandOffReason.UNKNOWN_TICKET)


def test_expired_lease_unpins_its_blocks() -> None:
    leases, lapsed = rules.reap(_running(), 5.0)

    assert lapsed == (1,)
    assert not leases.is_live


def test_renewed_lease_outlives_its_first_deadline() -> None:
    leases, lapsed = rules.reap(rules.renew(_running(), 1, 4.0), 8.9)

    assert lapsed == ()
    assert leases.is_live


def test_renewal_does_not_extend_beyond_the_maximum() -> None:
    leases = _running()
    for now_s in (4.0, 8.0, 11.0):
        leases = rules.renew(leases, 1, now_s)

    assert leases.next_deadline_s == 12.0
    assert not rules.settle(leases, 1, 12.0)[1]


def test_renewal_does_not_revive_an_expired_lease_that_was_not_reaped() -> None:
    leases = rules.renew(_running(), 1, 5.0)

    assert not rules.settle(leases, 1, 5.0)[1]


def test_settling_in_time_is_valid_and_late_is_not() -> None:
    assert rules.settle(_running(), 1, 4.9)[1]
    assert not rules.settle(_running(), 1, 5.0)[1]


def test_settling_twice_gives_the_first_answer() -> None:
    in_time, _ = rules.settle(_running(), 1, 1.0)
    late, _ = rules.settle(_running(), 1, 6.0)

    assert rules.settle(in_time, 1, 100.0) == (in_time, True)
    assert rules.settle(late, 1, 0.0) == (late, False)


def test_settling_before_the_first_sealed_block_is_not_valid() -> None:
    leases, valid = rules.settle(_attached(), 1, 0.0)

    assert not valid
    assert not leases.is_live


def test_an_attempt_can_attach_only_once() -> None:
    settled, _ = rules.settle(_running(), 1, 1.0)

    for leases in (_attached(), _running(), settled):
        assert rules.attach(leases, 1, 1.0) == (leases, HandOffReason.REPLAYED_TICKET)


def test_blocks_stay_pinned_until_the_last_attempt_ends() -> None:
    leases = rules.reissue(_running(), 2, 1.0)
    leases, _ = rules.attach(leases, 2, 1.0)
    leases, valid = rules.settle(leases, 1, 2.0)
    assert valid
    assert leases.is_live

    leases, valid = rules.settle(leases, 2, 3.0)

    assert valid
    assert not leases.is_live


def test_reissuing_withdraws_attempts_without_an_importer() -> None:
    leases = rules.reissue(offer(POLICY, 1), 2, 0.0)

    assert rules.attach(leases, 1, 0.0)[1] is HandOffReason.UNKNOWN_TICKET
    assert rules.attach(leases, 2, 0.0)[1] is None


def test_after_the_last_lease_there_is_no_new_attempt() -> None:
    ended, _ = rules.reap(_running(), 5.0)

    assert not rules.can_reissue(ended, 2)
    with pytest.raises(IllegalMove, match="attempt 2"):
        rules.reissue(ended, 2, 5.0)


def test_importer_that_disconnects_without_settling_ends_its_lease() -> None:
    leases = rules.end(_running(), 1)

    assert not leases.is_live
    assert rules.settle(leases, 1, 0.0) == (leases, False)


def test_failed_importers_ticket_is_vacant_for_as_long_as_a_lease() -> None:
    vacant = rules.vacate(_running(), 1, 2.0)

    assert vacant.is_pinned
    assert not vacant.is_live
    assert rules.reap(vacant, 6.9)[0].is_pinned
    assert not rules.reap(vacant, 7.0)[0].is_pinned


def test_vacant_ticket_goes_to_another_importer_with_a_lease_of_its_own() -> None:
    leases = rules.reissue(rules.vacate(_running(), 1, 2.0), 2, 6.0)
    leases, refusal = rules.attach(leases, 2, 6.5)

    assert refusal is None
    assert leases.next_deadline_s == 11.5
    assert leases.find(1) == Lease(1, LeasePhase.SETTLED)


def test_importer_lost_before_the_first_sealed_block_leaves_a_vacancy() -> None:
    vacant = rules.seal(rules.vacate(_attached(), 1, 0.0), 3.0)

    assert rules.can_reissue(vacant, 2)
    assert vacant.next_deadline_s == 5.0


def test_expired_lease_leaves_no_vacancy() -> None:
    leases = rules.vacate(_running(), 1, 5.0)

    assert _phase(leases) is LeasePhase.LAPSED
    assert not leases.is_pinned
    assert not rules.can_reissue(leases, 2)


def test_ticket_is_not_vacant_while_another_attempt_runs() -> None:
    leases, _ = rules.attach(rules.reissue(_running(), 2, 1.0), 2, 1.0)

    assert rules.vacate(leases, 1, 2.0).vacant_until_s is None


def test_closed_ticket_is_neither_vacant_nor_reissued() -> None:
    leases = rules.withdraw(_running())

    assert not rules.can_reissue(leases, 2)
    assert not rules.vacate(leases, 1, 1.0).is_pinned
    assert not rules.withdraw(rules.vacate(_running(), 1, 1.0)).is_pinned


_OPERATIONS = st.sampled_from(["attach", "seal", "renew", "settle", "end", "vacate", "reap", "reissue", "withdraw"])


def _apply(leases: TicketLeases, operation: str, attempt: int, now_s: float) -> TicketLeases:
    match operation:
        case "attach":
            return rules.attach(leases, attempt, now_s)[0]
        case "seal":
            return rules.seal(leases, now_s)
        case "renew":
            return rules.renew(leases, attempt, now_s)
        case "settle":
            return rules.settle(leases, attempt, now_s)[0]
        case "end":
            return rules.end(leases, attempt)
        case "vacate":
            return rules.vacate(leases, attempt, now_s)
        case "reap":
            return rules.reap(leases, now_s)[0]
        case "reissue":
            newest = leases.leases[-1].attempt + 1
            return rules.reissue(leases, newest, now_s) if rules.can_reissue(leases, newest) else leases
        case _:
            return rules.withdraw(leases)


@given(st.lists(st.tuples(_OPERATIONS, st.integers(1, 3), st.floats(0.0, 10.0)), max_size=40))
def test_leases_keep_their_invariants_for_any_sequence_of_events(story: list[tuple[str, int, float]]) -> None:
    leases, now_s = offer(POLICY, 1), 0.0
    started_s: dict[int, float] = {}
    for operation, attempt, waited_s in story:
        now_s += waited_s
        before = leases
        leases = _apply(leases, operation, attempt, now_s)

        leases.check()
        for lease in leases.leases:
            old = before.find(lease.attempt)
            _assert_moved_legally(old, lease)
            if lease.phase is LeasePhase.RUNNING:
                first_s = started_s.setdefault(lease.attempt, now_s)
                assert lease.deadline_s is not None
                assert lease.deadline_s <= first_s + POLICY.max_lease_s
            if lease.was_valid and old is not None and not old.was_valid:
                assert old.deadline_s is not None
                assert now_s < old.deadline_s
        assert before.is_pinned or not leases.is_pinned, "an ended ticket came back"

    for _ in range(4):  # every lease ends at its deadline without an event
        deadline_s = leases.next_deadline_s
        if deadline_s is not None:
            leases, _ = rules.reap(leases, deadline_s)
    assert leases.next_deadline_s is None
    assert not leases.has_sealed or not leases.is_pinned


def _assert_moved_legally(old: Lease | None, new: Lease) -> None:
    if old is not None and not old.is_live:
        assert new == old, "an ended lease changed"


def test_attempts_only_count_upwards() -> None:
    with pytest.raises(IllegalMove, match="attempt 1"):
        rules.reissue(_running(), 1, 0.0)
