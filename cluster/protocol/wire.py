"""Convert between the messages of tandem/internal/v1 and the values of cluster/messages.py.

cluster/protocol/received.py checks a received message first: each field is within its bounds, or MalformedMessage. The
worker checks values against its model; cluster/protocol/tickets.py verifies signatures. Sends nothing.

Sampling travels as 32-bit floats: both legs of a request read the same rounded values.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from cluster.errors import InvalidRequest
from cluster.messages import (
    DecodeJob,
    Epoch,
    FinishReason,
    Grammar,
    GrammarKind,
    LayoutFingerprint,
    LogitRules,
    MemberId,
    PrefillJob,
    PrefixSource,
    PromptLogprobs,
    SampledToken,
    Sampling,
    SequenceStart,
    TenantShare,
    Ticket,
    TokenLogprobs,
    TokenStops,
)
from cluster.protocol import hashing
from cluster.protocol.received import checked
from tandem.enum_words import FINISH_REASONS, GRAMMAR_KINDS, EnumWords
from tandem.internal.v1 import kv_pb2, worker_pb2
from tandem.v1 import inference_pb2

WIRE_DTYPES = EnumWords(kv_pb2.WireDtype)  # their words are the values of --kv-wire-dtype
ID_BYTES, pack_ids = hashing.ID_BYTES, hashing.pack_ids
# Fields that the jobs of both roles have, in messages as in values.
_JOB_FIELDS = (
    *("request_id", "attempt", "timeout_s", "cache_salt", "priority", "is_batch", "age_s", "is_unproven"),
    "num_expected_cached",
)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Inverse of pack_ids. Raises InvalidRequest unless the bytes are a whole number of ids."""
    if len(packed) % ID_BYTES:
        raise InvalidRequest(f"packed ids must be a multiple of {ID_BYTES} bytes, not {len(packed)}")
    return struct.unpack(f"<{len(packed) // ID_BYTES}I", packed)


def member_from_wire(text: str) -> MemberId:
    """Return the member of a message. Raises InvalidRequest."""
    try:
        return MemberId.parse(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def sampling_to_wire(sampling: Sampling) -> worker_pb2.ResolvedSampling:
    return worker_pb2.ResolvedSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        logprobs_plus_one=0 if sampling.num_logprobs is None else sampling.num_logprobs + 1,
        rules=None if sampling.rules is None else _rules_to_wire(sampling.rules),
    )


def sampling_from_wire(message: worker_pb2.ResolvedSampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        num_logprobs=message.logprobs_plus_one - 1 if message.logprobs_plus_one else None,
        rules=_rules_from_wire(message.rules) if message.HasField("rules") else None,
    )


def stops_to_wire(stops: TokenStops) -> worker_pb2.TokenStops:
    return worker_pb2.TokenStops(
        max_tokens=stops.max_tokens,
        min_tokens=stops.min_tokens,
        stop_token_ids=pack_ids(sorted(stops.stop_token_ids)),
    )


def stops_from_wire(message: worker_pb2.TokenStops) -> TokenStops:
    return TokenStops(message.max_tokens, message.min_tokens, frozenset(unpack_ids(message.stop_token_ids)))


def grammar_to_wire(grammar: Grammar) -> inference_pb2.Grammar:
    return inference_pb2.Grammar(kind=GRAMMAR_KINDS.number(grammar.kind), text=grammar.text)


def grammar_from_wire(message: inference_pb2.Grammar) -> Grammar:
    """Convert part of a checked message."""
    return Grammar(GrammarKind(GRAMMAR_KINDS.word(message.kind)), message.text)


def prefill_job_to_wire(job: PrefillJob) -> worker_pb2.PrefillRequest:
    return worker_pb2.PrefillRequest(
        token_ids=_packed(job.token_ids, job.packed),
        seeds=job.seeds,
        num_committed=job.num_committed,
        importer=str(job.importer) if job.importer is not None else "",
        router=str(job.router) if job.router is not None else "",
        prefix_sources=[
            worker_pb2.PrefixSource(member=str(source.member), address=source.address, num_tokens=source.num_tokens)
            for source in job.prefix_sources
        ],
        prompt_logprobs_plus_one=0 if job.num_prompt_logprobs is None else job.num_prompt_logprobs + 1,
        **_job_to_wire(job),
    )


