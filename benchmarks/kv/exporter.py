"""The exporter's process: a pool, one transport, hand-offs over a worker's server, and its side of the limits.

Reads and writes JSON, one object per line: first it prints what the importer must know, then it answers requests until
its standard input ends.
"""

import argparse
import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass

from benchmarks.kv.nixl import BareExporter
from benchmarks.kv.parties import (
    EPOCH,
    EXPORTER,
    HOST,
    IMPORTER,
    KEY,
    LAYOUT,
    PROMPT_HASH,
    load_tls,
    means_of,
    module_of,
)
from benchmarks.kv.shapes import BLOCK_SIZE, source_pool
from benchmarks.kv.sockets import PlainServer
from cluster.accounts.audit import Audit
from cluster.auth.gate import MemberGate
from cluster.clock import MonotonicClock
from cluster.observe.telemetry import Telemetry
from cluster.serving.serving import GrpcServer, join_address
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.counters import TransferCounters
from kvtransfer.exporter.exporter import Exporter, FirstToken
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.transports.base import ExporterTransport
from kvtransfer.wire.wire_format import NativeFormat
from tandem.internal.v1 import kv_pb2_grpc


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of the process. Bytes are hexadecimal digits."""

    pid: int
    memfd: int  # -1: the pool is not in host memory, and the limits that need it are not offered
    endpoint: str  # of the transport, for EPOCH
    plain_port: int
    bare_nixl: str  # the bare agent's metadata; empty without the library
    address: int  # of the pool in that process


class Offers:
    """Hand-offs whose blocks are sealed and digested before their importer attaches."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._num_issued = 0

    async def make(self, block_ids: list[int]) -> bytes:
        self._num_issued += 1
        issued = self._exporter.issue(
            request_id=f"request-{self._num_issued}",
            attempt=1,
            importer=IMPORTER,
            num_tokens=len(block_ids) * BLOCK_SIZE,
            prompt_hash=PROMPT_HASH,
            num_choices=1,
        )
        self._exporter.seal(issued.ticket_id, first_index=0, block_ids=block_ids)
        self._exporter.finish(issued.ticket_id, first_tokens=[FirstToken(1, False)], tail=None)
        while self._exporter._is_digesting:  # noqa: ASYNC110 - nothing is timed yet
            await asyncio.sleep(0.001)
        return issued.signed


async def serve(transport_name: str, num_blocks: int, certificates: str, device: str, verify: str) -> None:
    tls = load_tls(certificates)
    pool = source_pool(num_blocks, device, transport_name)
    transport: ExporterTransport = module_of(transport_name).exporter(means_of(EXPORTER, pool, tls))
    telemetry = Telemetry()
    gate = MemberGate(KEY, EXPORTER, telemetry, Audit())
    server = GrpcServer(
        service_names=["tandem.internal.v1.KvTransfer"],
        telemetry=telemetry,
        gate=gate,
        credentials=tls.member_credentials() if tls is not None else None,
    )
    gate.serve(server)
    exporter = Exporter(
        member=EXPORTER,
        address=join_address(HOST, server.bind(HOST, 0)),
        wire=NativeFormat(pool),
        layout=LAYOUT,
        keys=KEY,
        settings=TransferSettings(kv_verify=verify),
        transports=[transport],
        release=lambda ticket_id: None,
        clock=MonotonicClock(),
        counters=TransferCounters(telemetry),
    )
    kv_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(exporter=exporter), server.grpc)
    await exporter.start()
    await server.start()
    bare = BareExporter(pool) if transport_name == "nixl" and pool.memfd is not None else None
    hello = Hello(
        pid=os.getpid(),
        memfd=-1 if pool.memfd is None else pool.memfd,
        endpoint=transport.grant(EPOCH).hex(),
        plain_port=0 if pool.memfd is None else PlainServer(pool, tls.server_context() if tls else None).port,
        bare_nixl=bare.metadata.hex() if bare else "",
        address=pool.raw.data_ptr(),
    )
    _say(asdict(hello))
    await _answer(Offers(exporter))
    await exporter.close()
    await server.stop(0)


async def _answer(offers: Offers) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        signed = await offers.make(json.loads(line)["offer"])
        _say({"ticket": signed.hex()})


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--certificates", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--verify", default="all")
    arguments = parser.parse_args()
    asyncio.run(
        serve(arguments.transport, arguments.blocks, arguments.certificates, arguments.device, arguments.verify)
    )
