"""At which lengths a model may begin to behave differently, read from its configuration as a dictionary. Pure."""

from collections.abc import Iterator, Mapping

# Keys whose whole numbers are lengths in tokens: attention windows, attention chunks, position-dependent query scales.
_LENGTH_WORDS = ("window", "chunk", "floor_scale")
# Rotary frequencies of these kinds depend on nothing but the position itself.
_STATIC_ROTARY = frozenset({"default", "linear", "yarn", "llama3", "proportional", "mrope"})
_ROTARY_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")


def thresholds(config: Mapping[str, object], max_model_len: int) -> tuple[int, ...]:
    """Lengths that a sequence of at most `max_model_len` tokens can pass, ascending."""
    lengths = {value for key, value in _numbers(config) if any(word in key for word in _LENGTH_WORDS)}
    if length_dependent_rotary(config):
        lengths |= {value for key, value in _numbers(config) if key in _ROTARY_LENGTHS}
    return tuple(sorted(length for length in lengths if 0 < length < max_model_len))


def length_dependent_rotary(config: Mapping[str, object]) -> str | None:
    """The kind of rotary scaling that looks at the length of its input, if the model has one."""
    for key, value in _leaves(config):
        if key in ("rope_type", "type") and isinstance(value, str) and value not in _STATIC_ROTARY:
            return value
    return None


def _numbers(config: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    for key, value in _leaves(config):
        if isinstance(value, int) and not isinstance(value, bool):
            yield key, value


def _leaves(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield str(key), value
