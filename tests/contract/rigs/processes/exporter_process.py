"""An exporter in a separate process, to be stopped and killed. Not a test:
tests/contract/handoff/test_handoff_processes.py starts it, reads one line with the signed tickets, and writes one line
when the first blocks are to be sealed."""

import asyncio
import sys

import grpc

from cluster.clock import MonotonicClock
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.exporter.exporter import Exporter
from kvtransfer.exporter.service import KvTransferServicer
from kvtransfer.transports.shm.transport import ShmExporter
from kvtransfer.transports.tcp.transport import TcpExporter
from kvtransfer.wire.wire_format import NativeFormat
from tandem.internal.v1 import kv_pb2_grpc
from tests.contract.rigs.handoff_parts import EXPORTER, IMPORTER, KEY, LAYOUT, Counters
from tests.contract.rigs.kv_pools import BLOCK_SIZE, random_pool
from tests.contract.rigs.proofs import PROOFS

NUM_BLOCKS = 8
PROMPT_HASH = b"h" * 16
NUM_TOKENS = 3 * BLOCK_SIZE


async def main() -> None:
    pool = random_pool(NUM_BLOCKS, seed=1)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    exporter = Exporter(
        member=EXPORTER,
        address=f"127.0.0.1:{port}",
        wire=NativeFormat(pool),
        layout=LAYOUT,
        keys=KEY,
        settings=TransferSettings(lease_s=600.0, max_lease_s=600.0),  # the importers' clocks stand still
        transports=[
            ShmExporter(memory=pool, proofs=PROOFS),
            TcpExporter(memory=pool, proofs=PROOFS, host="127.0.0.1", advertise_host="127.0.0.1", send_timeout_s=60.0),
        ],
        release=lambda ticket_id: None,
        clock=MonotonicClock(),
        counters=Counters(),
    )
    kv_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(exporter=exporter), server)
    await exporter.start()
    await server.start()
    issued = [
        exporter.issue(
            request_id=f"request-{number}",
            attempt=1,
            importer=IMPORTER,
            num_tokens=NUM_TOKENS,
            prompt_hash=PROMPT_HASH,
            num_choices=1,
        )
        for number in range(2)
    ]
    print(*(ticket.signed.hex() for ticket in issued), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for number, ticket in enumerate(issued):
        exporter.seal(ticket.ticket_id, first_index=0, block_ids=[2 * number, 2 * number + 1])
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main())
