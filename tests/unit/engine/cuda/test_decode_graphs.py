"""Decodes from graphs have the same logits as plain ones, in any order of steps; idle rows write to no sequence's
block.

On the CPU a graph is replayed by calling the recorded computation over the same tensors in place.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from cluster.messages import Sampling
from cluster.settings.worker_settings import EngineSettings
from engine.attention.gather import GatherBackend, attend_dense
from engine.attention.interface import AttentionOptions, LayerKv
from engine.attention.registry import Capability
from engine.batch import PackedBatch
from engine.cuda.graph_forward import GraphForward, NewForward, bucket_for, bucket_sizes, captured
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.model.loading import load
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.forward import PlainForward
from engine.steps.runner import ModelRunner
from tests.golden.families import FAMILIES

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, MAX_SEQS = 8, 40, 40, 11
SAMPLE = (Sample(0, 0, Sampling()),)


def test_sizes_reach_every_number_of_decodes() -> None:
    for most in (1, 3, 8, 11, 64, 256, 300):
        sizes = bucket_sizes(most)
        assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == most
        for count in range(1, most + 1):
            size = bucket_for(count, sizes)
            assert size is not None and count <= size <= max(2 * count, count + 31)
        assert bucket_for(most + 1, sizes) is None


class TableBackend:
    """A back end that reads tensors only when it computes decodes, as it must under capture."""

    def for_graph(self, batch: PackedBatch) -> "TableBackend":
        return TableBackend()

    def prepare(self, batch: PackedBatch) -> None:
        assert [start + 1 for start in batch.starts] == batch.context_lens.tolist()

    def attend(self, query: torch.Tensor, kv: LayerKv, batch: PackedBatch, options: AttentionOptions) -> torch.Tensor:
        if set(batch.query_lens) != {1}:
            return GatherBackend().attend(query, kv, batch, options)
        keys, values = (view[batch.block_tables].flatten(1, 2).transpose(1, 2) for view in (kv.keys, kv.values))
        positions = torch.arange(keys.shape[2])
        visible = positions < batch.context_lens[:, None]
        if options.sliding_window is not None:
            visible &= positions >= batch.context_lens[:, None] - options.sliding_window
        grouped = query.view(len(query), keys.shape[1], -1, query.shape[2])
        return attend_dense(grouped, keys, values, visible[:, None, None], None, options).flatten(1, 2)


TABLE = Capability("table", TableBackend, frozenset({"cpu"}), captures=True)


def plainly(loaded: LoadedModel, pool: KvPool) -> NewForward:
    return lambda backend: PlainForward(loaded.model, pool, backend)


def play(compute: Callable[[], object], prepare: Callable[[], None]) -> Callable[[], None]:
    def replay() -> None:
        compute()

    return replay


@dataclass(frozen=True, slots=True)
class Bench:
    plain: ModelRunner
    graphed: ModelRunner
    graphs: GraphForward
    pools: tuple[KvPool, KvPool]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param].save(folder)
    settings = EngineSettings(
        model=str(folder), dtype="float32", device="cpu", block_size=BLOCK_SIZE, max_model_len=MAX_LEN
    )
    return load(settings)


@pytest.fixture
def bench(loaded: LoadedModel) -> Iterator[Bench]:
    pools = KvPool(loaded.layout, NUM_BLOCKS), KvPool(loaded.layout, NUM_BLOCKS, num_spare=1)
    for pool in pools:
        pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    tables = dataclasses.replace(loaded, attention=TABLE)
    graphs, why = captured(MAX_SEQS, tables, pools[1], plainly(loaded, pools[1]), play)
    assert why == "" and graphs.sizes == (1, 2, 4, 8, 11)
    yield Bench(ModelRunner(loaded.forward(pools[0]), pools[0]), ModelRunner(graphs, pools[1]), graphs, pools)
    for pool in pools:
        pool.close()


def random_decodes(dice: random.Random, count: int) -> StepPlan:
    free = list(range(NUM_BLOCKS))
    dice.shuffle(free)
    chunks = []
    for _ in range(count):
        start = dice.randrange(3 * BLOCK_SIZE)
        block_ids = tuple(free.pop() for _ in range(start // BLOCK_SIZE + 1))
        chunks.append(Chunk(0, (dice.randrange(1, 128),), start, block_ids, SAMPLE if dice.random() < 0.8 else ()))
    return StepPlan(tuple(chunks))


def test_decodes_from_graphs_have_the_logits_of_plain_decodes_in_any_order(bench: Bench) -> None:
    dice = random.Random(5)
    for _ in range(25):
        plan = random_decodes(dice, dice.randint(1, MAX_SEQS))
        expected = bench.plain.logits(plan)
        assert torch.allclose(bench.graphed.logits(plan), expected, atol=1e-5)
        assert torch.allclose(bench.pools[1].tensor, bench.pools[0].tensor, atol=1e-5)


def test_idle_rows_write_only_to_the_spare_block(bench: Bench) -> None:
    before = bench.pools[1].tensor.clone()
    plan = StepPlan((Chunk(0, (5,), 3, (7,), SAMPLE), Chunk(0, (6,), 9, (2, 30), SAMPLE), Chunk(0, (6,), 1, (9,))))
    bench.graphed.logits(plan)
    changed = (bench.pools[1].tensor != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [7, 9, 30]


def test_longer_chunks_and_larger_steps_are_computed_without_graphs(bench: Bench) -> None:
    chunk = StepPlan((Chunk(0, (1, 2, 3), 0, (4,), SAMPLE), Chunk(0, (6,), 1, (9,), SAMPLE)))
    larger = StepPlan(tuple(Chunk(0, (row + 1,), 0, (row,), SAMPLE) for row in range(MAX_SEQS + 2)))
    for plan in (chunk, larger):
        assert torch.allclose(bench.graphed.logits(plan), bench.plain.logits(plan), atol=1e-5)


def test_sizes_that_cannot_be_captured_are_computed_plainly_and_reported(loaded: LoadedModel) -> None:
    pool = KvPool(loaded.layout, NUM_BLOCKS, num_spare=1)
    calls = []

    def refuse_small(compute: Callable[[], object], prepare: Callable[[], None]) -> Callable[[], None]:
        calls.append(compute)
        if len(calls) == 3:
            raise RuntimeError("operation not permitted when stream is capturing\nsecond line")
        return play(compute, prepare)

    tables = dataclasses.replace(loaded, attention=TABLE)
    graphs, why = captured(MAX_SEQS, tables, pool, plainly(loaded, pool), refuse_small)
    assert why == "operation not permitted when stream is capturing"
    assert graphs.sizes == (8, 11)
    pool.close()
