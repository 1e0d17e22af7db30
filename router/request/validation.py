"""Checks a request and resolves its defaults, before any work is spent on it.

`check` looks at everything except the prompt's tokens, so that an invalid request is not even tokenized; `resolve` does
the rest. `MessageLimits` checks that an admitted request still fits one message when all its tokens travel with it.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.errors import ContextLengthExceeded, InvalidRequest, NoTokenizer, RequestTooLarge, UnknownModel
from cluster.messages import MAX_GRAMMAR_BYTES, MAX_PROMPT_LOGPROBS, Grammar, LogitRules, Sampling, TokenStops
from cluster.protocol.field_rules import LONGEST_S
from cluster.protocol.hashing import pack_ids
from router.request.logit_rules import check_logit_rules, resolved_logit_rules
from router.requests import Accepted, GenerateRequest, ResumedChoice, SamplingParams, StopConditions
from router.text.model_files import ModelInfo

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STREAM_INTERVAL = 4096
MAX_REQUEST_ID_CHARACTERS = 128
MAX_LABEL_CHARACTERS = 160  # an x-request-id and the number of the prompt
MAX_CACHE_SALT_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A checked request without any open default, ready for the workers."""

    prompt_token_ids: tuple[int, ...]
    packed_prompt: bytes  # the same, packed once for all messages and hashes
    sampling: Sampling
    stops: TokenStops
    stop_strings: tuple[str, ...]
    includes_stop: bool  # the text ends behind the stop string or stop token
    skips_special_tokens: bool  # in the text
    named_stop_token_ids: frozenset[int]  # of the client: only these are reported as stop_cause
    seed: int
    seeds: tuple[int, ...]  # one per choice, made from `seed`; a retry draws the same tokens
    cache_salt: str
    priority: int
    is_batch: bool
    vocab_size: int  # the model's
    grammar: Grammar | None = None
    num_prompt_logprobs: int | None = None  # of the most likely tokens at each position of the prompt

    def at_most(self, num_output: int) -> "ResolvedRequest":
        """Return the request with `max_tokens` reduced to what a worker can hold. Unchanged if that is less than 1 or
        less than `min_tokens`."""
        fewer = min(self.stops.max_tokens, num_output)
        if fewer < max(1, self.stops.min_tokens):
            return self
        return replace(self, stops=replace(self.stops, max_tokens=fewer))

    def accepted(self, params: SamplingParams, acceptance: bytes) -> Accepted:
        """Return the values that the client sends so that another router resolves the request to the same values.
        `params`: the request's own."""
        sampling, rules = self.sampling, self.sampling.rules or LogitRules()
        resolved = replace(
            params,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=self.seed,
            presence_penalty=rules.presence_penalty,
            frequency_penalty=rules.frequency_penalty,
            repetition_penalty=rules.repetition_penalty,
        )
        return Accepted(resolved, self.stops.max_tokens, acceptance, self.prompt_token_ids)


def check(request: GenerateRequest, model: ModelInfo) -> None:
    """Check everything but the prompt's tokens. Raises InvalidRequest or a subclass; its message says what to
    change."""
    check_model(request.model, model)
    _check_names(request)
    _check_range("n", request.n, 1, MAX_CHOICES)
    _check_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    _check_range("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_range("stream_interval", request.stream_interval, 1, MAX_STREAM_INTERVAL)
    if not -(1 << 31) <= request.priority < 1 << 31:
        raise InvalidRequest(f"priority must fit 32 bits with sign, not {request.priority}", param="priority")
    kept = request.truncate_prompt_tokens
    if not (kept is None or kept == -1 or 1 <= kept <= model.max_model_len):
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or from 1 to the context of {model.max_model_len}, not {kept}",
            param="truncate_prompt_tokens",
        )
    _check_times(request)
    _check_sampling(request.sampling)
    if _has_logit_rules(request.sampling):
        check_logit_rules(request.sampling, model)
    _check_stop(request.stop, model)
    if request.grammar is not None:
        _check_grammar(request, model)
    if request.resume_from is not None:
        _check_resumption(request, request.resume_from, model)


def check_model(name: str, model: ModelInfo) -> None:
    """Check the name of the model; empty means the served one. Raises UnknownModel."""
    if name not in ("", model.name):
        raise UnknownModel(f"there is no model {name!r}; this router serves {model.name!r}", param="model")


