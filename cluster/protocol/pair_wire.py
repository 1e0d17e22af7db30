"""The figures of pairs as messages (tandem/v1) and back."""

from collections.abc import Iterable

from cluster.messages import PairFigure
from cluster.protocol.wire import member_from_wire
from tandem.v1 import worker_pb2


def figures_to_wire(figures: Iterable[PairFigure]) -> list[worker_pb2.PairFigures]:
    return [
        worker_pb2.PairFigures(
            exporter=str(figure.exporter),
            transport=figure.transport,
            bytes_per_s=figure.bytes_per_s,
            latency_s=figure.latency_s,
        )
        for figure in figures
    ]


def figures_from_wire(messages: Iterable[worker_pb2.PairFigures]) -> tuple[PairFigure, ...]:
    """In their order, of a checked message."""
    return tuple(map(_figure_from_wire, messages))


def _figure_from_wire(message: worker_pb2.PairFigures) -> PairFigure:
    return PairFigure(
        exporter=member_from_wire(message.exporter),
        transport=message.transport,
        bytes_per_s=message.bytes_per_s,
        latency_s=message.latency_s,
    )
