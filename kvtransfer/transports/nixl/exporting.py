"""The exporter's half of `nixl`: a registered pool, a table of admitted epochs, and a thread that makes progress.

The network reads the pool without asking this process, so it cannot refuse a single read: whoever has the metadata can
read until the agent is gone. What is promised instead: the metadata travels only in the answer to a signed ticket; an
importer compares its token with the table, read the same one-sided way, before its first block; a block that was given
to somebody else while it was read shows in the lease and in the digest.
"""

import asyncio
import logging
import secrets
import threading
import time
from concurrent.futures import Future

import torch

from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.nixl.agent import NixlAgent, NixlError, Region
from kvtransfer.transports.nixl.endpoint import MAGIC, TOKEN_BYTES, NixlEndpoint
from kvtransfer.transports.nixl.pace import Pace

_LOG = logging.getLogger(__name__)

_NUM_SLOTS = 8192
_LONGEST_REST_S = 0.002
_WORKING_S = 10e-6  # of processor time in one poll: it moved something


class NixlExporter:
    """Owns its agent, which the thread alone calls, and the table. The thread sleeps while nobody may read."""

    def __init__(self, *, memory: PoolMemory, linger_s: float) -> None:
        """`linger_s`: how long reads that are in flight when their epoch ends are still served."""
        self._raw = memory.raw
        self._linger_s = linger_s
        self._table = torch.zeros((_NUM_SLOTS, TOKEN_BYTES), dtype=torch.uint8)
        self._pool, self._admissions = Region.of(memory.raw), Region.of(self._table)
        self._slots: dict[tuple[bytes, int], tuple[int, bytes]] = {}  # slot and token by (ticket id, attempt)
        self._free_slots = list(range(_NUM_SLOTS))
        self._metadata = b""
        self._wanted = threading.Event()  # to serve, or to end
        self._serve_until_s = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return "nixl"

    @property
    def num_free_slots(self) -> int:
        """For how many more epochs there is room."""
        return len(self._free_slots)

    async def start(self) -> None:
        """Raises OSError."""
        ready: Future[bytes] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="kv-nixl-serve", daemon=True)
        self._thread.start()
        try:
            self._metadata = await asyncio.wrap_future(ready)
        except NixlError as error:
            raise OSError(f"nixl: {error}") from error

    def reachable(self, importer_endpoint: bytes) -> bool:
        """UCX finds a way between any two hosts that route to each other, TCP if nothing better."""
        return importer_endpoint == MAGIC and self._thread is not None and self._thread.is_alive()

    def admit(self, epoch: Epoch) -> bytes:
        assert self._metadata, "admit before start"
        slot, token = self._admitted(epoch)
        self._serve_until_s = float("inf")
        self._wanted.set()
        return NixlEndpoint(slot, token, self._pool, self._admissions, self._metadata).pack()

    def revoke(self, epoch: Epoch) -> None:
        """No importer opens a channel for it any more. One that has may read on: lease and digests tell it."""
        slot, _ = self._slots.pop((epoch.ticket_id, epoch.attempt), (None, b""))
        if slot is not None:
            self._table[slot] = 0
            self._free_slots.append(slot)
        if not self._slots:
            self._serve_until_s = time.monotonic() + self._linger_s

    async def close(self) -> None:
        self._closing.set()
        self._wanted.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _admitted(self, epoch: Epoch) -> tuple[int, bytes]:
        key = (epoch.ticket_id, epoch.attempt)
        if key not in self._slots:
            token = secrets.token_bytes(TOKEN_BYTES)
            if not self._free_slots:
                return 0, token  # is in no slot: the importer will not open
            slot = self._free_slots.pop()
            self._table[slot] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
            self._slots[key] = (slot, token)
        return self._slots[key]

    def _run(self, ready: "Future[bytes]") -> None:
        try:
            agent = NixlAgent(f"exporter-{secrets.token_hex(8)}", self._pool.device)
            for region in (self._pool, self._admissions):
                agent.register(region)
            ready.set_result(agent.metadata())
        except (NixlError, ImportError) as error:
            ready.set_exception(error)
            return
        try:
            self._serve(agent)
        except NixlError as error:
            _LOG.error("nixl serves no more reads: %s", error)
        finally:
            agent.destroy()

    def _serve(self, agent: NixlAgent) -> None:
        pace = Pace(_LONGEST_REST_S)
        while not self._closing.is_set():
            began_s = time.thread_time()
            agent.make_progress()
            now_s = time.monotonic()
            if time.thread_time() - began_s > _WORKING_S:
                pace.hurry(now_s)
            if now_s > self._serve_until_s:
                self._wanted.clear()
                if now_s > self._serve_until_s and not self._closing.is_set():  # still, and from here the event tells
                    self._wanted.wait()
            elif rest_s := pace.rest_s(now_s):
                self._closing.wait(rest_s)
