"""The attention kernels over shapes at every edge, by Triton's interpreter, against attention written out in float64.

Every place that no sequence has written holds NaN, every tensor that the kernels make is between guards, and each
launch is watched (`watched_launches.py`). The allowed error is computed for each element: weights and results are
rounded once each to the query's dtype, the rest is float32.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from engine.attention.interface import AttentionOptions, LayerKv
from engine.batch import PackedBatch, pack
from engine.cuda.fused_forward import Heads, Rotation
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import TORCH_DTYPES, KvPool, quantise
from engine.scheduling.step import Chunk
from tests.unit.engine.rigs.interpreted_triton import needs_the_interpreter

NAN_BYTE = 0xFF  # NaN in bfloat16, float16, float32 and e4m3; int8 has none, its scales do
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # half the distance between two numbers around 1
GUARD = 64  # elements
LEAST_PART = 64


@dataclass(frozen=True, slots=True)
class Shape:
    group: int = 2
    kv_heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 8
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    sharpness: float = 1.0  # of the scores


@dataclass(frozen=True, slots=True)
class Case:
    query: torch.Tensor
    kv: LayerKv
    batch: PackedBatch
    options: AttentionOptions
    contexts: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # float64 K and V of each sequence, as the pool has them
    pool: KvPool


def make_case(shape: Shape, chunks: list[tuple[int, int]], seed: int = 3) -> Case:
    """Return a case with these chunks: (tokens, position of the first)."""
    generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    layer = LayerShape(shape.kv_heads, shape.key_dim, shape.value_dim)
    layout = lay_out([layer] * 2, shape.block_size, shape.kv_dtype or shape.dtype)
    needed = [layout.num_blocks_for(start + length) for length, start in chunks]
    pool = KvPool(layout, sum(needed) + 1)
    pool.raw.fill_(NAN_BYTE)
    free = list(range(pool.num_blocks))
    dice.shuffle(free)
    dtype = TORCH_DTYPES[shape.dtype]
    scales = pool.scales[1] if pool.scales else (None, None)
    planned, contexts = [], []
    for (length, start), num_blocks in zip(chunks, needed, strict=True):
        block_ids = tuple(free.pop() for _ in range(num_blocks))
        places = torch.arange(start + length)
        where = (torch.tensor(block_ids)[places // shape.block_size], places % shape.block_size)
        kept = []
        for view, scale_view in zip(pool.layers[1], scales, strict=True):
            states = torch.randn(start + length, shape.kv_heads, view.shape[3], generator=generator).to(dtype)
            if scale_view is None:
                view[where] = states
                kept.append(states.double())
            else:
                codes, found = quantise(states, view.dtype)
                view[where], scale_view[where] = codes, found
                kept.append(codes.double() * found.double().unsqueeze(-1))
        contexts.append((kept[0], kept[1]))
        planned.append(Chunk(0, (1,) * length, start, block_ids))
    heads, num_tokens = shape.group * shape.kv_heads, sum(length for length, _ in chunks)
    query = torch.randn(num_tokens, heads, shape.key_dim, generator=generator).to(dtype)
    sinks = torch.randn(heads, generator=generator).to(dtype) if shape.sinks else None
    nothing = torch.full((num_tokens, shape.kv_heads, 1), torch.nan)  # the pool has the step's own tokens already
    return Case(
        query,
        LayerKv(nothing, nothing, *pool.layers[1], *scales),
        pack(planned, shape.block_size, torch.device("cpu")),
        AttentionOptions(shape.sharpness * shape.key_dim**-0.5, shape.window, shape.softcap, sinks),
        tuple(contexts),
        pool,
    )


def written_out(case: Case, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result in float64, and the allowed error of each element."""
    results, bounds = [], []
    options = case.options
    for (keys, values), rows in zip(case.contexts, case.batch.rows, strict=True):
        query = case.query[rows].double()  # [tokens, heads, dim]
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        own = torch.arange(len(keys) - len(query), len(keys))[:, None]
        seen = torch.arange(len(keys))
        visible = seen <= own
        if options.sliding_window is not None:
            visible &= seen > own - options.sliding_window
        scores = scores.masked_fill(~visible, -torch.inf)
        if options.sinks is not None:
            sink = options.sinks.double()[:, None, None].expand(-1, len(query), 1)
            weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        result = torch.einsum("hqk,khd->qhd", weights, values)
        magnitude = torch.einsum("hqk,khd->qhd", weights, values.abs())
        results.append(result)
        bounds.append(unit * (magnitude + result.abs()) + 2e-5 * (magnitude + 1))
    return torch.cat(results), torch.cat(bounds)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allocate the back end's tensors between guards that no kernel may touch."""
    wholes: list[tuple[torch.Tensor, torch.Tensor]] = []

    plain = torch.Tensor.new_empty

    def new_empty(
        like: torch.Tensor, *size: int, dtype: torch.dtype | None = None, device: str | None = None
    ) -> torch.Tensor:
        dtype = dtype or like.dtype
        if device is not None:  # the interpreter itself
            return plain(like, *size, dtype=dtype, device=device)
        count = int(torch.Size(size).numel())
        whole = torch.empty(count + 2 * GUARD, dtype=dtype)
        whole.view(torch.uint8).fill_(NAN_BYTE)
        wholes.append(
            (whole.view(torch.uint8), torch.full_like(whole.view(torch.uint8)[: GUARD * whole.itemsize], 255))
        )
        return whole[GUARD : GUARD + count].view(size)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield
    assert wholes
    for whole, guard in wholes:
        assert torch.equal(whole[: len(guard)], guard) and torch.equal(whole[-len(guard) :], guard)


