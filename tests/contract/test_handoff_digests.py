"""Hand-offs between workers that know different definitions of a block's digest: both sides compute the same one."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest

from cluster.errors import HandOffReason
from cluster.protocol import tickets
from cluster.protocol.kv_wire import fingerprint_to_wire
from cluster.protocol.wire import unpack_ids
from kvtransfer.digest.definitions import DEFINITIONS, FOLDED, SUMS, DigestDefinition, digest_blocks, split_digests
from kvtransfer.exporter.export_call import ExportCall
from kvtransfer.wire.handoff_wire import IMPORTER_METADATA
from tandem.v1 import kv_pb2, kv_pb2_grpc
from tests.contract.handoff_rig import DEADLINE_S, IMPORTER, KEY, LAYOUT, Rig, handoff_rig
from tests.contract.kv_pools import BLOCK_SIZE

NUM_TOKENS = 3 * BLOCK_SIZE + 3
EARLIER = (SUMS,)  # what the previous version knows


def names(definitions: Sequence[DigestDefinition]) -> str:
    return "+".join(definition.name for definition in definitions)


async def told(rig: Rig, signed: bytes, digests: Sequence[str], num_messages: int) -> list[kv_pb2.ExporterMessage]:
    """What an importer hears that names these definitions, one message after the other."""
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
        heard = [await call.read() for _ in range(num_messages)]
    assert all(isinstance(message, kv_pb2.ExporterMessage) for message in heard)
    return heard


@pytest.mark.parametrize("is_early", [True, False], ids=["attached before", "attached after"])
@pytest.mark.parametrize("exporter", [DEFINITIONS, EARLIER], ids=names)
@pytest.mark.parametrize("importer", [DEFINITIONS, EARLIER], ids=names)
async def test_every_block_is_verified_whatever_the_two_sides_know(
    exporter: Sequence[DigestDefinition], importer: Sequence[DigestDefinition], is_early: bool
) -> None:
    async with handoff_rig("tcp", exporter_digests=exporter, importer_digests=importer) as rig:
        prefill = rig.prefill(NUM_TOKENS, num_choices=2)
        if is_early:
            importing = rig.start_import(prefill)
            prefill.seal(1)
            await rig.read_arrived()
            prefill.compute()
        else:
            prefill.compute()
            await rig.digested()
            importing = rig.start_import(prefill)
        async with asyncio.timeout(DEADLINE_S):
            assert rig.holds(prefill, await importing)
            await prefill.released.wait()
        assert (rig.counters.num_verified, rig.counters.num_unverified) == (5, 0)
        assert rig.counters.num_digest_failures == 0
        rig.decode.finish(1)
        rig.check_clean()


@pytest.mark.parametrize(
    ("named", "exporter", "spoken"),
    [
        ([], DEFINITIONS, SUMS),
        (["piece-sums"], DEFINITIONS, SUMS),
        (["folded-sums", "piece-sums"], DEFINITIONS, FOLDED),
        (["piece-sums", "of tomorrow", "folded-sums"], DEFINITIONS, FOLDED),
        (["of tomorrow"], DEFINITIONS, SUMS),
        (["folded-sums", "piece-sums"], EARLIER, SUMS),
    ],
)
async def test_the_best_definition_that_both_know_is_said_and_kept_to(
    named: list[str], exporter: Sequence[DigestDefinition], spoken: DigestDefinition
) -> None:
    async with handoff_rig("tcp", exporter_digests=exporter) as rig:
        prefill = rig.prefill(NUM_TOKENS)
        prefill.compute()
        await rig.digested()
        accepted, sealed, finished = await told(rig, prefill.signed, named, 3)
        assert accepted.accepted.digest == spoken.name
        block_ids = (*unpack_ids(sealed.sealed.block_ids), finished.finished.tail.block_id)
        heard = (*split_digests(sealed.sealed.digests), finished.finished.tail.digest)
        assert block_ids == prefill.block_ids
        assert heard == digest_blocks(rig.source, block_ids, spoken)


async def test_a_second_importer_of_another_version_hears_digests_of_its_own() -> None:
    async with handoff_rig("tcp") as rig:
        prefill = rig.prefill(NUM_TOKENS)
        prefill.compute()
        rig.watched.num_failing = 1
        assert await rig.failure(rig.start_import(prefill)) is HandOffReason.READ_FAILED
        await rig.counters.exported.wait()
        rig.importer._means = replace(rig.importer._means, digests=EARLIER)
        again = tickets.reissue(prefill.signed, KEY, attempt=2, importer=IMPORTER)
        async with asyncio.timeout(DEADLINE_S):
            assert rig.holds(prefill, await rig.start_import(prefill, 2, signed=again))
        assert (rig.counters.num_verified, rig.counters.num_digest_failures) == (4, 0)
        rig.decode.finish(2)


async def test_a_block_that_changed_since_it_was_sealed_is_caught_in_an_older_definition_too() -> None:
    """Its digest is taken late there, but only that of what was sealed is told."""
    async with handoff_rig("tcp", importer_digests=EARLIER) as rig:
        prefill = rig.prefill(NUM_TOKENS)
        prefill.compute()
        await rig.digested()
        rig.source.raw[prefill.block_ids[1], 7] ^= 1
        assert await rig.failure(rig.start_import(prefill), match=r"blocks \[1\]") is HandOffReason.DIGEST_MISMATCH
        await rig.given_up(prefill)
        rig.check_clean()


async def test_an_exporter_that_takes_a_definition_nobody_offered_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = ExportCall._admit

    def too_new(attached: object, accepted: kv_pb2.Accepted) -> None:
        admit(attached, accepted)  # type: ignore[arg-type]
        accepted.digest = "of tomorrow"

    monkeypatch.setattr(ExportCall, "_admit", staticmethod(too_new))
    async with handoff_rig("tcp") as rig:
        importing = rig.start_import(rig.prefill(NUM_TOKENS))
        assert await rig.failure(importing, match="of tomorrow") is HandOffReason.PROTOCOL
