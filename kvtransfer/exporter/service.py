"""The gRPC face of the exporter: one HandOff call is one hand-off, one OpenProbe opens a measurement. Owns nothing that
outlives a call."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from cluster.errors import HandOffReason, InvalidRequest, MalformedMessage, Unavailable
from cluster.protocol.received import checked
from kvtransfer.exporter.export_call import ExportCall
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.prefix_offers import PrefixOffers
from kvtransfer.probe.opening import ProbeOpening
from kvtransfer.wire.handoff_wire import IMPORTER_METADATA, renew_or_settle_from_wire
from tandem.v1 import kv_pb2, kv_pb2_grpc

_LOG = logging.getLogger(__name__)
ATTACH_S = 10.0  # an importer attaches as it calls: one that does not holds nothing here for longer


class KvTransferServicer(kv_pb2_grpc.KvTransferServicer):
    def __init__(
        self, *, exporter: Exporter, probes: ProbeOpening | None = None, prefixes: PrefixOffers | None = None
    ) -> None:
        """`probes` None: nobody may measure here. `prefixes` None: none are kept here."""
        self._exporter, self._probes, self._prefixes = exporter, probes, prefixes

    async def HandOff(
        self,
        request_iterator: AsyncIterator[kv_pb2.ImporterMessage],
        context: grpc.aio.ServicerContext[kv_pb2.ImporterMessage, kv_pb2.ExporterMessage],
    ) -> AsyncIterator[kv_pb2.ExporterMessage]:
        metadata = dict(context.invocation_metadata() or ())
        call = self._exporter.open_call(importer=str(metadata.get(IMPORTER_METADATA, "")))
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
                _LOG.error("hand-off %d of %s", call.number, call.importer, exc_info=reader.exception())

    async def OpenProbe(
        self,
        request: kv_pb2.OpenProbeRequest,
        context: grpc.aio.ServicerContext[kv_pb2.OpenProbeRequest, kv_pb2.OpenProbeResponse],
    ) -> kv_pb2.OpenProbeResponse:
        if self._probes is None:
            raise Unavailable("nobody may measure here")
        return self._probes.open(request)

    async def OfferPrefix(
        self,
        request: kv_pb2.OfferPrefixRequest,
        context: grpc.aio.ServicerContext[kv_pb2.OfferPrefixRequest, kv_pb2.OfferPrefixResponse],
    ) -> kv_pb2.OfferPrefixResponse:
        return kv_pb2.OfferPrefixResponse() if self._prefixes is None else await self._prefixes.offer(request)

    async def _read(self, messages: AsyncIterator[kv_pb2.ImporterMessage], call: ExportCall) -> None:
        try:
            async for message in messages:
                self._hear(call, message)
        except MalformedMessage as error:
            call.refuse(HandOffReason.MALFORMED_MESSAGE, error.message)
        except (InvalidRequest, ValueError) as error:
            call.refuse(HandOffReason.PROTOCOL, str(error))
        finally:
            call.end()  # the importer speaks no more: a call without its Settle ends as failed

    def _hear(self, call: ExportCall, message: kv_pb2.ImporterMessage) -> None:
        """Raises MalformedMessage; InvalidRequest, ValueError for what may not come, or not here."""
        checked(message)
        if message.WhichOneof("message") == "attach":
            if call.attached is None:
                self._exporter.attach(call, message.attach)
        elif call.attached is None:
            raise ValueError("a hand-off begins with Attach")
        elif message.WhichOneof("message") is not None:  # else of a kind that only newer versions know
            self._exporter.hear(call, renew_or_settle_from_wire(message, call.attached.ticket.epoch))


def _refuse_unattached(call: ExportCall) -> None:
    if call.attached is None:
        call.refuse(HandOffReason.PROTOCOL, f"nothing was attached to within {ATTACH_S:g} s")
