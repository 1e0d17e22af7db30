"""Sampling and stopping through real processes: the tokens depend on the request, not on the workers that served it."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from tandem.v1 import inference_pb2
from tests.system.rigs.members.asking import Answer, ask, question
from tests.system.rigs.processes.local_cluster import DEMO_MODEL, LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_PROMPT = tuple(range(30, 67))  # two blocks of 16 and a tail
_BLOCK_SIZE = 16
_WARM = inference_pb2.SamplingParams(temperature=0.9, top_k=200, top_p=0.95, min_p=0.001, seed=11)


async def test_equal_seeds_give_equal_tokens_and_different_seeds_different_ones(cluster: LocalCluster) -> None:
    request = question(_PROMPT, max_tokens=24, n=3, sampling=_WARM, ignore_eos=True)
    first, second = await ask(cluster, request), await ask(cluster, request)
    other = inference_pb2.SamplingParams()
    other.CopyFrom(_WARM)
    other.seed = 12
    third = await ask(cluster, question(_PROMPT, max_tokens=24, n=3, sampling=other, ignore_eos=True))

    assert first.choices == second.choices
    assert {len(tokens) for tokens in first.choices.values()} == {24}
    drawn = {tuple(tokens) for answer in (first, third) for tokens in answer.choices.values()}
    assert len(drawn) == 6, "choices of one request, or two seeds, share their noise"


async def test_choices_share_the_prompts_blocks(cluster: LocalCluster) -> None:
    num_choices = 3
    request = question(
        _PROMPT, max_tokens=6, n=num_choices, sampling=_WARM, ignore_eos=True, cache_salt="shared with no other request"
    )
    answer = await ask(cluster, request)
    block_bytes = (await cluster.inspect(cluster.workers("decode")[0])).figures["block_bytes"]
    num_full = len(_PROMPT) // _BLOCK_SIZE
    assert answer.ledger.kv_bytes == (num_full + num_choices) * block_bytes, "full blocks once, a tail per choice"
    assert answer.ledger.transport == "shm"
    await cluster.until_free()


@pytest.mark.parametrize("temperature", [0.0, 1.3])
async def test_logprobs_are_the_models_own(cluster: LocalCluster, temperature: float) -> None:
    sampling = inference_pb2.SamplingParams(temperature=temperature, seed=5)
    answer = await ask(cluster, question(_PROMPT, max_tokens=12, sampling=sampling, logprobs=4, ignore_eos=True))
    reference = _logprobs(answer)
    assert len(answer.logprobs) == len(answer.token_ids) == 12
    for token_id, row, told in zip(answer.token_ids, reference, answer.logprobs, strict=True):
        assert told.chosen.token_id == token_id
        assert math.isclose(told.chosen.logprob, float(row[token_id]), abs_tol=1e-3)
        values, ids = row.topk(4)
        assert [top.token_id for top in told.top] == ids.tolist()
        assert [top.logprob for top in told.top] == pytest.approx(values.tolist(), abs=1e-3)


@pytest.mark.parametrize("n", [1, 3])
async def test_log_probabilities_of_the_prompt_are_the_models_own_though_it_is_cached(
    cluster: LocalCluster, n: int
) -> None:
    plain = await ask(cluster, question(_PROMPT, max_tokens=6, n=n, ignore_eos=True))
    answer = await ask(cluster, question(_PROMPT, max_tokens=6, n=n, prompt_logprobs=3, ignore_eos=True))
    assert answer.choices == plain.choices
    assert answer.usage.cached_tokens == 0
    assert [told.token.token_id for told in answer.prompt] == list(_PROMPT[1:])
    for told, row in zip(answer.prompt, _prompt_logprobs(_PROMPT), strict=True):
        own = row[told.token.token_id]
        assert told.token.logprob == pytest.approx(own.item(), abs=1e-3)
        assert told.rank == int((row > own).sum()) + 1
        values, ids = row.topk(3)
        assert [top.token_id for top in told.top] == ids.tolist()
        assert [top.logprob for top in told.top] == pytest.approx(values.tolist(), abs=1e-3)


@torch.inference_mode()
def _prompt_logprobs(prompt: tuple[int, ...]) -> torch.Tensor:
    """Return those of `transformers` at every position but the last. [tokens - 1, vocabulary]"""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([prompt])).logits[0, :-1]
    return logits.log_softmax(-1)


@torch.inference_mode()
def _logprobs(answer: Answer) -> torch.Tensor:
    """Return the log-probabilities `[tokens, vocabulary]` of transformers under teacher forcing."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([[*_PROMPT, *answer.token_ids]])).logits[0]
    return logits[len(_PROMPT) - 1 : -1].log_softmax(-1)


