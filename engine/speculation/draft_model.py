"""Draft tokens from a second, smaller model with the target model's vocabulary. Owns that model's KV; the step thread
alone calls it.

A draft token is drawn with the same noise as the target model's token of that position (same seed, same position), so
where the two distributions are similar both mostly draw the same token, at any temperature.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.errors import ConfigError
from cluster.request_size import blocks_for
from cluster.settings.worker_settings import EngineSettings
from engine.build import Engine, build_engine
from engine.scheduling.step import Chunk, DrawnToken, Runner, Sample, StepPlan

_MEMORY_SHARE = 4  # the draft model's pool is this fraction of the target's, allocated in addition to it
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class DraftLimits:
    num_blocks: int
    block_size: int
    max_model_len: int
    max_tokens: int  # prompt tokens of all sequences that one draft step computes


@dataclass(slots=True, eq=False)
class _Held:
    """The draft model's KV of one sequence: `num_computed` tokens, of which those from `num_known` on are draft
    tokens."""

    block_ids: list[int]
    num_computed: int = 0
    num_known: int = 0
    draft_tokens: tuple[int, ...] = ()

    def agree(self, token_ids: Sequence[int]) -> None:
        """Drop the KV of rejected draft tokens, and of the newest token, whose logits the next draft step needs."""
        right = 0
        for draft_token, token_id in zip(
            self.draft_tokens, itertools.islice(token_ids, self.num_known, None), strict=False
        ):
            if draft_token != token_id:
                break
            right += 1
        self.num_computed = min(self.num_computed, self.num_known + right, len(token_ids) - 1)


@dataclass(slots=True, eq=False)
class _Draft:
    """One DraftRequest while it is served."""

    index: int  # of its chunk in the plan
    sequence_id: int
    held: _Held
    unread: tuple[int, ...]  # known tokens without KV in the draft model
    num_known: int
    max_draft_tokens: int
    sample: Sample
    draft_tokens: tuple[int, ...] = ()

    @property
    def is_done(self) -> bool:
        return len(self.draft_tokens) >= self.max_draft_tokens


class DraftModel:
    """Computes draft tokens and caches KV per sequence. Sequences need not be closed: the least recently requested one
    is evicted when blocks run out."""

    def __init__(self, runner: Runner, limits: DraftLimits) -> None:
        self._runner = runner
        self._limits = limits
        self._free = list(range(limits.num_blocks))
        self._held: dict[int, _Held] = {}  # by sequence id, least recently requested first

    @property
    def num_held(self) -> int:
        return len(self._held)

    def draft(self, plan: StepPlan, tokens: Sequence[Sequence[DrawnToken]]) -> tuple[tuple[int, ...], ...]:
        """Return the draft tokens for each chunk of the plan; `tokens` are the tokens that the step drew for each
        chunk.

        A chunk gets none if it requested none, if the draft model's pool has no room for its sequence, or if the draft
        model has not yet computed all known tokens.
        """
        drafts = self._begin(plan, tokens)
        answers: list[tuple[int, ...]] = [()] * len(plan.chunks)
        budget = self._limits.max_tokens
        reading = []
        for draft in drafts:
            draft.unread, budget = draft.unread[: max(0, budget)], budget - len(draft.unread)
            if draft.unread:
                reading.append(draft)
        self._step(reading)
        while going := [draft for draft in reading if draft.draft_tokens and not draft.is_done]:
            self._step(going)
        for draft in reading:
            answers[draft.index] = draft.draft_tokens
            draft.held.num_known, draft.held.draft_tokens = draft.num_known, draft.draft_tokens
        return tuple(answers)

    def _begin(self, plan: StepPlan, tokens: Sequence[Sequence[DrawnToken]]) -> list[_Draft]:
        asked = [index for index, chunk in enumerate(plan.chunks) if chunk.draft is not None and tokens[index]]
        now = {plan.chunks[index].sequence_id for index in asked}
        drafts = []
        for index in asked:
            chunk = plan.chunks[index]
            assert chunk.draft is not None and len(chunk.samples) == chunk.num_draft_tokens + 1, chunk
            known = [*chunk.draft.token_ids, *(token.token_id for token in tokens[index])]
            max_draft_tokens = min(chunk.draft.max_draft_tokens, self._limits.max_model_len - len(known))
            if max_draft_tokens < 1:
                continue
            held = self._room_for(chunk.sequence_id, len(known) + max_draft_tokens - 1, now)
            if held is None:
                continue
            held.agree(known)
            unread = tuple(known[held.num_computed :])
            sampling = replace(chunk.samples[-1].sampling, num_logprobs=None)
            sample = replace(chunk.samples[-1], sampling=sampling)
            drafts.append(_Draft(index, chunk.sequence_id, held, unread, len(known), max_draft_tokens, sample))
        return drafts

    def _room_for(self, sequence_id: int, num_tokens: int, now: Iterable[int]) -> _Held | None:
        """Return the sequence's KV, grown to `num_tokens` tokens; None if that would need blocks of a sequence in
        `now`."""
        held = self._held.pop(sequence_id, None) or _Held([])
        missing = blocks_for(num_tokens, self._limits.block_size) - len(held.block_ids)
        for other in [other for other in self._held if other not in now]:
            if len(self._free) >= missing:
                break
            self._free += self._held.pop(other).block_ids
        self._held[sequence_id] = held
        if len(self._free) < missing:
            return None
        held.block_ids += [self._free.pop() for _ in range(missing)]
        return held

    def _step(self, drafts: Sequence[_Draft]) -> None:
        """Compute the unread tokens of each request, and draw one draft token for those whose known tokens are
        complete."""
        if not drafts:
            return
        result = self._runner.run(StepPlan(tuple(self._chunk(draft) for draft in drafts)))
        for draft, drawn in zip(drafts, result.tokens, strict=True):
            draft.held.num_computed += len(draft.unread)
            draft.unread = tuple(token.token_id for token in drawn)
            draft.draft_tokens += draft.unread

    def _chunk(self, draft: _Draft) -> Chunk:
        start = draft.held.num_computed
        end = start + len(draft.unread)
        ends_known = end == draft.num_known + len(draft.draft_tokens)
        return Chunk(
            sequence_id=draft.sequence_id,
            token_ids=draft.unread,
            start=start,
            block_ids=tuple(draft.held.block_ids[: blocks_for(end, self._limits.block_size)]),
            samples=(replace(draft.sample, position=end),) if ends_known else (),
        )


def with_draft_model(settings: EngineSettings, target: Engine) -> Engine:
    """Load --draft-model and attach it to the target's runner. Raises ConfigError and ModelRefused."""
    target.runner.drafts, engine = build_draft_model(settings, target)
    tokens = engine.pool.num_blocks * engine.pool.layout.block_size
    line = (
        f"draft model: {engine.model_info.name}, KV of {tokens} tokens, "
        f"up to {settings.num_draft_tokens} draft tokens a step"
    )
    return replace(target, report=(*target.report, line))


