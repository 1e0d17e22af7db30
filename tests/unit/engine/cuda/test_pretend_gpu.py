"""The engine on a pretended GPU: a step mixes no tensors of two devices, waits for nothing but its tokens, and draws
the same tokens as a CPU, with and without graphs. With Triton and TRITON_INTERPRET=1 its kernels take part.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.messages import LogitRules, Sampling
from cluster.settings.worker_settings import EngineSettings
from engine import build as engine_build
from engine.attention import registry
from engine.attention.gather import attend_dense
from engine.attention.interface import AttentionOptions, LayerKv
from engine.attention.registry import ALL_DTYPES, Capability
from engine.batch import PackedBatch, pack, to_device
from engine.build import Engine, build_engine
from engine.cuda.fused_forward import TorchOps
from engine.kv import pool
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import KvPool, restore
from engine.model import loading
from engine.sampling.logit_state import LogitState
from engine.scheduling.step import BlockCopy, Chunk, Sample, StepPlan
from engine.steps.runner import LaunchingRunner, ModelRunner
from tests.golden.families import FAMILIES
from tests.unit.engine.rigs.interpreted_triton import IS_INTERPRETED, compute_as_a_gpu
from tests.unit.engine.rigs.pretend_gpu import DEVICE, OnGpu, PretendGpu, gpu, moved, played
from tests.unit.engine.rigs.watched_launches import watch_launches

__all__ = ["gpu"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
NUM_BLOCKS = 12


class TensorAttention:
    """Attention that reads nothing on the host but lengths."""

    def for_graph(self, batch: PackedBatch) -> "TensorAttention":
        return TensorAttention()

    def prepare(self, batch: PackedBatch) -> None: ...

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        tables = batch.block_tables
        if set(batch.query_lens) != {1}:
            rows = [row for row, length in enumerate(batch.query_lens) for _ in range(length)]
            tables = tables[to_device(torch.tensor(rows), query.device)]
        keys, values = (
            (view[tables] if scales is None else restore(view[tables], scales[tables], query.dtype))
            .flatten(1, 2)
            .transpose(1, 2)
            for view, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales))
        )
        visible = torch.arange(keys.shape[2], device=query.device) <= batch.position_ids[0][:, None]
        grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[2])
        return attend_dense(grouped, keys, values, visible[:, None, None], None, options).flatten(1, 2)


class Interpreted:
    """A kernel, launched on the pretended GPU by Triton's interpreter."""

    def __init__(self, gpu: PretendGpu, kernel: Any) -> None:
        self._gpu, self._kernel = gpu, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **options: Any) -> None:
            assert all(isinstance(each, OnGpu) for each in given if isinstance(each, torch.Tensor))
            inner = [each.inner if isinstance(each, OnGpu) else each for each in given]
            self._gpu.launch(lambda: self._kernel[grid](*inner, **options))

        return launch


class PlainTorch:
    """Looks like torch, but a tensor on the pretended GPU is a plain one."""

    Tensor = OnGpu

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def settings(folder: Path, **changes: object) -> EngineSettings:
    given: dict[str, object] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "block_size": 8,
        "num_blocks": NUM_BLOCKS,
        "max_model_len": 32,
        "max_prefill_tokens": 20,
        "max_num_seqs": 3,
        "cpu_kernels": "off",
    }
    return EngineSettings(**given | changes)  # type: ignore[arg-type]


