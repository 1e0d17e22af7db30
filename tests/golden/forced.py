"""Sequences under teacher forcing: their tokens are given, and every step's logits are held against the reference."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from cluster.messages import Sampling
from engine.scheduling.step import Chunk, Sample, StepPlan
from engine.steps.runner import ModelRunner
from engine.steps.sampler import draw
from tests.golden.families import BLOCK_SIZE, CHUNK_TOKENS, WINDOW

NUM_SEQUENCES = 17
PROMPT_LENS = (
    1,
    BLOCK_SIZE - 1,
    BLOCK_SIZE,
    BLOCK_SIZE + 1,
    CHUNK_TOKENS + 3,
    WINDOW + BLOCK_SIZE + 2,
    2 * CHUNK_TOKENS + 1,
)
CONTINUATION_LEN = 2 * NUM_SEQUENCES + 8  # the first sequence still runs when the last one joins


@dataclass(slots=True)
class Forced:
    """A sequence under teacher forcing. `observed[position]` has the engine's logits for the token after that
    position.
    """

    token_ids: tuple[int, ...]
    prompt_len: int
    block_ids: tuple[int, ...]
    computed: int = 0
    observed: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt_len

    @property
    def finished(self) -> bool:
        return self.computed == len(self.token_ids)

    def next_chunk(self) -> Chunk:
        """Return the rest of the prompt up to the size of a chunk, or the next token alone."""
        end = self.computed + 1 if self.decoding else min(self.prompt_len, self.computed + CHUNK_TOKENS)
        sample = Sample(seed=0, position=end, sampling=Sampling())
        return Chunk(
            sequence_id=self.prompt_len,
            token_ids=self.token_ids[self.computed : end],
            start=self.computed,
            block_ids=self.block_ids[: -(-end // BLOCK_SIZE)],
            samples=(sample,) if end >= self.prompt_len else (),
        )


def make_sequences(seed: int, vocab_size: int) -> list[Forced]:
    """Return sequences with every prompt length at least twice; their blocks are in random order and not shared."""
    dice = random.Random(seed)
    lengths = [PROMPT_LENS[index % len(PROMPT_LENS)] for index in range(NUM_SEQUENCES)]
    dice.shuffle(lengths)
    blocks = list(range(num_blocks()))
    dice.shuffle(blocks)
    sequences = []
    for length in lengths:
        num_tokens = length + CONTINUATION_LEN
        taken = -(-num_tokens // BLOCK_SIZE)
        token_ids = tuple(dice.randrange(1, vocab_size) for _ in range(num_tokens))
        sequences.append(Forced(token_ids, length, tuple(blocks[:taken])))
        del blocks[:taken]
    return sequences


def num_blocks() -> int:
    longest = max(PROMPT_LENS) + CONTINUATION_LEN
    return NUM_SEQUENCES * -(-longest // BLOCK_SIZE)


def run_step(runner: ModelRunner, members: Sequence[Forced]) -> None:
    """Run one step with the next chunk of each sequence."""
    plan = StepPlan(tuple(member.next_chunk() for member in members))
    sampled = [(member, chunk) for member, chunk in zip(members, plan.chunks, strict=True) if chunk.samples]
    logits = runner.logits(plan)
    tokens = draw(logits, [chunk.samples[0] for _, chunk in sampled]) if sampled else []
    for (member, chunk), row, token in zip(sampled, logits, tokens, strict=True):
        member.observed[chunk.start + len(chunk.token_ids) - 1] = (row.float().clone(), token.token_id)
    for member, chunk in zip(members, plan.chunks, strict=True):
        member.computed += len(chunk.token_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results over all observed positions of all sequences."""

    worst: float  # largest difference of any logit
    decisive: int  # positions where the reference's top-1 margin exceeds 1e-3
    wrong: int  # of those, where the greedy token is another
    positions: int


class Reference:
    """A model's own eager attention on each sequence alone, without a cache; computed once per sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """Return the logits after each token, `[tokens, vocab]`."""
        if token_ids not in self._known:
            found = self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
            self._known[token_ids] = found.float()
        return self._known[token_ids]


def judge(reference: Reference, sequences: Sequence[Forced]) -> Verdict:
    """Compare the observed logits with the reference's."""
    worst, decisive, wrong, positions = 0.0, 0, 0, 0
    for sequence in sequences:
        logits = reference.logits(sequence.token_ids)
        for position, (row, token_id) in sequence.observed.items():
            worst = max(worst, float((row - logits[position]).abs().max()))
            best, second = logits[position].topk(2).values.tolist()
            positions += 1
            if best - second > 1e-3:
                decisive += 1
                wrong += token_id != int(logits[position].argmax())
    return Verdict(worst, decisive, wrong, positions)


def staggered(sequences: Sequence[Forced]) -> Iterator[list[Forced]]:
    """Yield the sequences of each step: another sequence joins when all running ones are decoding; finished ones
    leave.
    """
    waiting = list(sequences)
    running: list[Forced] = []
    while waiting or running:
        if waiting and all(sequence.decoding for sequence in running):
            running.append(waiting.pop(0))
        yield running
        running = [sequence for sequence in running if not sequence.finished]
