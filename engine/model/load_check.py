"""The check at load: compares a model's logits as Tandem computes them with those of the model itself, and refuses the
model if they differ.

The logits of two sequences, packed, chunked and paged through the real runner, must equal those of the model's own
eager forward on each sequence alone. The second sequence is longer than every window, chunk and rotary threshold that
`max_model_len` allows, so the check finds everything that depends on length or on the rest of the batch.
"""

import contextlib
import dataclasses
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from cluster.errors import ModelRefused
from cluster.messages import Sampling
from engine.attention.interface import ATTENTION_NAME
from engine.kv.layout import lay_out
from engine.kv.pool import TORCH_DTYPES, KvPool
from engine.model.loaded import LoadedModel
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.forward import Forward
from engine.steps.runner import ModelRunner

_NUM_DECODES = 4  # one-token steps at the end of each sequence
_SHORT_PROMPT = 3
_LONG = 24
_STALE = 3.0  # stands for the content that earlier sequences left in the blocks
_SAMPLE = (Sample(seed=0, position=0, sampling=Sampling()),)
_SEED = 7
_EAGER_BYTES = (
    4 << 30
)  # bytes of the reference's scores; above it the model's own sdpa, which stores none, replaces eager attention
# Keys whose whole numbers are lengths in tokens: attention windows, attention chunks, position-dependent query scales.
_LENGTH_WORDS = ("window", "chunk", "floor_scale")
_LAYER_COUNTS = ("_layers", "_pattern")  # endings of keys that count layers, such as max_window_layers
# Rotary frequencies of these kinds depend only on the position itself.
_STATIC_ROTARY = frozenset({"default", "linear", "yarn", "llama3", "proportional", "mrope"})
_ROTARY_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")


def check_equal(loaded: LoadedModel, chunk_tokens: int) -> None:
    """Raises ModelRefused with the difference and, if the configuration explains it, the cause.

    16 bits are too coarse to decide: they hide a small error, and rounding may send a near-tie of a mixture's router to
    another expert, after which everything differs. So if a threshold is within `max_model_len`, or 16 bits disagree,
    the comparison is repeated with the same weights in float32 if memory allows, and that result counts.
    """
    loaded = _with_layout(loaded, loaded.info.dtype)  # 8 bits in the pool would hide the errors
    coarse = _check(loaded, chunk_tokens)
    answer = coarse
    if (coarse is not None or _thresholds(loaded)) and _can_widen(loaded):
        with _in_float32(loaded) as widened:
            answer = _check(widened, chunk_tokens)
    if answer is not None:
        raise ModelRefused(answer)


@dataclass(frozen=True, slots=True)
class Deviation:
    """The errors of another Forward's logits, relative to the spread of a row's logits. `typical`: the largest median
    error of a sequence's rows; `worst`: the largest error of any row; `allowed`: the median that `check_equal`
    allows."""

    typical: float
    worst: float
    allowed: float

    @property
    def fault(self) -> str | None:
        """Return why this Forward must not replace the model's own; None: it may.

        Both have rounding errors, so more is allowed than in `check_equal`. Over seven families in bfloat16 with eight
        draws of weights each, half of a sequence's rows used at most 90 % of the limit and the worst row 57 %. Every
        row counts, since these models are not mixtures.
        """
        typical, worst = 2 * self.allowed, 6 * self.allowed
        if self.typical <= typical and self.worst <= worst:
            return None
        return (  # a NaN comes here as well
            f"its logits differ from the model's own by {self.typical:.1e} of their size, at worst "
            f"{self.worst:.1e} ({typical:.1e} and {worst:.1e} allowed)"
        )


