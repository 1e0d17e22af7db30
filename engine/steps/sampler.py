"""Draws tokens from logits. Owns the noise and the filters; keeps no state between calls. Penalties and the like change
the logits first (`engine/sampling/adjustment.py`).

A token is argmax(logits / temperature + Gumbel noise) over the tokens that the filters keep, which is a draw from their
softmax (Gumbel-max). The noise is a counter-based hash (the finaliser of SplitMix64, Steele et al. 2014) of seed,
position and token id: the same logits at the same position give the same token in any row, batch, process or worker.

Random rows are computed in float64. The noise then has 52 bits, so tokens with a probability down to 1e-15 can be
drawn, and the last-bit differences between the logarithms of a CPU and a GPU change a draw less than once in 1e12.

A prompt with many choices has one row of logits for all of them, and a worker may end many such prompts in one step. So
StepDraws draws the tokens of a step in parts, which bounds the temporary memory of drawing.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cluster.messages import Sampling, TokenLogprobs
from engine.batch import to_device, to_host
from engine.sampling.adjustment import AdjustedRows, MaskedRows, adjusted_rows, masked_rows
from engine.scheduling.step import DrawnToken, Sample, StepPlan

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LOGITS_AT_ONCE = 1 << 26  # 256 MiB as float32, and 256 rows of the largest vocabularies
_FIRST_WIDTH = 1024  # number of best tokens that are examined before all are sorted
_ELEMENTS_AT_ONCE = 1 << 22  # bounds the temporaries to a few hundred megabytes


class RowDraw(Protocol):
    """A faster implementation of the same draws: it returns tokens `[rows]`, or None for logits that it does not
    support. Where there are `adjusted` rows, it draws from them, and only tokens that the masks allow.
    """

    def __call__(
        self,
        logits: torch.Tensor,
        samples: Sequence[Sample],
        adjusted: AdjustedRows | None = None,
        masked: MaskedRows | None = None,
    ) -> torch.Tensor | None: ...


def draw(logits: torch.Tensor, samples: Sequence[Sample], compiled: RowDraw | None = None) -> list[DrawnToken]:
    """Draw one token per sample: `samples[i]` reads row i of `logits`, floats `[rows, vocab]`, and no other row.

    Log-probabilities are those of the given logits, before rules, temperature, filters and bans.
    """
    return Draw(logits, samples, compiled).read()


class Draw:
    """The tokens of one step, drawn on the device of the logits.

    The constructor does not wait; `read` waits for the tokens. The parameters of a row are known on the host, so
    nothing is read from the device in between, with one exception: a top-p set that is wider than the best tokens that
    were examined. Such rows are marked and drawn again in `read`, on a GPU from a copy of the logits, because their own
    memory may already belong to another step.
    """

    @torch.inference_mode()
    def __init__(self, logits: torch.Tensor, samples: Sequence[Sample], compiled: RowDraw | None = None) -> None:
        assert logits.shape[0] == len(samples), f"{logits.shape[0]} rows of logits for {len(samples)} samples"
        self._samples = samples
        self.redrawn: list[int] = []  # rows whose token, once read, is not the one in `token_ids`
        can_be_short = any(_can_be_short(sample.sampling, logits.shape[1]) for sample in samples)
        self._logits = logits = logits.clone() if can_be_short and logits.device.type != "cpu" else logits
        adjusted, masked = _changed_rows(logits, samples)
        token_ids = compiled(logits, samples, adjusted, masked) if compiled is not None else None
        if token_ids is not None:
            self._host: Sequence[torch.Tensor] = (token_ids,)
        else:
            changed = logits if adjusted is None else adjusted.in_place_of(logits)
            token_ids = self._draw_here(changed if masked is None else masked.in_place_of(changed))
        self.token_ids = token_ids  # [rows], on the device of the logits
        self._logprobs = _Logprobs.of(logits, samples, token_ids)
        self._arrival = _mark(logits.device)

    @property
    def num_rows(self) -> int:
        return len(self._samples)

    def _draw_here(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw from these logits and return the tokens. Their copy to the host, and that of which rows must be drawn
        again, have been launched."""
        samples = self._samples
        self._allowed = _without_banned(logits, samples)
        token_ids = _argmax(self._allowed)
        is_short = torch.zeros_like(token_ids, dtype=torch.bool)
        random_rows = [row for row, sample in enumerate(samples) if sample.sampling.temperature > 0]
        for rows in _slices(random_rows, logits.shape[1]):
            index, drawn, short = _draw_random(self._allowed, rows, samples, _FIRST_WIDTH)
            token_ids[index] = drawn
            is_short[index] = short
        can_be_short = any(_can_be_short(sample.sampling, logits.shape[1]) for sample in samples)
        self._host = to_host([token_ids, *([is_short] if can_be_short else [])])
        return token_ids

    @torch.inference_mode()
    def read(self) -> list[DrawnToken]:
        """Return the tokens, after waiting for the earlier work on the device's stream."""
        if self._arrival is not None:
            self._arrival.synchronize()
        chosen: list[int] = self._host[0].tolist()
        logprobs = self._logprobs
        short = self._host[1].nonzero().flatten().tolist() if len(self._host) > 1 else []
        if short:
            for rows in _slices(short, self._logits.shape[1]):
                _, drawn, _ = _draw_random(self._allowed, rows, self._samples, self._logits.shape[1])
                for row, token_id in zip(rows, drawn.tolist(), strict=True):
                    self.redrawn += [row] if token_id != chosen[row] else []
                    chosen[row] = token_id
            logprobs = _Logprobs.of(self._logits, self._samples, to_device(torch.tensor(chosen), self._logits.device))
            if self._logits.device.type == "cuda":
                torch.cuda.current_stream(self._logits.device).synchronize()
        by_row = logprobs.read(chosen) if logprobs is not None else {}
        return [DrawnToken(token_id, by_row.get(row)) for row, token_id in enumerate(chosen)]


