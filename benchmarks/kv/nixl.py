"""The limit of `nixl`: the library alone, on the same two pools, polled continuously by the measuring thread.

Descriptors are made before the clock starts. A sample prepares one transfer, posts it and waits for its end.
"""

import importlib
import importlib.util
import random
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.kv.shapes import Shape
from engine.kv.pool import KvPool
from kvtransfer.memory import runs

_PAUSE_S = 0.001


class BareExporter:
    """Registers the pool and accepts connections on its own thread."""

    def __init__(self, pool: KvPool) -> None:
        self._agent = _agent("bare-exporter", pool)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._never = threading.Event()
        threading.Thread(target=self._serve, name="bare-nixl", daemon=True).start()

    def _serve(self) -> None:
        while not self._never.wait(_PAUSE_S):
            self._agent.get_new_notifs()


class BareImporter:
    def __init__(self, metadata: bytes, remote_address: int, pool: KvPool) -> None:
        self._pool, self._remote_address = pool, remote_address
        self._agent = _agent("bare-importer", pool)
        self._peer: str = self._agent.add_remote_agent(metadata).decode()

    def prepare(self, shape: Shape, dice: random.Random) -> Callable[[], None]:
        remote, local = (shape.pick(self._pool.num_blocks, dice) for _ in range(2))
        stretches = list(runs(remote, local))
        lengths = [length for _, _, length in stretches]
        there = self._described(self._remote_address, [source for source, _, _ in stretches], lengths)
        here = self._described(self._pool.raw.data_ptr(), [target for _, target, _ in stretches], lengths)

        def move() -> None:
            handle = self._agent.initialize_xfer("READ", here, there, self._peer)
            state = self._agent.transfer(handle)
            while state != "DONE":
                if state == "ERR":
                    raise RuntimeError("the bare transfer failed")
                state = self._agent.check_xfer_state(handle)
            self._agent.release_xfer_handle(handle)

        return move

    def _described(self, address: int, rows: Sequence[int], lengths: Sequence[int]) -> Any:
        pieces = np.zeros((len(rows), 3), dtype=np.uint64)
        pieces[:, 0] = np.uint64(address) + np.array(rows, dtype=np.uint64) * np.uint64(self._pool.block_bytes)
        pieces[:, 1] = np.array(lengths, dtype=np.uint64) * np.uint64(self._pool.block_bytes)
        return self._agent.get_xfer_descs(pieces, "DRAM")


def _agent(name: str, pool: KvPool) -> Any:
    library = _library()
    agent = library.nixl_agent(name, library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    whole = np.array([[pool.raw.data_ptr(), pool.raw.numel(), 0]], dtype=np.uint64)
    agent.register_memory(whole, "DRAM")
    return agent


def _library() -> ModuleType:
    """Return the library. Raises ImportError."""
    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(f"{package}._api")
    raise ImportError("NIXL is not installed")