def deviation(loaded: LoadedModel, chunk_tokens: int, other: Callable[[KvPool], Forward]) -> Deviation:
    """Compare another Forward of this model with the model's own on the check's sequences. Raises ModelRefused if it
    fails."""
    sequences = _sequences(loaded, chunk_tokens)
    ours = _packed_logits(loaded, *sequences, other)
    medians, largest = [], []
    for sequence, rows in zip(sequences, ours, strict=True):
        errors = _errors(rows, _reference_logits(loaded, sequence))
        medians += [errors.median(), errors[sequence.parts()[1]].median()]
        largest.append(errors.max())
    return Deviation(float(torch.stack(medians).max()), float(torch.stack(largest).max()), _allowed(loaded))


def compute_own_logits(loaded: LoadedModel, chunk_tokens: int) -> None:
    """Compute the model's own logits, which `check_equal` and `deviation` then use."""
    for sequence in _sequences(loaded, chunk_tokens):
        _reference_logits(loaded, sequence)


def replaces_load_check(loaded: LoadedModel, found: Deviation) -> bool:
    """Return whether `check_equal` has nothing left to find about a model that only a Forward of this deviation will
    compute: that Forward meets its limit for 16 bits, and no threshold asks for the comparison in float32."""
    return found.fault is None and found.typical <= found.allowed and not _thresholds(loaded)


def _check(loaded: LoadedModel, chunk_tokens: int) -> str | None:
    """Return the difference found, or None."""
    short, long = _sequences(loaded, chunk_tokens)
    ours = _packed_logits(loaded, short, long, loaded.forward)
    for sequence, rows in zip((short, long), ours, strict=True):
        reference = _reference_logits(loaded, sequence)
        positions = sequence.sampled_positions()
        for part in sequence.parts():
            fault = _difference(loaded, positions[part], rows[part], reference[part])
            if fault is not None:
                return fault
    return None


def _difference(
    loaded: LoadedModel, positions: torch.Tensor, ours: torch.Tensor, reference: torch.Tensor
) -> str | None:
    """Return the difference found, or None.

    Two ways of rounding differ by about an epsilon per layer, and these differences add up like the steps of a random
    walk: twice that is allowed. Measured over eighteen architectures of 2 to 32 layers with random weights, 16 bits
    used at most 60 % of it, and float32 3e-6 where 1e-4 is allowed; the errors that the check looks for move logits by
    1e-2 and more. In float32 every row must agree, in 16 bits half of them: a near-tie of a mixture's router may fall
    the other way in one.
    """
    if not len(ours):
        return None
    errors, allowed = _errors(ours, reference), _allowed(loaded)
    error = float(errors.max() if loaded.layout.dtype == "float32" else errors.median())
    if error <= allowed:
        return None
    return (  # a NaN comes here as well
        f"{loaded.info.architecture} would be silently wrong: packed with another sequence, its logits at position "
        f"{int(positions[errors.argmax()])} differ from its own by {error:.1e} of their size ({allowed:.1e} allowed)"
        + _why(loaded)
    )


