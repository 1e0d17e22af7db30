"""Tests of a worker's other paths on a pretended GPU than plain steps: each path draws a CPU's tokens and waits for
nothing but its tokens, unless the test names another wait."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from cluster.messages import Sampling
from engine.build import Engine, build_engine
from engine.kv.capacity import CONTEXT_BYTES, MARGIN_BYTES
from engine.kv.host_blocks import allocate_host_blocks, with_swaps
from engine.scheduling.step import BlockSwap, Chunk, DraftRequest, Launcher, Sample, StepPlan
from engine.speculation.draft_model import with_draft_model
from engine.steps.runner import ModelRunner
from tests.golden.families import FAMILIES
from tests.unit.engine.cuda.test_pretend_gpu import OnCpu, build, drawn, on_cpu, settings
from tests.unit.engine.rigs.pretend_gpu import OnGpu, PretendGpu, gpu

__all__ = ["build", "gpu", "on_cpu"]

EIGHT_BITS = ("int8", "fp8")
CHOICES = (Sampling(), Sampling(0.9, num_logprobs=4), Sampling(0.7, top_p=0.95, top_k=30, num_logprobs=0))


def choices() -> Iterator[StepPlan]:
    """Return steps: a prompt from which several choices are drawn, then a step of each, with log-probabilities."""
    samples = tuple(Sample(which, 9, way) for which, way in enumerate(CHOICES))
    yield StepPlan((Chunk(0, tuple(range(20, 29)), 0, (3, 4), samples),))
    chunks = (
        Chunk(which, (40 + which,), 9, (3, 4 + which), (Sample(which, 10, way),)) for which, way in enumerate(CHOICES)
    )
    yield StepPlan(tuple(chunks))


def said(runner: ModelRunner) -> list[tuple[int, list[tuple[int, float]]]]:
    """Return the tokens of all choices, each with its best ones and their log-probabilities."""
    tokens = [token for plan in choices() for drawn in runner.run(plan).tokens for token in drawn]
    return [(each.token_id, list(each.logprobs.top) if each.logprobs else []) for each in tokens]


def drafted(runner: ModelRunner) -> list[tuple[tuple[int, ...], ...]]:
    """Return the draft model's proposals while a sequence grows by one token per step."""
    known, answers = list(range(1, 8)), []
    for position in range(7, 11):
        start = 0 if position == 7 else position - 1
        request = DraftRequest(list(known), 3)
        chunk = Chunk(5, tuple(known[start:]), start, (0, 1), (Sample(5, position, Sampling()),), draft=request)
        result = runner.run(StepPlan((chunk,)))
        answers.append(result.draft_tokens)
        known.append(result.tokens[0][0].token_id)
    return answers


def with_draft(engine: Engine, folder: Path, device: str) -> Engine:
    own = {"device": device, "speculation": "draft", "draft_model": str(folder), "num_draft_tokens": 3}
    return with_draft_model(settings(folder, **own), engine)


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    of_bits: dict[str, list[list[int]]]
    deterministic: list[list[int]]
    choices: list[tuple[int, list[tuple[int, float]]]]
    draft_tokens: list[tuple[tuple[int, ...], ...]]
    mixture: list[list[int]]
    mixture_folder: Path


