"""`python -m tests.chaos.held_worker ...`: an unchanged worker whose KV reads and steps can be held back from outside.

A held read has received its bytes and does not return. A held step has not started; its thread waits. A phase of
milliseconds thus lasts until the harness has observed it. The flags are a worker's; a --member-id that begins with
"prefill" makes it a prefill worker. HOLD_CONTROL is the path of a Unix socket whose other end is `holds.py`.
"""

import asyncio
import dataclasses
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from cluster.messages import Epoch, Role
from cluster.process import announce_ready, exit_process, run_process, stop_requested
from cluster.settings.config import WorkerConfig
from cluster.settings.config_sources import parse_arguments
from cluster.settings.worker_settings import TransferSettings
from engine.build import Engine
from kvtransfer.transports.available import Available, available_transports
from kvtransfer.transports.base import Channel, ImporterTransport, TransportSetup
from tests.faults.faulty_transport import Fault
from tests.faults.hanging_worker import HangingRunner
from worker import transfer as worker_transfer
from worker.life import run_worker


class Hold:
    """Holds a worker's reads and steps on command. It writes `hold EXPORTER` when a read begins to be held and `gone
    EXPORTER` when it ends. It reads `hold`; `step`: the held read continues, the next reads are held; `go`; `hang`: the
    next step writes `hung step` and waits; `wake`."""

    def __init__(self) -> None:
        self._is_held = False
        self._go_on = asyncio.Event()
        self._is_to_hang = False
        self._wake = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    async def connect(self, path: str, name: str) -> None:
        reader, self._writer = await asyncio.open_unix_connection(path)
        self._say(f"hello {name}")
        self._listening = asyncio.create_task(self._listen(reader))

    async def wait(self, exporter: str) -> None:
        if not self._is_held:
            return
        self._say(f"hold {exporter}")
        try:
            await self._go_on.wait()
        finally:
            self._say(f"gone {exporter}")

    def next(self, transport: str) -> Fault | None:
        """Return the next fault, for HangingRunner."""
        is_to_hang, self._is_to_hang = self._is_to_hang, False
        return Fault.HELD if is_to_hang else None

    def injected(self, fault: Fault) -> None:
        self._say("hung step")

    async def may_go_on(self) -> None:
        await self._wake.wait()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while word := (await reader.readline()).decode().strip():
            match word:
                case "hang":
                    self._is_to_hang = True
                    self._wake.clear()
                case "wake":
                    self._is_to_hang = False
                    self._wake.set()
                case _:
                    self._is_held = word != "go"
            if word in ("go", "step"):
                self._go_on.set()
                self._go_on = asyncio.Event()
            self._say(f"did {word}")

    def _say(self, what: str) -> None:
        assert self._writer is not None
        self._writer.write(f"{what}\n".encode())


class _Transport:
    def __init__(self, inner: ImporterTransport, hold: Hold) -> None:
        self._inner, self._hold = inner, hold

    @property
    def name(self) -> str:
        return self._inner.name

    def endpoint(self) -> bytes:
        return self._inner.endpoint()

    async def open_channel(self, epoch: Epoch, exporter_endpoint: bytes) -> "_Channel":
        return _Channel(await self._inner.open_channel(epoch, exporter_endpoint), self._hold, epoch.exporter.id)

    async def close(self) -> None:
        await self._inner.close()


class _Channel:
    def __init__(self, inner: Channel, hold: Hold, exporter: str) -> None:
        self._inner, self._hold, self._exporter = inner, hold, exporter

    async def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> None:
        await self._inner.read(remote_block_ids, local_block_ids)
        await self._hold.wait(self._exporter)

    async def destroy(self) -> None:
        await self._inner.destroy()

    async def finish(self) -> None:
        await self._inner.finish()


async def _main() -> None:
    config = parse_arguments(WorkerConfig, "held_worker", sys.argv[1:])
    role = "prefill" if config.member_id.startswith("prefill") else "decode"
    hold = Hold()
    orders: Any = hold
    await hold.connect(os.environ["HOLD_CONTROL"], config.member_id)
    loop = asyncio.get_running_loop()
    app: Any = import_module("worker.app")
    build = app.build_engine

    def held_transports(settings: TransferSettings, setup: TransportSetup) -> Available:
        found = available_transports(settings, setup)
        return dataclasses.replace(found, importers=tuple(_Transport(inner, hold) for inner in found.importers))

    def build_hanging(*arguments: Any) -> Engine:
        engine: Engine = build(*arguments)
        runner: Any = HangingRunner(engine.runner, orders, loop)
        return dataclasses.replace(engine, runner=runner)

    worker_transfer.available_transports = held_transports  # type: ignore[attr-defined]
    app.build_engine = build_hanging
    await run_worker(config, Role(role), stop=stop_requested(), announce=announce_ready)


if __name__ == "__main__":
    exit_process(run_process("held_worker", _main))
