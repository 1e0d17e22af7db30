"""How well a cluster predicted the times of requests that it has served, from what its router explains about them."""

from collections.abc import Iterable, Sequence

import grpc

from tandem.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 10.0
_LEAST_TOKENS = 8  # fewer say little about the time between tokens


async def prediction_errors(address: str, admin_key: str, request_ids: Sequence[str]) -> dict[str, list[float]]:
    """Return the relative errors of the predicted TTFT and time between tokens, of those requests that ended well at
    their first workers."""
    async with grpc.aio.insecure_channel(address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        shown = (("authorization", f"Bearer {admin_key}"),)
        answers = [
            await admin.Explain(admin_pb2.ExplainRequest(request=name), metadata=shown, timeout=_TIMEOUT_S)
            for name in request_ids
        ]
    return errors_of(explained for answer in answers for explained in answer.requests)


def errors_of(requests: Iterable[admin_pb2.RequestExplanation]) -> dict[str, list[float]]:
    """Return the relative errors of "ttft" and "itl"."""
    errors: dict[str, list[float]] = {"ttft": [], "itl": []}
    for request in requests:
        if request.outcome != "ok" or len(request.placements) != 1 or request.placements[0].failure:
            continue
        (placement,) = request.placements
        for candidate in placement.candidates:
            if not (candidate.is_chosen and candidate.HasField("prediction")):
                continue
            ttft_s = request.ttft_s - placement.after_s
            if ttft_s > 0:
                errors["ttft"].append(abs(candidate.prediction.ttft_s - ttft_s) / ttft_s)
            if request.num_tokens >= _LEAST_TOKENS and request.itl_s > 0:
                errors["itl"].append(abs(candidate.prediction.itl_s - request.itl_s) / request.itl_s)
    return errors
