"""Convert between the ServiceTimes of worker.proto and that of cluster/service_times.py."""

from cluster.service_times import DecodeTimes, HandOffTimes, MixedTimes, PrefillTimes, ServiceTimes
from tandem.internal.v1 import worker_pb2


def service_times_to_wire(times: ServiceTimes) -> worker_pb2.ServiceTimes:
    prefill, decode, mixed, hand_off = times.prefill, times.decode, times.mixed, times.hand_off
    return worker_pb2.ServiceTimes(
        prefill=worker_pb2.PrefillTimes(
            step_s=prefill.step_s,
            per_token_s=prefill.per_token_s,
            per_token_context_s=prefill.per_token_context_s,
            relative_error=prefill.relative_error,
        ),
        decode=worker_pb2.DecodeTimes(
            step_s=decode.step_s,
            per_sequence_s=decode.per_sequence_s,
            per_context_token_s=decode.per_context_token_s,
            relative_error=decode.relative_error,
        ),
        mixed=worker_pb2.MixedTimes(factor=mixed.factor, relative_error=mixed.relative_error) if mixed else None,
        hand_off=(
            worker_pb2.HandOffTimes(fixed_s=hand_off.fixed_s, relative_error=hand_off.relative_error)
            if hand_off
            else None
        ),
    )


def service_times_of(heartbeat: worker_pb2.Heartbeat) -> ServiceTimes | None:
    """Return the models in a checked heartbeat; None if the worker has measured nothing yet."""
    if not heartbeat.HasField("service_times"):
        return None
    times = heartbeat.service_times
    prefill, decode, mixed, hand_off = times.prefill, times.decode, times.mixed, times.hand_off
    return ServiceTimes(
        prefill=PrefillTimes(prefill.step_s, prefill.per_token_s, prefill.per_token_context_s, prefill.relative_error),
        decode=DecodeTimes(decode.step_s, decode.per_sequence_s, decode.per_context_token_s, decode.relative_error),
        mixed=MixedTimes(mixed.factor, mixed.relative_error) if times.HasField("mixed") else None,
        hand_off=HandOffTimes(hand_off.fixed_s, hand_off.relative_error) if times.HasField("hand_off") else None,
    )
