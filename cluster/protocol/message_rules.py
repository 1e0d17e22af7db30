"""The bounds of every field of every message that members of a cluster send to each other.

A test fails if a message of worker.proto or kv.proto, or one of its fields, is missing in this table. The receiver
afterwards compares values with its own limits: its vocabulary, the size of its pool, its request.
"""

from collections.abc import Mapping

from google.protobuf.message import Message

from cluster.messages import (
    MAX_GRAMMAR_BYTES,
    MAX_PREFILL_CHUNKS,
    MAX_PROFILE_BYTES,
    MAX_WAIT_DEPTH,
    MAX_WEIGHT,
    TENANT_LABEL_CHARACTERS,
)
from cluster.protocol.field_rules import (
    LARGEST_INT,
    TEXT_CHARACTERS,
    EnumValue,
    Flag,
    Many,
    MemberName,
    Octets,
    Part,
    Real,
    Rule,
    Table,
    Text,
    Whole,
)
from cluster.protocol.hashing import MAX_PREFIX_BLOCKS
from cluster.settings.worker_settings import MIN_LEASE_S
from tandem.internal.v1 import kv_pb2, worker_pb2
from tandem.v1 import admin_pb2, inference_pb2

ID_BYTES, DIGEST_BYTES = 4, 16
_HASH_BYTES, _TICKET_ID_BYTES = 16, 16
_MOST_CHOICES = 1_024
_MOST_ITEMS = 1 << 20  # tokens of a step, events of a moment: the size of the message bounds these
_MOST_BYTES = 1 << 30

_COUNT = Whole()
_UINT32 = Whole(most=(1 << 32) - 1)
_BIG = Whole(most=LARGEST_INT)
_UINT64 = Whole(most=(1 << 64) - 1)
_SECONDS = Real()
_SIGNED_SECONDS = Real(least=-1e9)  # a difference of two clocks: its reader takes less than 0 as 0
_DEADLINE = Real(excludes_least=True)
_LEASE = Real(least=MIN_LEASE_S)
_SPEED = Real(most=1e18)
_RATIO = Real()
_AMOUNT = Real(most=1e18)
_NAME = Text(least=1)
_WORDS = Text(most=TEXT_CHARACTERS)
_ADDRESS = Text(most=1_024, least=1)
_MEMBER = MemberName()
_MEMBER_OR_NONE = MemberName(may_be_empty=True)
_IDS = Octets(_MOST_BYTES, unit=ID_BYTES)
_SOME_IDS = Octets(_MOST_BYTES, least=ID_BYTES, unit=ID_BYTES)
_HASHES = Octets(_MOST_BYTES, unit=_HASH_BYTES)
_HASH = Octets(_HASH_BYTES, least=_HASH_BYTES)
_DIGESTS = Octets(_MOST_BYTES, unit=DIGEST_BYTES)
_DIGEST = Octets(DIGEST_BYTES, unit=DIGEST_BYTES)  # empty: its exporter computes none
_TICKET_ID = Octets(_TICKET_ID_BYTES, least=_TICKET_ID_BYTES)
_SIGNATURE = Octets(64)  # a wrong one has its own reason
_NONCE, _SESSION_ID = Octets(32, least=32), Octets(16, least=16)
_SIGNED = Octets(1 << 16, least=1)
_SIGNED_OR_NONE = Octets(1 << 16)
_ENDPOINT = Octets(1 << 20)
_FLAG = Flag()
_REQUIRED, _OPTIONAL = Part(is_required=True), Part()
_HANDLES = Many(_UINT32, _MOST_ITEMS, least=1)
_TRANSPORTS = Many(_NAME, 32, is_distinct=True)


_TENANT: Mapping[str, Rule] = {"tenant": Text(most=TENANT_LABEL_CHARACTERS), "weight": Whole(most=MAX_WEIGHT)}
# A worker that still runs cannot report that it was lost.
_DRAINED = EnumValue.of(admin_pb2.DrainOutcome, may_be_unset=True).without(admin_pb2.DRAIN_OUTCOME_LOST)
_WORKER_ROLE = EnumValue.of(admin_pb2.MemberRole).without(admin_pb2.MEMBER_ROLE_ROUTER)

