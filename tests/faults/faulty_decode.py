"""`python -m tests.faults.faulty_decode ...`: a decode worker as it is, but for its reads, which go wrong.

Its flags are the decode worker's. With FAULT_CONTROL, the path of a Unix socket, faults come when that side orders
them; else FAULT_RATE and FAULT_SEED roll dice, and at the end one line `faults flipped=3 ...` tells what was injected.
FAULT_LATE_S says how late a late read is.
"""

import dataclasses
import os
import sys

from cluster.process import announce_ready, leave, run_process, stop_requested
from cluster.settings.config import WorkerConfig
from cluster.settings.config_sources import parse_arguments
from cluster.settings.transfer_settings import TransferSettings
from decode_worker import start
from kvtransfer import worker_transfer
from kvtransfer.transports.available import Available, available_transports
from kvtransfer.transports.base import TransportMeans
from tests.faults.control import OrderedFaults
from tests.faults.faulty_transport import Dice, FaultSource, FaultyTransport


async def _main() -> None:
    config = parse_arguments(WorkerConfig, "decode_worker", sys.argv[1:])
    control = os.environ.get("FAULT_CONTROL")
    if control:
        orders = OrderedFaults()
        await orders.connect(control, config.member_id)
        await _serve(config, orders)
        return
    dice = Dice(rate=float(os.environ["FAULT_RATE"]), seed=int(os.environ["FAULT_SEED"]))
    try:
        await _serve(config, dice)
    finally:
        counted = (f"{fault}={count}" for fault, count in sorted(dice.counted.items()))
        sys.stdout.write(" ".join(("faults", *counted)) + "\n")


async def _serve(config: WorkerConfig, source: FaultSource) -> None:
    late_s = float(os.environ["FAULT_LATE_S"])

    def faulty_transports(settings: TransferSettings, means: TransportMeans) -> Available:
        found = available_transports(settings, means)
        faulty = tuple(FaultyTransport(inner, means.memory, source, late_s=late_s) for inner in found.importers)
        return dataclasses.replace(found, importers=faulty)

    worker_transfer.available_transports = faulty_transports  # type: ignore[attr-defined]
    await start.run(config, stop=stop_requested(), announce=announce_ready)


if __name__ == "__main__":
    leave(run_process("decode_worker", _main))
