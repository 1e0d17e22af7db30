"""The options of a request in its headers: bodies stay as OpenAI defines them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request

from cluster.accounts.keys import Caller
from cluster.accounts.usage import check_request
from cluster.observe.trace_context import RequestTrace
from cluster.protocol.field_rules import LONGEST_S
from router.requests import GenerateRequest

_LEAST_MS, _MOST_MS = 0.001, LONGEST_S * 1000


def _milliseconds(description: str) -> Any:
    return Field(None, ge=_LEAST_MS, le=_MOST_MS, allow_inf_nan=False, description=description)


class RequestHeaders(BaseModel):
    x_slo_ttft_ms: float | None = _milliseconds(
        "refuse the request at once if its first token is predicted later than this many milliseconds"
    )
    x_slo_tpot_ms: float | None = _milliseconds("the same for the mean time between the tokens of a choice")
    x_request_timeout_ms: float | None = _milliseconds(
        "the request's deadline in milliseconds from its arrival; without it the router's --request-timeout-s applies"
    )
    x_tandem_ledger: Literal["0", "1"] | None = Field(
        None,
        description="1: the response, or the last event of a stream, has ledger: where the request's time went",
    )

    # For the API's document: router/http/edge.py reads it.
    traceparent: str | None = Field(None, description="W3C trace context: the request's spans become its children")

    @property
    def wants_ledger(self) -> bool:
        return self.x_tandem_ledger == "1"

    def apply(self, requests: Sequence[GenerateRequest], arrived: Request) -> list[GenerateRequest]:
        """Add the wishes, the caller, its host's address and the place in traces to the requests of one body. Raises
        LimitReached where they have more sequences than the caller's key allows."""
        caller: Caller = arrived.state.caller
        trace: RequestTrace | None = arrived.state.trace
        check_request(caller, sum(request.n for request in requests), caller.max_priority)
        ttft_s, tpot_s, timeout_s = (
            None if ms is None else ms / 1000
            for ms in (self.x_slo_ttft_ms, self.x_slo_tpot_ms, self.x_request_timeout_ms)
        )
        return [
            replace(
                request,
                caller=caller,
                address=arrived.client.host if arrived.client is not None else "",
                slo_ttft_s=ttft_s,
                slo_tpot_s=tpot_s,
                timeout_s=timeout_s,
                trace=trace.beside() if trace is not None and number else trace,
            )
            for number, request in enumerate(requests)
        ]
