"""Tests that any malformed message of an exporter ends only its hand-off at a real importer.

The exporter is real too, up to the message that it sends: one message of each hand-off is changed on its way out.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cluster.errors import HandOffFailed, HandOffReason
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.exporter.ticket_driver import IncomingCall
from kvtransfer.importer.handoff_driver import HandOffDriver
from kvtransfer.importer.importer import ImportedBlocks
from tandem.internal.v1 import kv_pb2
from tests.contract.rigs.handoff_parts import DEADLINE_S
from tests.contract.rigs.handoff_rig import Prefill, Rig, handoff_rig
from tests.contract.rigs.kv_pools import BLOCK_SIZE
from tests.unit.cluster.protocol.member_messages import mutations

KINDS = ("accepted", "sealed", "finished", "settled")
Change = Callable[[Any], None]


class BrokenExporter:
    """Changes the message of one kind in each hand-off, before it is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.changes: dict[bytes, tuple[str, Change]] = {}  # by ticket
        self.seen: dict[str, kv_pb2.ExporterMessage] = {}  # the last of each kind, as it should be
        sent = IncomingCall.messages

        async def messages(call: IncomingCall) -> AsyncIterator[kv_pb2.ExporterMessage]:
            async for message in sent(call):
                self._change(call, message)
                yield message

        monkeypatch.setattr(IncomingCall, "messages", messages)

    def _change(self, call: IncomingCall, message: kv_pb2.ExporterMessage) -> None:
        ticket_id = call.attached.ticket.ticket_id if call.attached is not None else b""
        kind, change = self.changes.get(ticket_id, ("", lambda _: None))
        for one in (message, *message.then):
            found = one.WhichOneof("message") or ""
            self.seen[found] = kv_pb2.ExporterMessage()
            self.seen[found].CopyFrom(one)
            del self.seen[found].then[:]
            if found == kind:
                change(getattr(one, kind))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> BrokenExporter:
    return BrokenExporter(monkeypatch)


@pytest.fixture
async def rig(broken: BrokenExporter) -> AsyncIterator[Rig]:
    async with handoff_rig("loopback", num_blocks=192) as rig:
        yield rig


async def hand_off(rig: Rig, handoff_id: int = 1) -> tuple[Prefill, asyncio.Task[ImportedBlocks]]:
    prefill = rig.prefill(2 * BLOCK_SIZE + 1)
    prefill.compute()
    return prefill, rig.start_import(prefill, handoff_id)


async def changed(rig: Rig, broken: BrokenExporter, handoff_id: int, kind: str, change: Change) -> str:
    """Return the reason of the failure; empty: the blocks arrived unchanged. No block is held afterwards."""
    prefill = rig.prefill(2 * BLOCK_SIZE + 1)
    broken.changes[prefill.ticket_id] = (kind, change)
    prefill.compute()
    try:
        imported = await rig.start_import(prefill, handoff_id)
    except HandOffFailed as error:
        reason = str(error.handoff_reason)
    else:
        assert rig.holds(prefill, imported)
        reason = ""
        rig.decode.finish(handoff_id)
    rig.exporter.fail(prefill.ticket_id, reason=HandOffReason.CANCELLED, detail="the test is over")
    await prefill.released.wait()
    return reason


