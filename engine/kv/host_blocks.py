"""Host memory for blocks that were swapped out of the pool, and the runner that moves them. Owns the bytes; never
decides which block goes where.

A slot is as large as a block and holds it byte for byte. On a CPU its pages are allocated when they are first written
to; for CUDA the memory is pinned at the start, so that copies run at the link's speed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engine.kv.pool import KvPool
from engine.scheduling.step import BlockSwap, Launched, Launcher, Runner, StepPlan, StepResult

_NUM_PROBED = 16  # slots that are touched at the start


class HostBlocks:
    """The swap space: pinned host memory `[num_slots, block_bytes]`. Called by the step thread alone."""

    def __init__(self, pool: KvPool, num_slots: int) -> None:
        """Allocate the memory. Raises RuntimeError if the host cannot provide it."""
        assert num_slots >= 1
        self.num_slots = num_slots
        self._pool = pool
        is_pinned = pool.device.type == "cuda"
        self._memory = torch.empty((num_slots, pool.block_bytes), dtype=torch.uint8, pin_memory=is_pinned)

    def swap_out(self, swaps: Sequence[BlockSwap]) -> None:
        for swap in swaps:
            self._memory[swap.slot].copy_(self._pool.raw[swap.block_id], non_blocking=True)

    def swap_in(self, swaps: Sequence[BlockSwap]) -> None:
        for swap in swaps:
            self._pool.raw[swap.block_id].copy_(self._memory[swap.slot], non_blocking=True)

    def wait(self) -> None:
        """Wait until all requested copies are done."""
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()

    def copy_s_per_block(self, now_s: Callable[[], float] = time.perf_counter) -> float:
        """Measure the seconds to copy one block one way, with an unused pool and slots that were touched before."""
        swaps = [BlockSwap(i, i) for i in range(min(_NUM_PROBED, self.num_slots, self._pool.num_blocks))]
        self.swap_out(swaps)
        self.wait()
        started_s = now_s()
        self.swap_out(swaps)
        self.swap_in(swaps)
        self.wait()
        return (now_s() - started_s) / (2 * len(swaps))


class SwappingRunner:
    """A Runner whose steps may begin with copies between the pool and the swap space."""

    def __init__(self, runner: Runner, host_blocks: HostBlocks, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._runner = runner
        self._host_blocks = host_blocks
        self._now_s = now_s

    def run(self, plan: StepPlan) -> StepResult:
        swap_s = self._swap(plan)
        return replace(self._runner.run(plan), swap_s=swap_s)

    def _swap(self, plan: StepPlan) -> float:
        """Perform the plan's swaps and return the seconds they took."""
        if not plan.swaps_out and not plan.swaps_in:
            return 0.0
        started_s = self._now_s()
        self._host_blocks.swap_out(plan.swaps_out)
        self._host_blocks.swap_in(plan.swaps_in)
        self._host_blocks.wait()
        return self._now_s() - started_s


class SwappingLauncher(SwappingRunner):
    """A Launcher whose steps may begin with copies between the pool and the swap space. It waits for these copies, so
    that their time is known."""

    def __init__(self, launcher: Launcher, host_blocks: HostBlocks) -> None:
        super().__init__(launcher, host_blocks)
        self._launcher = launcher

    def launch(self, plan: StepPlan) -> Launched:
        swap_s = self._swap(plan)
        launched = self._launcher.launch(plan)
        return _LaunchedSwaps(launched, swap_s) if swap_s else launched


@dataclass(frozen=True, slots=True)
class _LaunchedSwaps:
    launched: Launched
    swap_s: float

    def result(self) -> StepResult:
        return replace(self.launched.result(), swap_s=self.swap_s)


def with_swaps(runner: Runner, host_blocks: HostBlocks) -> Runner:
    """Return the runner extended by swaps, as a SwappingLauncher if it is a Launcher."""
    if isinstance(runner, Launcher):
        return SwappingLauncher(runner, host_blocks)
    return SwappingRunner(runner, host_blocks)


def allocate_host_blocks(pool: KvPool, swap_bytes: int) -> tuple[HostBlocks | None, str]:
    """Return the swap space of a worker, or None if it has none, and a line for the worker to print."""
    num_slots = swap_bytes // pool.block_bytes
    if not swap_bytes:
        return None, "swap: off (--swap-space 0)"
    if not num_slots:
        return None, f"swap: off, as --swap-space {swap_bytes} holds no block of {pool.block_bytes} bytes"
    try:
        host_blocks = HostBlocks(pool, num_slots)
    except RuntimeError as error:
        return None, f"swap: off, as the host could not allocate {swap_bytes} bytes: {str(error).splitlines()[0]}"
    return host_blocks, f"swap: {num_slots} blocks in host memory"