class _OutputPenalties(LogitsProcessor):
    """OpenAI's frequency and presence penalties, which `transformers` does not have."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, len(_PROMPT) :], minlength=scores.shape[1])
        return scores - 0.5 * counts - 0.25 * (counts > 0)


async def test_greedy_tokens_under_logit_rules_are_those_of_transformers(cluster: LocalCluster) -> None:
    """The rules change some of the tokens, the prefill worker's first token included."""
    plain = (await ask(cluster, question(_PROMPT, max_tokens=20, ignore_eos=True))).token_ids
    biases = {plain[0]: -9.0, plain[3]: 2.5}
    rules = inference_pb2.SamplingParams(
        temperature=0,
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias=biases,
        bad_words=["self", "return x"],
    )

    answer = await ask(cluster, question(_PROMPT, max_tokens=20, sampling=rules, ignore_eos=True))

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    expected: Any = model.generate(  # type: ignore[misc]
        torch.tensor([_PROMPT]),
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=None,
        repetition_penalty=1.25,
        sequence_bias=[[[token_id], bias] for token_id, bias in biases.items()],
        bad_words_ids=[[271], [316], [321, 806], [621, 806]],  # each without and with a space before it
        logits_processor=LogitsProcessorList([_OutputPenalties()]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    best = torch.cat(expected.scores).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-2, "the reference is not decisive"
    assert list(answer.token_ids) == expected.sequences[0, len(_PROMPT) :].tolist()
    assert answer.token_ids != plain
    await cluster.until_free()


async def test_only_allowed_tokens_are_drawn(cluster: LocalCluster) -> None:
    sampling = inference_pb2.SamplingParams(temperature=1.0, seed=3, allowed_token_ids=[40, 41, 42])
    answer = await ask(cluster, question(_PROMPT, max_tokens=12, n=2, sampling=sampling))
    assert {token_id for tokens in answer.choices.values() for token_id in tokens} == {40, 41, 42}
    assert [len(tokens) for tokens in answer.choices.values()] == [12, 12], "the end of sequence is not allowed"
    await cluster.until_free()


async def test_a_stop_string_ends_the_text_before_it(cluster: LocalCluster) -> None:
    whole = await ask(cluster, question(_PROMPT, max_tokens=32, ignore_eos=True))
    text = whole.texts[0]
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    answer = await ask(cluster, question(_PROMPT, max_tokens=32, ignore_eos=True, stop=[stop]))
    assert answer.texts[0] == text[: text.index(stop)]
    assert (answer.finish_reasons[0], answer.stop_causes[0]) == ("stop", stop)
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    await cluster.until_free()


async def test_stop_tokens_wait_for_min_tokens(cluster: LocalCluster) -> None:
    whole = await ask(cluster, question(_PROMPT, max_tokens=16, ignore_eos=True))
    stop = whole.token_ids[2]
    ended = await ask(cluster, question(_PROMPT, max_tokens=16, ignore_eos=True, stop_token_ids=[stop]))
    held = await ask(cluster, question(_PROMPT, max_tokens=16, min_tokens=8, ignore_eos=True, stop_token_ids=[stop]))

    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert ended.finish_reasons[0] == "stop"
    assert len(held.token_ids) >= 8
    assert stop not in held.token_ids[:7]


async def test_ignore_eos_continues_past_the_end_of_sequence(cluster: LocalCluster) -> None:
    """At temperature 2 the model soon draws its end token; the test searches for a seed that does."""
    eos = int(AutoModelForCausalLM.from_pretrained(DEMO_MODEL).generation_config.eos_token_id)
    for seed in range(40):
        hot = inference_pb2.SamplingParams(temperature=2.0, seed=seed)
        ended = await ask(cluster, question(_PROMPT, max_tokens=120, sampling=hot))
        if ended.finish_reasons[0] == "stop":
            break
    assert ended.token_ids[-1] == eos
    ignored = await ask(cluster, question(_PROMPT, max_tokens=120, sampling=hot, ignore_eos=True))
    assert len(ignored.token_ids) == 120
    assert ignored.finish_reasons[0] == "length"
    assert ignored.token_ids[: len(ended.token_ids)] == ended.token_ids
