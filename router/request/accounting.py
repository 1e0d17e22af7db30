"""What a request leaves behind in the router's figures. Counts only; decides nothing."""

from collections.abc import Sequence

from cluster.observe.telemetry import Telemetry
from router.requests import ChoiceDelta, Ledger


class RequestAccount:
    """One request's, from its arrival to its end."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._last_token_s: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._admitted = False

    @property
    def num_tokens(self) -> int:
        """That the client has been given, over all choices."""
        return sum(self._num_tokens.values())

    def admitted(self, num_prompt_tokens: int) -> None:
        self._admitted = True
        self._telemetry.count("tandem_prompt_tokens_total", num_prompt_tokens)
        self._telemetry.observe("tandem_prompt_length_tokens", num_prompt_tokens)

    def handed_over(self, deltas: Sequence[ChoiceDelta], now_s: float) -> None:
        for delta in deltas:
            num_tokens = len(delta.token_ids)
            if not num_tokens:
                continue
            last_s = self._last_token_s.get(delta.choice)
            if last_s is not None:
                self._telemetry.observe("tandem_inter_token_seconds", (now_s - last_s) / num_tokens)
            self._last_token_s[delta.choice] = now_s
            self._num_tokens[delta.choice] = self._num_tokens.get(delta.choice, 0) + num_tokens
            self._telemetry.count("tandem_generated_tokens_total", num_tokens)

    def ended(self, outcome: str, ledger: Ledger) -> None:
        """`outcome`: ok, or the reason of an error."""
        self._telemetry.count("tandem_requests_total", outcome=outcome)
        if not self._admitted:
            self._telemetry.count("tandem_requests_refused_total", reason=outcome)
            return
        for phase in ledger.phases:
            self._telemetry.observe("tandem_phase_seconds", phase.duration_s, phase=phase.name)
        self._telemetry.observe("tandem_request_seconds", ledger.wall_s)
        if self._num_tokens:
            self._telemetry.observe("tandem_ttft_seconds", ledger.ttft_s)
        for num_tokens in self._num_tokens.values():
            self._telemetry.observe("tandem_output_length_tokens", num_tokens)