def build_draft_model(settings: EngineSettings, target: Engine) -> tuple[DraftModel, Engine]:
    """Load --draft-model with a pool of its own. Raises ConfigError and ModelRefused."""
    memory = min(target.pool.raw.nbytes // _MEMORY_SHARE, _MOST_BYTES)
    own = replace(
        settings,
        model=settings.draft_model,
        revision="",  # it is one of the target's
        served_model_name="",
        speculation="off",
        draft_model="",
        deterministic="off",
        num_blocks=0,
        kv_cache_memory=str(memory),
        kv_cache_dtype="auto",
        max_model_len=0,
    )
    try:
        engine = build_engine(own)
    except ConfigError as error:
        raise type(error)(error.message.replace("--model ", "--draft-model ")) from error
    if engine.model_info.vocab_size != target.model_info.vocab_size:
        engine.pool.close()
        raise ConfigError(
            f"--draft-model {settings.draft_model} has {engine.model_info.vocab_size} tokens and the model "
            f"{target.model_info.vocab_size}: they must share a vocabulary"
        )
    limits = DraftLimits(
        num_blocks=engine.pool.num_blocks,
        block_size=engine.pool.layout.block_size,
        max_model_len=engine.model_info.max_model_len,
        max_tokens=settings.max_prefill_tokens,
    )
    return DraftModel(engine.runner, limits), engine
