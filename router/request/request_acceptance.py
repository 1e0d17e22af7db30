"""The acceptance that a client receives for each admitted request, and sends when it resumes the request.

An acceptance names one stream of one request: its id, the API key that made it, the instant at which its prompt was
rendered, and digests of its prompt and of its resolved parameters. It is signed with the cluster's keys, so that every
router of the cluster can check it. It never expires: its age affects only the place in the workers' queues.
"""

import hashlib
import hmac
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.auth.keys import SIGNATURE_BYTES, ClusterKeys, Purpose
from cluster.errors import (
    AcceptanceInvalid,
    AcceptanceMissing,
    AcceptanceOfAnotherClient,
    PromptChanged,
    RequestChanged,
)
from cluster.messages import LogitRules
from cluster.protocol.hashing import pack_ids
from cluster.request_size import NO_LIMITS
from router.request.validation import ResolvedRequest, resolve
from router.requests import GenerateRequest
from router.text.model_files import ModelInfo

_VERSION = 1
# Version, stream id, microseconds since 1970 of rendering and of the deadline, digests of client, prompt, parameters.
_BODY = struct.Struct(">B16sQQ16s32s32s")
ACCEPTANCE_BYTES = _BODY.size + SIGNATURE_BYTES
STREAM_ID_BYTES = 16
_CLOCK_LEEWAY_US = 60_000_000  # between the routers of a cluster
_LAST_US = 1 << 63


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The signed content of an acceptance: the stream, its owner, and digests of its prompt and parameters."""

    stream_id: bytes  # random; the key of the stream on every router that serves it
    rendered_at_us: int  # UTC, since 1970: what a chat template takes for the present
    ends_at_us: int  # the first deadline, by the wall clock of the router that accepted it
    client_digest: bytes
    prompt_digest: bytes
    parameters_digest: bytes

    def is_recent(self, now_us: int) -> bool:
        """Return whether the first deadline has not passed. Only then does a resumed request keep its place in
        queues."""
        return now_us <= self.ends_at_us + _CLOCK_LEEWAY_US

    def resolved(
        self,
        request: GenerateRequest,
        prompt_token_ids: tuple[int, ...],
        model: ModelInfo,
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> ResolvedRequest:
        """Resolve the request and check that it is the one that was accepted. Raises PromptChanged, RequestChanged,
        InvalidRequest.

        The router's own limits on lengths do not apply: the request was admitted under those of another router.
        """
        if not hmac.compare_digest(self.prompt_digest, _prompt_digest(pack_ids(prompt_token_ids))):
            raise PromptChanged(
                "this router makes other tokens of the prompt than the router that accepted the request: send the same"
                " prompt, or ask a router with the same tokenizer and chat template"
            )
        resolved = resolve(request, prompt_token_ids, replace(model, lengths=NO_LIMITS), bad_words)
        if not hmac.compare_digest(self.parameters_digest, _parameters_digest(resolved, model)):
            raise RequestChanged(
                "this router resolves other parameters than those that were accepted: send every field as the first"
                " time and those of AcceptedRequest, or ask a router with the same model files and the same"
                " --tool-call-parser and --reasoning-parser"
            )
        return resolved


def accept(
    request: GenerateRequest,
    resolved: ResolvedRequest,
    model: ModelInfo,
    *,
    stream_id: bytes,
    rendered_at_us: int,
    timeout_s: float,
) -> Acceptance:
    """Return the acceptance of a new request. `timeout_s` counts from `rendered_at_us`. That of a request that cannot
    be resumed has no digests, which take 3 ms for a prompt of 100,000 tokens."""
    is_resumable = request.num_bytes > 0
    return Acceptance(
        stream_id=stream_id,
        rendered_at_us=rendered_at_us,
        ends_at_us=int(min(rendered_at_us + timeout_s * 1e6, _LAST_US)),
        client_digest=_client_digest(request.client) if is_resumable else b"",
        prompt_digest=_prompt_digest(resolved.packed_prompt) if is_resumable else b"",
        parameters_digest=_parameters_digest(resolved, model) if is_resumable else b"",
    )


class AcceptanceSigner:
    def __init__(self, keys: ClusterKeys) -> None:
        self._keys = keys

    def sign(self, request_id: str, acceptance: Acceptance) -> bytes:
        """Return `ACCEPTANCE_BYTES` bytes for the client; none if the request cannot be resumed. Equal acceptances give
        equal bytes."""
        if not acceptance.parameters_digest:
            return b""
        body = _BODY.pack(
            _VERSION,
            acceptance.stream_id,
            acceptance.rendered_at_us,
            acceptance.ends_at_us,
            acceptance.client_digest,
            acceptance.prompt_digest,
            acceptance.parameters_digest,
        )
        return body + self._keys.sign(Purpose.ACCEPTANCES, _signed(request_id, body))

    def shown(self, request: GenerateRequest) -> Acceptance:
        """Return the acceptance of a resumed request, after checking its signature and its client.

        Raises AcceptanceMissing, AcceptanceInvalid, AcceptanceOfAnotherClient.
        """
        token = request.acceptance
        if not token:
            raise AcceptanceMissing(
                "resume_from needs the acceptance that came with AcceptedRequest; a request without one must begin as a"
                " new request"
            )
        body, signature = token[: _BODY.size], token[_BODY.size :]
        signed = _signed(request.request_id, body)
        if len(token) != ACCEPTANCE_BYTES or not self._keys.verify(Purpose.ACCEPTANCES, signed, signature):
            raise AcceptanceInvalid(
                "resume_from.acceptance was not given by this cluster for this request_id; send the bytes of"
                " AcceptedRequest.acceptance unchanged"
            )
        version, *fields = _BODY.unpack(body)
        assert version == _VERSION, "the signature covers the version"
        acceptance = Acceptance(*fields)
        if not hmac.compare_digest(acceptance.client_digest, _client_digest(request.client)):
            raise AcceptanceOfAnotherClient("the request was made with another API key; resume it with that key")
        return acceptance


def _signed(request_id: str, body: bytes) -> bytes:
    named = request_id.encode()
    return struct.pack(">I", len(named)) + named + body


def client_of(authorization: str) -> bytes:
    """Return an identifier of the client with this API key; empty if the router requires no key."""
    return hashlib.sha256(b"tandem client\0" + authorization.encode()).digest() if authorization else b""


def _client_digest(client: bytes) -> bytes:
    return hashlib.sha256(b"tandem acceptance client\0" + client).digest()[:16]


def _prompt_digest(packed: bytes) -> bytes:
    return hashlib.sha256(packed).digest()


def _parameters_digest(resolved: ResolvedRequest, model: ModelInfo) -> bytes:
    """Return a digest of everything in `resolved` except the prompt, and of the tokenizer: a resumed request replays
    its text and looks for stop strings in it."""
    sampling, stops = resolved.sampling, resolved.stops
    fields = (
        [model.name, model.tokenizer_digest, resolved.vocab_size],
        [_as_travelled(value) for value in (sampling.temperature, sampling.top_p, sampling.min_p)],
        [sampling.top_k, sampling.num_logprobs],
        [stops.max_tokens, stops.min_tokens, sorted(stops.stop_token_ids)],
        [list(resolved.stop_strings), sorted(resolved.named_stop_token_ids)],
        [resolved.includes_stop, resolved.skips_special_tokens],
        [resolved.seed, list(resolved.seeds)],
        [resolved.cache_salt, resolved.priority, resolved.is_batch],
        _rules_fields(sampling.rules or LogitRules()),
        [resolved.grammar.digest.hex() if resolved.grammar is not None else "", resolved.num_prompt_logprobs],
    )
    return hashlib.sha256(json.dumps(fields).encode()).digest()


def _rules_fields(rules: LogitRules) -> list[object]:
    penalties = rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
    return [
        [[token_id, _as_travelled(bias)] for token_id, bias in rules.logit_bias],
        list(map(_as_travelled, penalties)),
        [list(rules.allowed_token_ids), list(map(list, rules.bad_words))],
    ]


def _as_travelled(value: float) -> str:
    """Return the value rounded to the 32 bits in which AcceptedRequest carries it, because a default of 0.7 comes back
    as another double.
    """
    return struct.pack(">f", value).hex()
