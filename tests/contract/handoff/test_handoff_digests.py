"""Two workers agree on a definition of the digest of a block, or the exporter refuses the hand-off."""

from collections.abc import Sequence

import grpc
import pytest

from cluster.errors import HandOffReason
from cluster.protocol.wire import fingerprint_to_wire, unpack_ids
from kvtransfer.digests import KNOWN_DIGESTS, digest_blocks, split_digests
from kvtransfer.exporter.ticket_driver import IncomingCall
from kvtransfer.wire.handoff_wire import IMPORTER_METADATA
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc
from tests.contract.rigs.handoff_parts import DEADLINE_S, IMPORTER, LAYOUT
from tests.contract.rigs.handoff_rig import Rig, handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE

NUM_TOKENS = 3 * BLOCK_SIZE + 3


async def received(rig: Rig, signed: bytes, digests: Sequence[str], num_messages: int) -> list[kv_pb2.ExporterMessage]:
    """Return the first messages that an importer receives that offers these definitions."""
    attach = kv_pb2.Attach(
        ticket=kv_pb2.SignedTicket.FromString(signed),
        transports=["tcp"],
        layout=fingerprint_to_wire(LAYOUT),
        endpoints={"tcp": b""},
        digests=digests,
    )
    async with grpc.aio.insecure_channel(rig.address) as channel:
        call = kv_pb2_grpc.KvTransferStub(channel).HandOff(
            timeout=DEADLINE_S, metadata=((IMPORTER_METADATA, str(IMPORTER)),)
        )
        await call.write(kv_pb2.ImporterMessage(attach=attach))
        messages = [await call.read() for _ in range(num_messages)]
    assert all(isinstance(message, kv_pb2.ExporterMessage) for message in messages)
    return messages


@pytest.mark.parametrize(
    ("offered", "known"),
    [
        (["folded-sums"], KNOWN_DIGESTS),
        (["of tomorrow", "folded-sums"], KNOWN_DIGESTS),
        (["folded-sums"], ("of tomorrow", *KNOWN_DIGESTS)),
    ],
)
async def test_both_sides_use_the_best_definition_that_both_know(offered: list[str], known: Sequence[str]) -> None:
    async with handoff_rig("tcp", exporter_digests=known) as rig:
        prefill = rig.prefill(NUM_TOKENS)
        prefill.compute()
        await rig.digested()
        accepted, sealed, finished = await received(rig, prefill.signed, offered, 3)
        assert accepted.accepted.digest == "folded-sums"
        block_ids = (*unpack_ids(sealed.sealed.block_ids), finished.finished.tail.block_id)
        digests = (*split_digests(sealed.sealed.digests), finished.finished.tail.digest)
        assert block_ids == prefill.block_ids
        assert digests == digest_blocks(rig.source, block_ids)


@pytest.mark.parametrize("offered", [(), ("of tomorrow",)])
async def test_an_importer_without_a_common_definition_is_refused(offered: tuple[str, ...]) -> None:
    async with handoff_rig("tcp", importer_digests=offered) as rig:
        importing = rig.start_import(rig.prefill(NUM_TOKENS))
        assert await rig.failure(importing, match="folded-sums") is HandOffReason.NO_COMMON_PROTOCOL


async def test_importer_refuses_a_definition_that_it_did_not_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admit = IncomingCall._admit

    def too_new(attached: object, accepted: kv_pb2.Accepted) -> None:
        admit(attached, accepted)  # type: ignore[arg-type]
        accepted.digest = "of tomorrow"

    monkeypatch.setattr(IncomingCall, "_admit", staticmethod(too_new))
    async with handoff_rig("tcp") as rig:
        importing = rig.start_import(rig.prefill(NUM_TOKENS))
        assert await rig.failure(importing, match="of tomorrow") is HandOffReason.PROTOCOL