def prefill_job_from_wire(message: worker_pb2.PrefillRequest) -> PrefillJob:
    """Return the job of a message. Raises MalformedMessage."""
    checked(message)
    return PrefillJob(
        token_ids=unpack_ids(message.token_ids),
        seeds=tuple(message.seeds),
        num_committed=message.num_committed,
        importer=member_from_wire(message.importer) if message.importer else None,
        router=member_from_wire(message.router) if message.router else None,
        prefix_sources=tuple(
            PrefixSource(member_from_wire(source.member), source.address, source.num_tokens)
            for source in message.prefix_sources
        ),
        num_prompt_logprobs=message.prompt_logprobs_plus_one - 1 if message.prompt_logprobs_plus_one else None,
        **_job_from_wire(message),
    )


def decode_job_to_wire(job: DecodeJob) -> worker_pb2.StartRequest:
    return worker_pb2.StartRequest(
        router=str(job.router),
        prompt_token_ids=_packed(job.prompt_token_ids, job.packed),
        sequences=[_sequence_to_wire(sequence) for sequence in job.sequences],
        ticket=job.signed_ticket or b"",
        num_expected_output=job.num_expected_output,
        **_job_to_wire(job),
    )


def decode_job_from_wire(message: worker_pb2.StartRequest) -> DecodeJob:
    """Return the job of a message. Raises MalformedMessage."""
    checked(message)
    return DecodeJob(
        router=member_from_wire(message.router),
        prompt_token_ids=unpack_ids(message.prompt_token_ids),
        sequences=tuple(_sequence_from_wire(sequence) for sequence in message.sequences),
        signed_ticket=message.ticket or None,
        num_expected_output=message.num_expected_output,
        **_job_from_wire(message),
    )


def logprobs_to_wire(logprobs: TokenLogprobs) -> inference_pb2.PositionLogprobs:
    return inference_pb2.PositionLogprobs(
        chosen=inference_pb2.TokenLogprob(token_id=logprobs.token_id, logprob=logprobs.logprob),
        top=[inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top],
    )


def logprobs_from_wire(message: inference_pb2.PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.chosen.token_id,
        logprob=message.chosen.logprob,
        top=tuple((item.token_id, item.logprob) for item in message.top),
    )


_PACKED = ("logprobs", "ranks", "top_token_ids", "top_logprobs")


def prompt_logprobs_to_wire(logprobs: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        first_position=logprobs.first_position,
        num_top=logprobs.num_top,
        **{name: getattr(logprobs, name) for name in _PACKED},
    )


