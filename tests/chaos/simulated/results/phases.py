"""The messages that begin and end each phase of a request."""

from typing import Any

from tandem.internal.v1 import kv_pb2, worker_pb2
from tests.chaos.simulated.schedules.mishaps import Phase

ENDS_WITH: dict[Phase, Phase | None] = {
    Phase.QUEUED: Phase.PREFILLING,
    Phase.PREFILLING: Phase.FIRST_TOKEN,
    Phase.FIRST_TOKEN: Phase.DECODING,
    Phase.PULLING: Phase.SETTLING,
    Phase.SETTLING: Phase.DECODING,
    Phase.DECODING: None,
}
_ONEOFS = {
    worker_pb2.PrefillEvent: "event",
    kv_pb2.ImporterMessage: "message",
    kv_pb2.ExporterMessage: "message",
    worker_pb2.RouterMessage: "message",
    worker_pb2.WorkerMessage: "message",
}
BEGINS = {
    ("/tandem.internal.v1.PrefillWorker/Prefill", "PrefillRequest"): Phase.QUEUED,
    ("/tandem.internal.v1.PrefillWorker/Prefill", "accepted"): Phase.PREFILLING,
    ("/tandem.internal.v1.PrefillWorker/Prefill", "first_tokens"): Phase.FIRST_TOKEN,
    ("/tandem.internal.v1.KvTransfer/HandOff", "attach"): Phase.PULLING,
    ("/tandem.internal.v1.KvTransfer/HandOff", "settle"): Phase.SETTLING,
    ("/tandem.internal.v1.DecodeWorker/Connect", "step"): Phase.DECODING,
}


def kind_of(message: Any) -> str:
    """Return the kind of a message with a oneof, or else its type."""
    oneof = _ONEOFS.get(type(message))
    return str(message.WhichOneof(oneof)) if oneof is not None else type(message).__name__
