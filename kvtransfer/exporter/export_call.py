"""One HandOff stream as the exporter sees it: what is to be sent, and how the hand-off ended, counted once.

The queue holds at most one message per chunk of the prompt, and what begins and ends a hand-off; it needs no bound.
"""

import asyncio
from collections.abc import AsyncIterator

from cluster.errors import HandOffReason
from kvtransfer.counters import TransferCounters
from kvtransfer.digest.older_digests import OlderDigests
from kvtransfer.exporter.attach_rules import AcceptedAttach
from kvtransfer.protocol.handoff import Accepted, ExporterMessage, Finished, Refused, Settled
from kvtransfer.wire.handoff_wire import to_wire
from tandem.v1 import kv_pb2


class ExportCall:
    def __init__(self, *, number: int, importer: str, counters: TransferCounters, older_digests: OlderDigests) -> None:
        self.number = number
        self.importer = importer
        self.attached: AcceptedAttach | None = None  # once its Attach has passed every check
        self._counters, self._older_digests = counters, older_digests
        self._counted = False
        self._outbox: asyncio.Queue[kv_pb2.ExporterMessage | None] = asyncio.Queue()

    async def messages(self) -> AsyncIterator[kv_pb2.ExporterMessage]:
        """Everything to be sent, until the call is over. What is there at once leaves as one, to who can read it: each
        message costs both sides a turn of their loop, and a wake-up."""
        while (message := await self._outbox.get()) is not None:
            is_last = self.attached is not None and self.attached.reads_then and self._append_ready(message)
            if self.attached is not None:
                for one in (message, *message.then):
                    await self._older_digests.put_into(one, self.attached.digests)
            yield message
            if is_last:
                return

    def _append_ready(self, message: kv_pb2.ExporterMessage) -> bool:
        """True: the end of the call was among it."""
        while not self._outbox.empty():
            following = self._outbox.get_nowait()
            if following is None:
                return True
            message.then.append(following)
        return False

    def send(self, message: ExporterMessage, *, age_s: float) -> None:
        """Refused and Settled are the last. `age_s`: since the prefill's last step, for Finished."""
        wire = to_wire(message)
        if isinstance(message, Finished):
            wire.finished.age_s = age_s
        if isinstance(message, Accepted):
            assert self.attached is not None, "accepted before it was attached"
            self._admit(self.attached, wire.accepted)
        self._outbox.put_nowait(wire)
        if isinstance(message, Refused):
            self.count("refused", message.reason)
        if isinstance(message, Refused | Settled):
            self.end()

    @staticmethod
    def _admit(attached: AcceptedAttach, accepted: kv_pb2.Accepted) -> None:
        """Opens the pool to the epoch, by every way that was agreed."""
        accepted.protocol, accepted.digest = attached.protocol, attached.digests.name
        first, *others = attached.transports
        accepted.transport, accepted.endpoint = first.name, first.admit(attached.ticket.epoch)
        for other in others:
            accepted.alternatives.add(transport=other.name, endpoint=other.admit(attached.ticket.epoch))

    def refuse(self, reason: HandOffReason, detail: str) -> None:
        """Before any machine has heard of the call."""
        self.count("refused", reason)
        self._outbox.put_nowait(kv_pb2.ExporterMessage(refused=kv_pb2.Refused(reason=reason, detail=detail)))
        self.end()

    def end(self) -> None:
        """Nothing more will be sent."""
        self._outbox.put_nowait(None)

    def count(self, outcome: str, reason: HandOffReason | None) -> None:
        """How the hand-off ended; the first to say so is right."""
        if not self._counted:
            self._counted = True
            transport = self.attached.transports[0].name if self.attached is not None else ""
            self._counters.handoff(side="exporter", transport=transport, outcome=outcome, reason=reason or "")