def plans() -> Iterator[StepPlan]:
    """Return the steps: a prompt together with a decode, decodes alone, a copied block, rejected draft tokens; every
    sampling method, and logit rules."""
    rules = LogitRules(((4, 2.0),), 1.2, 0.3, 0.4, tuple(range(2, 90)), ((3,), (2, 5)))
    states = (None, LogitState(rules, [1, 2, 2, 7], 1), None)
    ways = (Sampling(), Sampling(0.8, top_p=0.9), Sampling(0.7, top_k=20, min_p=0.02, num_logprobs=3))

    def sampled(row: int, position: int, count: int = 1) -> tuple[Sample, ...]:
        banned = frozenset({3} if row else ())
        return tuple(
            Sample(row, position + place + 1, ways[row], banned, states[row], (1, 2, 3)[:place])
            for place in range(count)
        )

    yield StepPlan((Chunk(0, tuple(range(1, 12)), 0, (0, 1), sampled(0, 10)), Chunk(1, (9,), 0, (4,), sampled(1, 0))))
    yield StepPlan((Chunk(0, (5,), 11, (0, 1), sampled(0, 11)), Chunk(1, (6,), 1, (4,), sampled(1, 1))))
    third = Chunk(2, (8,), 0, (7,), sampled(2, 0))
    yield StepPlan((Chunk(0, (5,), 12, (0, 9), sampled(0, 12)), third), copies=(BlockCopy(1, 9),))
    speculating = Chunk(1, (7, 1, 2, 3), 2, (4,), sampled(1, 2, 4), num_draft_tokens=3)
    yield StepPlan((Chunk(0, (5,), 13, (0, 9), sampled(0, 13)), speculating))
    yield StepPlan(tuple(Chunk(row, (2,), 14, (2 * row, 2 * row + 1), sampled(row, 14)) for row in range(3)))


def drawn(runner: ModelRunner) -> list[list[int]]:
    return [[token.token_id for tokens in runner.run(plan).tokens for token in tokens] for plan in plans()]


@dataclass(frozen=True, slots=True)
class OnCpu:
    """The tokens of a run on the CPU, and its pool afterwards."""

    folder: Path
    tokens: list[list[int]]
    pool: torch.Tensor


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    """Return the results on a CPU, computed before there is any GPU, because `transformers` looks for devices once, at
    its first model.
    """
    folder = tmp_path_factory.mktemp("llama")
    FAMILIES["llama"].save(folder)
    engine = build_engine(settings(folder))
    found = OnCpu(folder, drawn(engine.runner), engine.pool.tensor.clone())
    engine.pool.close()
    return found


