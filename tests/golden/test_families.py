"""Every promised family gives through Tandem's engine the results of plain `transformers`: paged, and handed over.

Float32, teacher forcing, reference: the model's own eager attention on each sequence alone, without a cache. Seventeen
sequences join one by one, so that steps hold 1 to 17 of them, prompts in chunks and decodes together.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.settings.worker_settings import EngineSettings
from engine.kv.layout import lay_out
from engine.kv.pool import KvPool
from engine.model.loaded import LoadedModel
from engine.model.loading import load
from engine.steps.runner import ModelRunner
from tests.golden.families import BLOCK_SIZE, CHUNK_TOKENS, FAMILIES, Family
from tests.golden.forced import (
    NUM_SEQUENCES,
    Forced,
    Reference,
    Verdict,
    judge,
    make_sequences,
    num_blocks,
    run_step,
    staggered,
)

ALL_BATCH_SIZES = set(range(1, NUM_SEQUENCES + 1))


@dataclass(frozen=True, slots=True)
class Golden:
    loaded: LoadedModel
    reference: Reference


@pytest.fixture(scope="module", params=list(FAMILIES))
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    family: Family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(family.name)
    family.save(folder)
    settings = EngineSettings(
        model=str(folder), dtype="float32", device="cpu", block_size=BLOCK_SIZE, max_prefill_tokens=CHUNK_TOKENS
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Golden(load(settings), Reference(model.eval()))  # type: ignore[no-untyped-call]


@pytest.fixture
def sequences(golden: Golden) -> list[Forced]:
    return make_sequences(seed=1, vocab_size=golden.loaded.info.vocab_size)


@pytest.fixture
def runner(golden: Golden) -> Iterator[ModelRunner]:
    pool = KvPool(golden.loaded.layout, num_blocks())
    yield ModelRunner(golden.loaded.forward(pool), pool)
    pool.close()


def test_paged_logits_and_greedy_tokens_are_the_models_own(
    golden: Golden, runner: ModelRunner, sequences: list[Forced]
) -> None:
    batch_sizes = set()
    for members in staggered(sequences):
        run_step(runner, members)
        batch_sizes.add(len(members))

    assert batch_sizes == ALL_BATCH_SIZES
    hold(judge(golden.reference, sequences), sequences)


def test_handed_over_logits_and_greedy_tokens_are_the_models_own(golden: Golden, sequences: list[Forced]) -> None:
    prefill_pool, decode_pool = (KvPool(golden.loaded.layout, num_blocks()) for _ in range(2))
    decode_pool.tensor.fill_(7.0)  # what earlier sequences left behind
    prefill, decode = (
        ModelRunner(golden.loaded.forward(prefill_pool), prefill_pool),
        ModelRunner(golden.loaded.forward(decode_pool), decode_pool),
    )
    batch_sizes = set()
    running: list[Forced] = []

    for sequence in sequences:
        while not sequence.decoding:
            run_step(prefill, [sequence])
        running.append(hand_over(sequence, prefill_pool, decode_pool))
        run_step(decode, running)
        batch_sizes.add(len(running))
    while running := [sequence for sequence in running if not sequence.finished]:
        run_step(decode, running)
    prefill_pool.close()
    decode_pool.close()

    assert batch_sizes == ALL_BATCH_SIZES
    hold(judge(golden.reference, sequences), sequences)


def test_logits_over_a_pool_of_eight_bits_are_near_the_models_own(golden: Golden, sequences: list[Forced]) -> None:
    layout = golden.loaded.layout
    pool = KvPool(lay_out([place.shape for place in layout.layers], BLOCK_SIZE, "int8"), num_blocks())
    runner = ModelRunner(golden.loaded.forward(pool), pool)
    few = sequences[:6]
    for members in staggered(few):
        run_step(runner, members)
    pool.close()

    # Random weights have flat logits; a mixture's near-tie may send a token to another expert: half of the rows count.
    assert 1e-5 < statistics.median(row_errors(golden.reference, few)) < 0.02
    assert judge(golden.reference, few).wrong < 0.05 * sum(len(item.observed) for item in few)


def row_errors(reference: Reference, sequences: Sequence[Forced]) -> list[float]:
    """Return the error of each observed row, relative to the row's size."""
    errors = []
    for sequence in sequences:
        logits = reference.logits(sequence.token_ids)
        errors += [float((row - logits[at]).norm() / logits[at].norm()) for at, (row, _) in sequence.observed.items()]
    return errors


def hand_over(sequence: Forced, source: KvPool, target: KvPool) -> Forced:
    """Copy the raw bytes of the sequence's computed blocks into other blocks of another pool."""
    block_ids = tuple(target.num_blocks - 1 - block_id for block_id in sequence.block_ids)
    num_computed = -(-sequence.computed // BLOCK_SIZE)
    for from_id, to_id in zip(sequence.block_ids[:num_computed], block_ids, strict=False):
        target.raw[to_id] = source.raw[from_id]
    sequence.block_ids = block_ids
    return sequence


def hold(verdict: Verdict, sequences: Sequence[Forced]) -> None:
    assert verdict.positions == sum(len(item.token_ids) - item.prompt_len + 1 for item in sequences)
    assert verdict.worst < 1e-4
    assert verdict.wrong == 0
    assert verdict.decisive >= 0.95 * verdict.positions
