"""The exporter's side of `nixl`: a registered pool, a table of admitted epochs, and a thread that makes progress.

The network reads the pool without this process, which therefore cannot refuse a single read: a process that has the
metadata can read until the agent is destroyed. Three rules protect the pool instead: the metadata is sent only in the
answer to a signed ticket, in a call in which both members have proved themselves; an importer compares its token with
the table, which it reads in the same one-sided way, before its first block; a block that was reused while it was read
is found by the lease and by the digest.

`NixlEndpoint` is the message to an importer: fixed fields and the agent's own binary metadata, signed by the exporter
for one epoch, so that neither damaged nor invented bytes reach the library.
"""

import asyncio
import logging
import secrets
import struct
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from cluster.auth.keys import SIGNATURE_BYTES
from cluster.messages import Epoch
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nixl.agent import NixlAgent, NixlError, Pace, Region
from kvtransfer.transports.proven_connections import ConnectionProofs

NAME = "nixl"
MAGIC = b"NKV1"
_SIGNED_AT = len(MAGIC) + SIGNATURE_BYTES
TOKEN_BYTES = 16
# slot, token; pool: address, blocks, bytes per block, device or -1; admissions: address, slots; bytes of metadata.
_FIELDS = struct.Struct(f"<I{TOKEN_BYTES}sQQQiQII")
_MAX_METADATA_BYTES = 1 << 20
_LOG = logging.getLogger(__name__)
_NUM_SLOTS = 8192
_LONGEST_REST_S = 0.002
_WORKING_S = 10e-6  # of processor time: a poll that takes longer transferred data


@dataclass(frozen=True, slots=True)
class NixlEndpoint:
    slot: int
    token: bytes
    pool: Region
    admissions: Region
    metadata: bytes

    def pack(self, proofs: ConnectionProofs, epoch: Epoch) -> bytes:
        """Return the endpoint with a signature of this exporter for the epoch."""
        pool, admissions = self.pool, self.admissions
        device = -1 if pool.device is None else pool.device
        fields = _FIELDS.pack(
            self.slot,
            self.token,
            pool.address,
            pool.num_rows,
            pool.row_bytes,
            device,
            admissions.address,
            admissions.num_rows,
            len(self.metadata),
        )
        body = fields + self.metadata
        return MAGIC + proofs.seal(NAME, _for_epoch(epoch, body)) + body

    @classmethod
    def parse(cls, packed: bytes, proofs: ConnectionProofs, epoch: Epoch) -> "NixlEndpoint":
        """Parse an endpoint that the epoch's exporter signed. Raises TransportError."""
        signature, body = packed[len(MAGIC) : _SIGNED_AT], packed[_SIGNED_AT:]
        if not packed.startswith(MAGIC):
            raise TransportError("the endpoint is damaged or belongs to another transport")
        if not proofs.is_sealed(signature, NAME, epoch.exporter, _for_epoch(epoch, body)):
            raise TransportError(f"{epoch.exporter} has not signed the endpoint for this epoch")
        if not _FIELDS.size < len(body) <= _FIELDS.size + _MAX_METADATA_BYTES:
            raise TransportError(f"the endpoint has {len(body)} bytes, which its fields cannot fill")
        slot, token, address, num_blocks, block_bytes, device, table, num_slots, size = _FIELDS.unpack_from(body)
        metadata = body[_FIELDS.size :]
        if len(metadata) != size or slot >= num_slots or device < -1 or token == bytes(TOKEN_BYTES):
            raise TransportError("the fields of the endpoint contradict each other")
        pool = Region(address, num_blocks, block_bytes, None if device < 0 else device)
        return cls(slot, token, pool, Region(table, num_slots, TOKEN_BYTES), metadata)


def _for_epoch(epoch: Epoch, body: bytes) -> bytes:
    return epoch.ticket_id + struct.pack("<I", epoch.attempt) + body


class NixlExporter:
    """Owns the table and the agent, which only its thread calls. The thread sleeps while no epoch is admitted."""

    def __init__(self, *, memory: PoolMemory, proofs: ConnectionProofs, linger_s: float) -> None:
        """`linger_s` is how long reads in flight are still served after their epoch ended."""
        self._raw, self._proofs = memory.raw, proofs
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
        return NAME

    @property
    def num_free_slots(self) -> int:
        """Return the number of further epochs that can be admitted."""
        return len(self._free_slots)

    async def start(self) -> None:
        """Start the thread and the agent. Raises OSError."""
        ready: Future[bytes] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="kv-nixl-serve", daemon=True)
        self._thread.start()
        try:
            self._metadata = await asyncio.wrap_future(ready)
        except NixlError as error:
            raise OSError(f"nixl: {error}") from error

    def reachable(self, importer_endpoint: bytes) -> bool:
        """Return whether an importer can read: UCX connects any two hosts that route to each other, by TCP if
        necessary."""
        return importer_endpoint == MAGIC and self._thread is not None and self._thread.is_alive()

    def grant(self, epoch: Epoch) -> bytes:
        assert self._metadata, "admit before start"
        slot, token = self._admitted(epoch)
        self._serve_until_s = float("inf")
        self._wanted.set()
        return NixlEndpoint(slot, token, self._pool, self._admissions, self._metadata).pack(self._proofs, epoch)

    def revoke(self, epoch: Epoch) -> None:
        """Let no importer open a channel for this epoch any more.

        An importer that has a channel may read on; the lease and the digests reveal it."""
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
            _LOG.error("nixl: the exporter's thread has failed and serves no more reads: %s", error)
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
                if (
                    now_s > self._serve_until_s and not self._closing.is_set()
                ):  # checked again after the clear, so that no wake-up is lost
                    self._wanted.wait()
            elif rest_s := pace.rest_s(now_s):
                self._closing.wait(rest_s)