def _errors(ours: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return each row's error relative to the spread of its logits."""
    centred = reference - reference.mean(dim=-1, keepdim=True)
    errors: torch.Tensor = (ours - reference).norm(dim=-1) / centred.norm(dim=-1).clamp(min=1e-20)
    return errors


def _allowed(loaded: LoadedModel) -> float:
    eps = torch.finfo(TORCH_DTYPES[loaded.layout.dtype]).eps
    return max(1e-4, 2 * eps * math.sqrt(len(loaded.layout.layers)))


def _why(loaded: LoadedModel) -> str:
    lengths = _thresholds(loaded)
    if not lengths:
        return ""
    advice = f"; --max-model-len {lengths[0]} or less avoids it"
    config = loaded.model.config.get_text_config().to_dict()
    rotary = length_dependent_rotary(config)
    if rotary:
        return f"; its rotary scaling {rotary!r} looks at the longest position of the whole batch{advice}"
    if config.get("attention_chunk_size"):
        return f"; its chunked attention exists only in its mask{advice}"
    return ""


def _thresholds(loaded: LoadedModel) -> tuple[int, ...]:
    return thresholds(loaded.model.config.get_text_config().to_dict(), loaded.info.max_model_len)


def _can_widen(loaded: LoadedModel) -> bool:
    if loaded.layout.dtype == "float32" or getattr(loaded.model, "is_quantized", False):
        return False
    needed = 4 * sum(tensor.numel() for tensor in _narrow(loaded))
    if loaded.device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(loaded.device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return needed < 0.8 * free


def _narrow(loaded: LoadedModel) -> list[torch.Tensor]:
    """Return the 16-bit parameters and buffers. Rotary frequencies, for example, are float32 in any dtype."""
    tensors = (*loaded.model.parameters(), *loaded.model.buffers())
    return [tensor for tensor in tensors if tensor.dtype in (torch.bfloat16, torch.float16)]


def _with_layout(loaded: LoadedModel, dtype: str) -> LoadedModel:
    shapes = [place.shape for place in loaded.layout.layers]
    return dataclasses.replace(loaded, layout=lay_out(shapes, loaded.layout.block_size, dtype))


@contextlib.contextmanager
def _in_float32(loaded: LoadedModel) -> Iterator[LoadedModel]:
    """Run with the same weights widened to float32, and restore them bit for bit afterwards."""
    narrow = _narrow(loaded)
    kept = [tensor.data for tensor in narrow]
    try:
        for tensor in narrow:
            tensor.data = tensor.data.float()
        yield dataclasses.replace(_with_layout(loaded, "float32"), own_logits={})
    finally:
        for tensor, data in zip(narrow, kept, strict=True):
            tensor.data = data


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Tokens, the chunks they are computed in, and blocks in no particular order."""

    token_ids: tuple[int, ...]
    cuts: tuple[int, ...]  # where each chunk begins
    block_ids: tuple[int, ...]

    def chunks(self) -> list[Chunk]:
        bounds = itertools.pairwise((*self.cuts, len(self.token_ids)))
        return [
            Chunk(len(self.token_ids), self.token_ids[begin:end], begin, self.block_ids, _SAMPLE)
            for begin, end in bounds
        ]

    def sampled_positions(self) -> torch.Tensor:
        return torch.tensor([*self.cuts[1:], len(self.token_ids)]) - 1

    def parts(self) -> tuple[slice, slice]:
        """Split the sampled rows: in the second part the long sequence is past every threshold."""
        late = max(0, len(self.cuts) - _NUM_DECODES - 1)
        return slice(late), slice(late, None)


def _sequences(loaded: LoadedModel, chunk_tokens: int) -> tuple[_Sequence, _Sequence]:
    block_size, longest = loaded.layout.block_size, loaded.info.max_model_len
    short_len = min(_SHORT_PROMPT + _NUM_DECODES, longest)
    past_all = max(_thresholds(loaded), default=0) + _NUM_DECODES + 1
    long_len = min(max(past_all, 2 * block_size + block_size // 2, _LONG), longest)
    chunk = max(1, min(chunk_tokens, long_len // 2))
    ids = _token_ids(loaded, short_len + long_len)
    num_blocks = loaded.layout.num_blocks_for(short_len) + loaded.layout.num_blocks_for(long_len)
    block_ids = tuple(reversed(range(num_blocks)))
    num_long_blocks = loaded.layout.num_blocks_for(long_len)
    return (
        _Sequence(ids[:short_len], _cuts(short_len, short_len), block_ids[num_long_blocks:]),
        _Sequence(ids[short_len:], _cuts(long_len, chunk), block_ids[:num_long_blocks]),
    )


def _cuts(num_tokens: int, chunk_tokens: int) -> tuple[int, ...]:
    prompt = max(num_tokens - _NUM_DECODES, 1)
    return (*range(0, prompt, chunk_tokens), *range(prompt, num_tokens))


def _token_ids(loaded: LoadedModel, num_tokens: int) -> tuple[int, ...]:
    """Return seeded token ids without those the configuration names, which may stand for an image or padding."""
    config = loaded.model.config
    keys = config.get_text_config().to_dict() | config.to_dict()
    named = {value for key, value in keys.items() if "token" in key and isinstance(value, int)}
    ordinary = torch.tensor([token for token in range(min(loaded.info.vocab_size, 32_000)) if token not in named])
    picks = torch.randint(len(ordinary), (num_tokens,), generator=torch.Generator().manual_seed(_SEED))
    return tuple(ordinary[picks].tolist())


def _packed_logits(
    loaded: LoadedModel, short: _Sequence, long: _Sequence, forward: Callable[[KvPool], Forward]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of each sequence's chunks, in order. Both sequences end together, so the short one shares its
    steps with the long one's last, longest chunks and precedes it in the row."""
    pool = KvPool(loaded.layout, len(short.block_ids) + len(long.block_ids), loaded.device)
    pool.tensor.fill_(_STALE)
    runner = ModelRunner(forward(pool), pool)
    rows: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    chunks = (short.chunks(), long.chunks())
    num_steps = max(map(len, chunks))
    try:
        for step in range(-num_steps, 0):
            members = [which for which in (0, 1) if -step <= len(chunks[which])]
            logits = runner.logits(StepPlan(tuple(chunks[which][step] for which in members)))
            for which, row in zip(members, logits, strict=True):
                rows[which].append(row.float().clone())  # the next call may overwrite the returned logits
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise ModelRefused(f"{loaded.info.architecture} fails on a packed batch: {error}") from error
    finally:
        pool.close()
    return torch.stack(rows[0]), torch.stack(rows[1])


def _reference_logits(loaded: LoadedModel, sequence: _Sequence) -> torch.Tensor:
    """Return the model's own logits at the sampled positions: its own attention, one sequence, no cache. They are
    computed once, for the load check and for the check of a faster forward."""
    key = (sequence.token_ids, sequence.cuts)
    if key not in loaded.own_logits:
        loaded.own_logits[key] = _computed_logits(loaded, sequence)
    return loaded.own_logits[key]


@torch.inference_mode()
def _computed_logits(loaded: LoadedModel, sequence: _Sequence) -> torch.Tensor:
    model, num_tokens = loaded.model, len(sequence.token_ids)
    positions = sequence.sampled_positions().to(model.device)
    heads = model.config.get_text_config().num_attention_heads
    keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
    keywords = {"logits_to_keep": positions} if keeps_rows else {}
    try:
        _set_own_attention(loaded, fits=8 * heads * num_tokens**2 <= _EAGER_BYTES)
        ids = torch.tensor([sequence.token_ids], device=model.device)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **keywords).logits[0]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return (logits if keeps_rows else logits[positions]).float()


def _set_own_attention(loaded: LoadedModel, fits: bool) -> None:
    if not fits:
        with contextlib.suppress(ValueError, ImportError):  # the model has no sdpa: eager at any size
            loaded.model.set_attn_implementation("sdpa")
            return
    loaded.model.set_attn_implementation("eager")


def thresholds(config: Mapping[str, object], max_model_len: int) -> tuple[int, ...]:
    """Return the lengths, ascending, that a sequence of at most `max_model_len` tokens can pass and at which the model
    may begin to behave differently."""
    lengths = {value for key, value in _numbers(config) if _is_length(key)}
    if length_dependent_rotary(config):
        lengths |= {value for key, value in _numbers(config) if key in _ROTARY_LENGTHS}
    return tuple(sorted(length for length in lengths if 0 < length < max_model_len))


def _is_length(key: str) -> bool:
    return any(word in key for word in _LENGTH_WORDS) and not key.endswith(_LAYER_COUNTS)


def length_dependent_rotary(config: Mapping[str, object]) -> str | None:
    """Return the kind of rotary scaling that depends on the input's length, or None."""
    for key, value in _leaves(config):
        if key in ("rope_type", "type") and isinstance(value, str) and value not in _STATIC_ROTARY:
            return value
    return None


def _numbers(config: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    for key, value in _leaves(config):
        if isinstance(value, int) and not isinstance(value, bool):
            yield key, value


def _leaves(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield str(key), value
