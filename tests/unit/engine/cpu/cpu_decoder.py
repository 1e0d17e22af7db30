"""A random decoder in the layout of the CPU kernels, and the same computation in float32."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.cpu.library import Kernels, Layer, Model, Product, Step
from engine.decoders.layer_parts import GELU_TANH, SILU

VOCAB = 130


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder, small enough for a reference in plain float32."""

    num_layers: int = 2
    hidden: int = 96
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 168
    rotary_dim: int = 32
    activation: int = SILU
    norms_whole_rows: bool = False
    norms: tuple[str, ...] = ("input_norm", "ffn_norm")
    biases: bool = False
    softcap: float = 0.0
    window: int = 0  # of every second layer
    block_size: int = 16

    @property
    def scaling(self) -> float:
        return float(self.head_dim**-0.5)

    def norm_width(self, name: str) -> int:
        heads = {"query_norm": self.num_heads, "key_norm": self.num_kv_heads}.get(name)
        if heads is None:
            return self.hidden
        return self.head_dim * heads if self.norms_whole_rows else self.head_dim


class Decoder:
    """A decoder with random packed weights and a pool, and the same computation by torch in float32 from the same bf16
    weights.
    """

    def __init__(self, kernels: Kernels, shape: Shape, num_blocks: int = 40) -> None:
        self.kernels, self.shape = kernels, shape
        self.random = torch.Generator().manual_seed(len(repr(shape)))
        self.kept: list[torch.Tensor] = []
        self.pool = torch.full((num_blocks, self.block_elems), float("nan"), dtype=torch.bfloat16)
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        widths = {
            "qkv": (query + 2 * kv, shape.hidden),
            "out": (shape.hidden, query),
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }
        self.weights = [{name: self.normal(*width) for name, width in widths.items()} for _ in range(shape.num_layers)]
        self.biases = [
            {name: self.normal(width[0]).float() for name, width in widths.items() if shape.biases}
            for _ in range(shape.num_layers)
        ]
        self.norms = [
            {name: 1 + self.normal(shape.norm_width(name)).float() for name in shape.norms}
            for _ in range(shape.num_layers)
        ]
        self.final_norm = 1 + self.normal(shape.hidden).float()
        self.head = self.normal(VOCAB, shape.hidden)
        self.embedding = self.normal(VOCAB, shape.hidden).float() * 8
        angles = torch.outer(torch.arange(4096), 0.5 ** torch.arange(shape.rotary_dim // 2)).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.layers = (Layer * shape.num_layers)(*(self.layer(index) for index in range(shape.num_layers)))

    @property
    def block_elems(self) -> int:
        return self.shape.num_layers * 2 * self.plane_elems

    @property
    def plane_elems(self) -> int:
        return self.shape.block_size * self.shape.num_kv_heads * self.shape.head_dim

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random).div(float(size[-1]) ** 0.5).bfloat16()

    def window(self, layer: int) -> int:
        return self.shape.window if layer % 2 else 0

    def layer(self, index: int) -> Layer:
        weights, biases = self.weights[index], self.biases[index]
        keys = self.pool.data_ptr() + index * 2 * self.plane_elems * 2
        return Layer(
            **{name: norm.data_ptr() for name, norm in self.norms[index].items()},
            **{name: packed(self, weights[name], biases.get(name)) for name in ("qkv", "out", "down")},
            gate_up=packed_gate_up(self, weights["gate_up"], biases.get("gate_up")),
            keys=keys,
            values=keys + self.plane_elems * 2,
            window=self.window(index),
        )

    def model(self) -> Model:
        shape = self.shape
        return Model(
            **{
                name: getattr(shape, name) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim")
            },
            **{name: getattr(shape, name) for name in ("intermediate", "rotary_dim", "activation", "block_size")},
            norms_whole_rows=shape.norms_whole_rows,
            norm_eps=1e-5,
            scaling=shape.scaling,
            softcap=shape.softcap,
            block_elems=self.block_elems,
            layers=self.layers,
            final_norm=self.final_norm.data_ptr(),
            head=packed(self, self.head, None),
        )

    def run(self, step: "Chunks", wanted: Sequence[int] | None = None) -> torch.Tensor:
        """Return the logits `[rows, vocab]` of the wanted rows, or else of every token."""
        hidden = self.embedding[torch.cat([chunk.tokens for chunk in step.chunks])]
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in step.chunks])
        rotation = [self.cos[positions], self.sin[positions]]
        logit_rows = list(range(len(hidden)) if wanted is None else wanted)
        logits = torch.full((len(logit_rows), VOCAB), float("nan"))
        model = self.model()
        scratch = aligned(self.kernels.td_scratch_bytes(model, len(hidden)), torch.uint8)
        struct = step.struct(logit_rows)
        struct.cos[0], struct.sin[0] = (part.data_ptr() for part in rotation)
        struct.hidden, struct.logits, struct.scratch = hidden.data_ptr(), logits.data_ptr(), scratch.data_ptr()
        self.kernels.td_run(model, struct)
        return logits

    def reference(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of one whole sequence, in float32 except for keys and values, which the pool keeps in
        bf16.
        """
        shape, hidden = self.shape, self.embedding[tokens]
        rotation = self.cos[: len(tokens), None], self.sin[: len(tokens), None]
        for index in range(shape.num_layers):
            linear = Linears(self.weights[index], self.biases[index])
            norm = Norms(self.norms[index])
            widths = [shape.num_heads * shape.head_dim, *[shape.num_kv_heads * shape.head_dim] * 2]
            query, key, value = torch.split(linear("qkv", norm("input_norm", hidden)), widths, -1)
            query, key = (self._normed_heads(norm, *pair) for pair in (("query_norm", query), ("key_norm", key)))
            rotated_query, rotated_key = rotated(query, *rotation), rotated(key, *rotation)
            attended = attention(rotated_query, rotated_key, self._heads(value), self.window(index), shape)
            hidden = hidden + norm("attention_out_norm", linear("out", attended.flatten(1)))
            gate, up = linear("gate_up", norm("ffn_norm", hidden)).chunk(2, -1)
            active = F.silu(gate) if shape.activation == SILU else F.gelu(gate, approximate="tanh")
            hidden = hidden + norm("ffn_out_norm", linear("down", active * up))
        return rms_norm(hidden, self.final_norm) @ self.head.float().T

    def _normed_heads(self, norm: "Norms", name: str, rows: torch.Tensor) -> torch.Tensor:
        whole = self.shape.norms_whole_rows
        return self._heads(norm(name, rows)) if whole else norm(name, self._heads(rows))

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(len(rows), -1, self.shape.head_dim)


@dataclass(frozen=True)
class Linears:
    weights: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[name].float(), self.biases.get(name))


@dataclass(frozen=True)
class Norms:
    weights: dict[str, torch.Tensor]

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weights[name]) if name in self.weights else x


@dataclass(frozen=True)
class Chunk:
    tokens: torch.Tensor
    start: int
    block_ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Chunks:
    chunks: Sequence[Chunk]
    block_size: int
    kept: list[torch.Tensor] = field(default_factory=list)

    def struct(self, logit_rows: list[int]) -> Step:
        positions = [(chunk, position) for chunk in self.chunks for position in range(chunk.start, chunk.end)]
        width = max(len(chunk.block_ids) for chunk in self.chunks)
        tables = [[*chunk.block_ids, *[0] * (width - len(chunk.block_ids))] for chunk in self.chunks]
        return Step(
            num_tokens=len(positions),
            num_sequences=len(self.chunks),
            num_logit_rows=len(logit_rows),
            table_stride=width,
            slot_blocks=self._place([chunk.block_ids[position // self.block_size] for chunk, position in positions]),
            slot_offsets=self._place([position % self.block_size for _, position in positions]),
            block_tables=self._place(list(itertools.chain(*tables))),
            query_starts=self._place([0, *itertools.accumulate(len(chunk.tokens) for chunk in self.chunks)]),
            context_lens=self._place([chunk.end for chunk in self.chunks]),
            logit_rows=self._place(logit_rows),
        )

    def _place(self, numbers: list[int]) -> int:
        self.kept.append(torch.tensor(numbers))
        return self.kept[-1].data_ptr()


def aligned(count: int, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.zeros(count + 64, dtype=dtype)
    begin = -whole.data_ptr() % 64 // dtype.itemsize
    return whole[begin : begin + count]


def packed(keeper: Decoder, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    panels = aligned(keeper.kernels.td_packed_elems(*weight.shape), torch.bfloat16)
    keeper.kernels.td_pack(weight.data_ptr(), weight.stride(0), *weight.shape, panels.data_ptr())
    keeper.kept.append(panels)
    return Product(panels.data_ptr(), None if bias is None else bias.data_ptr(), weight.shape[1], weight.shape[0])


def packed_gate_up(keeper: Decoder, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    gate, up = weight.chunk(2)
    panels = aligned(keeper.kernels.td_packed_elems(*weight.shape), torch.bfloat16)
    keeper.kernels.td_pack_gate_up(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), *gate.shape, panels.data_ptr()
    )
    keeper.kept.append(panels)
    return Product(panels.data_ptr(), None if bias is None else bias.data_ptr(), weight.shape[1], weight.shape[0])


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps=1e-5)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, rest = torch.split(heads, [cos.shape[-1], heads.shape[-1] - cos.shape[-1]], -1)
    low, high = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-high, low], -1) * sin, rest], -1)


def attention(
    query: torch.Tensor,  # [queries, heads, dim]: those of the last tokens of the context
    key: torch.Tensor,  # [context, kv_heads, dim]
    value: torch.Tensor,
    window: int,
    shape: Shape,
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * shape.scaling
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    behind = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
    seen = (behind >= 0) & ((behind < window) if window else True)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


def chunks_of(lengths: Sequence[tuple[int, int]], shape: Shape) -> Chunks:
    """Return chunks (start, end) of different sequences, whose blocks are in random order."""
    needed = [-(-end // shape.block_size) for _, end in lengths]
    blocks = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    taken = iter(blocks)
    tokens = torch.arange(10_000) * 7919 % VOCAB
    return Chunks(
        [
            Chunk(tokens[start + 31 * index : end + 31 * index], start, list(itertools.islice(taken, count)))
            for index, ((start, end), count) in enumerate(zip(lengths, needed, strict=True))
        ],
        shape.block_size,
    )


def close(ours: torch.Tensor, reference: torch.Tensor, share: float) -> bool:
    """Return whether every element is within a share of the reference's largest value."""
    return bool((ours.float() - reference).abs().max() <= share * reference.abs().max())


def fill(decoder: Decoder, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Write random keys and values of a whole context into the second layer's blocks, and return them."""
    shape = decoder.shape
    planes = decoder.pool.view(-1, shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    context = torch.randn(2, chunk.end, shape.num_kv_heads, shape.head_dim).bfloat16()
    for position in range(chunk.end):
        block = chunk.block_ids[position // shape.block_size]
        planes[block, 1, :, position % shape.block_size] = context[:, position]
    return context[0].float(), context[1].float()


FAMILIES = {
    "llama": Shape(),
    "qwen2, with biases": Shape(biases=True, intermediate=100),
    "qwen3, norms of heads": Shape(norms=("input_norm", "ffn_norm", "query_norm", "key_norm"), hidden=80),
    "olmo2, norms of rows and behind": Shape(
        norms=("attention_out_norm", "ffn_out_norm", "query_norm", "key_norm"), norms_whole_rows=True
    ),
    "gemma3, norms around, window": Shape(
        norms=("input_norm", "attention_out_norm", "ffn_norm", "ffn_out_norm", "query_norm", "key_norm"),
        activation=GELU_TANH,
        window=40,
    ),
    "gemma2, softcap": Shape(
        norms=("input_norm", "attention_out_norm", "ffn_norm", "ffn_out_norm"), activation=GELU_TANH, softcap=5.0
    ),
    "phi, rotated in part": Shape(rotary_dim=20, num_kv_heads=6, head_dim=48),
}
