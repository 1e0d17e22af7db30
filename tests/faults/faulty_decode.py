"""`python -m tests.faults.faulty_decode ...`: a decode worker whose reads have faults.

Its flags are the decode worker's. With FAULT_CONTROL, the path of a Unix socket, faults come on command; with
FAULT_ALWAYS each read has this one, with FAULT_WHILE too only while the file of that name exists; otherwise FAULT_RATE
and FAULT_SEED draw them at random, and one line `faults flipped=3 ...` at the end counts them. FAULT_LATE_S is the
delay of a late read.
"""

import dataclasses
import os
import sys

from cluster.messages import Role
from cluster.process import announce_ready, exit_process, run_process, stop_requested
from cluster.settings.config import WorkerConfig
from cluster.settings.config_sources import parse_arguments
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.transports.available import Available, available_transports
from kvtransfer.transports.base import TransportSetup
from tests.faults.control import OrderedFaults
from tests.faults.faulty_transport import Always, Dice, Fault, FaultSource, FaultyTransport
from worker import transfer as worker_transfer
from worker.life import run_worker


async def _main() -> None:
    config = parse_arguments(WorkerConfig, "decode_worker", sys.argv[1:])
    control = os.environ.get("FAULT_CONTROL")
    if control:
        orders = OrderedFaults()
        await orders.connect(control, config.member_id)
        await _serve(config, orders)
        return
    if always := os.environ.get("FAULT_ALWAYS"):
        await _serve(config, Always(Fault(always), os.environ.get("FAULT_WHILE")))
        return
    dice = Dice(rate=float(os.environ["FAULT_RATE"]), seed=int(os.environ["FAULT_SEED"]))
    try:
        await _serve(config, dice)
    finally:
        counted = (f"{fault}={count}" for fault, count in sorted(dice.counted.items()))
        sys.stdout.write(" ".join(("faults", *counted)) + "\n")


async def _serve(config: WorkerConfig, source: FaultSource) -> None:
    late_s = float(os.environ["FAULT_LATE_S"])

    def faulty_transports(settings: TransferSettings, setup: TransportSetup) -> Available:
        found = available_transports(settings, setup)
        faulty = tuple(FaultyTransport(inner, setup.memory, source, late_s=late_s) for inner in found.importers)
        return dataclasses.replace(found, importers=faulty)

    worker_transfer.available_transports = faulty_transports  # type: ignore[attr-defined]
    await run_worker(config, Role.DECODE, stop=stop_requested(), announce=announce_ready)


if __name__ == "__main__":
    exit_process(run_process("decode_worker", _main))
