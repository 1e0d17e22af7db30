"""Acceptances: which request they allow a client to resume, with which parameters; a wrong clock does not revoke
one.
"""

import dataclasses
from dataclasses import replace

import pytest

from cluster.auth.keys import ClusterKeys
from cluster.errors import (
    AcceptanceInvalid,
    AcceptanceMissing,
    AcceptanceOfAnotherClient,
    PromptChanged,
    RequestChanged,
)
from cluster.messages import Grammar, GrammarKind, Sampling
from cluster.request_size import LengthLimits
from router.request.request_acceptance import (
    ACCEPTANCE_BYTES,
    Acceptance,
    AcceptanceSigner,
    _parameters_digest,
    accept,
    client_of,
)
from router.request.validation import ResolvedRequest, resolve
from router.requests import GenerateRequest, ResumedChoice, SamplingParams, StopConditions, TokenPrompt
from router.text.model_files import ModelInfo

PROMPT = (5, 6, 7)
NOW_US = 1_795_000_000_000_000
HOUR_US = 3_600_000_000
MODEL = ModelInfo(
    model="folder",
    name="m",
    max_model_len=100,
    vocab_size=50,
    has_tokenizer=True,
    has_chat_template=False,
    bos_token_id=None,
    eos_token_ids=frozenset({0}),
    default_sampling=Sampling(temperature=0.7, top_k=0, top_p=0.95, min_p=0.0),
    default_max_tokens=None,
)
REQUEST = GenerateRequest(
    TokenPrompt(PROMPT),
    "r",
    client=client_of("Bearer one"),
    num_bytes=100,
    sampling=SamplingParams(seed=3),
    stop=StopConditions(max_tokens=9, stop=("end",), stop_token_ids=(4,)),
    n=2,
)


def accepted(request: GenerateRequest = REQUEST, model: ModelInfo = MODEL) -> Acceptance:
    resolved = resolve(request, PROMPT, model)
    return accept(request, resolved, model, stream_id=b"s" * 16, rendered_at_us=NOW_US, timeout_s=600)


def resumed(token: bytes, **changes: object) -> GenerateRequest:
    request = replace(REQUEST, resume_from=(ResumedChoice((9,)), ResumedChoice()), acceptance=token)
    return replace(request, **changes)  # type: ignore[arg-type]


@pytest.fixture
def token() -> bytes:
    return AcceptanceSigner(ClusterKeys(b"key")).sign("r", accepted())


def test_every_router_of_the_cluster_verifies_acceptances_of_the_others(token: bytes) -> None:
    acceptance = AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(token))
    assert acceptance == accepted()
    assert acceptance.resolved(resumed(token), PROMPT, MODEL) == resolve(REQUEST, PROMPT, MODEL)
    assert AcceptanceSigner(ClusterKeys(b"key")).sign("r", acceptance) == token
    assert len(token) == ACCEPTANCE_BYTES


def test_an_acceptance_with_any_changed_byte_is_refused(token: bytes) -> None:
    for place in range(len(token)):
        for bit in range(8):
            changed = bytearray(token)
            changed[place] ^= 1 << bit
            with pytest.raises(AcceptanceInvalid):
                AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(bytes(changed)))


def test_an_acceptance_that_is_too_short_or_too_long_is_refused(token: bytes) -> None:
    for length in range(1, len(token)):
        with pytest.raises(AcceptanceInvalid):
            AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(token[:length]))
    for longer in (token + b"\0", token + token, b"\0" + token):
        with pytest.raises(AcceptanceInvalid):
            AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(longer))
    with pytest.raises(AcceptanceMissing, match="new request"):
        AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(b""))


def test_an_acceptance_holds_for_one_request_id_one_cluster_and_one_api_key(token: bytes) -> None:
    with pytest.raises(AcceptanceInvalid):
        AcceptanceSigner(ClusterKeys(b"another")).shown(resumed(token))
    with pytest.raises(AcceptanceInvalid):
        AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(token, request_id="s"))
    for client in (client_of("Bearer two"), b"", client_of("Bearer one")[:-1]):
        with pytest.raises(AcceptanceOfAnotherClient):
            AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(token, client=client))