def check_token_ids(token_ids: tuple[int, ...], model: ModelInfo, param: str) -> None:
    """Check that all token ids of a field are in the vocabulary. Raises InvalidRequest."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside the vocabulary: 0 to {model.vocab_size - 1}", param=param
            )


def resolve(
    request: GenerateRequest,
    prompt_token_ids: tuple[int, ...],
    model: ModelInfo,
    bad_words: Sequence[tuple[int, ...]] = (),
) -> ResolvedRequest:
    """Resolve all defaults of a request that has passed `check`. `bad_words`: the request's, in tokens. Raises
    InvalidRequest, ContextLengthExceeded."""
    if not prompt_token_ids:
        raise InvalidRequest("the prompt is empty: it must have at least one token", param=request.prompt_field)
    max_tokens = _max_tokens(len(prompt_token_ids), request, model)  # first: it may be too long to look through
    packed_prompt = _packed(prompt_token_ids, model, request)
    _check_prompt_logprobs(request, len(prompt_token_ids))
    if request.stop.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.stop.min_tokens}, more than the {max_tokens} tokens that may be generated",
            param="min_tokens",
        )
    eos = frozenset() if request.stop.ignore_eos else model.eos_token_ids
    seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
    stops = TokenStops(max_tokens, request.stop.min_tokens, eos | frozenset(request.stop.stop_token_ids))
    return ResolvedRequest(
        prompt_token_ids=prompt_token_ids,
        packed_prompt=packed_prompt,
        sampling=_sampling(
            request.sampling, request.logprobs, _rules(request, bad_words, stops, model), model.default_sampling
        ),
        stops=stops,
        stop_strings=request.stop.stop,
        includes_stop=request.stop.include_stop_str_in_output,
        skips_special_tokens=request.skip_special_tokens,
        named_stop_token_ids=frozenset(request.stop.stop_token_ids),
        seed=seed,
        seeds=tuple(_choice_seed(seed, choice) for choice in range(request.n)),
        cache_salt=request.cache_salt,
        priority=request.priority,
        is_batch=request.is_batch,
        vocab_size=model.vocab_size,
        grammar=request.grammar,
        num_prompt_logprobs=request.prompt_logprobs,
    )


def _rules(
    request: GenerateRequest, bad_words: Sequence[tuple[int, ...]], stops: TokenStops, model: ModelInfo
) -> LogitRules | None:
    """Return the rules of the request and the model; None without any, as for most requests. Raises InvalidRequest."""
    params = request.sampling
    if not (_has_logit_rules(params) or bad_words or stops.min_tokens or model.default_sampling.rules):
        return None
    return resolved_logit_rules(params, bad_words, stops, model)


def _has_logit_rules(params: SamplingParams) -> bool:
    """Return whether the client set a field that logit_rules.py checks, which most clients do not."""
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    return penalties != (None, None, None) or bool(params.logit_bias or params.allowed_token_ids or params.bad_words)


def _packed(token_ids: tuple[int, ...], model: ModelInfo, request: GenerateRequest) -> bytes:
    """Check that all token ids of the prompt are in the vocabulary, and pack them. Raises InvalidRequest."""
    try:
        packed = pack_ids(token_ids)  # only unsigned ids, so only the largest one can be outside
    except ValueError:
        packed = b""
    if not packed or max(token_ids) >= model.vocab_size:
        check_token_ids(token_ids, model, request.prompt_field)
    return packed


def _check_prompt_logprobs(request: GenerateRequest, num_prompt: int) -> None:
    if request.prompt_logprobs is None:
        return
    num_values = num_prompt * (1 + request.prompt_logprobs)
    if num_values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs of {request.prompt_logprobs} for {num_prompt} tokens are {num_values} values, and an"
            f" answer has at most {MAX_PROMPT_LOGPROBS}: ask for fewer, or shorten the prompt",
            param="prompt_logprobs",
        )


def _check_names(request: GenerateRequest) -> None:
    both = ("request_id", request.request_id, MAX_REQUEST_ID_CHARACTERS), ("label", request.label, MAX_LABEL_CHARACTERS)
    for name, value, most in both:
        if len(value) > most or not (not value or value.isprintable()):
            raise InvalidRequest(f"{name} must be at most {most} printable characters", param=name)
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARACTERS:
        raise InvalidRequest(f"cache_salt must have at most {MAX_CACHE_SALT_CHARACTERS} characters", param="cache_salt")
    if any("\ud800" <= character <= "\udfff" for character in request.cache_salt):
        raise InvalidRequest("cache_salt has half of a surrogate pair", param="cache_salt")


def _check_times(request: GenerateRequest) -> None:
    if not (request.timeout_s is None or 0 < request.timeout_s <= LONGEST_S):
        raise InvalidRequest(
            f"the request's timeout must be above 0 and at most {LONGEST_S:g} s, not {request.timeout_s}"
        )
    for name, slo_s in (("slo_ttft_s", request.slo_ttft_s), ("slo_tpot_s", request.slo_tpot_s)):
        if not (slo_s is None or 0 < slo_s < math.inf):
            raise InvalidRequest(f"{name} must be positive, not {slo_s}", param=name)


def _check_range(name: str, value: float | None, least: float, most: float) -> None:
    if not (value is None or least <= value <= most):
        raise InvalidRequest(f"{name} must be from {least} to {most}, not {value}", param=name)


def _check_sampling(params: SamplingParams) -> None:
    _check_range("temperature", params.temperature, 0, 2)
    _check_range("min_p", params.min_p, 0, 1)
    top_k, top_p, seed = params.top_k, params.top_p, params.seed
    if not (top_k is None or 0 <= top_k < 1 << 32):
        raise InvalidRequest(f"top_k must be 0 (all) or positive, not {top_k}", param="top_k")
    if not (top_p is None or 0 < top_p <= 1):
        raise InvalidRequest(f"top_p must be above 0 and at most 1, not {top_p}", param="top_p")
    if not (seed is None or 0 <= seed < 1 << 64):
        raise InvalidRequest(f"seed must fit 64 bits without sign, not {seed}", param="seed")


def _check_stop(stop: StopConditions, model: ModelInfo) -> None:
    if stop.max_tokens is not None and stop.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {stop.max_tokens}", param="max_tokens")
    if stop.min_tokens < 0:
        raise InvalidRequest(f"min_tokens must not be negative, not {stop.min_tokens}", param="min_tokens")
    if stop.stop:
        _check_stop_strings(stop.stop, model)
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"at most {MAX_STOP_TOKEN_IDS} stop token ids, not {len(stop.stop_token_ids)}", param="stop_token_ids"
        )
    check_token_ids(stop.stop_token_ids, model, "stop_token_ids")


def _check_stop_strings(stops: tuple[str, ...], model: ModelInfo) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, not {len(stops)}", param="stop")
    if not all(stops):
        raise InvalidRequest("a stop string must not be empty", param="stop")
    if max(map(len, stops)) > MAX_STOP_STRING_CHARACTERS:
        raise InvalidRequest(f"a stop string must have at most {MAX_STOP_STRING_CHARACTERS} characters", param="stop")
    if not model.has_tokenizer:
        raise NoTokenizer(
            f"the model {model.name} has no tokenizer: send stop_token_ids instead of stop strings", param="stop"
        )


def _check_grammar(request: GenerateRequest, model: ModelInfo) -> None:
    """Check that no other field contradicts the grammar, whose content router/grammars/ checks."""
    field = request.grammar_field
    if not model.has_tokenizer:
        raise NoTokenizer(f"the model {model.name} has no tokenizer: leave out {field}", param=field)
    if not model.eos_token_ids:
        raise InvalidRequest(
            f"{field} needs an end-of-sequence token, which the model {model.name} has not", param=field
        )
    if request.stop.ignore_eos:
        raise InvalidRequest(
            f"{field} ends the text with the model's end of sequence: drop ignore_eos", param="ignore_eos"
        )
    if request.stop.min_tokens:
        raise InvalidRequest(f"{field} says where the text may end: drop min_tokens", param="min_tokens")
    for name in ("allowed_token_ids", "bad_words"):
        if getattr(request.sampling, name):
            raise InvalidRequest(
                f"{field} says which tokens may follow: drop allowed_token_ids and bad_words", param=name
            )


def _check_resumption(request: GenerateRequest, choices: tuple[ResumedChoice, ...], model: ModelInfo) -> None:
    """Check the form of the resumed choices. Choice.resume checks their tokens."""
    if not request.request_id:
        raise InvalidRequest("resume_from resumes a request: give its request_id", param="request_id")
    if request.resume_number < 1:
        raise InvalidRequest(
            "resume_from.resume_number counts a request's resumptions from 1, not from 0", param="resume_from"
        )
    if len(choices) != request.n:
        raise InvalidRequest(f"resume_from has {len(choices)} choices, the request {request.n}", param="resume_from")
    for choice in choices:
        if len(choice.token_ids) > model.max_model_len:
            raise InvalidRequest(
                f"a choice of resume_from has {len(choice.token_ids)} tokens, the context {model.max_model_len}",
                param="resume_from",
            )
        check_token_ids(choice.token_ids, model, "resume_from")


def _max_tokens(num_prompt_tokens: int, request: GenerateRequest, model: ModelInfo) -> int:
    stop = request.stop
    room = model.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens; this model's maximum context length is {model.max_model_len}"
            f" tokens: at most {model.max_model_len - 1} leave room for one more",
            num_prompt=num_prompt_tokens,
            most=model.max_model_len - 1,
            param=request.prompt_field,
        )
    wanted, most = stop.max_tokens, model.lengths.most_output(room)
    refusal = model.lengths.refusal(num_prompt_tokens, wanted or 1)
    if refusal is not None:
        raise refusal
    if wanted is None:
        return min(most, stop.default_max_tokens or model.default_max_tokens or most)
    if wanted > room:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {wanted}; this model's maximum context length"
            f" is {model.max_model_len} tokens: ask for at most {room}",
            num_prompt=num_prompt_tokens,
            most=model.max_model_len - wanted,
            param="max_tokens",
        )
    return wanted


def _sampling(
    params: SamplingParams, num_logprobs: int | None, rules: LogitRules | None, defaults: Sampling
) -> Sampling:
    return Sampling(
        temperature=defaults.temperature if params.temperature is None else params.temperature,
        top_k=defaults.top_k if params.top_k is None else params.top_k,
        top_p=defaults.top_p if params.top_p is None else params.top_p,
        min_p=defaults.min_p if params.min_p is None else params.min_p,
        num_logprobs=num_logprobs,
        rules=rules,
    )


def _choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one choice. Choices of a request differ, and neighbouring seeds of a client share no
    choice."""
    digest = hashlib.blake2b(struct.pack("<QI", seed, choice), digest_size=8, person=b"tandem.seed").digest()
    return int.from_bytes(digest, "little")