def hold_equal(shape: Shape, chunks: list[tuple[int, int]], seed: int = 3) -> None:
    from engine.attention.triton_paged import TritonBackend

    case = make_case(shape, chunks, seed)
    before = case.pool.raw.clone()
    output = TritonBackend(LEAST_PART).attend(case.query, case.kv, case.batch, case.options)
    assert torch.equal(case.pool.raw, before)
    expected, bound = written_out(case, UNIT[shape.dtype])
    case.pool.close()
    error = (output.double() - expected).abs()
    assert not output.isnan().any()
    assert (error <= bound).all(), f"{shape} {chunks}: off by {float((error / bound).max()):.2f} of what is allowed"


@pytest.fixture(autouse=True)
def interpreted() -> None:
    needs_the_interpreter()


# Contexts of decodes: parts of 64 tokens, at most 32 of them, so from 2,048 on they grow by whole tiles of 64.
EDGES = (1, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("kv_dtype", [None, "int8", "fp8"])
def test_decodes_with_contexts_at_the_edges_of_parts_equal_float64(kv_dtype: str | None) -> None:
    hold_equal(Shape(kv_dtype=kv_dtype), [(1, length - 1) for length in EDGES])


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 5000])
def test_windows_around_the_size_of_a_tile_equal_float64(window: int) -> None:
    chunks = [(1, length - 1) for length in (1, 64, 65, 200)] + [(70, 0), (9, 130), (66, 63)]
    hold_equal(Shape(window=window), chunks)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("group", "kv_heads", "dim"),
    [(1, 2, 64), (2, 2, 80), (3, 1, 96), (4, 1, 112), (5, 1, 128), (6, 1, 64), (7, 1, 80), (8, 1, 256)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_group_size_and_width_of_heads_equals_float64(group: int, kv_heads: int, dim: int, dtype: str) -> None:
    shape = Shape(group, kv_heads, dim, dim, block_size=16, dtype=dtype)
    hold_equal(shape, [(1, 0), (1, 99), (19, 0), (7, 45)])


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_blocks_of_every_size_with_a_partly_filled_tail_equal_float64(block_size: int) -> None:
    filled = (block_size - 1, block_size, block_size + 1, 2 * block_size + 3)
    chunks = [(1, length - 1) for length in filled] + [(5, block_size - 3), (block_size // 2, block_size + 1)]
    hold_equal(Shape(block_size=block_size, kv_dtype="int8"), chunks)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_attention_options_at_once_equal_float64(dtype: str) -> None:
    shape = Shape(3, 2, 24, 16, 8, dtype, "int8", window=70, softcap=2.5, sinks=True)
    hold_equal(shape, [(1, 0), (1, 64), (1, 300), (40, 0), (21, 77), (2, 6)])


@pytest.mark.usefixtures("guarded")
def test_a_chunk_that_begins_in_the_middle_of_a_block_sees_the_cached_prefix() -> None:
    hold_equal(Shape(4, 1, 32, 32, 16), [(30, 21), (2, 15), (65, 7)])


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(("window", "start"), [(None, 61), (None, 62), (None, 63), (126, 128), (127, 128), (128, 128)])
def test_the_first_tile_that_not_all_rows_attend_to_equals_float64(window: int | None, start: int) -> None:
    """A tile has 64 queries: one position more or less decides whether the tile is masked."""
    hold_equal(Shape(window=window), [(70, start)])


@pytest.mark.usefixtures("guarded")
def test_a_part_with_scores_far_above_all_others_equals_float64() -> None:
    hold_equal(Shape(sharpness=1600.0), [(1, length - 1) for length in (128, 192, 256, 320)])


@pytest.mark.usefixtures("guarded")
def test_one_long_sequence_beside_many_short_ones_equals_float64() -> None:
    hold_equal(Shape(1, 1), [(1, 32_767), *[(1, 0)] * 255])


def test_blocks_beyond_two_to_the_31_elements_are_read_and_written() -> None:
    """The other pages of this pool are never touched."""
    from engine.attention.triton_paged import TritonBackend
    from engine.cuda.triton_ops import TritonOps

    layout = lay_out([LayerShape(1, 16, 16)] * 2, 8, "bfloat16")
    pool = KvPool(layout, 2**31 // (layout.block_bytes // 2) + 8)
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(21, 4, 16, generator=generator).bfloat16()  # two heads of queries, one of keys, one of values
    ids = (pool.num_blocks - 1, pool.num_blocks - 5, pool.num_blocks - 2)
    assert min(ids) * (layout.block_bytes // 2) > 2**31
    batch = pack([Chunk(0, (1,) * 21, 0, ids)], 8, torch.device("cpu"))
    query, key, value = torch.split(states, [2, 1, 1], dim=1)
    keys, values = pool.layers[1]
    still = Rotation(torch.ones(21, 16), torch.zeros(21, 16))
    TritonOps().rotate(Heads(query, key, value, None, None, keys, values, batch.slot_blocks, batch.slot_offsets), still)
    assert torch.equal(keys[list(ids)].view(-1, 1, 16)[:21], key)
    options = AttentionOptions(0.25)
    output = TritonBackend(LEAST_PART).attend(query, LayerKv(key, value, keys, values), batch, options)
    case = Case(query, LayerKv(key, value, keys, values), batch, options, ((key.double(), value.double()),), pool)
    expected, bound = written_out(case, UNIT["bfloat16"])
    pool.close()
    assert ((output.double() - expected).abs() <= bound).all()


def drawn_case(dice: random.Random) -> tuple[Shape, list[tuple[int, int]]]:
    dim = dice.choice((16, 24, 40, 64, 80, 96, 112, 128))
    shape = Shape(
        group=dice.randint(1, 8),
        kv_heads=dice.randint(1, 3),
        key_dim=dim,
        value_dim=dim if dice.random() < 0.7 else dice.choice((16, 48, 64)),
        block_size=dice.choice((1, 7, 8, 16, 32, 100, 256)),
        dtype=dice.choice(("bfloat16", "bfloat16", "float16", "float32")),
        kv_dtype=dice.choice((None, None, "int8", "fp8")),
        window=dice.choice((None, None, 1, dice.randint(2, 300))),
        softcap=dice.choice((None, None, 1.5, 30.0)),
        sinks=dice.random() < 0.3,
    )
    decodes = [(1, dice.choice((0, 63, 64, 65, dice.randint(0, 400)))) for _ in range(dice.randint(0, 4))]
    chunks = [(dice.randint(2, 80), dice.choice((0, 0, dice.randint(1, 90)))) for _ in range(dice.randint(0, 2))]
    steps = decodes + chunks or [(1, 0)]
    dice.shuffle(steps)
    return shape, steps


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("seed", range(12))
def test_random_steps_equal_float64(seed: int) -> None:
    hold_equal(*drawn_case(random.Random(seed)), seed)


@pytest.mark.slow
@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_more_random_steps_equal_float64(seed: int) -> None:
    hold_equal(*drawn_case(random.Random(seed)), seed)
