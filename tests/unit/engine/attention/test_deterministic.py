"""Tests of --deterministic: a sequence's logits have the same bits alone, in a batch, with other chunks, and after a
hand-off.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cli.verbs.clusters.up import UpConfig
from cluster.errors import ConfigError, ModelRefused
from cluster.messages import Sampling
from cluster.request_size import blocks_for
from cluster.settings.config import WorkerConfig
from cluster.settings.worker_settings import EngineSettings
from engine.attention.fixed_tiles import FixedTilesBackend
from engine.attention.interface import LayerKv
from engine.batch import PackedBatch, pack
from engine.build import Engine, build_engine
from engine.deterministic import ROW_COUNTS, FixedRows, agreeing_counts, check, cut, fix_own_products
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import KvPool
from engine.scheduling.step import Chunk, DrawnToken, Sample, StepPlan
from engine.steps.runner import ModelRunner
from tests.golden.families import FAMILIES
from tests.unit.engine.attention.test_attention import OPTIONS, SHAPES, hold_equal, in_turns, make_case
from tests.unit.engine.rigs.speculating import BLOCK_SIZE, FixedDrafter, Oracle, TableForward, speak, talks_of

DRAWN = 6  # tokens of each sequence
SAMPLING = Sampling(temperature=1.0, num_logprobs=2)
Drawn = list[DrawnToken]


def engine_of(folder: Path, **others: object) -> Engine:
    given: dict[str, object] = {
        "model": str(folder),
        "dtype": "bfloat16",
        "device": "cpu",
        "block_size": BLOCK_SIZE,
        "num_blocks": 96,
        "max_model_len": 128,
        "deterministic": "on",
    }
    return build_engine(EngineSettings(**given | others))  # type: ignore[arg-type]


def prompts() -> list[tuple[int, ...]]:
    lengths = (1, 3, 17, 40, 64, 5)
    return [tuple((7 * number + 3 * i + i * i) % 120 + 1 for i in range(n)) for number, n in enumerate(lengths)]


class Served:
    """A sequence on one engine, and its progress there."""

    def __init__(self, number: int, token_ids: Sequence[int], block_ids: tuple[int, ...]) -> None:
        self.number, self.token_ids, self.block_ids = number, list(token_ids), block_ids
        self.num_computed = 0
        self.drawn: Drawn = []

    def chunk(self, most_tokens: int) -> Chunk:
        end = min(self.num_computed + most_tokens, len(self.token_ids))
        samples = (Sample(self.number, end, SAMPLING),) if end == len(self.token_ids) else ()
        blocks = self.block_ids[: blocks_for(end, BLOCK_SIZE)]
        return Chunk(self.number, tuple(self.token_ids[self.num_computed : end]), self.num_computed, blocks, samples)

    def grow(self, chunk: Chunk, drawn: Sequence[DrawnToken]) -> None:
        self.num_computed = chunk.end
        self.drawn += drawn
        self.token_ids += (token.token_id for token in drawn)


def serve(engine: Engine, sequences: Sequence[Served], chunk_sizes: Iterator[int], until: int = DRAWN) -> None:
    while going := [sequence for sequence in sequences if len(sequence.drawn) < until]:
        chunks = tuple(sequence.chunk(next(chunk_sizes)) for sequence in going)
        for sequence, chunk, drawn in zip(going, chunks, engine.runner.run(StepPlan(chunks)).tokens, strict=True):
            sequence.grow(chunk, drawn)


def all_prompts() -> list[Served]:
    width = blocks_for(64 + DRAWN, BLOCK_SIZE)
    return [Served(i, prompt, tuple(range(i * width, (i + 1) * width))) for i, prompt in enumerate(prompts())]


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("llama", "on"),
        pytest.param("llama", "off", marks=pytest.mark.slow),
        ("gemma2", "on"),
        ("gpt2", "off"),
        pytest.param("mixtral", "off", marks=pytest.mark.slow),
        ("gpt_oss", "off"),
    ],
)
def test_tokens_do_not_depend_on_batch_chunks_or_worker(family: str, kernels: str, tmp_path: Path) -> None:
    """Log-probabilities are equal bit for bit too."""
    FAMILIES[family].save(tmp_path)
    first, second = (engine_of(tmp_path, cpu_kernels=kernels) for _ in range(2))
    assert first.fingerprint == second.fingerprint

    alone = all_prompts()
    for sequence in alone:
        serve(first, [sequence], itertools.repeat(1000))
    expected = [sequence.drawn for sequence in alone]

    together = all_prompts()
    serve(first, together, itertools.repeat(1000))
    assert [sequence.drawn for sequence in together] == expected

    in_chunks = all_prompts()
    serve(first, in_chunks, itertools.cycle((7, 1, 13, 2, 32)))
    assert [sequence.drawn for sequence in in_chunks] == expected

    moved = all_prompts()
    serve(first, moved, itertools.repeat(20), until=3)
    blocks = [block for sequence in moved for block in sequence.block_ids]
    second.pool.raw[[block + 20 for block in blocks]] = first.pool.raw[blocks]
    for sequence in moved:
        sequence.block_ids = tuple(block + 20 for block in sequence.block_ids)
    serve(second, moved[::-1], itertools.repeat(1000))
    assert [sequence.drawn for sequence in moved] == expected

    recomputed = all_prompts()  # as after a failover: what was drawn is part of the prompt now
    for sequence, drawn in zip(recomputed, expected, strict=True):
        sequence.drawn = drawn[:4]
        sequence.token_ids += (token.token_id for token in drawn[:4])
    serve(second, recomputed, itertools.cycle((11, 1000, 3)))
    assert [sequence.drawn for sequence in recomputed] == expected
    for engine in (first, second):
        engine.pool.close()


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_draft_tokens_change_no_token_in_16_bits(kernels: str, tmp_path: Path) -> None:
    FAMILIES["llama"].save(tmp_path)
    engine = engine_of(tmp_path, cpu_kernels=kernels)
    plain, speculating = (talks_of(6, [5, 9, 11, 4] * 4, 60) for _ in range(2))
    for talk in (*plain, *speculating):
        talk.sampling = Sampling(temperature=0.5)
    steps = speak(engine.runner, plain, 60)
    dice = random.Random(2)
    for truth, talk in zip(plain, speculating, strict=True):
        is_right = (dice.random() < 0.7 for _ in itertools.count())
        talk.drafter = FixedDrafter(Oracle(truth.token_ids, is_right, vocab_size=128), 4)
    assert speak(engine.runner, speculating, 60) < steps / 2
    assert [talk.token_ids for talk in speculating] == [talk.token_ids for talk in plain]
    engine.pool.close()


def test_odd_widths_in_float32_and_quantised_kv_keep_the_promise(tmp_path: Path) -> None:
    """Building the engine makes the check. With 36 columns vector units have a remainder unless steps are padded."""
    llama = FAMILIES["llama"]
    replace(llama, settings={**llama.settings, "intermediate_size": 36}).save(tmp_path)
    for settings in ({"dtype": "float32"}, {"kv_cache_dtype": "int8"}):
        engine = engine_of(tmp_path, **settings)
        assert any("deterministic: products of" in line for line in engine.report)
        engine.pool.close()


def test_workers_exchange_kv_only_if_both_are_deterministic_in_the_same_way(tmp_path: Path) -> None:
    FAMILIES["llama"].save(tmp_path)
    engines = [
        engine_of(tmp_path, deterministic="off"),
        engine_of(tmp_path, cpu_kernels="off"),
        engine_of(tmp_path, cpu_kernels="off", dtype="float32"),
    ]
    assert engines[0].fingerprint.dtype == "bfloat16"
    assert len({engine.fingerprint.dtype for engine in engines}) == 3
    for engine in engines:
        engine.pool.close()


@pytest.mark.parametrize("config_type", [WorkerConfig, UpConfig])
def test_kv_that_changes_in_transfer_is_refused(config_type: type[WorkerConfig] | type[UpConfig]) -> None:
    with pytest.raises(ConfigError, match="--deterministic on cannot go with --kv-wire-dtype int8"):
        config_type(model="m", deterministic="on", kv_wire_dtype="int8")
    assert config_type(model="m", deterministic="on", kv_cache_dtype="int8").deterministic == "on"


class Changed(TableForward):
    """A model whose logits depend on the last token, and on a property of the step that should have no effect."""

    def __init__(self, change: Callable[[torch.Tensor, PackedBatch], torch.Tensor]) -> None:
        super().__init__(torch.randn(50, 50, generator=torch.Generator().manual_seed(1)))
        self._change = change

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        return self._change(super().__call__(batch), batch)


def runner_of(change: Callable[[torch.Tensor, PackedBatch], torch.Tensor]) -> tuple[ModelRunner, KvPool]:
    pool = KvPool(lay_out([LayerShape(1, 1, 1)], BLOCK_SIZE, "float32"), 64)
    return ModelRunner(Changed(change), pool), pool


def test_the_check_passes_a_model_whose_logits_do_not_depend_on_the_step() -> None:
    runner, pool = runner_of(lambda logits, _: logits)
    pool.raw.fill_(7)
    assert check(runner, pool, 50, 128) == check(runner, pool, 50, 128)
    assert not pool.raw.any()


@pytest.mark.parametrize(
    "change",
    [
        lambda logits, batch: logits + 1e-6 * len(batch.rows),  # company
        lambda logits, batch: logits * (1 + 1e-6 * (batch.input_ids.shape[1] < 4)),  # few rows
        lambda logits, batch: logits + 1e-6 * (max(batch.query_lens) > 60),  # long chunks
        lambda logits, batch: logits + 1e-6 * (batch.logit_rows[:, None] == batch.input_ids.shape[1] - 1),  # the last
    ],
)
def test_the_check_refuses_a_model_whose_logits_depend_on_the_step(
    change: Callable[[torch.Tensor, PackedBatch], torch.Tensor],
) -> None:
    runner, pool = runner_of(change)
    with pytest.raises(ModelRefused, match="of a sequence differ in chunks of"):
        check(runner, pool, 50, 128)


def test_the_check_compares_kv_as_well() -> None:
    def forward(logits: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        pool.layers[0][0][batch.slot_blocks, batch.slot_offsets] = float(len(batch.rows))
        return logits

    runner, pool = runner_of(forward)
    with pytest.raises(ModelRefused, match="its KV"):
        check(runner, pool, 50, 128)


@pytest.mark.parametrize("num_rows", [*range(1, 40), 127, 128, 129, 300])
def test_pieces_cover_every_row_once_and_reach_beyond_the_last_only(num_rows: int) -> None:
    pieces = cut(num_rows, ROW_COUNTS)
    ends = [begin + count for begin, count in pieces]
    assert [begin for begin, _ in pieces] == [0, *ends[:-1]]
    assert ends[-1] - num_rows < ROW_COUNTS[0] and {count for _, count in pieces} <= set(ROW_COUNTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_fixed_product_has_the_same_bits_at_every_place(dtype: torch.dtype) -> None:
    linear = nn.Linear(72, 40).to(dtype)
    rows = torch.randn(150, 72, generator=torch.Generator().manual_seed(0)).to(dtype)
    fixed = FixedRows(linear.forward, agreeing_counts(linear.forward, rows[:128], "it"))
    together = fixed(rows[None])[0]
    assert torch.allclose(together, linear(rows), atol=1e-5 if dtype == torch.float32 else 1e-1)
    for row in range(0, 150, 7):
        assert torch.equal(fixed(rows[row : row + 1])[0], together[row])
        assert torch.equal(fixed(rows[row // 2 : row + 1])[-1], together[row])
    assert fixed(rows[:0]).shape == (0, 40)


def test_a_number_of_rows_with_other_bits_is_not_used() -> None:
    def product(rows: torch.Tensor) -> torch.Tensor:
        return rows * (1 + 1e-6 * (len(rows) == 32))

    assert agreeing_counts(product, torch.rand(128, 4), "it") == (8, 128)


def test_a_product_whose_rows_depend_on_their_position_is_refused() -> None:
    def product(rows: torch.Tensor) -> torch.Tensor:
        return rows + 1e-6 * (torch.arange(len(rows)) == len(rows) - 1)[:, None]

    with pytest.raises(ModelRefused, match="a row of it depends on its position among 8 rows"):
        agreeing_counts(product, torch.rand(128, 4), "it")


class _Own(nn.Module):
    def __init__(self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 4, 4))
        self._product = product

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows, self.weight)


def test_products_of_a_modules_own_weights_are_fixed_or_refused() -> None:
    rows = torch.rand(3, 4)
    for product in (lambda rows, weight: nn.functional.linear(rows, weight[0]), lambda rows, weight: rows @ weight[1]):
        own = _Own(product)
        expected = own(rows)
        fix_own_products(own)
        assert torch.allclose(own(rows), expected) and torch.equal(own(rows[:1])[0], own(rows)[0])
    grouped = _Own(lambda rows, weight: torch.bmm(rows.expand(2, -1, -1), weight))
    fix_own_products(grouped)
    with pytest.raises(ModelRefused, match="_Own computes bmm"):
        grouped(rows)


@pytest.mark.parametrize(("wide", "shape", "options"), list(in_turns((True, False), SHAPES, OPTIONS)))
def test_fixed_tiles_compute_the_same_attention(wide: bool, shape: str, options: str) -> None:
    case = make_case(SHAPES[shape], OPTIONS[options], "float32", "cpu")
    hold_equal(FixedTilesBackend(wide), case, "float32")


@pytest.mark.parametrize("block_size", [1, 5, 16, 200])
def test_fixed_tiles_take_blocks_of_any_size(block_size: int) -> None:
    case = make_case(SHAPES["grouped"], OPTIONS["all"], "float32", "cpu", block_size=block_size)
    hold_equal(FixedTilesBackend(True), case, "float32")


@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
def test_fixed_tiles_read_16_and_8_bits(kv_dtype: str | None) -> None:
    case = make_case(SHAPES["grouped"], OPTIONS["all"], "bfloat16", "cpu", kv_dtype=kv_dtype)
    hold_equal(FixedTilesBackend(True), case, "bfloat16")


def test_a_sliding_window_reads_no_tiles_before_its_start() -> None:
    """The values there have no effect even if they are not numbers."""
    case = make_case(SHAPES["grouped"], OPTIONS["plain"], "float32", "cpu")
    options = replace(case.options, sliding_window=4)
    chunk = Chunk(0, (1,), 300, tuple(range(38)))
    pool = KvPool(lay_out([SHAPES["grouped"]], 8, "float32"), 38)
    pool.tensor[:30] = float("nan")
    pool.tensor[32:] = 1.0
    kv = LayerKv(case.kv.new_keys[:1], case.kv.new_values[:1], *pool.layers[0])
    output = FixedTilesBackend(True).attend(case.query[:1], kv, pack((chunk,), 8, torch.device("cpu")), options)
    assert torch.allclose(output, torch.ones_like(output))