def prompt_logprobs_from_wire(message: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    """Convert part of a checked message."""
    return PromptLogprobs(message.first_position, message.num_top, *(getattr(message, name) for name in _PACKED))


def sampled_token_to_wire(token: SampledToken) -> worker_pb2.SampledToken:
    return worker_pb2.SampledToken(
        token_id=token.token_id,
        logprobs=logprobs_to_wire(token.logprobs) if token.logprobs is not None else None,
        finish_reason=FINISH_REASONS.number(token.finish_reason or ""),
    )


def sampled_token_from_wire(message: worker_pb2.SampledToken) -> SampledToken:
    return SampledToken(
        token_id=message.token_id,
        logprobs=logprobs_from_wire(message.logprobs) if message.HasField("logprobs") else None,
        finish_reason=finish_reason_from_wire(message.finish_reason),
    )


def finish_reason_from_wire(number: int) -> FinishReason | None:
    """Return None for a sequence that has not ended. Raises InvalidRequest for an unknown number."""
    try:
        word = FINISH_REASONS.word(number)
    except ValueError as error:
        raise InvalidRequest(f"finish_reason: {error}") from None
    return FinishReason(word) if word else None


def first_tokens_to_wire(
    tokens: Iterable[SampledToken],
    *,
    queue_s: float,
    prefill_s: float,
    num_cached: int,
    num_pulled: int = 0,
    chunks: Iterable[tuple[int, float]] = (),
) -> worker_pb2.FirstTokens:
    """`chunks`: of each step of the prefill its tokens, and when it ended."""
    return worker_pb2.FirstTokens(
        tokens=[sampled_token_to_wire(token) for token in tokens],
        queue_s=queue_s,
        prefill_s=prefill_s,
        num_cached=num_cached,
        num_pulled=num_pulled,
        chunks=[worker_pb2.PrefillChunk(num_tokens=num_tokens, ended_s=ended_s) for num_tokens, ended_s in chunks],
    )


def epoch_to_wire(epoch: Epoch) -> kv_pb2.Epoch:
    return kv_pb2.Epoch(
        member_id=epoch.exporter.id,
        incarnation=epoch.exporter.incarnation,
        ticket_id=epoch.ticket_id,
        attempt=epoch.attempt,
    )


def epoch_from_wire(message: kv_pb2.Epoch) -> Epoch:
    return Epoch(MemberId(message.member_id, message.incarnation), message.ticket_id, message.attempt)


def ticket_to_wire(ticket: Ticket) -> kv_pb2.Ticket:
    return kv_pb2.Ticket(
        ticket_id=ticket.ticket_id,
        exporter_id=ticket.exporter.id,
        exporter_incarnation=ticket.exporter.incarnation,
        exporter_address=ticket.exporter_address,
        importer=str(ticket.importer),
        request_id=ticket.request_id,
        attempt=ticket.attempt,
        num_tokens=ticket.num_tokens,
        prompt_hash=ticket.prompt_hash,
        num_choices=ticket.num_choices,
        expires_at_s=ticket.expires_at_s,
    )


def ticket_from_wire(message: kv_pb2.Ticket) -> Ticket:
    """Convert a checked message. The exporter verifies the signature."""
    return Ticket(
        ticket_id=message.ticket_id,
        exporter=MemberId(message.exporter_id, message.exporter_incarnation),
        exporter_address=message.exporter_address,
        importer=member_from_wire(message.importer),
        request_id=message.request_id,
        attempt=message.attempt,
        num_tokens=message.num_tokens,
        prompt_hash=message.prompt_hash,
        num_choices=message.num_choices,
        expires_at_s=message.expires_at_s,
    )


def fingerprint_to_wire(fingerprint: LayoutFingerprint) -> kv_pb2.LayoutFingerprint:
    return kv_pb2.LayoutFingerprint(
        weights=fingerprint.weights,
        model_config=fingerprint.model_config,
        dtype=fingerprint.dtype,
        block_table=fingerprint.block_table,
        wire_dtype=WIRE_DTYPES.number(fingerprint.wire_dtype),
        kv_format=fingerprint.kv_format,
    )


def fingerprint_from_wire(message: kv_pb2.LayoutFingerprint) -> LayoutFingerprint:
    return LayoutFingerprint(
        weights=message.weights,
        model_config=message.model_config,
        dtype=message.dtype,
        block_table=message.block_table,
        wire_dtype=WIRE_DTYPES.word(message.wire_dtype),
        kv_format=message.kv_format,
    )


def _rules_to_wire(rules: LogitRules) -> worker_pb2.LogitRules:
    return worker_pb2.LogitRules(
        logit_bias=[worker_pb2.TokenBias(token_id=token_id, bias=bias) for token_id, bias in rules.logit_bias],
        repetition_penalty=rules.repetition_penalty,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
        allowed_token_ids=pack_ids(rules.allowed_token_ids),
        bad_words=map(pack_ids, rules.bad_words),
    )


def _rules_from_wire(message: worker_pb2.LogitRules) -> LogitRules:
    return LogitRules(
        logit_bias=tuple((item.token_id, item.bias) for item in message.logit_bias),
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        allowed_token_ids=unpack_ids(message.allowed_token_ids),
        bad_words=tuple(map(unpack_ids, message.bad_words)),
    )


def _packed(token_ids: Sequence[int], packed: bytes) -> bytes:
    """Pack token ids. `packed`: the first of them, where they are packed already."""
    return packed + pack_ids(token_ids[len(packed) // ID_BYTES :])


def _job_to_wire(job: PrefillJob | DecodeJob) -> dict[str, Any]:
    """Return the fields that the jobs of both roles have."""
    sampling, stops = sampling_to_wire(job.sampling), stops_to_wire(job.stops)
    grammar = grammar_to_wire(job.grammar) if job.grammar is not None else None
    return {name: getattr(job, name) for name in _JOB_FIELDS} | {
        "sampling": sampling,
        "stops": stops,
        "grammar": grammar,
        "tenant": job.tenant.label,
        "weight": job.tenant.weight,
    }


def _job_from_wire(message: worker_pb2.PrefillRequest | worker_pb2.StartRequest) -> dict[str, Any]:
    return {name: getattr(message, name) for name in _JOB_FIELDS} | {
        "sampling": sampling_from_wire(message.sampling),
        "stops": stops_from_wire(message.stops),
        "age_s": max(0.0, message.age_s),
        "grammar": grammar_from_wire(message.grammar) if message.HasField("grammar") else None,
        "tenant": TenantShare(message.tenant, max(1, message.weight)),
    }


def _sequence_to_wire(sequence: SequenceStart) -> worker_pb2.SequenceStart:
    return worker_pb2.SequenceStart(
        handle=sequence.handle,
        seed=sequence.seed,
        committed_token_ids=pack_ids(sequence.committed_token_ids),
    )


def _sequence_from_wire(message: worker_pb2.SequenceStart) -> SequenceStart:
    return SequenceStart(message.handle, message.seed, unpack_ids(message.committed_token_ids))
