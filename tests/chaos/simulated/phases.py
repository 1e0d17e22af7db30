"""Which message begins which phase of a request, and with which other one it ends."""

from typing import Any

from tandem.v1 import kv_pb2, worker_pb2
from tests.chaos.simulated.schedule import Phase

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
    ("/tandem.v1.PrefillWorker/Prefill", "PrefillRequest"): Phase.QUEUED,
    ("/tandem.v1.PrefillWorker/Prefill", "accepted"): Phase.PREFILLING,
    ("/tandem.v1.PrefillWorker/Prefill", "first_tokens"): Phase.FIRST_TOKEN,
    ("/tandem.v1.KvTransfer/HandOff", "attach"): Phase.PULLING,
    ("/tandem.v1.KvTransfer/HandOff", "settle"): Phase.SETTLING,
    ("/tandem.v1.DecodeWorker/Connect", "step"): Phase.DECODING,
}


def kind_of(message: Any) -> str:
    """Of a message that may be one of several, which; else its type."""
    oneof = _ONEOFS.get(type(message))
    return str(message.WhichOneof(oneof)) if oneof is not None else type(message).__name__
