"""A TCP exporter in a separate process that can be left without address space: no thread can be started then.

Not a test. It sends its endpoint and receives words: `short` takes the address space away, `whole` gives it back. Each
is answered with itself.
"""

import asyncio
import resource
from multiprocessing.connection import Connection
from pathlib import Path

from cluster.messages import Epoch, MemberId
from kvtransfer.transports.tcp.transport import TcpExporter
from tests.contract.rigs.kv_pools import random_pool
from tests.contract.rigs.proofs import PROOFS

NUM_BLOCKS = 8
EPOCH = Epoch(MemberId("p0", "a1"), b"t" * 16, 1)
_SPARE_BYTES = 1 << 20  # less than the stack of a thread


def exporting(connection: "Connection[object, object]", host: str) -> None:
    """Serve on this address."""
    asyncio.run(_export(connection, host))


async def _export(connection: "Connection[object, object]", host: str) -> None:
    pool = random_pool(NUM_BLOCKS, seed=1)
    exporter = TcpExporter(memory=pool, proofs=PROOFS, host=host, advertise_host=host, send_timeout_s=5.0)
    await exporter.start()
    connection.send(exporter.grant(EPOCH))
    _, most_bytes = resource.getrlimit(resource.RLIMIT_AS)
    while True:  # its threads serve; its loop has nothing to do
        words = connection.recv()
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit_bytes = used_bytes + _SPARE_BYTES if words == ("short",) else most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, most_bytes))
        connection.send(words)
