"""The gRPC service of the exporter: HandOff, OpenLinkCheck and LeasePrefix.

One HandOff call is one hand-off. LeasePrefix leases blocks that this worker's prefix cache holds to another worker,
under a separate ticket. Such a ticket is complete at once: it has sealed blocks only, no tail and no choices.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

import grpc

from cluster import holders
from cluster.errors import HandOffReason, InvalidRequest, MalformedMessage, Overloaded, Unavailable
from cluster.protocol import tickets, wire
from cluster.protocol.hashing import split_hashes
from cluster.protocol.received import checked
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.ticket_driver import IncomingCall
from kvtransfer.link_check import LinkCheckAccess
from kvtransfer.wire.handoff_wire import IMPORTER_METADATA, renew_or_settle_from_wire
from tandem.internal.v1 import kv_pb2, kv_pb2_grpc

_LOG = logging.getLogger(__name__)
_MAX_LOOKUPS = 64  # questions to the step thread at once; each names at most MAX_PREFIX_BLOCKS blocks, 1 MiB
ATTACH_S = 10.0  # an importer attaches as it calls; a call that has not attached by then is refused


class Leased(Protocol):
    """Leading blocks of a chain that are leased to a ticket."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The leased blocks; none if too few are cached."""
        ...

    @property
    def unverified(self) -> frozenset[int]:
        """The leased blocks that came from another worker and were not verified."""
        ...


class LeaseCachedPrefix(Protocol):
    async def __call__(self, ticket_id: bytes, block_hashes: tuple[bytes, ...], min_blocks: int) -> Leased:
        """Ask the step thread to lease the cached leading blocks of this chain. `release` must follow, even if this is
        cancelled, unless the exporter issues the ticket."""
        ...


class PrefixLeases:
    def __init__(
        self, *, exporter: Exporter, block_size: int, lease: LeaseCachedPrefix, release: Callable[[bytes], None]
    ) -> None:
        """`release` ends the leases of a ticket that was never issued."""
        self._exporter = exporter
        self._block_size = block_size
        self._lease = lease
        self._release = release
        self._leasing: set[bytes] = set()  # tickets that are not issued yet

    def owners(self) -> Iterator[str]:
        """Return the holders of blocks that this object tracks."""
        return map(holders.ticket, self._leasing)

    async def lease(self, request: kv_pb2.LeasePrefixRequest) -> kv_pb2.LeasePrefixResponse:
        """Lease the cached blocks of the chain and issue a ticket for them. Raises MalformedMessage, Overloaded."""
        checked(request)
        if len(self._leasing) >= _MAX_LOOKUPS:
            raise Overloaded(
                f"this worker looks up {_MAX_LOOKUPS} prefixes for other workers, the most it allows at once"
            )
        importer = wire.member_from_wire(request.importer)
        hashes = split_hashes(request.block_hashes)
        ticket_id = secrets.token_bytes(tickets.TICKET_ID_BYTES)
        self._leasing.add(ticket_id)
        try:
            leased = await self._lease(ticket_id, hashes, max(1, request.min_blocks))
            if not leased.block_ids:
                return kv_pb2.LeasePrefixResponse()
            issued = self._exporter.issue(
                request_id=request.request_id,
                attempt=request.attempt,
                importer=importer,
                num_tokens=len(leased.block_ids) * self._block_size,
                prompt_hash=hashes[len(leased.block_ids) - 1],  # it covers all before it
                num_choices=0,
                ticket_id=ticket_id,
            )
        except BaseException:
            self._release(ticket_id)
            raise
        finally:
            self._leasing.discard(ticket_id)
        self._exporter.seal(ticket_id, first_index=0, block_ids=leased.block_ids, unverified=leased.unverified)
        self._exporter.finish(ticket_id, first_tokens=(), tail=None)
        self._exporter.expect_soon(ticket_id)  # if this process was stopped for long, the importer may have timed out
        return kv_pb2.LeasePrefixResponse(ticket=issued.signed, num_blocks=len(leased.block_ids))


class KvTransferServicer(kv_pb2_grpc.KvTransferServicer):
    def __init__(
        self, *, exporter: Exporter, link_checks: LinkCheckAccess | None = None, prefixes: PrefixLeases | None = None
    ) -> None:
        """Create the service. Without `link_checks`, no worker may measure its link to this one. Without
        `prefixes`, no prefix is leased."""
        self._exporter, self._link_checks, self._prefixes = exporter, link_checks, prefixes

    async def HandOff(
        self,
        request_iterator: AsyncIterator[kv_pb2.ImporterMessage],
        context: grpc.aio.ServicerContext[kv_pb2.ImporterMessage, kv_pb2.ExporterMessage],
    ) -> AsyncIterator[kv_pb2.ExporterMessage]:
        metadata = dict(context.invocation_metadata() or ())
        call = self._exporter.start_call(importer=str(metadata.get(IMPORTER_METADATA, "")))
        reader = asyncio.create_task(self._read(request_iterator, call), name=f"hand-off {call.number}")
        late = asyncio.get_running_loop().call_later(ATTACH_S, _refuse_unattached, call)
        try:
            async for message in call.messages():
                yield message
        finally:
            late.cancel()
            reader.cancel()
            self._exporter.end_call(call)
            await asyncio.wait([reader])
            if not reader.cancelled() and reader.exception() is not None:
                _LOG.error("hand-off %d of %s failed", call.number, call.importer, exc_info=reader.exception())

    async def OpenLinkCheck(
        self,
        request: kv_pb2.OpenLinkCheckRequest,
        context: grpc.aio.ServicerContext[kv_pb2.OpenLinkCheckRequest, kv_pb2.OpenLinkCheckResponse],
    ) -> kv_pb2.OpenLinkCheckResponse:
        if self._link_checks is None:
            raise Unavailable("this worker does not offer link checks")
        return self._link_checks.start(request)

    async def LeasePrefix(
        self,
        request: kv_pb2.LeasePrefixRequest,
        context: grpc.aio.ServicerContext[kv_pb2.LeasePrefixRequest, kv_pb2.LeasePrefixResponse],
    ) -> kv_pb2.LeasePrefixResponse:
        return kv_pb2.LeasePrefixResponse() if self._prefixes is None else await self._prefixes.lease(request)

    async def _read(self, messages: AsyncIterator[kv_pb2.ImporterMessage], call: IncomingCall) -> None:
        try:
            async for message in messages:
                self._receive(call, message)
        except MalformedMessage as error:
            call.refuse(HandOffReason.MALFORMED_MESSAGE, error.message)
        except (InvalidRequest, ValueError) as error:
            call.refuse(HandOffReason.PROTOCOL, str(error))
        finally:
            call.end()  # the importer has closed its side: a call without its Settle ends as failed

    def _receive(self, call: IncomingCall, message: kv_pb2.ImporterMessage) -> None:
        """Handle one message. Raises MalformedMessage; InvalidRequest or ValueError for one that is not allowed at this
        point."""
        checked(message)
        if message.WhichOneof("message") == "attach":
            if call.attached is None:
                self._exporter.attach(call, message.attach)
        elif call.attached is None:
            raise ValueError("a hand-off begins with Attach")
        elif message.WhichOneof("message") is not None:  # otherwise of a kind that only newer versions have
            self._exporter.receive(call, renew_or_settle_from_wire(message, call.attached.ticket.epoch))


def _refuse_unattached(call: IncomingCall) -> None:
    if call.attached is None:
        call.refuse(HandOffReason.PROTOCOL, f"the importer sent no Attach within {ATTACH_S:g} s")
