"""Conversion of link speeds to and from the wire."""

import math

import pytest

from cluster.errors import MalformedMessage
from cluster.messages import LinkSpeed, MemberId
from cluster.protocol.received import checked
from cluster.protocol.report_wire import link_speeds_from_wire, link_speeds_to_wire
from tandem.internal.v1 import worker_pb2
from tandem.v1 import admin_pb2


def test_link_speeds_keep_their_values_and_order() -> None:
    speeds = (
        LinkSpeed(MemberId("prefill-1", "b"), "shm", 8.5e9, 0.0),
        LinkSpeed(MemberId("prefill-0", "a"), "tcp", 1.25e8, 0.004, 3.5),
    )
    assert link_speeds_from_wire(link_speeds_to_wire(speeds)) == speeds


@pytest.mark.parametrize(
    ("exporter", "bytes_per_s", "latency_s"),
    [
        ("prefill-0", 1e9, 0.0),
        ("p@a", 0.0, 0.0),
        ("p@a", 1e-310, 0.0),
        ("p@a", math.inf, 0.0),
        ("p@a", math.nan, 0.0),
        ("p@a", 1e9, -1.0),
    ],
)
def test_impossible_link_speeds_are_refused(exporter: str, bytes_per_s: float, latency_s: float) -> None:
    message = admin_pb2.LinkSpeed(exporter=exporter, transport="tcp", bytes_per_s=bytes_per_s, latency_s=latency_s)
    with pytest.raises(MalformedMessage):
        checked(worker_pb2.Heartbeat(links=[message]))
