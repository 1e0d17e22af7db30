"""--kv-verify keyed over real transports: forged, moved and replayed blocks are found, and what cannot be keyed is
refused by name.

An attacker on the path is played by the transport, which changes bytes, and by the exporter's side of the call, which
changes its messages after their tags were made."""

import asyncio
from collections.abc import Callable

import pytest

from cluster.auth.keys import ClusterKeys, Secrets
from cluster.errors import HandOffFailed, HandOffReason
from cluster.protocol import tickets
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.exporter import ticket_driver
from kvtransfer.exporter.exporter import FirstToken
from kvtransfer.protocol.handoff import ExporterMessage, RemoteBlock, Sealed
from kvtransfer.wire.handoff_wire import to_wire
from tandem.internal.v1 import kv_pb2
from tests.contract.rigs.handoff_parts import DEADLINE_S, IMPORTER
from tests.contract.rigs.handoff_rig import Prefill, Rig, handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE
from tests.unit.kvtransfer.digests.test_digests import FORGED_CHANGE

KEYED, ALL = TransferSettings(kv_verify="keyed"), TransferSettings()
OLD, NEW = b"o" * 32, b"n" * 32
NUM_TOKENS = 5 * BLOCK_SIZE + 1


async def _delivered(rig: Rig, prefill: Prefill, *, signed: bytes = b"") -> bool:
    """Import, and return whether every byte arrived as it was computed."""
    prefill.compute()
    async with asyncio.timeout(DEADLINE_S):
        imported = await rig.start_import(prefill, signed=signed)
        await prefill.released.wait()
    is_right = rig.holds(prefill, imported)
    rig.decode.finish(1)
    rig.check_clean()
    return is_right


async def _refusal(rig: Rig, prefill: Prefill) -> HandOffReason:
    prefill.compute()
    with pytest.raises(HandOffFailed) as refused:
        async with asyncio.timeout(DEADLINE_S):
            await rig.start_import(prefill)
    await rig.given_up(prefill)
    await rig.all_quiet()
    rig.check_clean()
    return refused.value.handoff_reason


@pytest.mark.parametrize(
    ("transport", "importer", "wire_dtype"),
    [("tcp", KEYED, "native"), ("shm", KEYED, "native"), ("tcp", KEYED, "int8"), ("tcp", ALL, "native")],
    ids=["tcp", "shm", "int8", "an importer with all"],
)
async def test_a_keyed_hand_off_moves_the_same_bytes(
    transport: str, importer: TransferSettings, wire_dtype: str
) -> None:
    async with handoff_rig(transport, settings=KEYED, importer_settings=importer, wire_dtype=wire_dtype) as rig:
        assert await _delivered(rig, rig.prefill(NUM_TOKENS, num_choices=2))
        assert rig.counters.num_verified == 7


@pytest.mark.parametrize("settings", [ALL, KEYED], ids=["all", "keyed"])
async def test_a_change_that_keeps_every_public_sum_is_found_only_by_keyed_digests(settings: TransferSettings) -> None:
    async with handoff_rig("tcp", settings=settings) as rig:
        rig.source.raw[:, : len(FORGED_CHANGE)] = 64

        def forge(block_id: int) -> None:
            for place, change in enumerate(FORGED_CHANGE):
                rig.arriving.raw[block_id, place] += change

        rig.watched.damage, rig.watched.num_damaged = forge, 9
        prefill = rig.prefill(NUM_TOKENS)
        if settings is ALL:
            assert not await _delivered(rig, prefill), "the attack works where digests have no key"
        else:
            assert await _refusal(rig, prefill) is HandOffReason.DIGEST_MISMATCH


def _on_path(monkeypatch: pytest.MonkeyPatch, change: Callable[[Sealed], Sealed]) -> None:
    def changed(message: ExporterMessage) -> kv_pb2.ExporterMessage:
        return to_wire(change(message) if isinstance(message, Sealed) else message)

    monkeypatch.setattr(ticket_driver, "to_wire", changed)