class StepDraws:
    """The draws of one step. The constructor does not wait; `read` waits for the tokens.

    The tokens of an ordinary step are drawn in one part, launched at once. Further parts are drawn by `read`, one after
    another, so that at most one is in memory. Unless `is_whole`, the logits must not change until `read`.
    """

    def __init__(self, logits: torch.Tensor, plan: StepPlan, compiled: RowDraw | None = None) -> None:
        """`logits` is `[rows, vocab]`: one row per chunk, or one per sample of a chunk with draft tokens."""
        self._parts = parts(logits, plan, _LOGITS_AT_ONCE)
        self._compiled = compiled
        self._on_its_way = [Draw(*part, compiled) for part in itertools.islice(self._parts, 1)]
        first = self._on_its_way[0] if self._on_its_way else None
        num_samples = sum(len(chunk.samples) for chunk in plan.chunks)
        self.is_whole = first is None or first.num_rows == num_samples  # `read` has nothing left to draw
        self.token_ids = None if first is None else first.token_ids  # of the first part, on the logits' device
        self.redrawn: list[int] = []  # samples whose token, once read, is not the one in `token_ids`

    def read(self) -> list[DrawnToken]:
        """Return the tokens. May be called once."""
        tokens: list[DrawnToken] = []
        while self._on_its_way:
            draw = self._on_its_way.pop()
            num_before = len(tokens)
            tokens += draw.read()
            self.redrawn += [num_before + row for row in draw.redrawn]
            self._on_its_way += (Draw(*part, self._compiled) for part in itertools.islice(self._parts, 1))
        return tokens