_TOKEN_BYTES = 4  # of a token id at most: packed to workers; as a varint from clients, for vocabularies up to 2**28
_CHOICE_BYTES = 48  # of a choice without its tokens: tags and lengths, handle, seed, characters, reason of its end
# A resumed message has more than the first, apart from tokens: sampling, max_tokens, acceptance, resume number.
_ACCEPTED_BYTES = 288
# A message to a worker has, apart from tokens: ids, addresses, stop token ids, salt, ticket, sources of prefixes, and a
# grammar.
_JOB_BYTES = 64 * 1024 + MAX_GRAMMAR_BYTES


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """The largest messages that a request may need.

    A request grows: its client resumes it with the tokens of all choices in one message, and routers send the committed
    tokens to workers. It is admitted only if the largest of these messages stays within its receiver's limit."""

    client_bytes: int  # `--max-message-bytes`: the largest message that routers take from a client
    worker_bytes: int  # the largest that workers take from a router

    def most_output(self, num_request_bytes: int, num_prompt: int, num_choices: int) -> int:
        """Return the largest max_tokens per choice with which such a request fits one message; less than 1 if none
        does.

        `num_request_bytes`: the size of the client's message without `resume_from`; 0 if its client cannot resume it.
        """
        to_worker = self.worker_bytes - _JOB_BYTES - _TOKEN_BYTES * num_prompt
        rooms = [to_worker]
        if num_request_bytes:
            rooms.append(self.client_bytes - _ACCEPTED_BYTES - num_request_bytes)
        return (min(rooms) // num_choices - _CHOICE_BYTES) // _TOKEN_BYTES

    def check(self, num_request_bytes: int, num_prompt: int, num_choices: int, max_tokens: int) -> None:
        """Check that a request fits one message. Raises RequestTooLarge."""
        most = self.most_output(num_request_bytes, num_prompt, num_choices)
        if max_tokens <= most:
            return
        change = f"ask for max_tokens of at most {most}, or a smaller n" if most > 0 else "ask for a smaller n"
        raise RequestTooLarge(
            f"with all tokens of {num_choices} x {max_tokens} the request would not fit one message when it is resumed:"
            f" {change}, shorten the prompt, or have the routers started with a larger --max-message-bytes"
            f" ({self.client_bytes} here; workers take {self.worker_bytes})"
        )