def _swapped(message: Sealed) -> Sealed:
    first, second, *others = message.blocks
    return Sealed(message.epoch, message.first_index, (second, first, *others))


@pytest.mark.parametrize("settings", [ALL, KEYED], ids=["all", "keyed"])
async def test_blocks_that_swap_places_with_their_tags_are_found_only_by_keyed_digests(
    settings: TransferSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_path(monkeypatch, _swapped)
    async with handoff_rig("tcp", settings=settings) as rig:
        prefill = rig.prefill(NUM_TOKENS)
        if settings is ALL:
            assert not await _delivered(rig, prefill), "the attack works where digests have no key"
        else:
            assert await _refusal(rig, prefill) is HandOffReason.DIGEST_MISMATCH


async def test_the_blocks_and_tags_of_another_ticket_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[RemoteBlock, ...]] = []

    def replay(message: Sealed) -> Sealed:
        recorded.append(message.blocks)
        return Sealed(message.epoch, message.first_index, recorded[0])

    _on_path(monkeypatch, replay)
    async with handoff_rig("tcp", settings=KEYED) as rig:
        assert await _delivered(rig, rig.prefill(NUM_TOKENS))
        assert await _refusal(rig, rig.prefill(NUM_TOKENS)) is HandOffReason.DIGEST_MISMATCH


async def test_a_block_whose_provenance_is_changed_on_the_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_verified(message: Sealed) -> Sealed:
        return Sealed(
            message.epoch, message.first_index, tuple(block._replace(is_unverified=False) for block in message.blocks)
        )

    _on_path(monkeypatch, call_verified)
    async with handoff_rig("tcp", settings=KEYED) as rig:
        prefill = rig.prefill(BLOCK_SIZE)
        rig.exporter.seal(
            prefill.ticket_id, first_index=0, block_ids=prefill.block_ids, unverified={*prefill.block_ids}
        )
        rig.exporter.finish(prefill.ticket_id, first_tokens=[FirstToken(100, ended=False)], tail=None)
        reason = await rig.failure(rig.start_import(prefill), match="pulled twice")
        assert reason is HandOffReason.DIGEST_MISMATCH
        await rig.given_up(prefill)


async def test_an_exporter_without_keyed_digests_is_refused_by_name() -> None:
    async with handoff_rig("tcp", settings=ALL, importer_settings=KEYED) as rig:
        importing = rig.start_import(rig.prefill(NUM_TOKENS))
        reason = await rig.failure(importing, match=r"by \[keyed-sums \w{8}\], the exporter by \[folded-sums\]")
        assert reason is HandOffReason.NO_COMMON_PROTOCOL


@pytest.mark.parametrize("first", ["issue", "reissue"])
async def test_a_ticket_from_before_a_rotation_is_imported_after_it(first: str) -> None:
    """Also where a router reissues it, and signs with the secret that it has by then."""
    before, after = ClusterKeys(Secrets(OLD, other=NEW)), ClusterKeys(Secrets(NEW, other=OLD))
    async with handoff_rig("tcp", settings=KEYED, exporter_keys=before, importer_keys=after) as rig:
        prefill = rig.prefill(NUM_TOKENS)
        signed = tickets.reissue(prefill.signed, after, attempt=2, importer=IMPORTER) if first == "reissue" else b""
        assert await _delivered(rig, prefill, signed=signed)


async def test_a_ticket_under_a_secret_that_was_dropped_is_refused_by_name() -> None:
    before, after = ClusterKeys(Secrets(OLD, other=NEW)), ClusterKeys(NEW)
    async with handoff_rig("tcp", settings=KEYED, exporter_keys=before, importer_keys=after) as rig:
        prefill = rig.prefill(NUM_TOKENS)
        reissued = tickets.reissue(prefill.signed, ClusterKeys(Secrets(NEW, other=OLD)), attempt=2, importer=IMPORTER)
        reason = await rig.failure(rig.start_import(prefill, signed=reissued), match="keyed-sums")
        assert reason is HandOffReason.NO_COMMON_PROTOCOL