@pytest.fixture(params=["tensors", "triton"])
def build(
    on_cpu: OnCpu, gpu: PretendGpu, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    plain = loading._build
    monkeypatch.setattr(loading, "_build", lambda *given: moved(plain(*given[:2], "cpu")))  # type: ignore[call-arg]
    monkeypatch.setattr(engine_build, "CudaCapture", lambda device: played(gpu))
    monkeypatch.setattr("engine.decoders.layer_parts.torch", PlainTorch())  # which asks for tensors of no subclass
    if request.param == "tensors":
        table = (Capability("tensors", TensorAttention, frozenset({"cuda"}), kv_dtypes=ALL_DTYPES, captures=True),)
        monkeypatch.setattr(registry.choose, "__defaults__", (table,))
    elif not IS_INTERPRETED:
        pytest.skip("needs Triton and TRITON_INTERPRET=1")
    if HAS_TRITON and not IS_INTERPRETED:  # compiled kernels want a driver
        monkeypatch.setattr("engine.cuda.fused_forward._ops", lambda device: TorchOps())
    if IS_INTERPRETED:
        compute_as_a_gpu()
        watch_launches()
        from engine.attention import triton_paged
        from engine.cuda import triton_ops

        for module, names in (
            (triton_paged, ("attend_tile", "merge_parts")),
            (triton_ops, ("_norm_rows", "_rotate_heads", "_gate_rows")),
        ):
            for name in names:
                monkeypatch.setattr(module, name, Interpreted(gpu, getattr(module, name)))

    def built(**changes: object) -> Engine:
        return build_engine(settings(on_cpu.folder, device="cuda:0", **changes))

    return built


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_step_never_synchronizes_and_draws_the_tokens_of_a_cpu(
    on_cpu: OnCpu, gpu: PretendGpu, build: Callable[..., Engine], graphs: str
) -> None:
    engine = build(cuda_graphs=graphs)
    assert isinstance(engine.runner, LaunchingRunner)
    assert engine.report[-1].startswith("cuda graphs: 3 sizes" if graphs == "auto" else "cuda graphs: off")
    with gpu.no_waits():
        assert drawn(engine.runner) == on_cpu.tokens
    pool = engine.pool.tensor
    assert isinstance(pool, OnGpu) and torch.allclose(pool.inner, on_cpu.pool, atol=1e-4)


def test_a_fused_step_never_synchronizes_with_and_without_graphs(gpu: PretendGpu, build: Callable[..., Engine]) -> None:
    """The step runs in bfloat16; the load check has compared the logits, so this test does not compare tokens."""
    for graphs in ("auto", "off"):
        engine = build(cuda_graphs=graphs, dtype="bfloat16")
        assert "forward: fused, 2 layers" in engine.report
        with gpu.no_waits():
            assert all(len(tokens) >= 2 for tokens in drawn(engine.runner))
        engine.pool.close()


def test_the_pool_is_allocated_after_weights_are_merged(
    build: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merging weights needs extra memory temporarily, and the driver cannot allocate to the pool the part that torch
    keeps.
    """
    done: list[str] = []

    def noting(name: str, plain: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            done.append(name)
            return plain(*given, **named)

        return call

    noted = ((engine_build, "fused_decoder"), (torch.cuda, "empty_cache"))
    for owner, name in (*noted, (pool, "_allocate"), (engine_build, "allocate_pool")):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    build(dtype="bfloat16", cuda_graphs="off").pool.close()
    assert "fused_decoder" in done[: done.index("allocate_pool")]
    assert done[done.index("allocate_pool") + 1 :][:2] == ["empty_cache", "_allocate"]


def test_the_pretended_gpu_refuses_mixed_devices_and_detects_synchronization(gpu: PretendGpu) -> None:
    ours, theirs = torch.ones(3, device=DEVICE), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        ours + theirs
    waiting: tuple[Callable[[], object], ...] = (
        ours.tolist,
        lambda: bool(ours[0]),
        lambda: theirs.to(DEVICE),
        lambda: ours[ours > 0],
        lambda: ours[torch.tensor([0, 1])],
        lambda: ours.index_put_((ours.long(),), torch.tensor(0.0)),
        lambda: torch.cuda.current_stream().synchronize(),
    )
    for work in waiting:
        with gpu.no_waits(), pytest.raises(RuntimeError, match="synchronizing"):
            work()
    with gpu.no_waits():
        assert to_device(theirs, DEVICE).device == DEVICE


def test_steps_of_any_size_are_computed_by_the_same_kernels(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, tables and their addresses change with every step; compiling a kernel for each would cost seconds."""
    if not HAS_TRITON or IS_INTERPRETED:
        pytest.skip("needs Triton, which comes with torch's CUDA wheels, and not its interpreter")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from engine.attention import triton_paged

    variants: dict[str, set[str]] = {}

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self._name = kernel.__name__
            target = make_backend(GPUTarget("cuda", 90, 32))
            self._bind = create_function_from_signature(kernel.signature, kernel.params, target)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*given: Any, **options: Any) -> None:
                variants.setdefault(self._name, set()).add(str(self._bind(*given, **options)[1:]))

            return launch

    for name in ("attend_tile", "merge_parts"):
        monkeypatch.setattr(triton_paged, name, Noted(getattr(triton_paged, name)))
    pool = KvPool(lay_out([LayerShape(2, 16, 16)], 16, "bfloat16"), 4, DEVICE)
    keys, values = pool.layers[0]
    backend = triton_paged.TritonBackend()
    for count in range(1, 9):
        for width in (*range(17, 40), 64, 600):
            chunks = [Chunk(row, (1,), 16 * width - 2, (0,) * width) for row in range(count)]
            chunks.append(Chunk(count, (1,) * (count + 4), 0, (0,)))
            query = torch.zeros(
                sum(len(chunk.token_ids) for chunk in chunks), 4, 16, dtype=torch.bfloat16, device=DEVICE
            )
            new = query[:, :2]
            backend.attend(query, LayerKv(new, new, keys, values), pack(chunks, 16, DEVICE), AttentionOptions(0.25))
    assert {name: len(found) for name, found in variants.items()} == {"attend_tile": 2, "merge_parts": 1}