async def test_any_malformed_message_of_an_exporter_ends_that_hand_off_only(rig: Rig, broken: BrokenExporter) -> None:
    prefill, importing = await hand_off(rig)
    assert rig.holds(prefill, await importing)
    rig.decode.finish(1)
    cases = [
        (kind, what)
        for kind in KINDS
        for what, _ in mutations(getattr(broken.seen[kind], kind))
        if not what.split(".")[1].startswith("epoch")
    ]
    assert len(cases) > 150
    cases = random.Random(5).sample(cases, 120)
    reasons: dict[str, str] = {}
    slots = asyncio.Semaphore(24)

    async def run(number: int, kind: str, what: str) -> None:
        def mutate(message: Any) -> None:
            message.CopyFrom(next(mutated for how, mutated in mutations(message) if how == what))

        async with slots:
            reasons[what] = await changed(rig, broken, number, kind, mutate)

    async with asyncio.timeout(2 * DEADLINE_S):
        await asyncio.gather(*(run(number, *case) for number, case in enumerate(cases, start=2)))

    assert set(reasons.values()) <= {"", *map(str, HandOffReason)}
    assert list(reasons.values()).count("malformed_handoff_message") > 40
    assert rig.counters.handoffs["importer", "", "failed", "malformed_handoff_message"] > 10
    again, importing = await hand_off(rig)  # the next one is served as if nothing had been
    async with asyncio.timeout(DEADLINE_S):
        assert rig.holds(again, await importing)
    rig.decode.finish(1)
    await rig.all_quiet()
    rig.check_clean()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_of_another_attempt_is_ignored_until_a_deadline_ends_the_wait(
    rig: Rig, broken: BrokenExporter, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def mistake(message: Any) -> None:
        message.epoch.attempt += 1

    received, receive = asyncio.Event(), HandOffDriver._receive_one

    def watched(driver: HandOffDriver, wire: kv_pb2.ExporterMessage, *, is_followed: bool) -> None:
        receive(driver, wire, is_followed=is_followed)
        if wire.WhichOneof("message") == kind:
            received.set()

    monkeypatch.setattr(HandOffDriver, "_receive_one", watched)
    prefill = rig.prefill(2 * BLOCK_SIZE + 1)
    broken.changes[prefill.ticket_id] = (kind, mistake)
    prefill.compute()
    importing = rig.start_import(prefill)
    async with asyncio.timeout(DEADLINE_S):
        await received.wait()
    assert not importing.done()
    rig.pass_at_importer(TransferSettings().attach_timeout_s + TransferSettings().max_lease_s)
    assert await rig.failure(importing) in (HandOffReason.EXPORTER_LOST, HandOffReason.READ_TIMEOUT)
    rig.exporter.fail(prefill.ticket_id, reason=HandOffReason.CANCELLED, detail="the test is over")
    async with asyncio.timeout(DEADLINE_S):
        await prefill.released.wait()
    rig.check_clean()


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 1e-9, float("nan"), float("inf")])
async def test_an_invalid_lease_time_is_refused_and_starts_no_storm_of_renewals(
    rig: Rig, broken: BrokenExporter, lease_s: float
) -> None:
    """Before this check the importer renewed at every tick, thousands of times per second."""

    def change(accepted: kv_pb2.Accepted) -> None:
        accepted.lease_s = lease_s

    prefill = rig.prefill(2 * BLOCK_SIZE + 1)  # nothing is computed: the importer can only wait or cancel
    broken.changes[prefill.ticket_id] = ("accepted", change)
    importing = rig.start_import(prefill)
    assert await rig.failure(importing, match="Accepted: .*lease_s must be") is HandOffReason.MALFORMED_MESSAGE
    await rig.given_up(prefill)
    rig.check_clean()


async def test_a_first_token_that_the_model_does_not_have_is_refused(rig: Rig, broken: BrokenExporter) -> None:
    prefill = rig.prefill(2 * BLOCK_SIZE + 1)
    prefill.compute()
    expected = prefill.expected
    importing = rig.importer.import_blocks(
        handoff_id=1,
        signed_ticket=prefill.signed,
        expected=type(expected)(expected.num_tokens, expected.prompt_hash, expected.num_choices, vocab_size=100),
        blocks=rig.decode,
    )
    reason = await rig.failure(asyncio.ensure_future(importing), match="token 100 is outside the vocabulary of 100")
    assert reason is HandOffReason.PROTOCOL
    await rig.given_up(prefill)
    await rig.all_quiet()
    rig.check_clean()
