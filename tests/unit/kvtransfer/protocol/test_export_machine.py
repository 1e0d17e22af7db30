"""Tests of the exporter's side of a hand-off, move by move; test_handoff_exploration tests both sides together."""

from dataclasses import replace

import pytest

from cluster.errors import HandOffReason
from kvtransfer.protocol import export_machine as exporting
from kvtransfer.protocol.export_machine import ExporterState
from kvtransfer.protocol.handoff import (
    Accepted,
    Attach,
    ExportFailed,
    Finished,
    ImporterMessage,
    Outcome,
    Refused,
    Sealed,
    Settle,
    Settled,
)
from kvtransfer.protocol.leases import IllegalMove, LeasePhase, LeasePolicy
from tests.unit.kvtransfer.protocol.handoff_messages import (
    ACCEPTED,
    BLOCKS,
    EPOCH,
    EXPORTER,
    FINISHED,
    STALE,
    TAIL,
    TOKENS,
)


class _Exporter:
    """An export machine with the effects that it has requested."""

    def __init__(self) -> None:
        self.state: ExporterState = exporting.export(EXPORTER, b"ticket", 1, LeasePolicy(6.0, 60.0, 30.0))

    def hear(self, message: ImporterMessage, *, call: int = 1, now_s: float = 0.0) -> tuple[exporting.Action, ...]:
        return self.feed(exporting.FromImporter(call, message), now_s=now_s)

    def feed(self, event: exporting.Event, *, now_s: float = 0.0) -> tuple[exporting.Action, ...]:
        self.state, actions = exporting.advance(self.state, event, now_s)
        return actions


SEAL = exporting.SealBlocks(0, BLOCKS)
FINISH = exporting.Finish(TOKENS, 35, b"prompt", TAIL)
FAIL = exporting.Fail(HandOffReason.PREFILL_FAILED, "out of memory")


def _attached() -> _Exporter:
    exporter = _Exporter()
    exporter.hear(Attach(EPOCH))
    exporter.feed(SEAL)
    return exporter


def test_blocks_are_announced_as_soon_as_sealed() -> None:
    exporter = _Exporter()

    assert exporter.hear(Attach(EPOCH)) == (exporting.Send(1, ACCEPTED),)
    assert exporter.feed(SEAL) == (exporting.Send(1, Sealed(EPOCH, 0, BLOCKS)),)
    assert exporter.feed(FINISH) == (exporting.Send(1, FINISHED),)


def test_late_importer_receives_all_messages_at_once() -> None:
    exporter = _Exporter()
    exporter.feed(SEAL)
    exporter.feed(FINISH)

    sent = exporter.hear(Attach(EPOCH))

    assert sent == (
        exporting.Send(1, ACCEPTED),
        exporting.Send(1, Sealed(EPOCH, 0, BLOCKS)),
        exporting.Send(1, FINISHED),
    )


def test_settling_releases_the_blocks_exactly_once() -> None:
    exporter = _attached()
    exporter.feed(FINISH)

    first = exporter.hear(Settle(EPOCH, Outcome.OK), now_s=5.0)
    again = exporter.hear(Settle(EPOCH, Outcome.OK), now_s=9.0)

    ended = exporting.AttemptEnded(1, LeasePhase.SETTLED, was_valid=True)
    assert first == (exporting.Send(1, Settled(EPOCH, True)), ended, exporting.Release())
    assert again == (exporting.Send(1, Settled(EPOCH, True)),)


def test_expired_lease_releases_the_blocks_and_notifies_the_importer() -> None:
    exporter = _attached()
    exporter.feed(FINISH)

    assert exporter.feed(exporting.Tick(), now_s=6.0) == (
        exporting.Send(1, ExportFailed(EPOCH, HandOffReason.LEASE_LAPSED)),
        exporting.AttemptEnded(1, LeasePhase.LAPSED, was_valid=False),
        exporting.Release(),
    )
    assert exporter.hear(Settle(EPOCH, Outcome.OK), now_s=6.0) == (exporting.Send(1, Settled(EPOCH, False)),)


def test_settling_ok_before_the_prefill_is_done_is_invalid() -> None:
    sent = _attached().hear(Settle(EPOCH, Outcome.OK))

    assert exporting.Send(1, Settled(EPOCH, False)) in sent


def test_replayed_ticket_is_refused_and_the_first_importer_continues() -> None:
    exporter = _attached()
    before = exporter.state

    sent = exporter.hear(Attach(EPOCH), call=2)

    assert sent == (exporting.Send(2, Refused(EPOCH, HandOffReason.REPLAYED_TICKET)),)
    assert exporter.state == before
    assert exporter.hear(Attach(EPOCH)) == ()  # a duplicate on its own call


