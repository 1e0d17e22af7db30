"""Validation of requests: each refusal names the value and its allowed range."""

import math
from dataclasses import replace

import pytest

from cluster.errors import ContextLengthExceeded, InvalidRequest, NoTokenizer
from cluster.messages import LogitRules, Sampling
from cluster.request_size import LengthLimits
from router.request.validation import check, resolve
from router.requests import GenerateRequest, ResumedChoice, SamplingParams, StopConditions, TokenPrompt
from router.text.model_files import ModelInfo

MODEL = ModelInfo(
    model="m",
    name="m",
    max_model_len=100,
    vocab_size=50,
    has_tokenizer=True,
    has_chat_template=False,
    bos_token_id=None,
    eos_token_ids=frozenset({2, 3}),
    default_sampling=Sampling(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05),
    default_max_tokens=None,
)
REQUEST = GenerateRequest(TokenPrompt((1,)))


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (SamplingParams(temperature=-0.1), "temperature.*-0.1"),
        (SamplingParams(temperature=2.1), "temperature.*2.1"),
        (SamplingParams(temperature=math.nan), "temperature.*nan"),
        (SamplingParams(top_k=-1), "top_k.*-1"),
        (SamplingParams(top_k=1 << 32), "top_k"),
        (SamplingParams(top_p=0.0), "top_p.*0"),
        (SamplingParams(top_p=1.5), "top_p.*1.5"),
        (SamplingParams(min_p=1.1), "min_p.*1.1"),
        (SamplingParams(seed=-1), "seed.*-1"),
        (SamplingParams(seed=1 << 64), "seed"),
        (SamplingParams(presence_penalty=-2.1), "presence_penalty must be from -2 to 2, not -2.1"),
        (SamplingParams(frequency_penalty=math.nan), "frequency_penalty.*nan"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty must be from 0.001 to 1000, not 0.0"),
        (SamplingParams(logit_bias=((7, 100.5),)), "logit_bias of token 7 must be from -100 to 100, not 100.5"),
        (SamplingParams(logit_bias=((50, 1.0),)), "logit_bias: token id 50 is outside the vocabulary: 0 to 49"),
        (SamplingParams(logit_bias=((7, 1.0),) * 1025), "logit_bias must have at most 1024 entries, not 1025"),
        (SamplingParams(allowed_token_ids=(1, 50)), "allowed_token_ids: token id 50"),
        (SamplingParams(allowed_token_ids=(1,) * 4097), "allowed_token_ids must have at most 4096 entries, not 4097"),
        (SamplingParams(bad_words=("a",) * 129), "bad_words must have at most 128 entries, not 129"),
        (SamplingParams(bad_words=("a", " ")), "each of bad_words must have 1 to 256 characters, and not only spaces"),
    ],
)
def test_sampling_out_of_range_is_refused_by_name_and_value(sampling: SamplingParams, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as refused:
        check(replace(REQUEST, sampling=sampling), MODEL)
    assert refused.value.param in SamplingParams.__dataclass_fields__ and refused.value.param in named


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (replace(REQUEST, n=129), "n must be from 1 to 128, not 129"),
        (replace(REQUEST, logprobs=21), "logprobs.*21"),
        (replace(REQUEST, prompt_logprobs=21), "prompt_logprobs must be from 0 to 20, not 21"),
        (replace(REQUEST, request_id="a" * 129), "request_id"),
        (replace(REQUEST, request_id="a\nb"), "printable"),
        (replace(REQUEST, cache_salt="a" * 257), "cache_salt.*256"),
        (replace(REQUEST, priority=1 << 31), "priority.*2147483648"),
        (replace(REQUEST, priority=-(1 << 31) - 1), "priority"),
        (replace(REQUEST, timeout_s=0.0), "timeout"),
        (replace(REQUEST, stream_interval=0), "stream_interval.*1 to 4096, not 0"),
        (replace(REQUEST, stream_interval=4097), "stream_interval.*1 to 4096"),
        (replace(REQUEST, slo_ttft_s=0.0), "slo_ttft_s must be positive, not 0.0"),
        (replace(REQUEST, timeout_s=1e300), "timeout"),
        (replace(REQUEST, slo_ttft_s=math.nan), "slo_ttft_s must be positive"),
        (replace(REQUEST, slo_tpot_s=math.inf), "slo_tpot_s must be positive"),
        (replace(REQUEST, resume_from=(ResumedChoice(),)), "resume_from.*request_id"),
        (replace(REQUEST, request_id="r", resume_from=(ResumedChoice(),)), "resume_number.*from 1"),
        (replace(REQUEST, request_id="r", resume_number=1, resume_from=()), "resume_from has 0 choices, the request 1"),
        (replace(REQUEST, request_id="r", resume_number=1, resume_from=(ResumedChoice((50,)),)), "token id 50"),
        (replace(REQUEST, timeout_s=math.inf), "timeout"),
        (replace(REQUEST, stop=StopConditions(max_tokens=0)), "max_tokens.*0"),
        (replace(REQUEST, stop=StopConditions(min_tokens=-1)), "min_tokens.*-1"),
        (replace(REQUEST, stop=StopConditions(stop=("x",) * 17)), "16.*17"),
        (replace(REQUEST, stop=StopConditions(stop=("x" * 1025,))), "1024 characters"),
        (replace(REQUEST, stop=StopConditions(stop_token_ids=(50,))), "token id 50.*0 to 49"),
    ],
)
def test_lengths_and_counts_out_of_range_are_refused_by_name(request_: GenerateRequest, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as refused:
        check(request_, MODEL)
    fields = {*GenerateRequest.__dataclass_fields__, *StopConditions.__dataclass_fields__}
    assert refused.value.param in fields - {"timeout_s"} or named == "timeout"


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(NoTokenizer, match="stop_token_ids"):
        check(replace(REQUEST, stop=StopConditions(stop=("x",))), replace(MODEL, has_tokenizer=False))


def test_a_prompt_with_too_many_log_probabilities_is_refused_with_the_remedy() -> None:
    model, request = replace(MODEL, max_model_len=1 << 20), replace(REQUEST, prompt_logprobs=1)
    assert resolve(request, (1,) * (1 << 16), model).num_prompt_logprobs == 1
    with pytest.raises(
        InvalidRequest, match=r"65537 tokens are 131074 values.* at most 131072: ask for fewer"
    ) as refused:
        resolve(request, (1,) * ((1 << 16) + 1), model)
    assert refused.value.param == "prompt_logprobs"


def test_the_models_sampling_applies_unless_the_request_sets_its_own() -> None:
    assert resolve(REQUEST, (1,), MODEL).sampling == MODEL.default_sampling
    said = replace(REQUEST, sampling=SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0), logprobs=3)
    assert resolve(said, (1,), MODEL).sampling == Sampling(0.0, 0, 1.0, 0.0, 3)