@pytest.fixture(scope="module")
def expected(on_cpu: OnCpu, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Return the results on a CPU, computed before there is any GPU."""
    mixture = tmp_path_factory.mktemp("mixtral")
    FAMILIES["mixtral"].save(mixture)

    def answered(ask: Callable[[ModelRunner], object], folder: Path = on_cpu.folder, **changes: object) -> object:
        engine = build_engine(settings(folder, **changes))
        if ask is drafted:
            engine = with_draft(engine, folder, "cpu")
        found = ask(engine.runner)
        engine.pool.close()
        return found

    return Expected(
        {bits: answered(drawn, kv_cache_dtype=bits) for bits in EIGHT_BITS},  # type: ignore[misc]
        answered(drawn, deterministic="on"),  # type: ignore[arg-type]
        answered(said),  # type: ignore[arg-type]
        answered(drafted),  # type: ignore[arg-type]
        answered(drawn, mixture),  # type: ignore[arg-type]
        mixture,
    )


@pytest.mark.parametrize("bits", EIGHT_BITS)
def test_kv_of_eight_bits(expected: Expected, gpu: PretendGpu, build: Callable[..., Engine], bits: str) -> None:
    engine = build(kv_cache_dtype=bits)
    assert engine.report[-1].startswith("cuda graphs: 3 sizes")
    with gpu.no_waits():
        assert drawn(engine.runner) == expected.of_bits[bits]


def test_deterministic_steps_synchronize_only_to_copy_their_tables(
    expected: Expected, gpu: PretendGpu, build: Callable[..., Engine]
) -> None:
    engine = build(deterministic="on")
    gpu.waits.clear()
    assert drawn(engine.runner) == expected.deterministic
    assert set(gpu.waits) == {"copy cuda -> pageable memory", "aten._to_copy.default cpu -> cuda"}


def test_several_choices_with_log_probabilities(
    expected: Expected, gpu: PretendGpu, build: Callable[..., Engine]
) -> None:
    engine = build()
    with gpu.no_waits():
        ours = said(engine.runner)
    for (token_id, best), (wanted_id, wanted) in zip(ours, expected.choices, strict=True):
        assert token_id == wanted_id
        assert [each for each, _ in best] == [each for each, _ in wanted]
        assert [value for _, value in best] == pytest.approx([value for _, value in wanted], abs=1e-4)


def test_a_draft_model_on_a_gpu_proposes_the_tokens_of_a_cpu(
    expected: Expected, on_cpu: OnCpu, gpu: PretendGpu, build: Callable[..., Engine]
) -> None:
    engine = with_draft(build(), on_cpu.folder, "cuda:0")
    with gpu.no_waits():
        assert drafted(engine.runner) == expected.draft_tokens


def test_a_mixture_that_cannot_be_captured_is_reported_and_draws_the_tokens_of_a_cpu(
    expected: Expected, gpu: PretendGpu, build: Callable[..., Engine]
) -> None:
    engine = build(model=str(expected.mixture_folder))
    assert engine.report[-1].startswith("cuda graphs: off, as the model cannot be captured (called a synchronizing")
    assert drawn(engine.runner) == expected.mixture


def test_swapped_blocks_come_back_by_copies_between_pinned_memory_and_the_device(
    gpu: PretendGpu, build: Callable[..., Engine]
) -> None:
    engine = build(cuda_graphs="off")
    host_blocks, line = allocate_host_blocks(engine.pool, 4 * engine.pool.block_bytes)
    assert host_blocks is not None and line == "swap: 4 blocks in host memory"
    runner = with_swaps(engine.runner, host_blocks)
    assert isinstance(runner, Launcher) and isinstance(engine.pool.raw, OnGpu)
    engine.pool.raw.inner.copy_(torch.arange(engine.pool.raw.numel()).view_as(engine.pool.raw.inner) % 251)
    before = engine.pool.raw.inner.clone()
    swaps = tuple(BlockSwap(block, slot) for block, slot in ((2, 3), (7, 0)))
    back = tuple(BlockSwap(block, swap.slot) for block, swap in zip((5, 6), swaps, strict=True))
    gpu.waits.clear()
    runner.launch(StepPlan((), swaps_out=swaps)).result()
    runner.launch(StepPlan((), swaps_in=back)).result()
    assert torch.equal(engine.pool.raw.inner[[5, 6]], before[[2, 7]])
    assert set(gpu.waits) == {"stream"}  # their time is to be known


def test_the_pool_gets_the_memory_that_a_profiling_run_leaves(
    gpu: PretendGpu, build: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    total, step = CONTEXT_BYTES + MARGIN_BYTES + (64 << 20), 8 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total, total))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: step)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    engine = build(num_blocks=0, kv_cache_memory="auto", gpu_memory_utilization=1.0)
    left = total - CONTEXT_BYTES - MARGIN_BYTES - step
    assert left - engine.pool.block_bytes < engine.pool.raw.nbytes <= left
