"""When a sequence ends by its tokens. Pure. Prefill and decode workers agree on it; stop strings are the router's."""

from cluster.messages import FinishReason, TokenStops

_NONE: frozenset[int] = frozenset()


def banned_token_ids(stops: TokenStops, num_output: int) -> frozenset[int]:
    """Tokens that may not be drawn after so many output tokens: what would end the sequence too early."""
    return stops.stop_token_ids if num_output < stops.min_tokens else _NONE


def finish_reason(stops: TokenStops, token_id: int, num_output: int) -> FinishReason | None:
    """Whether a sequence ends with this token, its `num_output`-th (the first has 1)."""
    if token_id in stops.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= stops.max_tokens else None
