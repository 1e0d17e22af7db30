"""Swap space on a real pool: bytes come back unchanged, and a swapped sequence continues with its own tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from cluster.errors import ConfigError
from cluster.messages import DecodeJob, MemberId, Sampling, SequenceStart, TokenStops
from cluster.protocol.hashing import nameless_chains
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine
from engine.kv.host_blocks import HostBlocks, SwappingRunner, allocate_host_blocks, with_swaps
from engine.scheduling.commands import AdmitLocal, StepTokens
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import BlockSwap, Launched, Launcher, Runner, StepPlan, StepResult
from tests.unit.engine.rigs.tiny_engine import BLOCK_SIZE, tiny_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("llama")) as engine:
        yield engine


def test_swapped_blocks_come_back_byte_for_byte_at_any_place(engine: Engine) -> None:
    runner = SwappingRunner(engine.runner, HostBlocks(engine.pool, 4))
    engine.pool.raw.random_(0, 256)
    before = engine.pool.raw.clone()

    runner.run(StepPlan((), swaps_out=(BlockSwap(3, 2), BlockSwap(9, 0))))
    engine.pool.raw[[3, 9]] = 7
    result = runner.run(StepPlan((), swaps_out=(BlockSwap(5, 1),), swaps_in=(BlockSwap(5, 2), BlockSwap(20, 0))))

    assert torch.equal(engine.pool.raw[[5, 20]], before[[3, 9]])
    runner.run(StepPlan((), swaps_in=(BlockSwap(3, 1),)))
    assert torch.equal(engine.pool.raw[3], before[5])  # it went out before another one came in
    others = [block_id for block_id in range(24) if block_id not in (3, 5, 9, 20)]
    assert torch.equal(engine.pool.raw[others], before[others])
    assert result.swap_s > 0


def _outputs(engine: Engine, num_blocks: int, num_slots: int) -> tuple[dict[int, list[int]], dict[str, float]]:
    """Return the outputs and figures of three greedy sequences whose KV needs 15 blocks in the end."""
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=64,
        max_num_seqs=4,
        max_prefill_tokens=16,
        max_queue=8,
        watermark=0.0,
        num_swap_slots=num_slots,
    )
    scheduler = SequenceScheduler(limits, new_chain=nameless_chains())
    engine.pool.tensor.fill_(float("nan"))
    runner = SwappingRunner(engine.runner, HostBlocks(engine.pool, max(1, num_slots)))
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for handle in outputs:
        prompt = tuple(range(1 + 7 * handle, 12 + 8 * handle))
        start = SequenceStart(handle, seed=handle, committed_token_ids=())
        stops = TokenStops(max_tokens=26, min_tokens=0, stop_token_ids=frozenset())
        job = DecodeJob("request", 0, MemberId("router", "1"), prompt, Sampling(), stops, (start,), None, 1e6)
        scheduler.apply(AdmitLocal(job), 0.0)
    while (plan := scheduler.plan(0.0)[1]) is not None:
        for event in scheduler.complete(plan, runner.run(plan), 0.0):
            if isinstance(event, StepTokens):
                for told in event.tokens:
                    outputs[told.handle].append(told.token.token_id)
        scheduler.check()
    return outputs, dict(scheduler._swaps.figures)


@pytest.mark.parametrize(("num_slots", "way"), [(12, "swapped_in"), (0, "recomputed")])
def test_a_preempted_sequence_draws_the_tokens_of_an_undisturbed_one(engine: Engine, num_slots: int, way: str) -> None:
    undisturbed, _ = _outputs(engine, num_blocks=24, num_slots=0)
    preempted, figures = _outputs(engine, num_blocks=7, num_slots=num_slots)

    assert figures[way] >= 1
    assert preempted == undisturbed
    assert all(len(output) == 26 for output in preempted.values())


def test_a_launched_step_swaps_before_computing_and_reports_the_time(engine: Engine) -> None:
    launcher = with_swaps(_Launcher(engine.runner), HostBlocks(engine.pool, 4))
    assert isinstance(launcher, Launcher)
    assert not isinstance(with_swaps(engine.runner, HostBlocks(engine.pool, 4)), Launcher)
    engine.pool.raw.random_(0, 256)
    before = engine.pool.raw[4].clone()

    result = launcher.launch(StepPlan((), swaps_out=(BlockSwap(4, 1),), swaps_in=(BlockSwap(6, 1),))).result()

    assert torch.equal(engine.pool.raw[6], before) and result.swap_s > 0
    assert launcher.launch(StepPlan(())).result().swap_s == 0


@dataclass(frozen=True, slots=True)
class _Later:
    runner: Runner
    plan: StepPlan

    def result(self) -> StepResult:
        return self.runner.run(self.plan)


@dataclass(frozen=True, slots=True)
class _Launcher:
    runner: Runner

    def run(self, plan: StepPlan) -> StepResult:
        return self.runner.run(plan)

    def launch(self, plan: StepPlan) -> Launched:
        return _Later(self.runner, plan)


def test_without_host_memory_swapping_is_off_with_the_reason(engine: Engine) -> None:
    assert allocate_host_blocks(engine.pool, 0) == (None, "swap: off (--swap-space 0)")
    none, line = allocate_host_blocks(engine.pool, 1 << 60)
    assert none is None and "the host could not allocate" in line
    few, line = allocate_host_blocks(engine.pool, 3 * engine.pool.block_bytes + 1)
    assert few is not None and few.num_slots == 3 and "3 blocks" in line
    assert few.copy_s_per_block() > 0


def test_swap_space_must_be_a_size() -> None:
    assert EngineSettings(swap_space="0").swap_bytes == 0
    assert EngineSettings(swap_space="2MiB").swap_bytes == 1 << 21
    with pytest.raises(ConfigError, match="--swap-space must be"):
        EngineSettings(swap_space="-1")
