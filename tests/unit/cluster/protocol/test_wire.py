"""Wire messages and the values inside Tandem are equal after conversion."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import InvalidRequest, MalformedMessage
from cluster.messages import (
    DecodeJob,
    FinishReason,
    LayoutFingerprint,
    LogitRules,
    MemberId,
    PrefillJob,
    PrefixSource,
    PromptLogprobs,
    SampledToken,
    Sampling,
    SequenceStart,
    Ticket,
    TokenLogprobs,
    TokenStops,
)
from cluster.protocol import wire
from cluster.protocol.received import checked
from tandem.internal.v1 import worker_pb2
from tests.examples import num_examples

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
F32 = st.floats(0, 2, width=32)
SHARE = st.floats(0, 1, width=32)
COUNT = st.integers(0, 2**31 - 1)
IDS = st.lists(U32, max_size=40).map(tuple)
TOKENS = st.lists(U32, min_size=1, max_size=40).map(tuple)
NAME = st.text(st.characters(blacklist_characters="@", blacklist_categories=["Cs"]), min_size=1, max_size=8)
MEMBERS = st.builds(MemberId, NAME, NAME)
PENALTY = st.floats(-2, 2, width=32)
RULES = st.builds(
    LogitRules,
    st.lists(st.tuples(COUNT, st.floats(-100, 100, width=32)), max_size=3).map(tuple),
    st.floats(0.0009765625, 1000, width=32),
    PENALTY,
    PENALTY,
    IDS,
    st.lists(TOKENS, max_size=3).map(tuple),
)
SAMPLING = st.builds(Sampling, F32, U32, SHARE, SHARE, st.none() | st.integers(0, 20), st.none() | RULES)
STOPS = st.builds(TokenStops, st.integers(1, 2**31 - 1), COUNT, st.frozensets(U32, max_size=5))
TIMEOUT = st.floats(0.001, 1e6)
LOGPROBS = st.builds(
    TokenLogprobs,
    U32,
    st.floats(-100, 0, width=32),
    st.lists(st.tuples(U32, st.floats(-100, 0, width=32)), max_size=3).map(tuple),
)
PREFILL_JOBS = st.builds(
    PrefillJob,
    request_id=NAME,
    attempt=COUNT,
    token_ids=TOKENS,
    sampling=SAMPLING,
    stops=STOPS,
    seeds=st.lists(U64, min_size=1, max_size=3).map(tuple),
    num_committed=st.just(0),
    importer=st.none() | MEMBERS,
    timeout_s=TIMEOUT,
    cache_salt=st.text(max_size=5),
    prefix_sources=st.lists(st.builds(PrefixSource, MEMBERS, NAME, COUNT), max_size=2).map(tuple),
    priority=I32,
    is_batch=st.booleans(),
    age_s=st.floats(0, 1e6),
    is_unproven=st.booleans(),
    num_prompt_logprobs=st.none() | st.integers(0, 20),
)
SEQUENCES = st.lists(
    st.builds(SequenceStart, U32, U64, IDS), min_size=1, max_size=3, unique_by=lambda start: start.handle
).map(tuple)
DECODE_JOBS = st.builds(
    DecodeJob,
    request_id=NAME,
    attempt=COUNT,
    router=MEMBERS,
    prompt_token_ids=TOKENS,
    sampling=SAMPLING,
    stops=STOPS,
    sequences=SEQUENCES,
    signed_ticket=st.none() | st.binary(min_size=1, max_size=20),
    timeout_s=TIMEOUT,
    cache_salt=st.text(max_size=5),
    priority=I32,
    is_batch=st.booleans(),
    age_s=st.floats(0, 1e6),
    is_unproven=st.booleans(),
)


@given(IDS)
def test_unpacked_ids_equal_the_packed_ones(ids: tuple[int, ...]) -> None:
    assert wire.unpack_ids(wire.pack_ids(ids)) == ids


def test_packed_ids_are_little_endian_on_every_machine() -> None:
    assert wire.pack_ids((1, 0x01020304)) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_ragged_packed_ids_are_refused_with_their_length(length: int) -> None:
    with pytest.raises(InvalidRequest, match=f"not {length}"):
        wire.unpack_ids(bytes(length))


@pytest.mark.parametrize("value", [-1, 2**32])
def test_an_id_that_does_not_fit_is_named(value: int) -> None:
    with pytest.raises(ValueError, match=str(value)):
        wire.pack_ids((0, value))


@settings(max_examples=num_examples(suite=33, search=250))
@given(PREFILL_JOBS)
def test_a_prefill_job_survives_the_wire(job: PrefillJob) -> None:
    message = wire.prefill_job_to_wire(job)
    assert wire.prefill_job_from_wire(type(message).FromString(message.SerializeToString())) == job


@given(st.lists(st.tuples(st.floats(-100, 0, width=32), st.integers(1, 9), U32), min_size=1, max_size=5), st.booleans())
def test_log_probabilities_of_a_prompt_survive_the_wire(rows: list[tuple[float, int, int]], has_top: bool) -> None:
    own, ranks, ids = zip(*rows, strict=True)
    packed = struct.pack(f"<{len(own)}f", *own)
    top = (wire.pack_ids(ids), packed) if has_top else (b"", b"")
    sent = PromptLogprobs(3, int(has_top), packed, wire.pack_ids(ranks), *top)
    message = wire.prompt_logprobs_to_wire(sent)
    received = wire.prompt_logprobs_from_wire(checked(type(message).FromString(message.SerializeToString())))
    assert received == sent
    tops = [((token_id, value),) if has_top else () for token_id, value in zip(ids, own, strict=True)]
    assert list(received.values()) == list(zip(own, ranks, tops, strict=True))


@settings(max_examples=num_examples(suite=33, search=250))
@given(DECODE_JOBS)
def test_a_decode_job_survives_the_wire(job: DecodeJob) -> None:
    message = wire.decode_job_to_wire(job)
    assert wire.decode_job_from_wire(type(message).FromString(message.SerializeToString())) == job


@given(st.builds(SampledToken, U32, st.none() | LOGPROBS, st.none() | st.sampled_from(FinishReason)))
def test_a_sampled_token_survives_the_wire(token: SampledToken) -> None:
    assert wire.sampled_token_from_wire(wire.sampled_token_to_wire(token)) == token


def test_ticket_epoch_and_fingerprint_survive_the_wire() -> None:
    ticket = Ticket(b"t" * 16, MemberId("p0", "a"), "h:1", MemberId("d0", "b"), "r", 3, 17, b"h" * 16, 2, 1.5)
    fingerprint = LayoutFingerprint("w", "c", "float32", "t", "int8", 7)
    assert wire.ticket_from_wire(wire.ticket_to_wire(ticket)) == ticket
    assert wire.epoch_from_wire(wire.epoch_to_wire(ticket.epoch)) == ticket.epoch
    assert wire.fingerprint_from_wire(wire.fingerprint_to_wire(fingerprint)) == fingerprint


@settings(max_examples=num_examples(suite=33, search=250))
@given(PREFILL_JOBS, DECODE_JOBS, st.integers(0, 40))
def test_messages_with_ids_that_were_packed_before_are_the_same(
    prefill: PrefillJob, decode: DecodeJob, num_packed: int
) -> None:
    begun = replace(prefill, packed=wire.pack_ids(prefill.token_ids[:num_packed]))
    assert wire.prefill_job_to_wire(begun) == wire.prefill_job_to_wire(prefill)
    packed = replace(decode, packed=wire.pack_ids(decode.prompt_token_ids))
    assert wire.decode_job_to_wire(packed) == wire.decode_job_to_wire(decode)


def _valid_prefill() -> worker_pb2.PrefillRequest:
    job = PrefillJob("r", 1, (5, 6), Sampling(), TokenStops(4), (9,), 0, None, 10.0)
    return wire.prefill_job_to_wire(job)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("request_id", "", "request_id"),
        ("token_ids", b"", "4 to .* bytes"),
        ("token_ids", b"abc", "multiple of 4"),
        ("num_committed", 2, "num_committed"),
        ("importer", "no-incarnation", "id@incarnation"),
        ("timeout_s", 0.0, "timeout_s"),
    ],
)
def test_a_malformed_prefill_is_refused_with_the_wrong_field(field: str, value: object, said: str) -> None:
    message = _valid_prefill()
    setattr(message, field, value)
    with pytest.raises(MalformedMessage, match=said):
        wire.prefill_job_from_wire(message)


def test_a_prefill_without_choices_or_without_room_is_refused() -> None:
    without_seeds, without_room = _valid_prefill(), _valid_prefill()
    del without_seeds.seeds[:]
    without_room.stops.max_tokens = 0
    with pytest.raises(MalformedMessage, match="seed"):
        wire.prefill_job_from_wire(without_seeds)
    with pytest.raises(MalformedMessage, match="max_tokens"):
        wire.prefill_job_from_wire(without_room)


def test_two_sequences_with_the_same_handle_are_refused() -> None:
    sequences = (SequenceStart(7, 1), SequenceStart(7, 2))
    job = DecodeJob("r", 1, MemberId("a", "b"), (1,), Sampling(), TokenStops(4), sequences, None, 1.0)
    with pytest.raises(MalformedMessage, match="handles"):
        wire.decode_job_from_wire(wire.decode_job_to_wire(job))
