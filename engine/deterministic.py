"""`--deterministic`: makes a runner deterministic, checks that it is, and describes how for the worker's report and
fingerprint.

Without compiled kernels the plain forward runs over a padded step, so that no array leaves the processor's vector units
a remainder. Its products see one of a few numbers of rows. A library picks its kernel, and with it the order of a sum,
by the shape of the product. So rows are cut into pieces of `ROW_COUNTS`, the rest filled with zeros, and a number is
used only where it gives the bits of the least of them, for this very product, at every place in the piece, whatever the
other rows are: that is tried at load.

Products of weights that a module owns itself, without an nn.Linear (routers and experts of mixtures above all), are
replaced while the module runs.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cluster.errors import ModelRefused
from cluster.messages import LayoutFingerprint, Sampling
from cluster.request_size import blocks_for
from engine.attention.fixed_tiles import FixedTilesBackend
from engine.batch import PackedBatch
from engine.cpu.compiled_forward import CompiledForward
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel, PackedLinear
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.forward import PlainForward
from engine.steps.runner import ModelRunner

ROW_COUNTS = (8, 32, 128)
_SEED = 11
_ALIGNMENT = 64  # bytes: as torch allocates; a kernel may treat other addresses differently

Product = Callable[[torch.Tensor], torch.Tensor]
KINDS = (nn.Linear, PackedLinear, Conv1D)
_LINEAR = (nn.functional.linear,)
_MATMUL = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
_SHAPED_BY_ROWS = frozenset(
    {"bmm", "baddbmm", "addmm", "addbmm", "einsum", "grouped_mm", "_grouped_mm", "_scaled_mm", "conv1d", "conv2d"}
)


class FixedRows:
    """Replaces a module's `forward` with one that computes fixed numbers of rows; `counts` ascend from
    ROW_COUNTS[0]."""

    def __init__(self, product: Product, counts: Sequence[int]) -> None:
        self._product = product
        self._counts = tuple(counts)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        rows = states.reshape(-1, states.shape[-1])
        if not len(rows):
            return self._product(states)
        pieces = [self._computed(rows[begin : begin + count], count) for begin, count in cut(len(rows), self._counts)]
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return output[: len(rows)].view(*states.shape[:-1], -1)

    def _computed(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        if len(rows) < count:
            filled = rows.new_zeros(count, rows.shape[1])
            filled[: len(rows)] = rows
            rows = filled
        elif rows.data_ptr() % _ALIGNMENT or not rows.is_contiguous():
            rows = rows.clone(memory_format=torch.contiguous_format)
        return self._product(rows)


def cut(num_rows: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, count) of the pieces that cover `num_rows` rows, largest first; only the last piece may extend
    beyond them."""
    pieces, begin = [], 0
    for count in reversed(counts):
        while num_rows - begin >= count:
            pieces.append((begin, count))
            begin += count
    if begin < num_rows:
        pieces.append((begin, counts[0]))
    return pieces


def fix_rows(model: nn.Module) -> tuple[int, ...]:
    """Replace every product of the model by FixedRows, in place. Returns the row counts that all of them can use.

    Raises ModelRefused if the rows of a product depend on their position or on other rows at any count.
    """
    products = [(name, module) for name, module in model.named_modules() if isinstance(module, KINDS)]
    tried: dict[tuple[object, ...], tuple[int, ...]] = {}
    for name, module in products:
        shape, example = _shape_of(module)
        if shape not in tried:
            tried[shape] = agreeing_counts(module.forward, example, name)
        module.forward = FixedRows(module.forward, tried[shape])  # type: ignore[method-assign]
    everywhere = set(ROW_COUNTS).intersection(*tried.values())
    return tuple(sorted(everywhere))


def _shape_of(module: nn.Module) -> tuple[tuple[object, ...], torch.Tensor]:
    """Return the properties that select a product's kernel, and random rows for it."""
    assert isinstance(module, KINDS)
    weight: torch.Tensor = module._packed if isinstance(module, PackedLinear) else module.weight
    if isinstance(module, Conv1D):
        num_in, num_out = module.weight.shape
    else:
        num_in, num_out = module.in_features, module.out_features
    kind = (type(module).__name__, num_in, num_out, weight.dtype, module.bias is not None)
    return kind, random_rows(num_in, weight)


def random_rows(width: int, like: torch.Tensor) -> torch.Tensor:
    """Return random rows, as many as the largest of ROW_COUNTS."""
    rows = torch.randn(ROW_COUNTS[-1], width, generator=torch.Generator().manual_seed(_SEED)).to(like.device)
    return rows.to(like.dtype if like.dtype.is_floating_point else torch.bfloat16)


@torch.inference_mode()
def agreeing_counts(product: Product, rows: torch.Tensor, name: str) -> tuple[int, ...]:
    """Return those of ROW_COUNTS at which `rows` have equal bits at every position. Raises ModelRefused if not even the
    least does."""
    least = ROW_COUNTS[0]
    base = _in_pieces(product, rows, least)
    for shift in range(1, least):  # every row at every position of the smallest piece, with other rows and alone
        alone = rows[:least].clone()
        alone[:shift] = 0
        turned = _in_pieces(product, rows.roll(shift, 0), least)
        if not torch.equal(turned, base.roll(shift, 0)) or not torch.equal(product(alone)[shift:], base[shift:least]):
            raise ModelRefused(
                f"--deterministic on: a row of {name} depends on its position among {least} rows on this machine"
            )
    return tuple(count for count in ROW_COUNTS if _agrees(product, rows, base, count))


