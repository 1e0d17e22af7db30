"""The size of the pool: as configured, or the rest of the GPU's memory; an error gives both numbers when that is too
little.
"""

import dataclasses
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError
from cluster.settings.worker_settings import EngineSettings
from engine.build import build_engine, largest_step
from engine.kv import capacity
from engine.kv.capacity import CONTEXT_BYTES, MARGIN_BYTES, GpuMemory
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import allocate_pool, host_bytes
from kvtransfer.wire.wire_format import WireDtype
from tests.golden.families import FAMILIES

GIB = 1 << 30
LAYOUT = lay_out([LayerShape(8, 128, 128)] * 32, 16, "bfloat16")  # 2 MiB a block, 128 KiB a token
# 72 of 80 GiB may be used; weights, step, margin and context use 20 + 3 + 1 + 1.
MEMORY = GpuMemory(total=80 * GIB, weights=20 * GIB, largest_step=3 * GIB, free=59 * GIB)


def test_the_pool_gets_the_rest_of_the_share_of_gpu_memory() -> None:
    assert MARGIN_BYTES == CONTEXT_BYTES == GIB
    sized = capacity.measured(EngineSettings(), MEMORY, LAYOUT)
    assert capacity.num_blocks(sized, LAYOUT) == 47 * GIB // LAYOUT.block_bytes
    half = capacity.measured(EngineSettings(gpu_memory_utilization=0.5), MEMORY, LAYOUT)
    assert capacity.num_blocks(half, LAYOUT) == 15 * GIB // LAYOUT.block_bytes


def test_workers_that_share_a_gpu_get_equal_parts_in_any_order_of_start() -> None:
    """Memory that the other worker has already allocated is not free, and does not count against this worker's part."""
    for free in (59 * GIB, 21 * GIB):
        memory = dataclasses.replace(MEMORY, num_sharing=2, free=free)
        sized = capacity.measured(EngineSettings(), memory, LAYOUT)
        assert capacity.num_blocks(sized, LAYOUT) == 11 * GIB // LAYOUT.block_bytes


def test_the_pool_is_never_larger_than_the_memory_free_beside_a_step() -> None:
    sized = capacity.measured(EngineSettings(), dataclasses.replace(MEMORY, free=30 * GIB), LAYOUT)
    assert capacity.num_blocks(sized, LAYOUT) == 26 * GIB // LAYOUT.block_bytes


def test_the_wire_copy_counts_against_the_same_memory() -> None:
    wire = WireDtype("int8")
    sized = capacity.measured(EngineSettings(), MEMORY, LAYOUT, wire)
    assert capacity.num_blocks(sized, LAYOUT, wire) == 47 * GIB // (LAYOUT.block_bytes + wire.copy_bytes(LAYOUT))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            EngineSettings(gpu_memory_utilization=0.2),
            r"0\.2 of 80\.00 GiB for 1 .* leaves 0\.00 GiB .* 16 tokens",
        ),
        (EngineSettings(max_model_len=500_000), r"leaves 47\.00 GiB .* 500000 tokens takes 61\.04 GiB"),
    ],
)
def test_too_little_memory_for_one_sequence_is_refused_with_every_number(settings: EngineSettings, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        capacity.measured(settings, MEMORY, LAYOUT)
    for part in ("weights take 20.00 GiB", "step 3.00 GiB", "59.00 GiB of it free", "--max-num-seqs"):
        assert part in str(refusal.value)


def test_only_a_gpu_without_a_given_size_is_measured() -> None:
    def is_measured(device: str, **changes: object) -> bool:
        settings = EngineSettings(**changes)  # type: ignore[arg-type]
        return capacity.is_measured(capacity.with_pool_memory(settings, device))

    assert is_measured("cuda")
    assert is_measured("cuda:1")
    assert not is_measured("cpu")
    assert not is_measured("cuda", num_blocks=7)
    assert not is_measured("cuda", kv_cache_memory="1GiB")
    assert capacity.with_pool_memory(EngineSettings(), "cpu").kv_cache_memory == "256MiB"


def test_max_model_len_is_the_models_until_the_pool_is_measured_and_then_fits_the_pool() -> None:
    assert capacity.max_model_len(EngineSettings(), LAYOUT, 1 << 20) == 1 << 20
    sized = capacity.measured(EngineSettings(), MEMORY, LAYOUT)
    assert capacity.max_model_len(sized, LAYOUT, 1 << 20) == 47 * GIB // LAYOUT.block_bytes * 16


@pytest.mark.parametrize(("budget", "num_seqs", "longest"), [(512, 64, 4096), (512, 4, 100), (3, 9, 7), (1, 1, 1)])
def test_the_largest_step_fills_budget_sequences_and_lengths(budget: int, num_seqs: int, longest: int) -> None:
    settings = EngineSettings(max_prefill_tokens=budget, max_num_seqs=num_seqs)
    plan = largest_step(settings, LAYOUT, longest)

    assert len(plan.chunks) == num_seqs
    assert {chunk.end for chunk in plan.chunks} == {longest}
    assert all(chunk.samples and chunk.token_ids for chunk in plan.chunks)
    num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
    assert num_tokens >= min(budget, num_seqs * longest)
    assert max(block_id for chunk in plan.chunks for block_id in chunk.block_ids) < num_seqs


def test_the_largest_step_runs(tmp_path: Path) -> None:
    FAMILIES["llama"].save(tmp_path)
    settings = EngineSettings(
        model=str(tmp_path), dtype="float32", device="cpu", num_blocks=8, max_num_seqs=5, max_prefill_tokens=90
    )
    engine = build_engine(settings)
    result = engine.runner.run(largest_step(settings, engine.pool.layout, engine.model_info.max_model_len))
    engine.pool.close()
    assert [len(tokens) for tokens in result.tokens] == [1] * 5


def test_gpu_memory_utilization_on_a_cpu_is_reported_as_without_effect(tmp_path: Path) -> None:
    FAMILIES["llama"].save(tmp_path)
    engine = build_engine(
        EngineSettings(model=str(tmp_path), dtype="float32", device="cpu", num_blocks=8, gpu_memory_utilization=0.5)
    )
    engine.pool.close()
    assert "--gpu-memory-utilization 0.5 changes nothing on a CPU" in engine.report


def test_a_pool_larger_than_the_host_is_refused_at_the_start_with_both_numbers() -> None:
    most = host_bytes()
    num_blocks = most // LAYOUT.block_bytes + 1
    with pytest.raises(
        ConfigError, match=rf"{num_blocks} blocks takes .* this host has {most / GIB:.2f} GiB: set a smaller"
    ):
        allocate_pool(LAYOUT, num_blocks, "cpu")


@pytest.mark.cuda
@pytest.mark.whole_gpu
def test_a_measured_pool_leaves_room_for_the_largest_step(tmp_path: Path) -> None:
    """The memory of other processes is not counted: they come and go."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    FAMILIES["llama"].save(tmp_path)
    settings = EngineSettings(model=str(tmp_path), dtype="float32", device="cuda", gpu_memory_utilization=0.5)
    engine = build_engine(settings)
    pool, total = engine.pool, torch.cuda.mem_get_info()[1]
    exported = pool.num_blocks * pool.block_bytes if pool.cuda_file is not None else 0  # beside what torch has
    assert exported + torch.cuda.memory_reserved() < 0.5 * total
    engine.runner.run(largest_step(settings, engine.pool.layout, engine.model_info.max_model_len))
    engine.pool.close()
