"""Checks the logit rules of a request and resolves them over the model's own. Pure."""

from collections.abc import Sequence

from cluster.errors import InvalidRequest, NoTokenizer
from cluster.messages import LogitRules, TokenStops
from router.requests import SamplingParams
from router.text.model_files import PENALTY_RANGES, ModelInfo

MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_WORD_TOKENS = 4096  # of all bad words together, those of the model included: they travel to workers
MAX_BIAS = 100.0
_MOST_ENTRIES = {
    "logit_bias": MAX_LOGIT_BIAS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
}


def check_logit_rules(params: SamplingParams, model: ModelInfo) -> None:
    """Check the logit rules of a request. Raises InvalidRequest, NoTokenizer."""
    for name, (least, most) in PENALTY_RANGES.items():
        value = getattr(params, name)
        if not (value is None or least <= value <= most):
            raise InvalidRequest(f"{name} must be from {least:g} to {most:g}, not {value}", param=name)
    for name, most_entries in _MOST_ENTRIES.items():
        if (num_entries := len(getattr(params, name))) > most_entries:
            raise InvalidRequest(f"{name} must have at most {most_entries} entries, not {num_entries}", param=name)
    for token_id, bias in params.logit_bias:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias of token {token_id} must be from {-MAX_BIAS:g} to {MAX_BIAS:g}, not {bias}",
                param="logit_bias",
            )
    _check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], model)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids, model)
    if not all(word.strip() and len(word) <= MAX_BAD_WORD_CHARACTERS for word in params.bad_words):
        raise InvalidRequest(
            f"each of bad_words must have 1 to {MAX_BAD_WORD_CHARACTERS} characters, and not only spaces",
            param="bad_words",
        )
    if params.bad_words and not model.has_tokenizer:
        raise NoTokenizer(
            f"the model {model.name} has no tokenizer: send logit_bias instead of bad_words", param="bad_words"
        )


def resolved_logit_rules(
    params: SamplingParams, bad_words: Sequence[tuple[int, ...]], stops: TokenStops, model: ModelInfo
) -> LogitRules | None:
    """Return the rules of a request that passed the check; None if they change nothing. `bad_words`: the request's, in
    tokens. Raises InvalidRequest if no token might be left to draw."""
    default = model.default_sampling.rules or LogitRules()
    rules = LogitRules(
        logit_bias=params.logit_bias,
        repetition_penalty=_or(params.repetition_penalty, default.repetition_penalty),
        frequency_penalty=_or(params.frequency_penalty, default.frequency_penalty),
        presence_penalty=_or(params.presence_penalty, default.presence_penalty),
        allowed_token_ids=tuple(sorted(set(params.allowed_token_ids))),
        bad_words=tuple(dict.fromkeys((*default.bad_words, *bad_words))),
    )
    num_tokens = sum(map(len, rules.bad_words))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"bad_words have {num_tokens} tokens, each counted with and without a space before it; at most"
            f" {MAX_BAD_WORD_TOKENS}",
            param="bad_words",
        )
    _check_drawable(rules, stops, model)
    return None if rules == LogitRules() else rules


def _check_drawable(rules: LogitRules, stops: TokenStops, model: ModelInfo) -> None:
    """Check that at every position some token is left to draw, whatever precedes it."""
    excluded = {word[-1] for word in rules.bad_words}
    if stops.min_tokens:
        excluded |= stops.stop_token_ids
    num_left = (
        len(set(rules.allowed_token_ids) - excluded) if rules.allowed_token_ids else model.vocab_size - len(excluded)
    )
    if num_left < 1:
        raise InvalidRequest(
            "no token may be left to draw: allowed_token_ids must have one that ends no bad word and, with min_tokens,"
            " is no stop token",
            param="allowed_token_ids",
        )


def _check_token_ids(name: str, token_ids: Sequence[int], model: ModelInfo) -> None:
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < model.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"{name}: token id {wrong} is outside the vocabulary: 0 to {model.vocab_size - 1}", param=name
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
