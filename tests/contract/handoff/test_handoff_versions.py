"""Tests of hand-offs between workers of different versions: the agreed version, refusals, and ignored fields."""

import asyncio

import grpc
import pytest

from cluster.errors import HandOffReason
from cluster.member import ProtocolRange
from cluster.protocol import tickets
from cluster.protocol.wire import epoch_to_wire, fingerprint_to_wire
from kvtransfer.exporter.ticket_driver import IncomingCall
from kvtransfer.wire.handoff_wire import IMPORTER_METADATA
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc
from tests.contract.rigs.handoff_parts import DEADLINE_S, IMPORTER, KEY, LAYOUT
from tests.contract.rigs.handoff_rig import Rig, handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE
from tests.later_version import suspended, with_unknown_fields

VERSIONS = [ProtocolRange(*versions) for versions in ((1, 1), (1, 2), (2, 2), (2, 3))]
NUM_TOKENS = 2 * BLOCK_SIZE + 3


def attach(signed: bytes, protocol_oldest: int = 0, protocol_newest: int = 0) -> kv_pb2.ImporterMessage:
    return kv_pb2.ImporterMessage(
        attach=kv_pb2.Attach(
            ticket=kv_pb2.SignedTicket.FromString(signed),
            digests=["folded-sums"],
            transports=["tcp"],
            layout=fingerprint_to_wire(LAYOUT),
            endpoints={"tcp": b""},
            protocol_oldest=protocol_oldest,
            protocol_newest=protocol_newest,
        )
    )


async def first_answer(rig: Rig, message: kv_pb2.ImporterMessage) -> kv_pb2.ExporterMessage:
    async with grpc.aio.insecure_channel(rig.address) as channel:
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff(
            timeout=DEADLINE_S, metadata=((IMPORTER_METADATA, str(IMPORTER)),)
        )
        await call.write(message)
        answer = await call.read()
        assert isinstance(answer, kv_pb2.ExporterMessage)
        return answer


@pytest.mark.parametrize("exporter", VERSIONS, ids=str)
@pytest.mark.parametrize("importer", VERSIONS, ids=str)
async def test_workers_hand_off_with_a_common_version_and_name_the_reason_without_one(
    exporter: ProtocolRange, importer: ProtocolRange
) -> None:
    async with handoff_rig("tcp", exporter_protocol=exporter, importer_protocol=importer) as rig:
        prefill = rig.prefill(NUM_TOKENS)
        prefill.compute()
        importing = rig.start_import(prefill)
        if exporter.common(importer) is not None:
            async with asyncio.timeout(DEADLINE_S):
                assert rig.holds(prefill, await importing)
            return
        match = f"importer supports protocol {importer}, the exporter {exporter}"
        assert await rig.failure(importing, match=match) is HandOffReason.NO_COMMON_PROTOCOL


@pytest.mark.parametrize(
    ("exporter", "said", "spoken"),
    [((1, 1), {}, 1), ((1, 2), {}, 1), ((1, 2), {"protocol_oldest": 1, "protocol_newest": 3}, 2)],
)
async def test_an_exporter_names_the_chosen_version_and_treats_a_missing_one_as_the_first(
    exporter: tuple[int, int], said: dict[str, int], spoken: int
) -> None:
    async with handoff_rig("tcp", exporter_protocol=ProtocolRange(*exporter)) as rig:
        answer = await first_answer(rig, attach(rig.prefill(NUM_TOKENS).signed, **said))
        assert answer.accepted.protocol == spoken


async def test_an_importer_without_a_version_is_refused_by_an_exporter_that_dropped_the_first() -> None:
    async with handoff_rig("tcp", exporter_protocol=ProtocolRange(2, 2)) as rig:
        answer = await first_answer(rig, attach(rig.prefill(NUM_TOKENS).signed))
        assert answer.refused.reason == HandOffReason.NO_COMMON_PROTOCOL


async def test_versions_that_are_no_range_are_refused() -> None:
    async with handoff_rig("tcp") as rig:
        message = attach(rig.prefill(NUM_TOKENS).signed, protocol_oldest=3, protocol_newest=2)
        assert (await first_answer(rig, message)).refused.reason == HandOffReason.MALFORMED_MESSAGE


async def test_an_exporter_that_answers_in_a_version_that_was_not_offered_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admit = IncomingCall._admit

    def too_new(attached: object, accepted: kv_pb2.Accepted) -> None:
        admit(attached, accepted)  # type: ignore[arg-type]
        accepted.protocol = 2

    monkeypatch.setattr(IncomingCall, "_admit", staticmethod(too_new))
    async with handoff_rig("tcp") as rig:
        importing = rig.start_import(rig.prefill(NUM_TOKENS))
        assert await rig.failure(importing, match="protocol 2") is HandOffReason.PROTOCOL


@suspended
async def test_unknown_messages_of_a_newer_exporter_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields in every message, and unknown messages between them."""
    messages = IncomingCall.messages

    async def later(call: IncomingCall):  # type: ignore[no-untyped-def] # noqa: ANN202
        async for message in messages(call):
            yield with_unknown_fields(message)
            yield with_unknown_fields(kv_pb2.ExporterMessage())

    monkeypatch.setattr(IncomingCall, "messages", later)
    async with handoff_rig("tcp") as rig:
        prefill = rig.prefill(NUM_TOKENS)
        prefill.compute()
        async with asyncio.timeout(DEADLINE_S):
            assert rig.holds(prefill, await rig.start_import(prefill))


@suspended
async def test_unknown_messages_of_a_newer_importer_are_ignored() -> None:
    async with handoff_rig("tcp") as rig:
        prefill = rig.prefill(BLOCK_SIZE)
        prefill.compute()
        await rig.digested()
        epoch = epoch_to_wire(tickets.read(prefill.signed, KEY).epoch)
        settle = kv_pb2.Settle(epoch=epoch, outcome=kv_pb2.Settle.OUTCOME_OK)
        async with grpc.aio.insecure_channel(rig.address) as channel:
            call = kv_pb2_grpc.KvTransferStub(channel).HandOff(
                timeout=DEADLINE_S, metadata=((IMPORTER_METADATA, str(IMPORTER)),)
            )
            for message in (
                attach(prefill.signed),
                kv_pb2.ImporterMessage(),
                kv_pb2.ImporterMessage(renew=kv_pb2.Renew()),
                kv_pb2.ImporterMessage(),
                kv_pb2.ImporterMessage(settle=settle),
            ):
                await call.write(with_unknown_fields(message))
            await call.done_writing()
            answers = [answer.WhichOneof("message") async for answer in call]
        assert answers == ["accepted", "sealed", "finished", "settled"]
        rig.check_clean()