def parts(logits: torch.Tensor, plan: StepPlan, most_elements: int) -> Iterator[tuple[torch.Tensor, list[Sample]]]:
    """Yield the plan's samples in order with their rows of logits, in parts of at most `most_elements` elements, or one
    row. Contiguous rows are not copied."""
    sampled = list(_rows_and_samples(plan))
    size = max(1, most_elements // max(1, logits.shape[1]))
    for start in range(0, len(sampled), size):
        rows = [row for row, _ in sampled[start : start + size]]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            taken = logits[rows[0] : rows[0] + len(rows)]
        else:
            taken = logits[to_device(torch.tensor(rows), logits.device)]
        yield taken, [sample for _, sample in sampled[start : start + size]]


def _rows_and_samples(plan: StepPlan) -> Iterator[tuple[int, Sample]]:
    row = 0
    for chunk in plan.chunks:
        for place, sample in enumerate(chunk.samples):
            yield (row + place if chunk.num_draft_tokens else row), sample
        row += len(chunk.samples) if chunk.num_draft_tokens else bool(chunk.samples)


def _changed_rows(logits: torch.Tensor, samples: Sequence[Sample]) -> tuple[AdjustedRows | None, MaskedRows | None]:
    """Return the rows that logit rules change and those that grammars mask; None where no sample has either."""
    has_rules = any(sample.logit_state is not None for sample in samples)
    has_grammar = any(sample.grammar_state is not None for sample in samples)
    return adjusted_rows(logits, samples) if has_rules else None, masked_rows(samples) if has_grammar else None


def _can_be_short(sampling: Sampling, vocab_size: int) -> bool:
    """Return whether the top-p set may be wider than the best tokens that were examined."""
    return (
        sampling.temperature > 0
        and sampling.top_p < 1
        and not 0 < sampling.top_k < vocab_size
        and vocab_size > _FIRST_WIDTH
    )


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """Return each row's argmax, the lowest index among equals. On a CPU this uses NumPy, which is twenty times as fast
    as torch for 16 bits."""
    if scores.device.type != "cpu":
        return scores.argmax(dim=-1)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return torch.from_numpy(wide.numpy().argmax(axis=-1))


def _without_banned(logits: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    banned = [(row, token_id) for row, sample in enumerate(samples) for token_id in sample.banned_token_ids]
    if not banned:
        return logits
    rows, token_ids = to_device(torch.tensor(banned).T.contiguous(), logits.device)
    return logits.index_put((rows, token_ids), logits.new_full((), -torch.inf))


def _slices(rows: list[int], vocab_size: int) -> Iterator[list[int]]:
    num_rows = max(1, _ELEMENTS_AT_ONCE // vocab_size)
    return (rows[start : start + num_rows] for start in range(0, len(rows), num_rows))


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of the rows drawn at random: `[rows]` each, copied to the logits' device at once."""

    rows: torch.Tensor
    keys: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor  # infinite for a top_p of 1, which keeps all tokens even if sums are rounded

    @classmethod
    def of(cls, rows: Sequence[int], samples: Sequence[Sample], like: torch.Tensor) -> "_Parameters":
        ours = [samples[row] for row in rows]
        samplings = [sample.sampling for sample in ours]
        whole = torch.tensor(
            [rows, [noise_key(s.seed, s.position) for s in ours], [s.top_k or like.shape[1] for s in samplings]]
        )
        shares = [
            [s.temperature for s in samplings],
            [s.min_p for s in samplings],
            [s.top_p if s.top_p < 1 else torch.inf for s in samplings],
        ]
        fractions = torch.tensor(shares, dtype=torch.float64)
        placed = to_device(torch.cat([whole, fractions.view(torch.int64)]), like.device)
        return cls(*placed[:3], *placed[3:].view(torch.float64))


def _draw_random(
    logits: torch.Tensor, rows: list[int], samples: Sequence[Sample], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (the rows, their tokens, which of them need a greater width), each `[rows]`."""
    parameters = _Parameters.of(rows, samples, logits)
    scores = logits[parameters.rows].double()
    scores -= scores.amax(dim=-1, keepdim=True)  # the best is 0, so no temperature overflows
    scores /= parameters.temperature.unsqueeze(1)
    samplings = [samples[row].sampling for row in rows]
    if any(sampling.min_p > 0 for sampling in samplings):
        least = parameters.min_p.unsqueeze(1).log()
        scores = scores.masked_fill(scores < least, -torch.inf)
    is_short = torch.zeros_like(parameters.rows, dtype=torch.bool)
    vocab_size = scores.shape[1]
    ranked = [row for row, s in enumerate(samplings) if 0 < s.top_k < vocab_size or s.top_p < 1]
    if ranked:
        index = to_device(torch.tensor(ranked), scores.device)
        ours = scores[index]
        limits = [samplings[row].top_k for row in ranked if 0 < samplings[row].top_k < vocab_size]
        looked_at = min(vocab_size, max(width, *limits) if limits else width)
        top_k = parameters.top_k[index]
        counts, least = _num_kept(looked_at, ours, top_k, parameters.top_p[index])
        if looked_at < vocab_size:
            is_short[index] = (counts.squeeze(1) == looked_at) & (top_k >= vocab_size)
        scores[index] = ours.masked_fill(~_best(ours, counts, least), -torch.inf)
    drawn = _argmax(_gumbel_noise(parameters.keys, vocab_size).add_(scores))
    return parameters.rows, drawn, is_short


def _num_kept(
    width: int, scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many of the best tokens each row keeps after top-k and top-p, and the score of the last of them, both
    `[rows, 1]`. Examines the best `width` tokens only: a count of `width` may be too low if top-k is off."""
    best = scores.topk(width, dim=-1).values
    weights = best.exp()
    sums = weights.cumsum(dim=-1)
    limit = top_k.clamp(max=scores.shape[1]).unsqueeze(1)
    all_weights = scores.exp().sum(dim=-1, keepdim=True)
    mass = torch.where(limit < scores.shape[1], sums.gather(1, limit.clamp(max=width) - 1), all_weights)
    nucleus = mass * top_p.unsqueeze(1)
    before = sums - weights
    kept = (before < nucleus) & (torch.arange(width, device=scores.device) < limit)
    counts = kept.sum(dim=-1, keepdim=True).clamp(min=1)
    return counts, best.gather(1, counts - 1)


def _best(scores: torch.Tensor, counts: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Mark exactly `counts` tokens per row: the best, and among equals those with the lowest ids."""
    above, equal = scores > least, scores == least
    num_equal_kept = counts - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= num_equal_kept))


def noise_key(seed: int, position: int) -> int:
    """Return a signed 64-bit key for all the noise at one position of one sequence."""
    key = _mixed((_mixed(seed & _MASK_64) + position * _GOLDEN) & _MASK_64)
    return _signed(key)


def _gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return finite float64 noise `[rows, vocab]` for every token id, from int64 `keys` `[rows]`."""
    counters = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(_GOLDEN)
    bits = keys.unsqueeze(1) + counters
    bits = bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(_MIX_1))
    bits = bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(_MIX_2))
    bits = bits.bitwise_xor_(_shifted(bits, 31))
    uniform = _shifted(bits, 12).double().add_(0.5).mul_(2.0**-52)  # 52 bits and a half: never 0, never 1
    return uniform.log_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, distance: int) -> torch.Tensor:
    """Shift right logically; int64 shifts copy the sign."""
    return (bits >> distance).bitwise_and_((1 << (64 - distance)) - 1)


def _mixed(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * _MIX_1) & _MASK_64
    bits = ((bits ^ (bits >> 27)) * _MIX_2) & _MASK_64
    return bits ^ (bits >> 31)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """The requested log-probabilities while they are copied to the host."""

    wanted: tuple[tuple[int, int], ...]  # (row, how many of the best)
    of_chosen: torch.Tensor  # [wanted]
    best_ids: torch.Tensor  # [wanted, most that any row wants]
    best: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, samples: Sequence[Sample], token_ids: torch.Tensor) -> "_Logprobs | None":
        counts = ((row, sample.sampling.num_logprobs) for row, sample in enumerate(samples))
        wanted = tuple((row, count) for row, count in counts if count is not None)
        if not wanted:
            return None
        rows = to_device(torch.tensor([row for row, _ in wanted]), logits.device)
        logprobs = logits[rows].float().log_softmax(dim=-1)
        best = logprobs.topk(min(max(count for _, count in wanted), logits.shape[1]), dim=-1)
        of_chosen = logprobs.gather(1, token_ids[rows].unsqueeze(1))[:, 0]
        return cls(wanted, *to_host([of_chosen, best.indices, best.values]))

    def read(self, chosen: list[int]) -> dict[int, TokenLogprobs]:
        columns = zip(self.wanted, self.of_chosen.tolist(), self.best_ids.tolist(), self.best.tolist(), strict=True)
        return {
            row: TokenLogprobs(chosen[row], logprob, tuple(zip(token_ids[:count], values[:count], strict=True)))
            for (row, count), logprob, token_ids, values in columns
        }
