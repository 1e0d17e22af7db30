"""The log-probabilities of prompts, as the engine computes them and a scheduler divides them among steps."""

from collections.abc import Iterator, Sequence
from itertools import count

import pytest
import torch

from cluster.messages import PromptLogprobs, Sampling
from cluster.protocol.hashing import keyed_chains
from engine.build import Engine
from engine.scheduling.commands import AdmitExport, ExportFinished, Release
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import Chunk, Sample, ScoredTokens, StepPlan
from engine.steps.runner import max_scored_tokens
from tests.prefill_jobs import prefill_job
from tests.unit.engine.rigs.tiny_engine import BLOCK_SIZE, tiny_engine

PROMPT = tuple(range(3, 46))
_MAX_SCORED, _MAX_TOKENS = 7, 16


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("llama")) as built:
        yield built


@pytest.fixture(scope="module")
def reference(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The log-probabilities of `transformers` at every position of PROMPT. [tokens, vocabulary]"""
    from transformers import AutoModelForCausalLM

    from tests.golden.families import FAMILIES

    folder = tmp_path_factory.mktemp("reference")
    FAMILIES["llama"].save(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits.log_softmax(-1)


class _Worker:
    """A scheduler over the engine. Keeps how many tokens each step scored."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine.runner
        limits = SchedulerLimits(
            num_blocks=24,
            block_size=BLOCK_SIZE,
            max_model_len=64,
            max_num_seqs=4,
            max_prefill_tokens=_MAX_TOKENS,
            max_queue=8,
            max_scored_tokens=_MAX_SCORED,
        )
        self.scheduler = SequenceScheduler(limits, new_chain=keyed_chains(bytes(32), BLOCK_SIZE))
        self.num_scored: list[int] = []
        self._tickets = count()

    def prefill(self, *jobs: tuple[Sequence[int], int | None]) -> list[ExportFinished]:
        """Compute jobs, each of a prompt and its number of log-probabilities, together."""
        tickets = [next(self._tickets).to_bytes(4, "big") for _ in jobs]
        for ticket, (token_ids, num_top) in zip(tickets, jobs, strict=True):
            job = prefill_job(token_ids, max_tokens=4, num_prompt_logprobs=num_top)
            self.scheduler.apply(AdmitExport(ticket, job), 0.0)
        finished: dict[bytes, ExportFinished] = {}
        while (plan := self.scheduler.plan(0.0)[1]) is not None:
            self.num_scored.append(sum(len(scored.token_ids) for scored in plan.scored))
            events = self.scheduler.complete(plan, self._runner.run(plan), 0.0)
            finished |= {event.ticket_id: event for event in events if isinstance(event, ExportFinished)}
            self.scheduler.check()
        for ticket in tickets:
            self.scheduler.apply(Release(ticket), 0.0)
        return [finished[ticket] for ticket in tickets]


def _assert_close(parts: Sequence[PromptLogprobs], token_ids: Sequence[int], num_top: int, rows: torch.Tensor) -> None:
    """`rows`: the reference's log-probabilities at the positions before those of `token_ids`."""
    values = [value for part in parts for value in part.values()]
    assert len(values) == len(token_ids)
    for (logprob, rank, top), token_id, row in zip(values, token_ids, rows, strict=True):
        assert logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert rank == int((row > row[token_id]).sum()) + 1
        best = row.topk(num_top)
        assert [token for token, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("num_top", [0, 3])
def test_all_tokens_but_the_first_have_the_models_log_probabilities(
    engine: Engine, reference: torch.Tensor, num_top: int
) -> None:
    worker = _Worker(engine)
    (finished,) = worker.prefill((PROMPT, num_top))
    assert [part.first_position for part in finished.prompt_logprobs] == list(range(1, len(PROMPT), _MAX_SCORED))
    _assert_close(finished.prompt_logprobs, PROMPT[1:], num_top, reference[:-1])
    assert max(worker.num_scored) == _MAX_SCORED, "a step computes the logits of a bounded number of positions"


def test_prompts_that_share_steps_are_scored_apart_and_the_others_not_at_all(
    engine: Engine, reference: torch.Tensor
) -> None:
    worker = _Worker(engine)
    (alone,) = worker.prefill((PROMPT, None))
    worker = _Worker(engine)
    short, plain, whole = worker.prefill((PROMPT[:3], 1), (PROMPT, None), (PROMPT, 4))
    _assert_close(short.prompt_logprobs, PROMPT[1:3], 1, reference[:2])
    _assert_close(whole.prompt_logprobs, PROMPT[1:], 4, reference[:-1])
    assert plain.prompt_logprobs == ()
    assert alone.tokens == plain.tokens == whole.tokens
    assert max(worker.num_scored) <= _MAX_SCORED


def test_cached_positions_are_computed_again_where_they_are_scored_and_stay_cached(
    engine: Engine, reference: torch.Tensor
) -> None:
    worker = _Worker(engine)
    worker.prefill((PROMPT, None))
    (scored,) = worker.prefill((PROMPT, 2))
    assert scored.num_cached == 0
    _assert_close(scored.prompt_logprobs, PROMPT[1:], 2, reference[:-1])
    (plain,) = worker.prefill((PROMPT, None))
    assert plain.num_cached == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


def test_a_prompt_that_was_only_scored_is_cached_for_others(engine: Engine) -> None:
    worker = _Worker(engine)
    worker.prefill((PROMPT, 0))
    (plain,) = worker.prefill((PROMPT, None))
    assert plain.num_cached == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


def test_a_prompt_of_one_token_has_nothing_to_score(engine: Engine) -> None:
    (finished,) = _Worker(engine).prefill((PROMPT[:1], 5))
    assert finished.prompt_logprobs == ()
    assert len(finished.tokens) == 1


def test_a_step_with_draft_tokens_draws_the_same_tokens_with_and_without_scores(
    engine: Engine, reference: torch.Tensor
) -> None:
    samples = tuple(Sample(seed=0, position=9 + place, sampling=Sampling()) for place in range(3))
    decode = Chunk(1, PROMPT[:10], 0, (0, 1), samples, num_draft_tokens=2)
    prompt = Chunk(2, PROMPT[:6], 0, (2,))
    plain = engine.runner.run(StepPlan((prompt, decode)))
    scored = (ScoredTokens(0, 2, PROMPT[2:5], 1),)
    result = engine.runner.run(StepPlan((prompt, decode), scored=scored))
    assert result.tokens == plain.tokens
    assert [part.first_position for part in result.scored] == [2]
    _assert_close(result.scored, PROMPT[2:5], 1, reference[1:4])


@pytest.mark.parametrize("vocab_size", [100, 32_000, 256_000, 1 << 30])
def test_the_logits_of_a_step_have_a_bound(vocab_size: int) -> None:
    assert max_scored_tokens(vocab_size) == 16 or max_scored_tokens(vocab_size) * vocab_size * 4 <= 128 << 20
