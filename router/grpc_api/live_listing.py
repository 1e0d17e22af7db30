"""What a router is serving now, as operators read it: each live request's phase, its workers, its tokens."""

from collections.abc import Iterable

from router.request.arrivals import Arrival
from tandem.v1 import admin_pb2


def live_requests_to_wire(arrivals: Iterable[Arrival], now_s: float) -> list[admin_pb2.LiveRequest]:
    """In their order. Until its first token a request is in `prefill_queue`: only then its worker says how much of that
    was prefill."""
    return [_to_wire(arrival, now_s) for arrival in arrivals]


def _to_wire(arrival: Arrival, now_s: float) -> admin_pb2.LiveRequest:
    ledger = arrival.ledger
    return admin_pb2.LiveRequest(
        request_id=arrival.request_id,
        phase=ledger.phase,
        age_s=now_s - ledger.began_s,
        prefill_member=ledger.prefill_member,
        decode_member=ledger.decode_member,
        num_tokens=arrival.account.num_tokens,
        reasons=ledger.reasons,
        label=arrival.request.label,
    )
