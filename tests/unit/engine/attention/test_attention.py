"""Every attention back end computes the same attention, over blocks in any order, as a reference that goes position by
position. Options that a back end lacks or the interface does not know are refused by name.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from cluster.errors import ConfigError, ModelRefused
from engine.attention.gather import alike
from engine.attention.interface import AttentionOptions, LayerKv, attend
from engine.attention.registry import ALL_DTYPES, CAPABILITIES, NATIVE_DTYPES, AttentionBackend, Needs, choose
from engine.batch import PackedBatch, pack
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import TORCH_DTYPES, KvPool, quantise, restore
from engine.scheduling.step import Chunk
from tests.unit.engine.rigs.interpreted_triton import kernel_device

HEADS = 6
PLAIN: dict[str, object] = {"sliding_window": None, "softcap": None, "sinks": False}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": PLAIN,
    "window": PLAIN | {"sliding_window": 9},
    "window_of_one": PLAIN | {"sliding_window": 1},
    "softcap": PLAIN | {"softcap": 2.0},
    "sinks": PLAIN | {"sinks": True},
    "all": {"sliding_window": 20, "softcap": 3.0, "sinks": True},
}
SHAPES = {
    "grouped": LayerShape(2, 16, 16),
    "one_kv_head": LayerShape(1, 32, 32),
    "no_groups": LayerShape(6, 16, 16),
    "odd_head": LayerShape(2, 24, 24),
    "k_and_v_differ": LayerShape(3, 24, 16),
}
# (tokens in the chunk, position of the first): decodes of several lengths, whole prompts and later chunks in one step.
CHUNKS = ((1, 0), (1, 7), (5, 0), (1, 40), (8, 0), (23, 13), (1, 16), (2, 31), (70, 0))
# float32 differs by the order of sums; in 16 bits weights and results are rounded once each.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


@dataclass(frozen=True, slots=True)
class Case:
    query: torch.Tensor
    kv: LayerKv
    batch: PackedBatch
    options: AttentionOptions
    contexts: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # contiguous K and V of each sequence


def make_case(
    shape: LayerShape,
    options: dict[str, object],
    dtype: str,
    device: str,
    block_size: int = 8,
    kv_dtype: str | None = None,
) -> Case:
    """Return a pool whose unused positions hold large values, with each sequence's context scattered over it. In 8 bits
    a context is the restored one.
    """
    generator, dice = torch.Generator().manual_seed(3), random.Random(3)
    layout = lay_out([shape] * 3, block_size, kv_dtype or dtype)
    needed = [layout.num_blocks_for(start + length) for length, start in CHUNKS]
    pool = KvPool(layout, sum(needed) + 4, device)
    pool.tensor.fill_(100)
    for view in (view for layer in pool.scales for view in layer):
        view.fill_(1.0)
    free = list(range(pool.num_blocks))
    dice.shuffle(free)
    chunks, contexts = [], []
    torch_dtype = TORCH_DTYPES[dtype]
    keys, values = pool.layers[1]
    scales = pool.scales[1] if pool.scales else (None, None)
    for (length, start), num_blocks in zip(CHUNKS, needed, strict=True):
        block_ids = tuple(free.pop() for _ in range(num_blocks))
        context = [
            torch.randn(start + length, shape.num_kv_heads, dim, generator=generator).to(device, torch_dtype)
            for dim in (shape.key_dim, shape.value_dim)
        ]
        for side, (view, scale_view) in enumerate(zip((keys, values), scales, strict=True)):
            states = context[side]
            if scale_view is not None:
                states, found = quantise(states, view.dtype)
                context[side] = restore(states, found, torch_dtype)
                for position, scale in enumerate(found):
                    scale_view[block_ids[position // block_size], position % block_size] = scale
            for position, state in enumerate(states):
                view[block_ids[position // block_size], position % block_size] = state
        chunks.append(Chunk(0, (1,) * length, start, block_ids))
        contexts.append((context[0], context[1]))
    new = [
        torch.cat([context[which][-length:] for context, (length, _) in zip(contexts, CHUNKS, strict=True)])
        for which in (0, 1)
    ]
    query = torch.randn(len(new[0]), HEADS, shape.key_dim, generator=generator).to(device, torch_dtype)
    sinks = torch.randn(HEADS, generator=generator).to(device, torch_dtype) if options["sinks"] else None
    return Case(
        query=query,
        kv=LayerKv(new[0], new[1], keys, values, *scales),
        batch=pack(chunks, block_size, torch.device(device)),
        options=AttentionOptions(
            scaling=shape.key_dim**-0.5,
            sliding_window=options["sliding_window"],  # type: ignore[arg-type]
            softcap=options["softcap"],  # type: ignore[arg-type]
            sinks=sinks,
        ),
        contexts=tuple(contexts),
    )


def by_hand(case: Case) -> torch.Tensor:
    """Compute attention for one position and one head at a time, in float64."""
    rows = []
    options = case.options
    row = 0
    for (keys, values), (length, start) in zip(case.contexts, CHUNKS, strict=True):
        group = HEADS // keys.shape[1]
        for position in range(start, start + length):
            lowest = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
            heads = []
            for head in range(HEADS):
                seen_keys = keys[lowest : position + 1, head // group].double()
                scores = seen_keys @ case.query[row, head].double() * options.scaling
                if options.softcap is not None:
                    scores = options.softcap * torch.tanh(scores / options.softcap)
                weights = scores.exp()
                total = weights.sum() + (0 if options.sinks is None else options.sinks[head].double().exp())
                heads.append(weights @ values[lowest : position + 1, head // group].double() / total)
            rows.append(torch.stack(heads))
            row += 1
    return torch.stack(rows)


def hold_equal(backend: AttentionBackend, case: Case, dtype: str) -> None:
    output = backend.attend(case.query, case.kv, case.batch, case.options)
    expected = by_hand(case)
    assert output.shape == expected.shape
    assert float((output.double() - expected).abs().max()) < TOLERANCE[dtype]


def backend(name: str) -> AttentionBackend:
    return next(capability for capability in CAPABILITIES if capability.name == name).build()


@pytest.mark.parametrize("name", ["sdpa", "gather"])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_attention_on_a_cpu_is_right_with_every_option(name: str, options: str) -> None:
    hold_equal(backend(name), make_case(SHAPES["grouped"], OPTIONS[options], "float32", "cpu"), "float32")


def in_turns(
    ways: Sequence[object], firsts: Iterable[str], seconds: Iterable[str]
) -> Iterator[tuple[object, str, str]]:
    """Yield every pair once, with one of two ways: each way meets every first and every second one."""
    for number, first in enumerate(firsts):
        for other, second in enumerate(seconds):
            yield ways[(number + other) % 2], first, second


@pytest.mark.parametrize(("name", "shape", "dtype"), list(in_turns(("sdpa", "gather"), SHAPES, TOLERANCE)))
def test_attention_on_a_cpu_is_right_for_every_shape_and_dtype(name: str, shape: str, dtype: str) -> None:
    hold_equal(backend(name), make_case(SHAPES[shape], OPTIONS["window"], dtype, "cpu"), dtype)


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_decodes_attend_alike_in_groups_of_any_size(
    monkeypatch: pytest.MonkeyPatch, options: str, kv_dtype: str | None
) -> None:
    monkeypatch.setattr("engine.attention.gather._FEW_TOKENS", 8)
    case = make_case(SHAPES["grouped"], OPTIONS[options], "float32", "cpu", block_size=1, kv_dtype=kv_dtype)
    hold_equal(backend("sdpa"), case, "float32")


def test_short_sequences_are_not_padded_to_the_longest() -> None:
    assert alike([3, 900, 4], few=0) == [[0], [1], [2]]
    assert alike([4, 900, 5, 7], few=0) == [[0, 2, 3], [1]]
    assert alike([3, 900, 4], few=2700) == [[0, 1, 2]]
    assert alike([10, 20, 15], few=0) == [[0, 1, 2]]
    widths = [*range(1, 400), 5000]
    padded = sum(len(places) * max(widths[place] for place in places) for places in alike(widths, few=0))
    assert padded < 2 * sum(widths)


@pytest.mark.parametrize("name", ["sdpa", "gather"])
@pytest.mark.parametrize("scores_at_once", [1, 500, 5000])
def test_queries_attend_alike_in_groups_of_any_size(
    monkeypatch: pytest.MonkeyPatch, name: str, scores_at_once: int
) -> None:
    monkeypatch.setattr("engine.attention.gather._SCORES_AT_ONCE", scores_at_once)
    hold_equal(backend(name), make_case(SHAPES["grouped"], OPTIONS["all"], "float32", "cpu"), "float32")


@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
def test_attention_on_a_cpu_is_right_for_any_block_size(block_size: int) -> None:
    case = make_case(SHAPES["grouped"], OPTIONS["window"], "float32", "cpu", block_size)
    hold_equal(backend("sdpa"), case, "float32")
    hold_equal(backend("gather"), case, "float32")


@pytest.mark.parametrize(("name", "shape", "kv_dtype"), list(in_turns(("sdpa", "gather"), SHAPES, ("int8", "fp8"))))
def test_attention_on_a_cpu_is_right_for_every_shape_of_8_bit_kv(name: str, shape: str, kv_dtype: str) -> None:
    for dtype in ("float32", "float16"):
        case = make_case(SHAPES[shape], OPTIONS["window"], dtype, "cpu", kv_dtype=kv_dtype)
        hold_equal(backend(name), case, dtype)


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_attention_on_a_cpu_is_right_for_any_block_size_of_8_bit_kv(block_size: int) -> None:
    case = make_case(SHAPES["grouped"], OPTIONS["plain"], "bfloat16", "cpu", block_size, "int8")
    hold_equal(backend("sdpa"), case, "bfloat16")
    hold_equal(backend("gather"), case, "bfloat16")


@pytest.mark.cuda
@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_triton_does_every_option(options: str, dtype: str) -> None:
    case = make_case(SHAPES["grouped"], OPTIONS[options], dtype, kernel_device())
    hold_equal(backend("triton"), case, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", list(SHAPES))
def test_triton_does_every_shape(shape: str) -> None:
    case = make_case(SHAPES[shape], OPTIONS["all"], "float32", kernel_device())
    hold_equal(backend("triton"), case, "float32")


@pytest.mark.cuda
@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
def test_triton_takes_any_block_size(block_size: int) -> None:
    case = make_case(SHAPES["grouped"], OPTIONS["window"], "float32", kernel_device(), block_size)
    hold_equal(backend("triton"), case, "float32")


@pytest.mark.cuda
@pytest.mark.parametrize("options", list(OPTIONS))
def test_gather_on_a_gpu(options: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    hold_equal(backend("gather"), make_case(SHAPES["grouped"], OPTIONS[options], "float32", "cuda"), "float32")


CPU_NEEDS = Needs("cpu", "float32", "float32", frozenset({64}), 16, window=True, softcap=True, sinks=True)
CUDA_NEEDS = Needs("cuda", "bfloat16", "bfloat16", frozenset({128}), 16, window=True, softcap=True, sinks=True)


INSTALLED = tuple(replace(capability, lacks_here=str) for capability in CAPABILITIES)


def test_the_best_able_back_end_is_chosen() -> None:
    assert choose("auto", CPU_NEEDS).name == "sdpa"
    assert choose("auto", CUDA_NEEDS, INSTALLED).name == "triton"
    assert choose("gather", CUDA_NEEDS).name == "gather"


def test_without_a_compiler_for_its_launches_triton_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "triton")
    monkeypatch.setenv("CC", "some-cc")
    assert choose("auto", CUDA_NEEDS).name == "triton"
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert choose("auto", CUDA_NEEDS).name == "gather"
    with pytest.raises(ConfigError, match="needs a C compiler"):
        choose("triton", CUDA_NEEDS)


def test_kv_of_eight_bits_is_read_by_a_back_end_that_supports_it() -> None:
    assert choose("auto", replace(CPU_NEEDS, kv_dtype="int8")).name == "sdpa"
    able = replace(INSTALLED[0], name="able", kv_dtypes=ALL_DTYPES)
    unable = replace(able, name="unable", kv_dtypes=NATIVE_DTYPES)
    needs = replace(CUDA_NEEDS, kv_dtype="fp8")
    assert choose("auto", needs, (unable, able)).name == "able"
    with pytest.raises(ConfigError, match="unable does not support fp8 KV"):
        choose("unable", needs, (unable, able))


def test_heads_too_wide_for_the_kernel_fall_back_to_gathering() -> None:
    wide = Needs("cuda", "bfloat16", "bfloat16", frozenset({512}), 16, window=False, softcap=False, sinks=False)
    assert choose("auto", wide).name == "gather"


def test_a_forced_back_end_that_is_unable_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="--attention-backend triton: triton runs on cuda, not cpu"):
        choose("triton", CPU_NEEDS)


class Layer(torch.nn.Module):
    layer_idx = 0
    is_causal = True


class Echo:
    """KvAccess that answers with its queries."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        return query


def call(module: torch.nn.Module | None = None, **keywords: object) -> torch.Tensor:
    states = torch.arange(24.0).view(1, 2, 3, 4)  # [1, heads, tokens, dim]
    arguments: dict[str, object] = {"attention_mask": None, "tandem_kv": Echo()} | keywords
    output, _ = attend(module or Layer(), states, states, states, **arguments)  # type: ignore[arg-type]
    return output


def test_heads_and_tokens_are_transposed() -> None:
    assert torch.equal(call(), torch.arange(24.0).view(1, 2, 3, 4).transpose(1, 2))


def test_keywords_without_effect_are_accepted() -> None:
    call(position_ids=torch.zeros(1, 3), use_cache=False, output_attentions=False, position_bias=None)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"attention_mask": torch.zeros(1)}, "mask of its own"),
        ({"is_causal": False}, "not causal"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"sliding_window": 0}, "sliding window of 0"),
        ({"tandem_kv": None}, "tandem_kv"),
        ({"module": torch.nn.Linear(1, 1)}, "which layer"),
    ],
)
def test_unknown_keywords_are_refused_by_name(keywords: dict[str, object], named: str) -> None:
    with pytest.raises(ModelRefused, match=named):
        call(**keywords)  # type: ignore[arg-type]
