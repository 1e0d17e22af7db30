"""A TCP exporter in a separate process that can be left without address space: no thread can be started then.

Not a test. Its argument is the address to listen on. Writes its endpoint in hexadecimal, then reads words from stdin:
`short` takes the address space away, `whole` gives it back; each is answered with itself.
"""

import asyncio
import resource
import sys
from pathlib import Path

from cluster.messages import Epoch, MemberId
from kvtransfer.transports.tcp.transport import TcpExporter
from tests.contract.kv_pools import random_pool
from tests.contract.proofs import PROOFS

NUM_BLOCKS = 8
EPOCH = Epoch(MemberId("p0", "a1"), b"t" * 16, 1)
_SPARE_BYTES = 1 << 20  # less than the stack of a thread


async def main() -> None:
    pool = random_pool(NUM_BLOCKS, seed=1)
    host = sys.argv[1]
    exporter = TcpExporter(memory=pool, proofs=PROOFS, host=host, advertise_host=host, send_timeout_s=5.0)
    await exporter.start()
    print(exporter.grant(EPOCH).hex(), flush=True)
    _, most_bytes = resource.getrlimit(resource.RLIMIT_AS)
    while word := sys.stdin.readline().strip():  # its threads serve; its loop has nothing to do
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit_bytes = used_bytes + _SPARE_BYTES if word == "short" else most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, most_bytes))
        print(word, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