def _agrees(product: Product, rows: torch.Tensor, base: torch.Tensor, count: int) -> bool:
    shifts = (0, count // 2 + 1)
    return all(torch.equal(_in_pieces(product, rows.roll(by, 0), count), base.roll(by, 0)) for by in shifts)


def _in_pieces(product: Product, rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([product(piece.clone()) for piece in torch.split(rows, count)])


def fix_own_products(model: nn.Module) -> None:
    """Fix the products of mixtures, in place: experts are computed one after another, each on the rows routed to it."""
    owners = [module for module in model.modules() if _has_weights_of_its_own(module)]
    if owners and isinstance(model, PreTrainedModel):
        model.set_experts_implementation("eager")
    for module in owners:
        module.forward = _Fixed(module.forward, _FixedProducts(type(module).__name__))


def _has_weights_of_its_own(module: nn.Module) -> bool:
    known = isinstance(module, (*KINDS, nn.Embedding))
    return not known and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


class _Fixed:
    """Replaces a module's `forward` by one whose products are fixed."""

    def __init__(self, forward: Callable[..., object], products: "_FixedProducts") -> None:
        self._forward = forward
        self._products = products

    def __call__(self, *args: object, **kwargs: object) -> object:
        with self._products:
            return self._forward(*args, **kwargs)


class _FixedProducts(TorchFunctionMode):
    """Turns products of rows with a matrix into FixedRows. Raises ModelRefused for those of another kind."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._counts: dict[tuple[object, ...], tuple[int, ...]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LINEAR:
            return self._product(func, *args, **kwargs)
        if func in _MATMUL:
            return self._product(func, *args)
        if getattr(func, "__name__", "") in _SHAPED_BY_ROWS:
            raise ModelRefused(f"--deterministic on: {self._name} computes {func.__name__}, whose rows cannot be fixed")
        return func(*args, **kwargs)

    def _product(
        self, func: Callable[..., torch.Tensor], rows: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor | None
    ) -> torch.Tensor:
        if weight.dim() != 2 or rows.dim() < 2:
            raise ModelRefused(f"--deterministic on: {self._name} computes a product that is not of rows with a matrix")
        product = functools.partial(_apply, func, weight, bias)
        shape = (func, weight.shape, weight.stride(), weight.dtype, len(bias))
        if shape not in self._counts:
            self._counts[shape] = agreeing_counts(product, random_rows(rows.shape[-1], rows), self._name)
        return FixedRows(product, self._counts[shape])(rows)


def _apply(
    func: Callable[..., torch.Tensor], weight: torch.Tensor, bias: tuple[torch.Tensor | None, ...], rows: torch.Tensor
) -> torch.Tensor:
    return func(rows, weight, *bias)


_LENGTH = 150  # tokens: more than one tile of attention, and more than the largest row count of products
_CHECK_SEED = 13
_SAMPLE = Sample(seed=0, position=0, sampling=Sampling())
# Lengths of the chunks, in turn, and of the other sequences' chunks before and behind each of them.
_WAYS = (
    ((_LENGTH,), ((1, 3), (17,))),
    ((1, 2, 3, 5, 7, 64), ()),
    ((33, 1, 1, 4, 9), ((2,), (1, 1, 5))),
    ((70, 1), ((40,), (11, 1))),
)


@dataclass(frozen=True, slots=True)
class Determinism:
    """The method by which determinism was reached, and the digest of the check's results."""

    path: str
    digest: str
    report: str

    def marked(self, fingerprint: LayoutFingerprint) -> LayoutFingerprint:
        """Return the fingerprint extended by the digest, so that only workers that compute the same bits exchange
        KV."""
        mark = f"{fingerprint.dtype}, deterministic by {self.path} ({self.digest})"
        return dataclasses.replace(fingerprint, dtype=mark)


def make_deterministic(loaded: LoadedModel, runner: ModelRunner, pool: KvPool) -> Determinism:
    """Make the engine deterministic: keep the compiled kernels, or replace any other forward by the plain one with
    fixed shapes. Raises ModelRefused if results still depend on the batch."""
    if isinstance(runner.forward, CompiledForward):
        digest = check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len)
        return Determinism("compiled kernels", digest, f"deterministic: the compiled kernels, verified ({digest})")
    counts = fix_rows(loaded.model)
    fix_own_products(loaded.model)
    digest, queries = _fixed(loaded, runner, pool)
    how = f"products of {'/'.join(map(str, counts))} rows, attention of {queries}"
    return Determinism("fixed shapes", digest, f"deterministic: {how}, verified ({digest})")


def _fixed(loaded: LoadedModel, runner: ModelRunner, pool: KvPool) -> tuple[str, str]:
    """Compute many queries of a chunk at once if that yields the same bits as one query at a time."""
    try:
        runner.forward = FixedForward(loaded.model, pool, wide=True)
        return check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len), "many queries"
    except ModelRefused:
        runner.forward = FixedForward(loaded.model, pool, wide=False)
        return check(runner, pool, loaded.info.vocab_size, loaded.info.max_model_len), "one query"