def test_foreign_call_cannot_settle() -> None:
    exporter = _attached()

    sent = exporter.hear(Settle(EPOCH, Outcome.UNNEEDED), call=2)

    assert sent == (exporting.Send(2, Refused(EPOCH, HandOffReason.REPLAYED_TICKET)),)
    assert exporter.state.leases.is_live


def test_messages_of_another_incarnation_are_dropped() -> None:
    exporter = _attached()

    assert exporter.hear(Settle(STALE, Outcome.OK)) == ()
    assert exporter.state.leases.is_live


def test_failed_prefill_keeps_its_blocks_until_the_importer_settles() -> None:
    exporter = _attached()

    assert exporter.feed(FAIL) == (
        exporting.Send(1, ExportFailed(EPOCH, HandOffReason.PREFILL_FAILED, "out of memory")),
    )
    assert exporting.Release() in exporter.hear(Settle(EPOCH, Outcome.FAILED))


def test_prefill_that_fails_before_its_first_block_releases_at_once() -> None:
    exporter = _Exporter()
    exporter.hear(Attach(EPOCH))

    assert exporter.feed(FAIL)[-1] == exporting.Release()


def test_blocks_of_a_lost_importer_stay_for_another_importer_for_one_lease() -> None:
    exporter = _attached()

    assert exporter.feed(exporting.CallEnded(2)) == ()
    assert exporting.Release() not in exporter.feed(exporting.CallEnded(1), now_s=1.0)
    assert exporting.Release() not in exporter.feed(exporting.Tick(), now_s=6.9)
    assert exporter.feed(exporting.Tick(), now_s=7.0)[-1] == exporting.Release()


def test_next_importer_receives_all_messages_that_a_lost_importer_had_received() -> None:
    exporter, second = _attached(), replace(EPOCH, attempt=2)
    exporter.feed(FINISH)
    exporter.feed(exporting.CallEnded(1))

    exporter.feed(exporting.Reissue(2))
    messages = [
        action.message for action in exporter.hear(Attach(second), call=2) if isinstance(action, exporting.Send)
    ]

    assert [type(message) for message in messages] == [Accepted, Sealed, Finished]
    assert exporter.hear(Settle(second, Outcome.OK), call=2)[-1] == exporting.Release()


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.UNNEEDED])
def test_settling_without_success_releases_the_blocks_at_once(outcome: Outcome) -> None:
    exporter = _attached()
    exporter.feed(FINISH)

    assert exporter.hear(Settle(EPOCH, outcome))[-1] == exporting.Release()


def test_withdrawn_ticket_does_not_wait_for_another_importer() -> None:
    exporter = _attached()
    exporter.feed(FINISH)
    exporter.feed(exporting.Fail(HandOffReason.CANCELLED))

    assert exporting.Release() in exporter.feed(exporting.CallEnded(1))


def test_withdrawing_a_ticket_without_an_importer_releases_its_blocks() -> None:
    exporter = _attached()
    exporter.feed(FINISH)
    exporter.hear(Settle(EPOCH, Outcome.FAILED))

    assert exporting.Release() in exporter.feed(exporting.Fail(HandOffReason.CANCELLED))


def test_second_importer_is_a_second_attempt_and_blocks_stay_until_both_have_ended() -> None:
    exporter = _attached()
    second = replace(EPOCH, attempt=2)
    assert exporter.feed(exporting.Reissue(2)) == ()
    assert exporter.hear(Attach(second), call=2)[0] == exporting.Send(2, replace(ACCEPTED, epoch=second))
    exporter.feed(FINISH)

    assert exporting.Release() not in exporter.feed(exporting.CallEnded(1))
    assert exporter.hear(Settle(second, Outcome.OK), call=2)[-1] == exporting.Release()


def test_released_ticket_is_not_reissued() -> None:
    exporter = _attached()
    exporter.feed(FINISH)
    exporter.hear(Settle(EPOCH, Outcome.OK))

    assert not exporting.can_reissue(exporter.state, 2)
    with pytest.raises(IllegalMove, match=r"reissue 2.*Settle"):
        exporter.feed(exporting.Reissue(2))


def test_a_prefill_that_continues_after_its_release_is_ignored() -> None:
    exporter = _attached()
    exporter.feed(exporting.CallEnded(1))

    assert exporter.feed(exporting.SealBlocks(2, (TAIL.block,))) == ()
    assert exporter.feed(FINISH) == ()


def test_sealing_blocks_out_of_the_tickets_order_is_an_internal_error() -> None:
    with pytest.raises(IllegalMove, match="SealBlocks"):
        _Exporter().feed(exporting.SealBlocks(1, BLOCKS[1:]))