def test_the_default_of_max_tokens_is_the_rest_of_the_context() -> None:
    assert resolve(REQUEST, (1,) * 99, MODEL).stops.max_tokens == 1
    assert resolve(REQUEST, (1,) * 40, MODEL).stops.max_tokens == 60
    with_default = replace(MODEL, default_max_tokens=7)
    assert resolve(REQUEST, (1,) * 40, with_default).stops.max_tokens == 7
    assert resolve(REQUEST, (1,) * 97, with_default).stops.max_tokens == 3


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"100 tokens.*99"):
        resolve(REQUEST, (1,) * 100, MODEL)
    with pytest.raises(ContextLengthExceeded, match=r"60 tokens.*41.*100.*at most 40"):
        resolve(replace(REQUEST, stop=StopConditions(max_tokens=41)), (1,) * 60, MODEL)


def test_requests_past_the_operators_lengths_are_refused_with_the_numbers() -> None:
    limited = replace(MODEL, lengths=LengthLimits(max_input_length=20, max_output_length=30))
    with pytest.raises(ContextLengthExceeded, match=r"21 tokens; --max-input-length allows at most 20"):
        resolve(REQUEST, (1,) * 21, limited)
    with pytest.raises(InvalidRequest, match=r"max_tokens is 31; --max-output-length allows at most 30"):
        resolve(replace(REQUEST, stop=StopConditions(max_tokens=31)), (1,) * 20, limited)
    assert resolve(replace(REQUEST, stop=StopConditions(max_tokens=30)), (1,) * 20, limited).stops.max_tokens == 30


def test_the_default_of_max_tokens_obeys_every_limit() -> None:
    limited = replace(MODEL, lengths=LengthLimits(max_output_length=30))
    assert resolve(REQUEST, (1,) * 40, limited).stops.max_tokens == 30
    assert resolve(REQUEST, (1,) * 90, limited).stops.max_tokens == 10
    assert resolve(REQUEST, (1,) * 40, replace(limited, default_max_tokens=99)).stops.max_tokens == 30
    assert resolve(REQUEST, (1,) * 40, replace(limited, default_max_tokens=7)).stops.max_tokens == 7


