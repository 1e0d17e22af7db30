"""The importer's link to one exporter: a separate agent, and the thread that makes its progress.

Every read of a link ends in one of two ways: complete, or with the agent destroyed. Both prove that nothing is written
any more. So a read that fails or passes its deadline ends the link and all other reads on it.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from kvtransfer.memory import runs
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nixl.agent import Descriptors, NixlAgent, NixlError, Pace, Region
from kvtransfer.transports.nixl.exporting import TOKEN_BYTES, NixlEndpoint
from kvtransfer.transports.sockets import joined

_NUM_SCRATCH_ROWS = 1024
_LONGEST_REST_S = 0.001
_FEW_ROWS = 64  # up to here plain Python is faster than numpy
_ON_THE_SPOT_BYTES = 1 << 20
_ON_THE_SPOT_S = 100e-6


@dataclass(slots=True, eq=False)
class _Read:
    """One read: source, target, its beginning and the future of its result."""

    there: tuple[Region, Descriptors]
    here: tuple[Region, Descriptors]
    began_s: float
    ended: "Future[None]"
    number: int = 0  # once it has started
    error: str = ""  # why it cannot continue


class NixlLink:
    """Create it on the event loop, which posts reads and ends the link.

    The agent belongs to the thread while reads are in flight and before the first one; otherwise the event loop may use
    it. The lock guards the state that both use."""

    def __init__(self, *, pool: Region, there: NixlEndpoint, timeout_s: float) -> None:
        self._pool, self._there, self._timeout_s = pool, there, timeout_s
        self._scratch = torch.zeros((_NUM_SCRATCH_ROWS, TOKEN_BYTES), dtype=torch.uint8)
        self._scratch_region = Region.of(self._scratch)
        self._free_scratch = list(range(_NUM_SCRATCH_ROWS))
        self._changed = threading.Condition()
        self._posted: list[_Read] = []
        self._closing = False
        self._num_in_flight = 0
        self._has_read = False
        self._agent: NixlAgent | None = None
        self._error = ""
        self._destroyed: Future[None] = Future()
        self._destroyed.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name="kv-nixl-read", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._closing

    async def check_admission(self, slot: int, token: bytes) -> None:
        """Check that the exporter's table has the token. The first check connects. Raises TransportError."""
        if not self._free_scratch:
            raise TransportError("too many channels are being opened to one exporter")
        row = self._free_scratch.pop()
        read = self._post((self._there.admissions, [slot]), (self._scratch_region, [row]))
        try:
            await asyncio.wrap_future(read)
            if self._scratch[row].numpy().tobytes() != token:
                raise TransportError("the exporter has not admitted this epoch")
        finally:  # at once, or when an abandoned read has ended
            read.add_done_callback(lambda _: self._free_scratch.append(row))

    def read(self, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> "Future[None]":
        """Start a read. It ends with the bytes in place, or with TransportError and the link destroyed. It cannot be
        cancelled."""
        return self._post((self._there.pool, remote_block_ids), (self._pool, local_block_ids))

    def close(self) -> None:
        """Start to end the link. Reads in flight fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    async def destroyed(self) -> None:
        """Wait until the agent is destroyed, forever if the library does not release it."""
        await joined(self._destroyed)

    def _post(self, there: tuple[Region, Sequence[int]], here: tuple[Region, Sequence[int]]) -> "Future[None]":
        source, target = _merged(there, here)
        read = _Read(source, target, time.monotonic(), Future())
        read.ended.set_running_or_notify_cancel()
        if _is_short(there, here) and self._is_idle() and self._done_on_the_spot(read):
            read.ended.set_result(None)
            return read.ended
        with self._changed:
            if self._closing:
                raise TransportError(self._error or "the link to the exporter is closed")
            self._posted.append(read)
            self._num_in_flight += 1
            self._changed.notify()
        return read.ended

    def _is_idle(self) -> bool:
        """Return whether the event loop may use the agent.

        The thread then waits for a post or for the end, which both come from the event loop. GPU memory needs the
        thread's context, so an agent with GPU memory is never idle in this sense."""
        if self._pool.device is not None:
            return False
        with self._changed:
            return self._has_read and self._num_in_flight == 0 and not self._closing

    def _done_on_the_spot(self, read: _Read) -> bool:
        """Try to complete a read at once. If it returns False, the thread continues the read."""
        assert self._agent is not None
        try:
            read.number = self._agent.start_read(read.there, read.here)
            until_s = time.monotonic() + _ON_THE_SPOT_S
            while not self._agent.is_complete(read.number):
                if time.monotonic() > until_s:
                    return False
        except Exception as error:  # noqa: BLE001  # any error: the read may have started, so the thread ends the agent
            read.error = str(error) if isinstance(error, NixlError) else f"{type(error).__name__}: {error}"
            return False
        return True

    def _run(self) -> None:
        reads: list[_Read] = []
        error = "the link to the exporter is closed"
        try:
            self._agent = self._connected()
            self._work(self._agent, reads)
        except (NixlError, ImportError) as failure:
            error = str(failure)
            if not self._has_read:
                error += "; the exporter is gone, or no RDMA, GPU or shared memory leads to it"
        finally:
            self._end(reads, error)

    def _end(self, reads: list[_Read], error: str) -> None:
        with self._changed:
            self._closing, self._error = True, error
            reads += self._posted
        if self._agent is not None:
            self._agent.destroy()
        self._destroyed.set_result(None)
        for read in reads:
            read.ended.set_exception(TransportError(error))

    def _connected(self) -> NixlAgent:
        agent = NixlAgent(f"importer-{secrets.token_hex(8)}", self._pool.device)
        for region in (self._pool, self._scratch_region):
            agent.register(region)
        agent.connect(self._there.metadata)
        return agent

    def _work(self, agent: NixlAgent, reads: list[_Read]) -> None:
        """Work until the link closes. Raises NixlError when a read has failed or is late."""
        pace = Pace(_LONGEST_REST_S)
        while True:
            with self._changed:
                if not reads:
                    self._changed.wait_for(lambda: self._posted or self._closing)
                if self._closing:
                    return
                new, self._posted = self._posted, []
            reads += new  # recorded before they start, so that each read ends in every case
            for read in new:
                if read.error:
                    raise NixlError(read.error)
                read.number = read.number or agent.start_read(read.there, read.here)
                pace.hurry(time.monotonic())
            self._advance(agent, reads, pace)

    def _advance(self, agent: NixlAgent, reads: list[_Read], pace: Pace) -> None:
        now_s = time.monotonic()
        for read in tuple(reads):
            if agent.is_complete(read.number):
                reads.remove(read)
                with self._changed:
                    self._has_read = True
                    self._num_in_flight -= 1  # with the last one the agent is not the thread's any more
                read.ended.set_result(None)
                pace.hurry(now_s)
            elif now_s > read.began_s + self._timeout_s:
                raise NixlError(f"the exporter did not answer within {self._timeout_s:g} s")
        if reads and (rest_s := pace.rest_s(now_s)):
            with self._changed:
                self._changed.wait_for(lambda: self._posted or self._closing, rest_s)


def _is_short(there: tuple[Region, Sequence[int]], here: tuple[Region, Sequence[int]]) -> bool:
    """Return whether a read of host memory takes less time than waking a thread and being woken by it, so that the
    event loop performs it."""
    host_only = there[0].device is None and here[0].device is None
    return host_only and len(here[1]) * here[0].row_bytes <= _ON_THE_SPOT_BYTES


def _merged(
    there: tuple[Region, Sequence[int]], here: tuple[Region, Sequence[int]]
) -> tuple[tuple[Region, Descriptors], tuple[Region, Descriptors]]:
    """Merge rows that are consecutive on both sides into one piece."""
    (source, source_rows), (target, target_rows) = there, here
    if len(source_rows) <= _FEW_ROWS:
        stretches = np.array(list(runs(source_rows, target_rows)), dtype=np.int64)  # [pieces, 3]
        sources, targets, lengths = stretches.T
    else:
        rows = np.array((source_rows, target_rows), dtype=np.int64)  # [2, rows]
        ends = np.flatnonzero((rows[:, 1:] - rows[:, :-1] != 1).any(axis=0)) + 1
        firsts = np.concatenate(([0], ends))
        lengths = np.concatenate((ends, [rows.shape[1]])) - firsts
        sources, targets = rows[:, firsts]
    return (source, source.pieces(sources, lengths)), (target, target.pieces(targets, lengths))