@pytest.mark.parametrize("prompt", [(5, 6), (5, 6, 7, 8), (5, 6, 8), (6, 5, 7)])
def test_a_changed_prompt_is_refused_with_prompt_changed(token: bytes, prompt: tuple[int, ...]) -> None:
    acceptance = AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(token))
    with pytest.raises(PromptChanged, match="tokenizer"):
        acceptance.resolved(resumed(token), prompt, MODEL)


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 3},
        {"n": 1},
        {"sampling": SamplingParams(seed=4)},
        {"sampling": SamplingParams(seed=3, temperature=0.71)},
        {"sampling": SamplingParams(seed=3, top_k=1)},
        {"sampling": SamplingParams(seed=3, top_p=0.5)},
        {"sampling": SamplingParams(seed=3, min_p=0.5)},
        {"sampling": SamplingParams(seed=3, presence_penalty=0.5)},
        {"sampling": SamplingParams(seed=3, frequency_penalty=0.5)},
        {"sampling": SamplingParams(seed=3, repetition_penalty=1.5)},
        {"sampling": SamplingParams(seed=3, logit_bias=((4, 1.0),))},
        {"sampling": SamplingParams(seed=3, allowed_token_ids=(4, 5))},
        {"stop": replace(REQUEST.stop, max_tokens=10)},
        {"stop": replace(REQUEST.stop, min_tokens=1)},
        {"stop": replace(REQUEST.stop, ignore_eos=True)},
        {"stop": replace(REQUEST.stop, stop=())},
        {"stop": replace(REQUEST.stop, stop=("end", "more"))},
        {"stop": replace(REQUEST.stop, stop_token_ids=())},
        {"stop": replace(REQUEST.stop, stop_token_ids=(4, 0))},
        {"stop": replace(REQUEST.stop, include_stop_str_in_output=True)},
        {"skip_special_tokens": False},
        {"logprobs": 0},
        {"cache_salt": "other"},
        {"priority": -1},
        {"is_batch": True},
        {"grammar": Grammar(GrammarKind.REGEX, "a")},
    ],
    ids=str,
)
def test_changed_parameters_are_refused_by_name(token: bytes, changes: dict[str, object]) -> None:
    acceptance = AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(token))
    with pytest.raises(RequestChanged, match="AcceptedRequest"):
        acceptance.resolved(resumed(token, **changes), PROMPT, MODEL)


def test_the_parameters_digest_covers_every_field_of_a_resolved_request() -> None:
    resolved = resolve(REQUEST, PROMPT, MODEL)
    other: dict[str, object] = {
        "sampling": replace(resolved.sampling, top_k=9),
        "stops": replace(resolved.stops, min_tokens=2),
        "includes_stop": True,
        "skips_special_tokens": False,
        "stop_strings": ("other",),
        "named_stop_token_ids": frozenset({5}),
        "seed": 8,
        "seeds": (1, 2),
        "cache_salt": "other",
        "priority": 4,
        "is_batch": True,
        "vocab_size": 51,
        "grammar": Grammar(GrammarKind.REGEX, "a"),
        "num_prompt_logprobs": 0,
    }
    fields = {field.name for field in dataclasses.fields(ResolvedRequest)} - {"prompt_token_ids", "packed_prompt"}
    assert set(other) == fields, "a new field needs a place in the digest"
    digest = _parameters_digest(resolved, MODEL)
    for name, value in other.items():
        assert _parameters_digest(replace(resolved, **{name: value}), MODEL) != digest, name  # type: ignore[arg-type]
    assert _parameters_digest(resolved, replace(MODEL, name="n")) != digest


def test_a_router_with_another_model_or_other_model_files_refuses_the_acceptance(token: bytes) -> None:
    acceptance = AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(token))
    for model in (
        replace(MODEL, eos_token_ids=frozenset({1})),
        replace(MODEL, name="another"),
        replace(MODEL, tokenizer_digest="another"),
    ):
        with pytest.raises(RequestChanged):
            acceptance.resolved(resumed(token), PROMPT, model)


def test_the_values_that_were_accepted_hold_under_other_defaults_and_limits() -> None:
    """The values that the first router resolved go to the client as 32-bit floats, and come back."""
    acceptance = accepted(replace(REQUEST, stop=StopConditions()))
    as_accepted = SamplingParams(temperature=0.699999988079071, top_k=0, top_p=0.949999988079071, min_p=0.0, seed=3)
    request = replace(REQUEST, sampling=as_accepted, stop=StopConditions(max_tokens=97))
    elsewhere = replace(
        MODEL,
        default_sampling=Sampling(temperature=0.2, top_k=7, top_p=0.5, min_p=0.1),
        default_max_tokens=3,
        lengths=LengthLimits(max_input_length=1, max_output_length=1),
    )
    assert acceptance.resolved(request, PROMPT, elsewhere).stops.max_tokens == 97


@pytest.mark.parametrize("shift_us", [-1000 * HOUR_US, -5 * HOUR_US, 0, 5 * HOUR_US, 1000 * HOUR_US])
def test_an_acceptance_stays_valid_when_a_clock_jumps(token: bytes, shift_us: int) -> None:
    """`shown` has no time argument. Only the place in the queue depends on the clock."""
    acceptance = AcceptanceSigner(ClusterKeys(b"key")).shown(resumed(token))
    assert acceptance.resolved(resumed(token), PROMPT, MODEL)
    assert acceptance.is_recent(NOW_US + shift_us) == (shift_us <= 0)


def test_a_deadline_too_late_to_encode_is_cut() -> None:
    acceptance = accept(
        REQUEST, resolve(REQUEST, PROMPT, MODEL), MODEL, stream_id=b"s" * 16, rendered_at_us=NOW_US, timeout_s=1e300
    )
    assert len(AcceptanceSigner(ClusterKeys(b"key")).sign("r", acceptance)) == ACCEPTANCE_BYTES


def test_a_request_that_cannot_be_resumed_gets_no_acceptance() -> None:
    assert AcceptanceSigner(ClusterKeys(b"key")).sign("r", accepted(replace(REQUEST, num_bytes=0))) == b""