@pytest.mark.parametrize("token_id", [-1, 50, -(10**30), 10**30])
def test_token_ids_outside_the_vocabulary_are_named(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"{token_id} is outside"):
        resolve(REQUEST, (1, token_id), MODEL)


def test_eos_stops_unless_ignored_and_only_the_clients_stop_tokens_are_named() -> None:
    stop = StopConditions(stop_token_ids=(7,))
    resolved = resolve(replace(REQUEST, stop=stop), (1,), MODEL)
    assert resolved.stops.stop_token_ids == {2, 3, 7}
    assert resolved.named_stop_token_ids == {7}
    ignoring = resolve(replace(REQUEST, stop=replace(stop, ignore_eos=True)), (1,), MODEL)
    assert ignoring.stops.stop_token_ids == {7}


def test_the_seed_of_a_request_fixes_a_different_seed_for_each_choice() -> None:
    seeds = resolve(replace(REQUEST, n=4, sampling=SamplingParams(seed=1)), (1,), MODEL).seeds
    again = resolve(replace(REQUEST, n=8, sampling=SamplingParams(seed=1)), (1,), MODEL).seeds
    other = resolve(replace(REQUEST, n=4, sampling=SamplingParams(seed=2)), (1,), MODEL).seeds
    assert seeds == again[:4]
    assert len({*seeds, *other}) == 8
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_two_requests_without_a_seed_get_different_seeds() -> None:
    assert resolve(REQUEST, (1,), MODEL).seeds != resolve(REQUEST, (1,), MODEL).seeds


def test_accepted_values_resolve_alike_at_every_router() -> None:
    """The accepted values replace the operator's defaults and the drawn seed, which would differ."""
    first = resolve(replace(REQUEST, n=3), (1, 2), MODEL)
    accepted = first.accepted(REQUEST.sampling, b"")
    again = replace(REQUEST, n=3, sampling=accepted.sampling, stop=StopConditions(max_tokens=accepted.max_tokens))
    rules = LogitRules(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2)
    other = replace(MODEL, default_sampling=Sampling(temperature=1.5, rules=rules), default_max_tokens=5)
    check(again, other)
    assert resolve(again, (1, 2), other) == first


def test_the_models_logit_rules_apply_unless_the_request_sets_its_own() -> None:
    own = LogitRules(repetition_penalty=1.2, presence_penalty=0.3, bad_words=((5, 6),))
    model = replace(MODEL, default_sampling=Sampling(rules=own))
    assert resolve(REQUEST, (1,), model).sampling.rules == own
    said = replace(REQUEST, sampling=SamplingParams(presence_penalty=0.0, logit_bias=((4, 1.0),)))
    assert resolve(said, (1,), model, [(7,), (5, 6)]).sampling.rules == LogitRules(
        logit_bias=((4, 1.0),), repetition_penalty=1.2, bad_words=((5, 6), (7,))
    )


def test_rules_that_change_nothing_are_no_rules() -> None:
    neutral = SamplingParams(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    assert resolve(replace(REQUEST, sampling=neutral), (1,), MODEL).sampling.rules is None


@pytest.mark.parametrize(
    ("sampling", "stop", "bad_words"),
    [
        (SamplingParams(allowed_token_ids=(5, 6)), StopConditions(), [(5,), (8, 6)]),
        (SamplingParams(allowed_token_ids=(2, 3)), StopConditions(min_tokens=1), []),
        (SamplingParams(), StopConditions(), [(token_id,) for token_id in range(50)]),
    ],
)
def test_rules_that_may_leave_no_token_are_refused(
    sampling: SamplingParams, stop: StopConditions, bad_words: list[tuple[int, ...]]
) -> None:
    request = replace(REQUEST, sampling=sampling, stop=stop)
    check(request, MODEL)
    with pytest.raises(InvalidRequest, match="no token may be left to draw"):
        resolve(request, (1,), MODEL, bad_words)


def test_bad_words_need_a_tokenizer_and_are_bounded_in_tokens() -> None:
    request = replace(REQUEST, sampling=SamplingParams(bad_words=("x",)))
    with pytest.raises(NoTokenizer, match="logit_bias"):
        check(request, replace(MODEL, has_tokenizer=False))
    with pytest.raises(InvalidRequest, match="bad_words have 4097 tokens"):
        resolve(request, (1,), MODEL, [(1,) * 4097])