RULES: Mapping[type[Message], Mapping[str, Rule]] = {
    worker_pb2.OpenSessionRequest: {"caller": _MEMBER, "nonce": _NONCE, "signature": _SIGNATURE},
    worker_pb2.OpenSessionResponse: {
        "callee": _MEMBER,
        "nonce": _NONCE,
        "session_id": _SESSION_ID,
        "proof": _SIGNATURE,
        "frame_port": Whole(most=65_535),
    },
    inference_pb2.TokenLogprob: {"token_id": _COUNT, "logprob": Real(least=-3.5e38, most=1.0)},
    inference_pb2.PositionLogprobs: {"chosen": _OPTIONAL, "top": Many(_REQUIRED, 4_096)},
    worker_pb2.ResolvedSampling: {
        "temperature": Real(most=1e6),
        "top_k": _UINT32,
        "top_p": Real(most=1.0),
        "min_p": Real(most=1.0),
        "logprobs_plus_one": Whole(most=4_097),
        "rules": _OPTIONAL,
    },
    worker_pb2.LogitRules: {
        "logit_bias": Many(_REQUIRED, 1 << 16),
        "repetition_penalty": Real(most=1e6, excludes_least=True),
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), Real(least=-1e6, most=1e6)),
        "allowed_token_ids": _IDS,
        "bad_words": Many(_SOME_IDS, 1 << 16),
    },
    worker_pb2.TokenBias: {"token_id": _COUNT, "bias": Real(least=-1e6, most=1e6)},
    worker_pb2.TokenStops: {"max_tokens": Whole(least=1), "min_tokens": _COUNT, "stop_token_ids": _IDS},
    inference_pb2.Grammar: {
        "kind": EnumValue.of(inference_pb2.GrammarKind),
        "text": Text(most=MAX_GRAMMAR_BYTES, least=1),
    },
    worker_pb2.PrefillRequest: {
        "request_id": _NAME,
        "attempt": _COUNT,
        "token_ids": _SOME_IDS,
        "sampling": _REQUIRED,
        "stops": _REQUIRED,
        "seeds": Many(_UINT64, _MOST_CHOICES, least=1),
        "num_committed": _COUNT,
        "importer": _MEMBER_OR_NONE,
        "timeout_s": _DEADLINE,
        "cache_salt": Text(most=1_024),
        "prefix_sources": Many(_REQUIRED, 1_024),
        "priority": Whole(least=-(1 << 31)),
        "is_batch": _FLAG,
        "age_s": _SIGNED_SECONDS,
        "is_unproven": _FLAG,
        "router": _MEMBER_OR_NONE,
        "num_expected_cached": _COUNT,
        "grammar": _OPTIONAL,
        **_TENANT,
        "prompt_logprobs_plus_one": Whole(most=4_097),
    },
    worker_pb2.PrefixSource: {"member": _MEMBER, "address": _ADDRESS, "num_tokens": _COUNT},
    worker_pb2.PrefillEvent: dict.fromkeys(("accepted", "first_tokens", "prompt_logprobs"), _OPTIONAL),
    worker_pb2.PromptLogprobs: {
        "first_position": Whole(least=1),
        "num_top": Whole(most=4_096),
        "logprobs": _SOME_IDS,
        "ranks": _SOME_IDS,
        "top_token_ids": _IDS,
        "top_logprobs": _IDS,
    },
    worker_pb2.PrefillAccepted: {"ticket": _SIGNED_OR_NONE},
    worker_pb2.AbandonRequest: {"ticket": _SIGNED},
    worker_pb2.AbandonResponse: {},
    worker_pb2.SampledToken: {
        "token_id": _COUNT,
        "logprobs": _OPTIONAL,
        "finish_reason": EnumValue.of(inference_pb2.FinishReason, may_be_unset=True),
    },
    worker_pb2.FirstTokens: {
        "tokens": Many(_REQUIRED, _MOST_CHOICES, least=1),
        "queue_s": _SECONDS,
        "prefill_s": _SECONDS,
        "num_cached": _COUNT,
        "num_pulled": _COUNT,
        "chunks": Many(_REQUIRED, MAX_PREFILL_CHUNKS),
    },
    worker_pb2.PrefillChunk: {"num_tokens": _COUNT, "ended_s": _SECONDS},
    worker_pb2.SequenceStart: {"handle": _UINT32, "seed": _UINT64, "committed_token_ids": _IDS},
    worker_pb2.StartRequest: {
        "request_id": _NAME,
        "attempt": _COUNT,
        "router": _MEMBER,
        "prompt_token_ids": _SOME_IDS,
        "sampling": _REQUIRED,
        "stops": _REQUIRED,
        "sequences": Many(_REQUIRED, _MOST_CHOICES, least=1),
        "ticket": _SIGNED_OR_NONE,
        "timeout_s": _DEADLINE,
        "cache_salt": Text(most=1_024),
        "priority": Whole(least=-(1 << 31)),
        "is_batch": _FLAG,
        "age_s": _SIGNED_SECONDS,
        "is_unproven": _FLAG,
        "num_expected_cached": _COUNT,
        "num_expected_output": _AMOUNT,
        "grammar": _OPTIONAL,
        **_TENANT,
    },
    worker_pb2.StartResponse: {},
    worker_pb2.FreezeRequest: {"router": _MEMBER, "handle": _UINT32, "importer": _MEMBER, "attempt": _COUNT},
    worker_pb2.FreezeResponse: {"ticket": _SIGNED, "num_output": _COUNT},
    worker_pb2.ThawRequest: {"router": _MEMBER, "handle": _UINT32, "new_handle": _UINT32},
    worker_pb2.ThawResponse: {},
    worker_pb2.RouterMessage: {"hello": _OPTIONAL, "cancel": _OPTIONAL},
    worker_pb2.RouterHello: {"router": _MEMBER, "has_no_sequences": _FLAG},
    worker_pb2.CancelSequences: {"handles": _IDS},
    worker_pb2.WorkerMessage: dict.fromkeys(
        ("hello", "step", "started", "failed", "heartbeat", "leaving", "others"), _OPTIONAL
    ),
    worker_pb2.WorkerLeaving: {"grace_s": _SECONDS},
    worker_pb2.WorkerHello: {"worker": _MEMBER},
    worker_pb2.StepOutput: {
        "step": _UINT64,
        "handles": _IDS,
        "token_ids": _IDS,
        "indices": _IDS,
        "logprobs": Many(_OPTIONAL, _MOST_ITEMS),
        "ends": Many(_REQUIRED, _MOST_ITEMS),
    },
    worker_pb2.SequenceEnd: {"handle": _UINT32, "finish_reason": EnumValue.of(inference_pb2.FinishReason)},
    worker_pb2.SequenceStarted: {
        "handles": _HANDLES,
        "first_token_ids": _IDS,
        "transfer_s": _SECONDS,
        "queue_s": _SECONDS,
        "kv_bytes": _BIG,
        "transport": Text(),
        "num_cached": _COUNT,
    },
    worker_pb2.SequenceFailed: {"handles": _HANDLES, "reason": _NAME, "detail": _WORDS},
    worker_pb2.Heartbeat: {
        "step": _UINT64,
        "running": _COUNT,
        "waiting": _COUNT,
        "free_blocks": _COUNT,
        "links": Many(_REQUIRED, 65_536),
        "step_s": _SECONDS,
        "service_times": _OPTIONAL,
    },
    worker_pb2.OthersWork: {
        "number": _UINT64,
        "prompt_tokens": _UINT64,
        "prompt_attended": _AMOUNT,
        "first_tokens": _UINT64,
        "first_attended": _AMOUNT,
        "elapsed_s": _SECONDS,
        "num_exported": _COUNT,
        "num_running": _COUNT,
        "num_joining": _COUNT,
        "context": _UINT64,
        "left": _AMOUNT,
    },
    worker_pb2.ServiceTimes: {
        **dict.fromkeys(("prefill", "decode"), _REQUIRED),
        **dict.fromkeys(("mixed", "hand_off", "typical_prefill", "typical_decode"), _OPTIONAL),
    },
    worker_pb2.TimedStep: {
        "num_new": _COUNT,
        "attended": Real(most=1e18),
        "batch": _COUNT,
        "context": _COUNT,
        "seconds": Real(excludes_least=True),
    },
    worker_pb2.PrefillTimes: {
        "step_s": _SECONDS,
        "per_token_s": _SECONDS,
        "per_token_context_s": _SECONDS,
        "relative_error": _RATIO,
    },
    worker_pb2.DecodeTimes: {
        "step_s": _SECONDS,
        "per_sequence_s": _SECONDS,
        "per_context_token_s": _SECONDS,
        "relative_error": _RATIO,
    },
    worker_pb2.MixedTimes: {"factor": Real(most=1e6, excludes_least=True), "relative_error": _RATIO},
    worker_pb2.HandOffTimes: {"fixed_s": _SECONDS, "relative_error": _RATIO},
    admin_pb2.LinkSpeed: {
        "exporter": _MEMBER,
        "transport": _NAME,
        "bytes_per_s": Real(least=1.0, most=1e18),  # at a speed of nearly 0 every time would be infinite
        "latency_s": _SECONDS,
        "slowdown": _RATIO,
    },
    worker_pb2.ProfileStepsRequest: {"num_steps": _COUNT, "timeout_s": _SECONDS},
    worker_pb2.ProfileStepsResponse: {"num_steps": _COUNT, "trace": Octets(MAX_PROFILE_BYTES)},
    worker_pb2.CheckLinkRequest: {"exporter": _MEMBER, "address": _ADDRESS, "max_blocks": _COUNT},
    worker_pb2.CheckLinkResponse: {"paths": Many(_REQUIRED, 64), "num_bytes": _BIG},
    worker_pb2.MeasuredPath: {"transport": _NAME, "bytes_per_s": _SPEED, "latency_s": _SECONDS, "reason": _WORDS},
    worker_pb2.SubscribeCacheEventsRequest: {"member": _MEMBER_OR_NONE, "since": _BIG},
    worker_pb2.CacheEvents: {
        "cleared": _FLAG,
        "first_number": _BIG,
        "next_number": _BIG,
        "stored": _HASHES,
        "removed": _HASHES,
        "member": _MEMBER_OR_NONE,
    },
    worker_pb2.InspectRequest: {},
    worker_pb2.InspectResponse: {
        "member": _MEMBER,
        "blocks": Table(_UINT32, 64),
        "figures": Table(Real(least=-1e18, most=1e18), 4_096),
        "violation": _WORDS,
    },
    worker_pb2.DrainWorkerRequest: {"wait": _FLAG},
    worker_pb2.DrainWorkerResponse: {"outcome": _DRAINED},
    worker_pb2.SetRoleRequest: {"role": _WORKER_ROLE},
    worker_pb2.SetRoleResponse: {"former_role": _WORKER_ROLE},
    kv_pb2.LeasePrefixRequest: {
        "request_id": _NAME,
        "attempt": _COUNT,
        "importer": _MEMBER,
        "block_hashes": Octets(MAX_PREFIX_BLOCKS * _HASH_BYTES, least=_HASH_BYTES, unit=_HASH_BYTES),
        "min_blocks": _COUNT,
    },
    kv_pb2.LeasePrefixResponse: {"ticket": _SIGNED_OR_NONE, "num_blocks": _COUNT},
    kv_pb2.OpenLinkCheckRequest: {
        "importer": _MEMBER,
        "signature": _SIGNATURE,
        "layout": _REQUIRED,
        "transports": _TRANSPORTS,
        "endpoints": Table(_ENDPOINT, 32),
    },
    kv_pb2.LinkCheckPath: {"transport": _NAME, "endpoint": _ENDPOINT, "reason": _WORDS},
    kv_pb2.OpenLinkCheckResponse: {
        "epoch": _OPTIONAL,  # the answer that ends a probe has none
        "paths": Many(_REQUIRED, 64),
        "block_ids": _IDS,
        "open_s": _SECONDS,
    },
    kv_pb2.Ticket: {
        "ticket_id": _TICKET_ID,
        "exporter_id": _NAME,
        "exporter_incarnation": _NAME,
        "exporter_address": _ADDRESS,
        "importer": _MEMBER,
        "request_id": _NAME,
        "attempt": _COUNT,
        "num_tokens": Whole(least=1),
        "prompt_hash": _HASH,
        "num_choices": Whole(most=_MOST_CHOICES),
        "expires_at_s": Real(most=1e12),
    },
    kv_pb2.SignedTicket: {"ticket": Octets(1 << 16), "signature": _SIGNATURE},
    kv_pb2.Epoch: {
        "member_id": _NAME,
        "incarnation": _NAME,
        "ticket_id": _TICKET_ID,
        "attempt": _COUNT,
    },
    kv_pb2.ImporterMessage: {"attach": _OPTIONAL, "renew": _OPTIONAL, "settle": _OPTIONAL},
    kv_pb2.Attach: {
        "ticket": _REQUIRED,
        "transports": _TRANSPORTS,
        "layout": _REQUIRED,
        "endpoints": Table(_ENDPOINT, 32),
        "protocol_oldest": _COUNT,
        "protocol_newest": _COUNT,
        "digests": Many(_NAME, 32),
        "reads_then": _FLAG,
    },
    kv_pb2.LayoutFingerprint: {
        "weights": Text(),
        "model_config": Text(),
        "dtype": Text(),
        "block_table": Text(),
        "wire_dtype": EnumValue.of(kv_pb2.WireDtype),
        "kv_format": _COUNT,
    },
    kv_pb2.Renew: {"wait_depth": Whole(most=MAX_WAIT_DEPTH), "wait_mark": _UINT32},
    kv_pb2.Settle: {
        "epoch": _REQUIRED,
        "outcome": EnumValue.of(kv_pb2.Settle.Outcome),
        "reason": Text(),
    },
    kv_pb2.ExporterMessage: {
        **dict.fromkeys(("accepted", "refused", "sealed", "finished", "failed", "settled"), _OPTIONAL),
        "then": Many(_REQUIRED, 65_536),
    },
    kv_pb2.Accepted: {
        "epoch": _REQUIRED,
        "transport": _NAME,
        "endpoint": _ENDPOINT,
        "lease_s": _LEASE,
        "max_lease_s": _LEASE,
        "alternatives": Many(_REQUIRED, 32),
        "protocol": _COUNT,
        "digest": Text(),
    },
    kv_pb2.TransportEndpoint: {"transport": _NAME, "endpoint": _ENDPOINT},
    kv_pb2.Refused: {"reason": _NAME, "detail": _WORDS},
    kv_pb2.Sealed: {
        "epoch": _REQUIRED,
        "first_index": _COUNT,
        "block_ids": _SOME_IDS,
        "digests": _DIGESTS,
        "unverified_block_ids": _IDS,
    },
    kv_pb2.Finished: {
        "epoch": _REQUIRED,
        "first_tokens": Many(_REQUIRED, _MOST_CHOICES),
        "num_tokens": Whole(least=1),
        "prompt_hash": _HASH,
        "tail": _OPTIONAL,
        "age_s": _SIGNED_SECONDS,
    },
    kv_pb2.FirstToken: {"token_id": _COUNT, "ended": _FLAG},
    kv_pb2.TailBlock: {"block_id": _UINT32, "digest": _DIGEST, "num_valid": Whole(least=1), "is_unverified": _FLAG},
    kv_pb2.Failed: {"epoch": _REQUIRED, "reason": _NAME, "detail": _WORDS},
    kv_pb2.Settled: {"epoch": _REQUIRED, "valid": _FLAG},
}
