"""One NIXL agent over UCX without its progress thread: registered memory, a peer, reads, and its destruction.

The agent makes every call into the library. It is not thread-safe: its user makes one call at a time. `Pace` computes
how long a thread that polls an agent pauses between two polls.
"""

import contextlib
import gc
import importlib
import importlib.util
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.memory import use_device

_SPIN_S = 0.001
_SHORTEST_REST_S = 50e-6
# The meta package chooses by torch's CUDA version; a wheel for one CUDA version serves host memory too.
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_LOAD_HINT = "install the extra `nixl`"
# Allows only reads that do not involve the exporter's processor. A read that UCX emulates (plain TCP, shared memory
# where the kernel forbids reading another process) aborts the exporter when a reader disappears during it. The
# environment overrides this: UCX_PROTO_EMULATION_ENABLE=y.
_UCX_SETTINGS = "PROTO_EMULATION_ENABLE=n"
Descriptors = npt.NDArray[np.uint64]  # [pieces, 3]: address, bytes, device
_Answer = TypeVar("_Answer")


class Pace:
    """The pause between two polls of one polling thread. It is zero shortly after an event and then doubles up to a
    bound."""

    def __init__(self, longest_rest_s: float) -> None:
        self._longest_rest_s = longest_rest_s
        self._rest_s = _SHORTEST_REST_S
        self._busy_until_s = 0.0

    def hurry(self, now_s: float) -> None:
        """Poll without a pause for a short time, because something happened or is about to."""
        self._busy_until_s = now_s + _SPIN_S
        self._rest_s = _SHORTEST_REST_S

    def rest_s(self, now_s: float) -> float:
        """Return the pause before the next poll; 0 for none."""
        if now_s < self._busy_until_s:
            return 0.0
        rest_s, self._rest_s = self._rest_s, min(2 * self._rest_s, self._longest_rest_s)
        return rest_s


class NixlError(Exception):
    """The library refused or reports a failed transfer."""


def why_not_loadable() -> str:
    """Return why the library cannot be used; empty if it can."""
    try:
        _api()
    except ImportError as error:
        return f"{error}; {_LOAD_HINT}"
    return ""


@dataclass(frozen=True, slots=True)
class Region:
    """Rows of equal size, in this process's memory or in another's."""

    address: int
    num_rows: int
    row_bytes: int
    device: int | None = None  # index of the GPU; None for host memory

    @classmethod
    def of(cls, rows: torch.Tensor) -> "Region":
        """Return the region of `rows`: [num_rows, row_bytes], contiguous."""
        assert rows.is_contiguous() and rows.element_size() == 1
        device = rows.device.index if rows.is_cuda else None
        return cls(rows.data_ptr(), rows.shape[0], rows.shape[1], device)

    @property
    def kind(self) -> str:
        return "DRAM" if self.device is None else "VRAM"

    def pieces(self, first_rows: npt.NDArray[np.int64], num_rows: npt.NDArray[np.int64]) -> Descriptors:
        described = np.zeros((len(first_rows), 3), dtype=np.uint64)
        described[:, 0] = first_rows * self.row_bytes + self.address
        described[:, 1] = num_rows * self.row_bytes
        if self.device is not None:
            described[:, 2] = self.device
        return described


class NixlAgent:
    """An agent of the NIXL library. After `destroy` it cannot access memory."""

    def __init__(self, name: str, device: int | None) -> None:
        """`device` is the GPU whose memory the agent transfers; if it is set, one thread must make all calls of the
        agent.

        Raises NixlError, ImportError.
        """
        api = _api()
        if device is not None:
            _called(lambda: use_device(device))
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = _called(lambda: api.nixl_agent(name, config))
        _called(lambda: self._agent.create_backend("UCX", {"engine_config": _UCX_SETTINGS}))
        self._peer = ""
        self._reads: dict[int, Any] = {}  # handles of those that were started and are not known to be complete
        self._num_reads = 0

    def register(self, region: Region) -> None:
        """Register memory, which pins it if the network needs that. Raises NixlError."""
        whole = np.array([[region.address, region.num_rows * region.row_bytes, region.device or 0]], dtype=np.uint64)
        _called(lambda: self._agent.register_memory(whole, region.kind))

    def metadata(self) -> bytes:
        """Return name, addresses and keys of registered memory in a plain length-prefixed binary format."""
        return bytes(_called(self._agent.get_agent_metadata))

    def connect(self, metadata: bytes) -> None:
        """Add the peer without contacting it. Raises NixlError."""
        self._peer = _called(lambda: self._agent.add_remote_agent(metadata)).decode()

    def start_read(self, there: tuple[Region, Descriptors], here: tuple[Region, Descriptors]) -> int:
        """Start a read and return its number, for `is_complete`. Raises NixlError."""
        (source, source_pieces), (target, target_pieces) = there, here
        self._num_reads += 1
        number = self._num_reads

        def started() -> None:
            agent = self._agent
            targets = agent.get_xfer_descs(target_pieces, target.kind)
            sources = agent.get_xfer_descs(source_pieces, source.kind)
            self._reads[number] = agent.initialize_xfer("READ", targets, sources, self._peer)
            self._settle(number, agent.transfer(self._reads[number]))

        _called(started)
        return number

    def is_complete(self, number: int) -> bool:
        """Make progress and return whether every byte has arrived. Raises NixlError."""
        handle = self._reads.get(number)
        if handle is not None:
            _called(lambda: self._settle(number, self._agent.check_xfer_state(handle)))
        return number not in self._reads

    def _settle(self, number: int, state: str) -> None:
        if state == "DONE":
            self._reads.pop(number).release()

    def make_progress(self) -> None:
        """Make progress for reads by others: UCX answers some of them, and every new connection, in this call. Raises
        NixlError."""
        _called(self._agent.get_new_notifs)

    def destroy(self) -> None:
        """Destroy the agent. When it returns, no read of it can write any more.

        Its endpoints, sockets, shared segments and queue pairs are gone then and its memory is deregistered. Neither
        cancelling nor releasing a running read would prove that; only the end of the agent's own object does. Raises
        NixlError when the library still holds the agent."""
        agent, self._agent = self._agent, None
        while self._reads:
            _, handle = self._reads.popitem()
            with contextlib.suppress(NixlError):  # the library may report that it could not be cancelled
                _called(handle.release)
            del handle
        alive = weakref.ref(agent.agent)
        del agent
        if alive() is not None:
            gc.collect()  # a traceback may hold a frame that holds the agent
        if alive() is not None:
            raise NixlError("the agent is still in use after it was dropped")


def _called(call: Callable[[], _Answer]) -> _Answer:
    try:
        return call()
    except _errors() as error:
        raise NixlError(str(error) or type(error).__name__) from None


@cache
def _errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the library raises; its own classes have no common base."""
    own = [kind for kind in vars(_api().nixlBind).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, RuntimeError, ValueError)


def _api() -> ModuleType:
    """Import the library. Raises ImportError.

    The import prints to standard output and turns `logging.raiseExceptions` off, which is undone here."""
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            raise_exceptions = logging.raiseExceptions
            try:
                module = importlib.import_module(f"{package}._api")
            finally:
                logging.raiseExceptions = raise_exceptions
            logging.getLogger("nixl").setLevel(logging.WARNING)
            return module
    raise ImportError("NIXL is not installed")
