"""Tests of the importer's side of a hand-off, move by move; test_handoff_exploration tests both sides together."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.errors import HandOffReason
from kvtransfer.protocol import import_machine as importing
from kvtransfer.protocol import import_state
from kvtransfer.protocol.handoff import (
    ExporterMessage,
    ExportFailed,
    Finished,
    FirstToken,
    Outcome,
    RemoteBlock,
    Renew,
    Sealed,
    Settle,
    Settled,
    Tail,
)
from kvtransfer.protocol.import_machine import HandOffPlan, ImporterPhase, ImporterState
from kvtransfer.protocol.import_state import FallBackReason
from kvtransfer.protocol.leases import IllegalMove
from tests.unit.kvtransfer.protocol.handoff_messages import ACCEPTED, BLOCKS, EPOCH, FINISHED, PLAN, STALE, TOKENS


class _Importer:
    """An import machine with the effects that it has requested."""

    def __init__(self, plan: HandOffPlan = PLAN) -> None:
        self.state: ImporterState
        self.state, actions = importing.begin(plan, 0.0)
        self.actions = list(actions)

    def hear(self, *messages: ExporterMessage, now_s: float = 0.0) -> tuple[import_state.Action, ...]:
        return self.feed(*(import_state.FromExporter(message) for message in messages), now_s=now_s)

    def feed(self, *events: import_state.Event, now_s: float = 0.0) -> tuple[import_state.Action, ...]:
        """Feed these events and return the resulting actions."""
        fresh: list[import_state.Action] = []
        for event in events:
            self.state, actions = importing.advance(self.state, event, now_s)
            fresh += actions
        self.actions += fresh
        return tuple(fresh)


def _as_one(*messages: ExporterMessage) -> tuple[import_state.FromExporter, ...]:
    """Return the events that the driver feeds for exporter messages received together."""
    return tuple(
        import_state.FromExporter(message, is_followed=place < len(messages))
        for place, message in enumerate(messages, 1)
    )


def _pulling() -> _Importer:
    importer = _Importer()
    importer.hear(ACCEPTED)
    importer.feed(import_state.Reserved((10, 11, 12, 13)))
    return importer


def _reading() -> _Importer:
    importer = _pulling()
    importer.hear(Sealed(EPOCH, 0, BLOCKS))
    return importer


def _settling() -> _Importer:
    importer = _reading()
    importer.hear(FINISHED)
    importer.feed(import_state.ReadCompleted(0, (b"d0", b"d1")), import_state.ReadCompleted(1, (b"d2",)))
    assert importer.state.phase is ImporterPhase.SETTLING
    return importer


def test_all_blocks_and_tails_are_reserved_in_one_step_before_the_first_read() -> None:
    importer = _Importer()

    assert importer.hear(Sealed(EPOCH, 0, BLOCKS), ACCEPTED) == (import_state.Reserve(4),)
    assert importer.feed(import_state.Reserved((10, 11, 12, 13))) == (import_state.StartRead(0, (40, 41), (10, 11)),)


def test_blocks_are_pulled_while_prefill_is_still_running() -> None:
    importer = _pulling()

    assert importer.hear(Sealed(EPOCH, 0, BLOCKS[:1])) == (import_state.StartRead(0, (40,), (10,)),)
    assert importer.hear(Sealed(EPOCH, 1, BLOCKS[1:])) == ()  # one read at a time
    assert importer.feed(import_state.ReadCompleted(0, (b"d0",))) == (import_state.StartRead(1, (41,), (11,)),)


def test_all_blocks_announced_in_one_message_are_read_at_once() -> None:
    importer = _pulling()

    assert importer.feed(*_as_one(Sealed(EPOCH, 0, BLOCKS), FINISHED)) == (
        import_state.StartRead(0, (40, 41, 42), (10, 11, 12)),
    )


@pytest.mark.parametrize("last", [Sealed(STALE, 0, BLOCKS), ACCEPTED], ids=["of another epoch", "a duplicate"])
def test_reads_begin_after_the_last_of_several_messages(last: ExporterMessage) -> None:
    importer = _pulling()

    assert importer.feed(*_as_one(Sealed(EPOCH, 0, BLOCKS), last)) == (import_state.StartRead(0, (40, 41), (10, 11)),)


def test_every_choice_reads_its_own_copy_of_the_tail() -> None:
    importer = _reading()
    importer.hear(replace(FINISHED, first_tokens=(FirstToken(7, False), FirstToken(8, False))))

    assert importer.feed(import_state.ReadCompleted(0, (b"d0", b"d1"))) == (
        import_state.StartRead(1, (42, 42), (12, 13)),
    )


def test_tail_of_a_choice_that_ended_is_not_read() -> None:
    importer = _reading()
    importer.hear(FINISHED)

    assert importer.feed(import_state.ReadCompleted(0, (b"d0", b"d1"))) == (import_state.StartRead(1, (42,), (12,)),)


def test_fully_cached_prompt_reads_only_its_tail_and_settles() -> None:
    importer = _Importer()
    importer.hear(ACCEPTED)

    assert importer.feed(import_state.Reserved((10, 11, 12, 13), num_cached=2)) == ()
    assert importer.hear(Sealed(EPOCH, 0, BLOCKS), FINISHED) == (import_state.StartRead(0, (42,), (12,)),)
    assert importer.feed(import_state.ReadCompleted(0, (b"d2",))) == (import_state.Send(Settle(EPOCH, Outcome.OK)),)
    assert importer.hear(Settled(EPOCH, True))[0] == import_state.Deliver((10, 11), (12, 13), TOKENS, 2, 1)


def test_fully_cached_prompt_without_a_tail_settles_without_a_read() -> None:
    importer = _Importer(replace(PLAN, num_tail_valid=0, num_tokens=32))
    importer.hear(ACCEPTED)
    importer.feed(import_state.Reserved((10, 11), num_cached=2))

    assert importer.hear(replace(FINISHED, num_tokens=32, tail=None)) == (import_state.Send(Settle(EPOCH, Outcome.OK)),)


def test_blocks_are_delivered_only_after_a_valid_settle() -> None:
    importer = _settling()
    assert importer.actions[-1] == import_state.Send(Settle(EPOCH, Outcome.OK))

    assert importer.hear(Settled(EPOCH, True)) == (
        import_state.Deliver((10, 11), (12, 13), TOKENS, 0, 3),
        import_state.Close(),
    )
    assert importer.state.is_over


def test_invalid_settle_drops_the_blocks() -> None:
    importer = _settling()

    assert importer.hear(Settled(EPOCH, False)) == (
        import_state.ReportFailure(HandOffReason.LEASE_LAPSED),
        import_state.Discard(frozenset()),
        import_state.Close(),
    )


def test_no_answer_to_settle_counts_as_invalid() -> None:
    importer = _settling()
    deadline_s = importer.state.next_deadline_s
    assert deadline_s == 6.0

    actions = importer.feed(import_state.Tick(), now_s=deadline_s)

    assert import_state.Discard(frozenset()) in actions
    assert importer.hear(Settled(EPOCH, True)) == ()


def test_cached_blocks_are_not_pulled() -> None:
    importer = _Importer()
    importer.hear(ACCEPTED, Sealed(EPOCH, 0, BLOCKS))

    actions = importer.feed(import_state.Reserved((10, 11, 12, 13), num_cached=1))

    assert actions == (import_state.StartRead(0, (41,), (11,)),)


def test_blocks_that_do_not_verify_are_pulled_again_once() -> None:
    importer = _reading()

    again = importer.feed(import_state.ReadCompleted(0, (b"d0", b"wrong")))
    failed = importer.feed(import_state.ReadCompleted(1, (b"wrong",)))

    assert again == (import_state.StartRead(1, (41,), (11,)),)
    assert [action.reason for action in failed if isinstance(action, import_state.ReportFailure)] == [
        HandOffReason.DIGEST_MISMATCH
    ]


def test_destinations_of_a_read_in_flight_are_quarantined_until_the_read_completes() -> None:
    importer = _reading()

    assert importer.feed(import_state.Cancel()) == (
        import_state.ReportFailure(HandOffReason.CANCELLED),
        import_state.Discard(frozenset({10, 11})),
    )
    assert importer.feed(import_state.ReadCompleted(0, (b"d0", b"d1"))) == (
        import_state.ReleaseQuarantined(frozenset({10, 11})),
        import_state.Send(Settle(EPOCH, Outcome.UNNEEDED, HandOffReason.CANCELLED)),
        import_state.Close(),
    )


def test_dead_read_that_does_not_end_has_its_channel_destroyed_at_quarantine_s() -> None:
    importer = _reading()
    importer.feed(import_state.Cancel(), now_s=1.0)
    assert importer.state.next_deadline_s == 11.0
    assert importer.feed(import_state.Tick(), now_s=10.9) == ()

    assert importer.feed(import_state.Tick(), now_s=11.0) == (import_state.DestroyChannel(),)
    assert import_state.ReleaseQuarantined(frozenset({10, 11})) in importer.feed(import_state.ChannelDestroyed())
    assert importer.state.phase is ImporterPhase.ENDED


def test_worker_reports_unhealthy_when_destroying_does_not_help() -> None:
    importer = _reading()
    importer.feed(import_state.Cancel())
    importer.feed(import_state.Tick(), now_s=10.0)

    assert importer.feed(import_state.Tick(), now_s=20.0) == (import_state.ReportUnhealthy(),)
    assert importer.state.next_deadline_s is None


def test_failed_read_may_still_write_to_its_blocks() -> None:
    importer = _reading()

    actions = importer.feed(import_state.ReadFailed(0, "connection reset"))

    assert actions == (
        import_state.ReportFailure(HandOffReason.READ_FAILED, "connection reset"),
        import_state.Discard(frozenset({10, 11})),
        import_state.DestroyChannel(),
    )
    assert importer.state.phase is ImporterPhase.DRAINING


def _with_alternative() -> _Importer:
    importer = _Importer()
    importer.hear(replace(ACCEPTED, num_alternatives=1))
    importer.feed(import_state.Reserved((10, 11, 12, 13)))
    importer.hear(Sealed(EPOCH, 0, BLOCKS))
    return importer


def test_failed_read_falls_back_once_the_first_transport_is_proven_quiet() -> None:
    importer = _with_alternative()

    assert importer.feed(import_state.ReadFailed(0, "reset")) == (import_state.DestroyChannel(),)
    assert importer.hear(FINISHED) == ()  # nothing is read before
    assert importer.feed(import_state.ChannelDestroyed()) == (
        import_state.FallBack(FallBackReason.READ_FAILED),
        import_state.StartRead(1, (40, 41, 42), (10, 11, 12)),
    )
    assert importer.feed(import_state.ReadFailed(1, "reset"))[0] == import_state.ReportFailure(
        HandOffReason.READ_FAILED, "reset"
    )


def test_channel_that_does_not_open_leaves_no_block_to_quarantine() -> None:
    importer = _with_alternative()

    assert importer.feed(import_state.OpenFailed(0)) == (
        import_state.FallBack(FallBackReason.OPEN_FAILED),
        import_state.StartRead(1, (40, 41), (10, 11)),
    )
    assert importer.feed(import_state.OpenFailed(1, "no route")) == (
        import_state.ReportFailure(HandOffReason.READ_FAILED, "no route"),
        import_state.Discard(frozenset()),
        import_state.Send(Settle(EPOCH, Outcome.FAILED, HandOffReason.READ_FAILED)),
        import_state.Close(),
    )


def test_read_past_its_deadline_falls_back_to_another_transport() -> None:
    importer = _with_alternative()

    assert importer.feed(import_state.Tick(), now_s=30.0) == (import_state.DestroyChannel(),)
    assert importer.feed(import_state.ReadCompleted(0, (b"d0", b"d1")), now_s=30.5) == ()  # too late
    assert importer.feed(import_state.ChannelDestroyed(), now_s=31.0)[0] == import_state.FallBack(
        FallBackReason.READ_TIMEOUT
    )


def test_cancel_while_a_broken_channel_is_destroyed_quarantines_its_destinations() -> None:
    importer = _with_alternative()
    importer.feed(import_state.ReadFailed(0))

    assert import_state.Discard(frozenset({10, 11})) in importer.feed(import_state.Cancel())
    assert import_state.ReleaseQuarantined(frozenset({10, 11})) in importer.feed(import_state.ChannelDestroyed())
    assert importer.state.phase is ImporterPhase.ENDED


@pytest.mark.parametrize(
    ("finished", "reason"),
    [
        (replace(FINISHED, num_tokens=36), HandOffReason.COUNT_MISMATCH),
        (replace(FINISHED, first_tokens=TOKENS[:1]), HandOffReason.COUNT_MISMATCH),
        (replace(FINISHED, tail=None), HandOffReason.COUNT_MISMATCH),
        (replace(FINISHED, tail=Tail(RemoteBlock(42, b"d2"), 4)), HandOffReason.COUNT_MISMATCH),
        (replace(FINISHED, prompt_hash=b"another"), HandOffReason.PROMPT_MISMATCH),
    ],
    ids=["tokens", "choices", "no tail", "tail length", "prompt"],
)
def test_kv_of_another_prompt_is_refused(finished: Finished, reason: HandOffReason) -> None:
    importer = _pulling()

    actions = importer.hear(finished)

    assert [action.reason for action in actions if isinstance(action, import_state.ReportFailure)] == [reason]
    assert actions[-2:] == (import_state.Send(Settle(EPOCH, Outcome.FAILED, reason)), import_state.Close())


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Settled(EPOCH, True), HandOffReason.PROTOCOL),
        (Sealed(EPOCH, 0, (RemoteBlock(40, b"other"),)), HandOffReason.PROTOCOL),
        (Sealed(EPOCH, 1, BLOCKS), HandOffReason.COUNT_MISMATCH),
        (ExportFailed(EPOCH, HandOffReason.PREFILL_FAILED, "out of memory"), HandOffReason.PREFILL_FAILED),
    ],
    ids=["settled before Settle", "block changed", "too many blocks", "failed"],
)
def test_a_peer_that_breaks_the_order_or_fails_ends_the_hand_off(
    message: ExporterMessage, reason: HandOffReason
) -> None:
    actions = _reading().hear(message)

    assert [action.reason for action in actions if isinstance(action, import_state.ReportFailure)] == [reason]


def test_messages_of_another_epoch_are_dropped() -> None:
    importer = _settling()

    assert importer.hear(Settled(STALE, True), ExportFailed(STALE, HandOffReason.CANCELLED)) == ()
    assert importer.state.phase is ImporterPhase.SETTLING


def test_duplicates_and_any_order_are_harmless() -> None:
    importer = _Importer()
    late, early = Sealed(EPOCH, 1, BLOCKS[1:]), Sealed(EPOCH, 0, BLOCKS[:1])
    importer.hear(FINISHED, late, late, ACCEPTED, FINISHED, ACCEPTED, early, early)

    actions = importer.feed(import_state.Reserved((10, 11, 12, 13)))

    assert actions == (import_state.StartRead(0, (40, 41, 42), (10, 11, 12)),)


def test_reservation_that_crosses_with_a_cancel_is_left_to_the_discard() -> None:
    importer = _Importer()
    importer.hear(ACCEPTED)

    assert import_state.Discard(frozenset()) in importer.feed(import_state.Cancel())
    assert importer.feed(import_state.Reserved((10, 11, 12, 13))) == ()


def test_importer_renews_its_lease_while_waiting_and_reading() -> None:
    importer = _pulling()
    assert importer.state.next_deadline_s == 2.0

    assert importer.feed(import_state.Tick(), now_s=2.0) == (import_state.Send(Renew(EPOCH)),)
    assert importer.state.next_deadline_s == 4.0


@pytest.mark.parametrize("make", [_Importer, _pulling, _reading, _settling])
def test_every_wait_of_the_importer_has_a_deadline_and_ends(make: Callable[[], _Importer]) -> None:
    importer = make()
    for _ in range(200):
        deadline_s = importer.state.next_deadline_s
        if deadline_s is None:
            break
        importer.feed(import_state.Tick(), now_s=deadline_s)
        if import_state.DestroyChannel() in importer.actions and not importer.state.is_over:
            importer.feed(import_state.ChannelDestroyed(), now_s=deadline_s)

    assert importer.state.phase is ImporterPhase.ENDED


def test_lost_exporter_is_not_settled_with() -> None:
    actions = _pulling().feed(import_state.CallEnded())

    assert actions == (
        import_state.ReportFailure(HandOffReason.EXPORTER_LOST),
        import_state.Discard(frozenset()),
        import_state.Close(),
    )


def test_illegal_event_raises_with_the_history() -> None:
    with pytest.raises(IllegalMove, match=r"read 5 completed.*Accepted:attaching > Reserved:reserving"):
        _pulling().feed(import_state.ReadCompleted(5, (b"",)))
