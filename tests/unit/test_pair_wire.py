"""Figures of pairs on the wire."""

import math

import pytest

from cluster.errors import MalformedMessage
from cluster.messages import MemberId, PairFigure
from cluster.protocol.pair_wire import figures_from_wire, figures_to_wire
from cluster.protocol.received import checked
from tandem.v1 import worker_pb2


def test_figures_travel_as_they_are_and_in_order() -> None:
    figures = (
        PairFigure(MemberId("prefill-1", "b"), "shm", 8.5e9, 0.0),
        PairFigure(MemberId("prefill-0", "a"), "tcp", 1.25e8, 0.004),
    )
    assert figures_from_wire(figures_to_wire(figures)) == figures


@pytest.mark.parametrize(
    ("exporter", "bytes_per_s", "latency_s"),
    [("prefill-0", 1e9, 0.0), ("p@a", 0.0, 0.0), ("p@a", math.inf, 0.0), ("p@a", math.nan, 0.0), ("p@a", 1e9, -1.0)],
)
def test_what_no_measurement_can_give_is_refused(exporter: str, bytes_per_s: float, latency_s: float) -> None:
    message = worker_pb2.PairFigures(exporter=exporter, transport="tcp", bytes_per_s=bytes_per_s, latency_s=latency_s)
    with pytest.raises(MalformedMessage):
        checked(worker_pb2.Heartbeat(pairs=[message]))
