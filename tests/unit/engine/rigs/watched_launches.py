"""Records what a launch in Triton's interpreter reads and writes, address by address. The interpreter runs one program
after the other over the host's memory, so it alone would never show a race or an invalid address.

Refused: a place outside the tensors that the launch was given; a place that two programs write, unless both write the
same bits there (a graph's idle rows do); a place that one program reads and another one writes. A kernel that is given
an address in place of a tensor may read anywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_LEAST_ADDRESS = 1 << 40  # no size and no stride of the tests is as large


@dataclass(slots=True)
class _Launch:
    regions: list[tuple[int, int]]  # first and last byte + 1 of each tensor
    reads_by_address: bool
    read: list[tuple[int, np.ndarray]] = field(default_factory=list)  # (program, addresses)
    written: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)  # and the bits that went there

    def contain(self, places: np.ndarray, num_bytes: int) -> None:
        first, last = int(places.min()), int(places.max()) + num_bytes
        if any(begin <= first and last <= end for begin, end in self.regions):
            return
        begins, ends = (np.array(side, dtype=np.uint64)[:, None] for side in zip(*self.regions, strict=True))
        inside = ((places >= begins) & (places + np.uint64(num_bytes) <= ends)).any(axis=0)
        assert inside.all(), f"{int((~inside).sum())} places outside the tensors of the launch"

    def check(self) -> None:
        """Check the launch after all programs have ended."""
        if not self.written:
            return
        programs = np.concatenate([np.full(len(places), program) for program, places, _ in self.written])
        places = np.concatenate([places for _, places, _ in self.written])
        bits = np.concatenate([bits.astype(np.uint64) for _, _, bits in self.written])
        order = np.lexsort((programs, places))
        programs, places, bits = programs[order], places[order], bits[order]
        twice = (places[1:] == places[:-1]) & (programs[1:] != programs[:-1]) & (bits[1:] != bits[:-1])
        assert not twice.any(), f"{int(twice.sum())} places are written by two programs"
        for program, read in self.read:
            found = np.minimum(np.searchsorted(places, read), len(places) - 1)
            raced = (places[found] == read) & (programs[found] != program)
            assert not raced.any(), f"{int(raced.sum())} places are read by one program and written by another"


def watch_launches() -> None:
    """Watch all launches from now on. A repeated call has no effect."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    if hasattr(executor.__call__, "watches"):
        return
    plain_call, plain_load, plain_store = executor.__call__, builder.create_masked_load, builder.create_masked_store
    current: list[_Launch] = []

    def call(self: Any, *given: Any, **named: Any) -> None:
        tensors = [value for value in (*given, *named.values()) if isinstance(value, torch.Tensor) and value.numel()]
        has_address = any(isinstance(value, int) and value >= _LEAST_ADDRESS for value in given)
        current.append(_Launch([_extent(tensor) for tensor in tensors], has_address))
        try:
            plain_call(self, *given, **named)
            current[-1].check()
        finally:
            current.pop()

    def load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        places, _ = _live(pointers, mask)
        if len(places):
            if not current[-1].reads_by_address:
                current[-1].contain(places, _num_bytes(pointers))
            current[-1].read.append((_program(self), places))
        return plain_load(self, pointers, mask, *others)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        places, live = _live(pointers, mask)
        if len(places):
            current[-1].contain(places, _num_bytes(pointers))
            data = np.broadcast_to(value.data, live.shape)[live]
            current[-1].written.append((_program(self), places, data.view(f"u{data.itemsize}")))
        return plain_store(self, pointers, value, mask, *others)

    call.watches = True  # type: ignore[attr-defined]
    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (executor, "__call__", call),
        (builder, "create_masked_load", load),
        (builder, "create_masked_store", store),
    )
    for owner, name, ours in replaced:
        setattr(owner, name, ours)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    furthest = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (furthest + 1) * tensor.element_size()


def _live(pointers: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    live = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
    return pointers.data[live], live


def _num_bytes(pointers: Any) -> int:
    return max(1, int(pointers.get_element_ty().primitive_bitwidth) // 8)


def _program(builder: Any) -> int:
    x, y, z = builder.grid_idx
    return int((x * builder.grid_dim[1] + y) * builder.grid_dim[2] + z)
