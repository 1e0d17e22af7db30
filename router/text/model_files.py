"""Reads the properties of a model from its small files; cluster/grammar/tokenizer_files.py finds them.

Never reads weights, and does not need the library that runs the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError
from cluster.grammar.tokenizer_files import read_json
from cluster.messages import LogitRules, Sampling
from cluster.request_size import NO_LIMITS, LengthLimits

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")
PENALTY_RANGES = {  # as at OpenAI; vLLM's repetition_penalty has no upper bound
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.001, 1000.0),
}
# Fields of generation_config.json that Tandem does not have, with the value that changes nothing.
_NEUTRAL: Mapping[str, object] = {
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "num_beams": 1,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of the served model that the router uses."""

    model: str  # folder or hub name
    name: str  # what clients call it
    max_model_len: int  # most tokens of prompt and continuation
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    bos_token_id: int | None
    eos_token_ids: frozenset[int]  # of config.json and generation_config.json together
    default_sampling: Sampling  # of generation_config.json, over temperature 1 and nothing cut off
    default_max_tokens: int | None  # its max_new_tokens
    lengths: LengthLimits = NO_LIMITS
    tokenizer_digest: str = ""  # of tokenizer.json, and of the tokens that tokenizer_config.json adds
    notes: tuple[str, ...] = ()  # settings of the files that are not applied; logged once at start


def model_info(
    model: str, folder: Path, *, served_model_name: str, max_model_len: int, has_chat_template: bool
) -> ModelInfo:
    """Read config.json and generation_config.json. `max_model_len` 0 means the model's own limit. Raises
    ConfigError."""
    whole = read_json(folder / "config.json")
    if not whole:
        raise ConfigError(f"--model {model}: the folder holds no config.json; name one that holds a model")
    inner = whole.get("text_config")
    config = {**whole, **inner} if isinstance(inner, dict) else whole
    generation = read_json(folder / "generation_config.json")
    bos = config.get("bos_token_id")
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return ModelInfo(
        model=model,
        name=served_model_name or Path(model.rstrip("/")).name,
        max_model_len=max_model_len or _own_length(config, model),
        vocab_size=_positive(config.get("vocab_size"), f"--model {model}: config.json has no vocab_size"),
        has_tokenizer=has_tokenizer,
        has_chat_template=has_chat_template,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_token_ids(config.get("eos_token_id")) | _token_ids(generation.get("eos_token_id")),
        default_sampling=_default_sampling(generation),
        default_max_tokens=_default_max_tokens(generation),
        notes=(*_generation_notes(generation), *_tokenizer_notes(folder, has_tokenizer)),
    )


def _own_length(config: Json, model: str) -> int:
    length = next((config[key] for key in _LENGTH_KEYS if config.get(key) is not None), None)
    return _positive(length, f"--model {model}: config.json names no longest sequence; give --max-model-len")


def _positive(value: object, message: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(message)
    return value


def _token_ids(value: object) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    return frozenset(i for i in ids if isinstance(i, int))


def _default_sampling(generation: Json) -> Sampling:
    """Return the sampling defaults. `do_sample` is ignored, as in vLLM: greedy sampling is temperature 0."""
    values = {key: generation[key] for key in _SAMPLING_KEYS if generation.get(key) is not None}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"generation_config.json: {key} must not be {value!r}")
    return Sampling(
        temperature=float(values.get("temperature", 1.0)),  # type: ignore[arg-type]  # checked above
        top_k=int(values.get("top_k", 0)),  # type: ignore[call-overload]
        top_p=float(values.get("top_p", 1.0)),  # type: ignore[arg-type]
        min_p=float(values.get("min_p", 0.0)),  # type: ignore[arg-type]
        rules=_default_rules(generation),
    )


def _default_rules(generation: Json) -> LogitRules | None:
    """Return the model's penalties, and `bad_words_ids` and `suppress_tokens` as bad words; as in `transformers`, an
    end-of-sequence token alone is none.
    """
    penalties = {key: generation[key] for key in PENALTY_RANGES if generation.get(key) is not None}
    for key, value in penalties.items():
        least, most = PENALTY_RANGES[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ConfigError(f"generation_config.json: {key} must be from {least:g} to {most:g}, not {value!r}")
    eos = _token_ids(generation.get("eos_token_id"))
    listed, suppressed = generation.get("bad_words_ids") or [], generation.get("suppress_tokens") or []
    if not isinstance(listed, list) or not isinstance(suppressed, list):
        raise ConfigError("generation_config.json: bad_words_ids and suppress_tokens must be lists")
    words = [*map(_word, listed), *((token_id,) for token_id in _word(suppressed))]
    rules = LogitRules(
        **{key: float(value) for key, value in penalties.items()},  # type: ignore[arg-type]
        bad_words=tuple(word for word in words if word and not (len(word) == 1 and word[0] in eos)),
    )
    return None if rules == LogitRules() else rules


def _word(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(token_id, int) and token_id >= 0 for token_id in value):
        raise ConfigError(
            f"generation_config.json: bad_words_ids and suppress_tokens must hold token ids, not {value!r}"
        )
    return tuple(value)


def _default_max_tokens(generation: Json) -> int | None:
    value = generation.get("max_new_tokens")
    return value if isinstance(value, int) and value > 0 else None


def _generation_notes(generation: Json) -> tuple[str, ...]:
    return tuple(
        f"generation_config.json: {key}={generation[key]} is not applied"
        for key, neutral in _NEUTRAL.items()
        if generation.get(key) not in (None, neutral)
    )


def _tokenizer_notes(folder: Path, has_tokenizer: bool) -> tuple[str, ...]:
    others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).exists()]
    if has_tokenizer or not others:
        return ()
    return (f"{others[0]} is not read: token ids only, until a tokenizer.json stands beside it",)
