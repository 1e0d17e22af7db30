"""`python -m tests.soak.faulty_decode ...`: a decode worker as it is, but for its reads, which go wrong now and then.

Its flags are the decode worker's. SOAK_FAULT_RATE, SOAK_SEED and SOAK_LATE_S say how often, which and how late. At
the end one line `faults flipped=3 ...` tells what was injected; SIGUSR1 asks for it earlier.
"""

import asyncio
import dataclasses
import os
import signal
import sys

from cluster.config import TransferSettings, WorkerConfig, parse_arguments
from cluster.process import announce_ready, leave, run_process, stop_requested
from decode_worker import start
from kvtransfer import worker_transfer
from kvtransfer.transports.available import Available, available_transports
from kvtransfer.transports.base import TransportMeans
from tests.soak.faulty_transport import FaultyTransport

_MADE: list[FaultyTransport] = []


def _faulty_transports(settings: TransferSettings, means: TransportMeans) -> Available:
    found = available_transports(settings, means)
    for importer in found.importers:
        _MADE.append(
            FaultyTransport(
                importer,
                means.memory,
                rate=float(os.environ["SOAK_FAULT_RATE"]),
                seed=int(os.environ["SOAK_SEED"]) + len(_MADE),
                late_s=float(os.environ["SOAK_LATE_S"]),
            )
        )
    return dataclasses.replace(found, importers=tuple(_MADE))


def _tell() -> None:
    counted = [f"{fault}={count}" for made in _MADE for fault, count in sorted(made.done.items())]
    sys.stdout.write(" ".join(("faults", *counted)) + "\n")
    sys.stdout.flush()


async def _main() -> None:
    worker_transfer.available_transports = _faulty_transports  # type: ignore[attr-defined]
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _tell)
    config = parse_arguments(WorkerConfig, "decode_worker", sys.argv[1:])
    try:
        await start.run(config, stop=stop_requested(), announce=announce_ready)
    finally:
        _tell()


if __name__ == "__main__":
    leave(run_process("decode_worker", _main))