class FixedForward:
    """A Forward whose rows have the same bits in any step. The products of its model are FixedRows."""

    def __init__(self, model: PreTrainedModel, pool: KvPool, wide: bool) -> None:
        self._plain = PlainForward(model, pool, FixedTilesBackend(wide))

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        return self._plain(padded(batch))[: len(batch.logit_rows)]


def padded(batch: PackedBatch) -> PackedBatch:
    """Repeat the last token and the last logit row up to a multiple of the least number of rows. The repeated token
    gets the same bits each time and is written to the same position."""
    num_tokens, num_rows = batch.input_ids.shape[1], len(batch.logit_rows)
    more_tokens, more_rows = (-num % ROW_COUNTS[0] for num in (num_tokens, num_rows))
    if not more_tokens and not more_rows:
        return batch

    def again(tensor: torch.Tensor, times: int) -> torch.Tensor:
        return torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], times)], dim=-1)

    return dataclasses.replace(
        batch,
        input_ids=again(batch.input_ids, more_tokens),
        position_ids=again(batch.position_ids, more_tokens),
        slot_blocks=again(batch.slot_blocks, more_tokens),
        slot_offsets=again(batch.slot_offsets, more_tokens),
        logit_rows=again(batch.logit_rows, more_rows) if num_rows else batch.logit_rows,
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    logits: torch.Tensor  # [tokens, vocab]
    blocks: torch.Tensor  # the bytes of the sequence's own KV


def check(runner: ModelRunner, pool: KvPool, vocab_size: int, longest: int) -> str:
    """Check that results do not depend on the batch, and return a digest of them: machines with equal digests compute
    equal bits. The pool is zero before and after. Raises ModelRefused with the dependence found."""
    num_free = pool.num_blocks - max(sum(_blocks(pool, way)) for _, way in _WAYS)
    length = min(_LENGTH, longest, num_free * pool.layout.block_size)
    if length < 2:
        raise ModelRefused(f"--deterministic on: a pool of {pool.num_blocks} blocks is too small for the check")
    generator = torch.Generator().manual_seed(_CHECK_SEED)
    token_ids = torch.randint(vocab_size, (2 * _LENGTH,), generator=generator).tolist()
    try:
        base = _computed(runner, pool, token_ids, length, ((_LENGTH,), ()))
        for way in _WAYS:
            other = _computed(runner, pool, token_ids, length, way)
            same = (other.logits == base.logits).all(dim=-1)
            if not bool(same.all()) or not torch.equal(other.blocks, base.blocks):
                where = f"{int((~same).sum())} of {length} rows of logits" if not bool(same.all()) else "its KV"
                raise ModelRefused(
                    f"--deterministic on: {where} of a sequence differ in chunks of {way[0][:3]} tokens "
                    f"beside others of {way[1]}, on this machine"
                )
    finally:
        pool.raw.zero_()
    return hashlib.blake2b(base.logits.float().cpu().numpy().tobytes(), digest_size=6).hexdigest()


def _computed(
    runner: ModelRunner,
    pool: KvPool,
    token_ids: list[int],
    length: int,
    way: tuple[Sequence[int], Sequence[Sequence[int]]],
) -> _Outcome:
    pool.raw.zero_()
    lengths, company = way
    own = tuple(range(pool.num_blocks - 1, pool.num_blocks - 1 - blocks_for(length, pool.layout.block_size), -1))
    others = _company(pool, token_ids, company)
    rows, done = [], 0
    for asked in itertools.cycle(lengths):
        tokens = tuple(token_ids[done : min(done + asked, length)])
        chunk = Chunk(0, tokens, done, own, (_SAMPLE,) * len(tokens), num_draft_tokens=len(tokens) - 1)
        before = others[: len(others) // 2]
        logits = runner.logits(StepPlan((*before, chunk, *others[len(before) :])))
        rows.append(logits[len(before) :][: len(tokens)].clone())
        done += len(tokens)
        if done == length:
            return _Outcome(torch.cat(rows), pool.raw[list(own)].clone())
    raise AssertionError


def _company(pool: KvPool, token_ids: list[int], company: Sequence[Sequence[int]]) -> tuple[Chunk, ...]:
    """Return chunks of short sequences that fill every step of the check beside the sequence that is checked."""
    chunks, first = [], 0
    for number, length in enumerate(itertools.chain.from_iterable(company), start=1):
        blocks = tuple(range(first, first + blocks_for(length, pool.layout.block_size)))
        chunks.append(Chunk(number, tuple(token_ids[-length - number : -number]), 0, blocks, (_SAMPLE,)))
        first += len(blocks)
    return tuple(chunks)


def _blocks(pool: KvPool, company: Sequence[Sequence[int]]) -> list[int]:
    return [blocks_for(length, pool.layout.block_size) for length in itertools.chain.from_iterable(company)]
