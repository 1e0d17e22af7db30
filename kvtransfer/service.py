"""The gRPC face of the exporter: one HandOff call is one hand-off."""

from collections.abc import AsyncIterator

import grpc

from kvtransfer.exporter import Exporter
from tandem.v1 import kv_pb2, kv_pb2_grpc


class KvTransferServicer(kv_pb2_grpc.KvTransferServicer):
    def __init__(self, *, exporter: Exporter) -> None:
        self._exporter = exporter

    async def HandOff(
        self,
        request_iterator: AsyncIterator[kv_pb2.ImporterMessage],
        context: grpc.aio.ServicerContext[kv_pb2.ImporterMessage, kv_pb2.ExporterMessage],
    ) -> AsyncIterator[kv_pb2.ExporterMessage]:
        raise NotImplementedError
        yield
