"""Tests that every Attach and message that is refused is refused by name and leaves nothing reserved."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import grpc
import pytest

from cluster.auth.keys import ClusterKeys
from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import Epoch, LayoutFingerprint, MemberId
from cluster.protocol import tickets
from cluster.protocol.wire import epoch_to_wire, fingerprint_to_wire
from kvtransfer.importer.importer import ExpectedPrompt
from kvtransfer.transports.shm import transport as shm
from kvtransfer.wire.handoff_wire import IMPORTER_METADATA
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc
from tests.contract.rigs.handoff_parts import DEADLINE_S, EXPORTER, IMPORTER, KEY, LAYOUT
from tests.contract.rigs.handoff_rig import Prefill, Rig, handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with handoff_rig("tcp") as rig:
        yield rig


def attach(
    signed: bytes, *, layout: LayoutFingerprint = LAYOUT, transports: tuple[str, ...] = ("tcp",)
) -> kv_pb2.ImporterMessage:
    return kv_pb2.ImporterMessage(
        attach=kv_pb2.Attach(
            ticket=kv_pb2.SignedTicket.FromString(signed),
            digests=["folded-sums"],
            transports=transports,
            layout=fingerprint_to_wire(layout),
            endpoints={"shm": shm.host_identity()},
        )
    )


def settle(prefill: Prefill, outcome: kv_pb2.Settle.Outcome, attempt: int = 1) -> kv_pb2.ImporterMessage:
    epoch = epoch_to_wire(Epoch(EXPORTER, prefill.ticket_id, attempt))
    return kv_pb2.ImporterMessage(settle=kv_pb2.Settle(epoch=epoch, outcome=outcome))


async def converse(
    rig: Rig, *messages: kv_pb2.ImporterMessage, importer: str = str(IMPORTER)
) -> list[kv_pb2.ExporterMessage]:
    """Send all messages at once, then read until the exporter ends the call."""
    async with grpc.aio.insecure_channel(rig.address) as channel:
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff(
            timeout=DEADLINE_S, metadata=((IMPORTER_METADATA, importer),)
        )
        for message in messages:
            await call.write(message)
        await call.done_writing()
        return [message async for message in call]


async def refusal(rig: Rig, message: kv_pb2.ImporterMessage, importer: str = str(IMPORTER)) -> tuple[str, str]:
    answers = await converse(rig, message, importer=importer)
    assert [answer.WhichOneof("message") for answer in answers] == ["refused"]
    reason = answers[0].refused.reason
    assert rig.counters.handoffs["exporter", "", "refused", reason] + sum(
        rig.counters.handoffs["exporter", transport, "refused", reason] for transport in ("tcp", "shm")
    )
    return reason, answers[0].refused.detail


async def test_a_forged_ticket_is_refused(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    forged = tickets.sign(tickets.read(prefill.signed, KEY), ClusterKeys(b"x" * 32))
    assert (await refusal(rig, attach(forged)))[0] == HandOffReason.BAD_SIGNATURE
    assert not prefill.released.is_set()


async def test_a_ticket_for_another_importer_is_refused(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    for importer in ("d1@b2", "d0@restarted", ""):
        reason, detail = await refusal(rig, attach(prefill.signed), importer=importer)
        assert reason == HandOffReason.FOREIGN_TICKET and str(IMPORTER) in detail
    own = MemberId("d1", "c3")
    with pytest.raises(HandOffFailed) as caught:  # the importer itself detects it before it calls the exporter
        await rig.importer.import_blocks(
            handoff_id=1,
            signed_ticket=tickets.reissue(prefill.signed, KEY, attempt=1, importer=own),
            expected=prefill.expected,
            blocks=rig.decode,
        )
    assert caught.value.handoff_reason is HandOffReason.FOREIGN_TICKET


async def test_an_expired_ticket(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    old = dataclasses.replace(tickets.read(prefill.signed, KEY), expires_at_s=900.0)
    assert (await refusal(rig, attach(tickets.sign(old, KEY))))[0] == HandOffReason.TICKET_EXPIRED
    signed = tickets.sign(old, KEY)
    assert await rig.failure(rig.start_import(prefill, signed=signed)) is HandOffReason.TICKET_EXPIRED
    assert rig.counters.handoffs["exporter", "", "refused", "ticket_expired"] == 2


async def test_a_ticket_of_an_earlier_incarnation_is_refused(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    before = dataclasses.replace(tickets.read(prefill.signed, KEY), exporter=MemberId(EXPORTER.id, "a0"))
    reason, detail = await refusal(rig, attach(tickets.sign(before, KEY)))
    assert reason == HandOffReason.STALE_INCARNATION
    assert "p0@a0" in detail and "p0@a1" in detail


async def test_foreign_and_unknown_tickets_are_refused(rig: Rig) -> None:
    ticket = tickets.read(rig.prefill(BLOCK_SIZE).signed, KEY)
    elsewhere = dataclasses.replace(ticket, exporter=MemberId("p7", "a1"))
    unknown = dataclasses.replace(ticket, ticket_id=b"u" * 16)
    for other in (elsewhere, unknown):
        assert (await refusal(rig, attach(tickets.sign(other, KEY))))[0] == HandOffReason.UNKNOWN_TICKET


async def test_another_layout_is_refused_with_both_values_by_name(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    fine_tune = dataclasses.replace(LAYOUT, weights="other weights", kv_format=7)
    reason, detail = await refusal(rig, attach(prefill.signed, layout=fine_tune))
    assert reason == HandOffReason.LAYOUT_MISMATCH
    assert detail == "weights: importer other weights, exporter weights; kv_format: importer 7, exporter 2"


async def test_an_importer_with_another_layout_is_refused_with_both_values() -> None:
    async with handoff_rig("tcp", importer_layout=dataclasses.replace(LAYOUT, dtype="bfloat16")) as rig:
        importing = rig.start_import(rig.prefill(BLOCK_SIZE))
        match = "dtype: importer bfloat16, exporter float32"
        assert await rig.failure(importing, match=match) is HandOffReason.LAYOUT_MISMATCH


async def test_workers_without_a_common_transport_are_refused(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    reason, detail = await refusal(rig, attach(prefill.signed, transports=("nixl", "shm")))
    assert reason == HandOffReason.NO_COMMON_TRANSPORT
    assert "[nixl, shm]" in detail and "[tcp]" in detail


async def test_a_request_with_another_prompt_than_the_tickets_is_refused(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    for expected, reason in (
        (ExpectedPrompt(prefill.num_tokens + 1, prefill.prompt_hash, 1), HandOffReason.COUNT_MISMATCH),
        (ExpectedPrompt(prefill.num_tokens, prefill.prompt_hash, 2), HandOffReason.COUNT_MISMATCH),
        (ExpectedPrompt(prefill.num_tokens, b"another prompt", 1), HandOffReason.PROMPT_MISMATCH),
    ):
        with pytest.raises(HandOffFailed) as caught:
            await rig.importer.import_blocks(
                handoff_id=1, signed_ticket=prefill.signed, expected=expected, blocks=rig.decode
            )
        assert caught.value.handoff_reason is reason


async def test_settling_twice_is_answered_once_and_releases_once(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    prefill.compute()
    await rig.digested()
    done = settle(prefill, kv_pb2.Settle.OUTCOME_OK)
    answers = await converse(rig, attach(prefill.signed), attach(prefill.signed), done, done)
    assert [a.WhichOneof("message") for a in answers] == ["accepted", "sealed", "finished", "settled"]
    assert answers[-1].settled.valid
    assert prefill.released.is_set()  # Rig.release raises on a second one
    rig.check_clean()


async def test_settling_an_unfinished_prefill_as_ok_is_invalid(rig: Rig) -> None:
    prefill = rig.prefill(2 * BLOCK_SIZE)
    prefill.seal(1)
    await rig.digested()
    answers = await converse(rig, attach(prefill.signed), settle(prefill, kv_pb2.Settle.OUTCOME_OK))
    assert answers[-1].WhichOneof("message") == "settled" and not answers[-1].settled.valid


async def test_a_call_that_ends_without_settling_counts_as_failed_and_keeps_the_blocks(rig: Rig) -> None:
    prefill = rig.prefill(2 * BLOCK_SIZE)
    prefill.seal(1)
    await rig.digested()
    answers = await converse(rig, attach(prefill.signed))
    assert [a.WhichOneof("message") for a in answers] == ["accepted", "sealed"]
    await rig.given_up(prefill)
    assert rig.counters.handoffs == {("exporter", "tcp", "failed", "importer_lost"): 1}
    rig.check_clean()


@pytest.mark.parametrize(
    "message",
    [
        kv_pb2.ImporterMessage(),
        kv_pb2.ImporterMessage(renew=kv_pb2.Renew()),
        kv_pb2.ImporterMessage(
            settle=kv_pb2.Settle(epoch=epoch_to_wire(Epoch(EXPORTER, b"t" * 16, 1)), outcome=kv_pb2.Settle.OUTCOME_OK)
        ),
    ],
    ids=["nothing", "renew", "settle"],
)
async def test_a_hand_off_begins_with_attach(rig: Rig, message: kv_pb2.ImporterMessage) -> None:
    assert (await refusal(rig, message))[0] == HandOffReason.PROTOCOL


async def test_a_settle_without_outcome_is_refused(rig: Rig) -> None:
    prefill = rig.prefill(BLOCK_SIZE)
    answers = await converse(rig, attach(prefill.signed), settle(prefill, kv_pb2.Settle.OUTCOME_UNSPECIFIED))
    assert answers[-1].refused.reason == HandOffReason.MALFORMED_MESSAGE
    assert "Settle: outcome must be" in answers[-1].refused.detail
    await rig.given_up(prefill)


async def test_settling_another_attempt_changes_nothing() -> None:
    """An epoch can be settled only by the call that attached it; the lease ends when that call does."""
    async with handoff_rig("tcp") as rig:
        prefill = rig.prefill(BLOCK_SIZE)
        prefill.compute()
        await rig.digested()
        stranger = settle(prefill, kv_pb2.Settle.OUTCOME_OK, attempt=2)
        answers = await converse(rig, attach(prefill.signed), stranger)
        assert "settled" not in [a.WhichOneof("message") for a in answers] or not answers[-1].settled.valid
        await rig.given_up(prefill)


async def test_an_exporter_whose_address_refuses_connections_is_reported_lost() -> None:
    async with handoff_rig("tcp") as rig:
        prefill = rig.prefill(BLOCK_SIZE)
        gone = dataclasses.replace(tickets.read(prefill.signed, KEY), exporter_address="127.0.0.1:1")
        importing = rig.start_import(prefill, signed=tickets.sign(gone, KEY))
        assert await rig.failure(importing, match="UNAVAILABLE") is HandOffReason.EXPORTER_LOST


async def test_a_broken_call_keeps_the_blocks_for_another_attempt(rig: Rig) -> None:
    """The exporter sees the same when its importer is killed."""
    prefill = rig.prefill(2 * BLOCK_SIZE)
    prefill.seal(1)
    async with grpc.aio.insecure_channel(rig.address) as channel, asyncio.timeout(DEADLINE_S):
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff(metadata=((IMPORTER_METADATA, str(IMPORTER)),))
        await call.write(attach(prefill.signed))
        assert (await call.read()).WhichOneof("message") == "accepted"
        call.cancel()
        await rig.given_up(prefill)
    assert rig.counters.handoffs == {("exporter", "tcp", "failed", "importer_lost"): 1}
    rig.check_clean()


async def test_a_call_that_never_attaches_is_refused_by_name(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.exporter.service.ATTACH_S", 0.1)
    async with grpc.aio.insecure_channel(rig.address) as channel, asyncio.timeout(DEADLINE_S):
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff(metadata=((IMPORTER_METADATA, str(IMPORTER)),))
        answer = await call.read()
        assert answer.refused.reason == HandOffReason.PROTOCOL
        assert await call.read() is grpc.aio.EOF
    rig.check_clean()
