"""The simulated engine: KV is a chain of hashes, and every token is a hash of all KV bytes of its sequence.

One wrong, stale or missing byte in any block of a table changes the next token and all later ones, and the
log-probabilities of the prompt's tokens. Nothing else does: every cluster must produce those of a serial run on a
separate pool.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from cluster.messages import Grammar, LayoutFingerprint, PromptLogprobs, Sampling
from engine.grammar.compiled_grammars import StepMasks
from engine.kv.layout import BlockLayout, LayerShape, lay_out
from engine.kv.pool import KvPool
from engine.model.loaded import ModelInfo
from engine.sampling.logit_state import GrammarState
from engine.scheduling.step import Chunk, DrawnToken, Launched, Sample, ScoredTokens, StepPlan, StepResult
from tests.chaos.simulated.members.grammars import END, AtOnce, compiled_grammars
from tests.chaos.simulated.schedules.schedule import MAX_MODEL_LEN

_KEY_BYTES = _VALUE_BYTES = 16


@lru_cache
def layout_of(block_size: int) -> BlockLayout:
    return lay_out((LayerShape(1, _KEY_BYTES // 4, _VALUE_BYTES // 4),), block_size, "float32")


class StandInRunner:
    """A model runner without a model. `engine.kv.host_blocks` wraps it and swaps blocks."""

    def __init__(self, memory: memoryview, vocab_size: int, block_size: int) -> None:
        """`memory`: every byte of a pool."""
        self._memory, self._vocab_size, self._block_size = memory, vocab_size, block_size
        self._block_bytes = layout_of(block_size).block_bytes
        self.masks: StepMasks | None = None  # as of a model runner
        self.on_written: Callable[[], None] | None = None  # so is this

    def run(self, plan: StepPlan) -> StepResult:
        size = self._block_bytes
        copied = [bytes(self._memory[copy.source * size : (copy.source + 1) * size]) for copy in plan.copies]
        for copy, content in zip(plan.copies, copied, strict=True):
            self._memory[copy.target * size : (copy.target + 1) * size] = content
        for chunk in plan.chunks:
            for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
                self._write(chunk.block_ids, position, token_id)
        if plan.announces and self.on_written is not None:
            self.on_written()
        refused = self.masks.begin(plan).wait() if self.masks is not None and plan.has_grammar else {}
        scored = tuple(self._score(plan.chunks[each.chunk].block_ids, each) for each in plan.scored)
        return StepResult(tuple(map(self._draw, plan.chunks)), refused=refused, scored=scored)

    def _score(self, block_ids: Sequence[int], scored: ScoredTokens) -> PromptLogprobs:
        """Return the log-probabilities of tokens of a prompt, each a hash of the token and of all KV before it."""
        rows = [
            scores(self._read(block_ids, position), token_id, scored.num_top, self._vocab_size)
            for position, token_id in enumerate(scored.token_ids, start=scored.first_position)
        ]
        num, top = len(rows), [pair for _, _, pairs in rows for pair in pairs]
        return PromptLogprobs(
            scored.first_position,
            scored.num_top,
            logprobs=struct.pack(f"<{num}f", *(logprob for logprob, _, _ in rows)),
            ranks=struct.pack(f"<{num}I", *(rank for _, rank, _ in rows)),
            top_token_ids=struct.pack(f"<{len(top)}I", *(token_id for token_id, _ in top)),
            top_logprobs=struct.pack(f"<{len(top)}f", *(logprob for _, logprob in top)),
        )

    def _draw(self, chunk: Chunk) -> tuple[DrawnToken, ...]:
        """Draw a chunk's tokens: the accepted draft tokens and one more. Rejected draft tokens leave no KV."""
        known, drawn = chunk.end - chunk.num_draft_tokens, []
        for place, sample in enumerate(chunk.samples):
            end = known + place if chunk.num_draft_tokens else known
            drawn.append(DrawnToken(self._token(self._read(chunk.block_ids, end), sample)))
            if place < chunk.num_draft_tokens and drawn[-1].token_id != chunk.token_ids[place - chunk.num_draft_tokens]:
                break
        if chunk.num_draft_tokens:
            for position in range(known + len(drawn) - 1, chunk.end):
                keys, values = self._places(chunk.block_ids, position)
                self._memory[keys], self._memory[values] = bytes(_KEY_BYTES), bytes(_VALUE_BYTES)
        return tuple(drawn)

    def _token(self, kv: bytes, sample: Sample) -> int:
        attempt, allowed = 0, _allowed(sample)
        while True:
            text = b"%d %d %d " % (sample.seed, sample.position, attempt)
            drawn = int.from_bytes(hashlib.blake2b(text + kv, digest_size=8).digest(), "little")
            token_id = drawn % self._vocab_size if allowed is None else allowed[drawn % len(allowed)]
            if token_id not in sample.banned_token_ids:
                return token_id
            attempt += 1

    def _write(self, block_ids: Sequence[int], position: int, token_id: int) -> None:
        before = b""
        if position:
            keys, values = self._places(block_ids, position - 1)
            before = bytes(self._memory[keys]) + bytes(self._memory[values])
        if position % self._block_size == 0:  # a block that a step begins is zero behind what is written
            start = block_ids[position // self._block_size] * self._block_bytes
            self._memory[start : start + self._block_bytes] = bytes(self._block_bytes)
        kv = hashlib.blake2b(
            before, digest_size=_KEY_BYTES + _VALUE_BYTES, salt=token_id.to_bytes(8, "little")
        ).digest()
        keys, values = self._places(block_ids, position)
        self._memory[keys], self._memory[values] = kv[:_KEY_BYTES], kv[_KEY_BYTES:]

    def _read(self, block_ids: Sequence[int], end: int) -> bytes:
        """Return every byte of the first `end` positions."""
        parts = []
        for index in range(-(-end // self._block_size)):
            start, num = block_ids[index] * self._block_bytes, min(self._block_size, end - index * self._block_size)
            values = start + self._block_size * _KEY_BYTES
            parts.append(bytes(self._memory[start : start + num * _KEY_BYTES]))
            parts.append(bytes(self._memory[values : values + num * _VALUE_BYTES]))
        return b"".join(parts)

    def _places(self, block_ids: Sequence[int], position: int) -> tuple[slice, slice]:
        index, offset = divmod(position, self._block_size)
        start = block_ids[index] * self._block_bytes
        keys = start + offset * _KEY_BYTES
        values = start + self._block_size * _KEY_BYTES + offset * _VALUE_BYTES
        return slice(keys, keys + _KEY_BYTES), slice(values, values + _VALUE_BYTES)


Scores = tuple[float, int, tuple[tuple[int, float], ...]]  # log-probability, rank, most likely tokens with theirs


def scores(kv: bytes, token_id: int, num_top: int, vocab_size: int) -> Scores:
    """Return the scores of a token after this KV. They are no probabilities, and fit 32 bits exactly."""
    digest = hashlib.blake2b(kv, digest_size=64, salt=token_id.to_bytes(8, "little")).digest()
    own, rank, *others = struct.unpack("<16I", digest)
    top = tuple((other % vocab_size, -(other % 4096) / 256) for other in others[:num_top])
    return -(own % 4096) / 256, 1 + rank % vocab_size, top


def _allowed(sample: Sample) -> tuple[int, ...] | None:
    """Return the tokens that the sample's grammar allows; None: all of them. What is drawn for a refused state is
    dropped."""
    state = sample.grammar_state
    if state is None or state.refusal is not None:
        return None
    assert isinstance(state.masks, torch.Tensor)
    return _set_bits(state.masks[len(sample.draft_tokens)].numpy().tobytes())


@lru_cache(1024)
def _set_bits(mask: bytes) -> tuple[int, ...]:
    number = int.from_bytes(mask, "little")
    return tuple(bit for bit in range(number.bit_length()) if number >> bit & 1)


class StandInLauncher(StandInRunner):
    """A launcher for a device that computes asynchronously. The results of a step are returned with the next step, and
    its tokens feed a step that was launched before they were read."""

    newest: tuple[int, ...] = ()

    def launch(self, plan: StepPlan) -> Launched:
        return _Later(self, plan)

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(replace(plan, chunks=tuple(map(self._fed, plan.chunks)), announces=False))
        self.newest = tuple(token.token_id for drawn in result.tokens for token in drawn)
        return result

    def _fed(self, chunk: Chunk) -> Chunk:
        """Return the chunk with the token that its predecessor drew. After a failed step this is an older token, or
        0."""
        if chunk.fed_by is None:
            return chunk
        return replace(chunk, token_ids=(self.newest[chunk.fed_by] if chunk.fed_by < len(self.newest) else 0,))


@dataclass(frozen=True, slots=True)
class _Later:
    runner: StandInRunner
    plan: StepPlan
    can_feed: bool = True

    def result(self) -> StepResult:
        return self.runner.run(self.plan)


@dataclass(frozen=True, slots=True, eq=False)
class StandInEngine:
    """The part of `engine.build.Engine` that workers use."""

    model_info: ModelInfo
    pool: KvPool
    runner: StandInRunner
    fingerprint: LayoutFingerprint
    report: tuple[str, ...] = ()


def stand_in_engine(num_blocks: int, block_size: int, vocab_size: int, *, launches: bool) -> StandInEngine:
    layout = layout_of(block_size)
    pool = KvPool(layout, num_blocks)
    info = ModelInfo("demo_model", "stand-in", vocab_size, MAX_MODEL_LEN, frozenset(), "float32", Sampling())
    runner = (StandInLauncher if launches else StandInRunner)(memory_of(pool), vocab_size, block_size)
    return StandInEngine(info, pool, runner, LayoutFingerprint("stand-in", "stand-in", "float32", layout.digest()))


def memory_of(pool: KvPool) -> memoryview:
    return memoryview(pool.raw.numpy().data).cast("B")


def serial_scores(prompt: Sequence[int], num_top: int, *, block_size: int, vocab_size: int) -> tuple[Scores, ...]:
    """Return the scores of all tokens but the first of a prompt that is computed alone on a separate pool."""
    block_ids = tuple(range(-(-len(prompt) // block_size)))
    memory = memoryview(bytearray(len(block_ids) * layout_of(block_size).block_bytes))
    wanted = ScoredTokens(0, 1, tuple(prompt[1:]), num_top)
    plan = StepPlan((Chunk(0, tuple(prompt), 0, block_ids),), scored=(wanted,))
    return tuple(StandInRunner(memory, vocab_size, block_size).run(plan).scored[0].values())


def serial_tokens(
    prompt: Sequence[int], seed: int, max_tokens: int, *, block_size: int, vocab_size: int, grammar: Grammar | None
) -> tuple[int, ...]:
    """Return the tokens of one sequence that runs alone on a separate pool. One with a grammar ends by itself."""
    num_blocks = -(-(len(prompt) + max_tokens) // block_size)
    memory = memoryview(bytearray(num_blocks * layout_of(block_size).block_bytes))
    runner = StandInRunner(memory, vocab_size, block_size)
    runner.masks = StepMasks(compiled_grammars(), AtOnce()) if grammar is not None else None  # type: ignore[arg-type]
    block_ids, known, start = tuple(range(num_blocks)), list(prompt), 0
    state = GrammarState(grammar, known, len(prompt)) if grammar is not None else None
    for position in range(len(prompt), len(prompt) + max_tokens):
        sample = Sample(seed, position, Sampling(), grammar_state=state)
        chunk = Chunk(0, tuple(known[start:]), start, block_ids, (sample,))
        start = position
        known.append(runner.run(StepPlan((chunk,))).tokens[0][0].token_id)
        if grammar is not None and known[-1] == END:
            break
    return tuple(known[len(prompt) :])
