"""Converts the reports of workers about themselves to values of the router and back: measured speeds, outstanding work,
cache events.

As in cluster/protocol/wire.py, a received message is checked first.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from cluster.messages import CacheEvents, LinkSpeed
from cluster.outstanding_work import OthersWork, PromptWork, SequenceWork
from cluster.protocol.hashing import MAX_PREFIX_BLOCKS, split_hashes
from cluster.protocol.received import checked
from cluster.protocol.wire import member_from_wire
from cluster.service_times import DecodeTimes, HandOffTimes, MixedTimes, PrefillTimes, ServiceTimes, StepWork, TimedStep
from tandem.internal.v1 import worker_pb2
from tandem.v1 import admin_pb2


def link_speeds_to_wire(speeds: Iterable[LinkSpeed]) -> list[admin_pb2.LinkSpeed]:
    return [
        admin_pb2.LinkSpeed(
            exporter=str(speed.exporter),
            transport=speed.transport,
            bytes_per_s=speed.bytes_per_s,
            latency_s=speed.latency_s,
            slowdown=speed.slowdown,
        )
        for speed in speeds
    ]


def link_speeds_from_wire(messages: Iterable[admin_pb2.LinkSpeed]) -> tuple[LinkSpeed, ...]:
    """Convert part of a checked message; the order is kept."""
    return tuple(map(_link_speed_from_wire, messages))


def service_times_to_wire(times: ServiceTimes) -> worker_pb2.ServiceTimes:
    """Convert models. Their fields have the same names in the message."""
    models = {name: model for name, model in asdict(times).items() if model is not None}
    for name in models.keys() & {"typical_prefill", "typical_decode"}:
        models[name] = {**models[name]["work"], "seconds": models[name]["seconds"]}
    return worker_pb2.ServiceTimes(**models)


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
        typical_prefill=_timed_step(times.typical_prefill) if times.HasField("typical_prefill") else None,
        typical_decode=_timed_step(times.typical_decode) if times.HasField("typical_decode") else None,
    )


def others_work_to_wire(work: OthersWork) -> worker_pb2.OthersWork:
    sequences = work.sequences
    return worker_pb2.OthersWork(
        number=work.number,
        prompt_tokens=round(work.prompts.num_new),
        prompt_attended=work.prompts.attended,
        first_tokens=round(work.first.num_new),
        first_attended=work.first.attended,
        elapsed_s=work.elapsed_s,
        num_exported=work.num_exported,
        num_running=sequences.num_running,
        num_joining=sequences.num_joining,
        context=sequences.context,
        left=sequences.left,
    )


def others_work_from_wire(message: worker_pb2.OthersWork) -> OthersWork:
    """Return the report in a checked message."""
    return OthersWork(
        number=message.number,
        prompts=PromptWork(message.prompt_tokens, message.prompt_attended),
        first=PromptWork(message.first_tokens, message.first_attended),
        elapsed_s=message.elapsed_s,
        num_exported=message.num_exported,
        sequences=SequenceWork(message.num_running, message.num_joining, message.context, message.left),
    )


def cache_events_to_wire(events: CacheEvents) -> Iterator[worker_pb2.CacheEvents]:
    """The messages to send, in this order. Messages after the first one carry no events, only the remaining `stored`
    hashes."""
    yield worker_pb2.CacheEvents(
        cleared=events.cleared,
        first_number=events.first_number,
        next_number=events.next_number,
        stored=b"".join(events.stored[:MAX_PREFIX_BLOCKS]),
        removed=b"".join(events.removed),
    )
    for start in range(MAX_PREFIX_BLOCKS, len(events.stored), MAX_PREFIX_BLOCKS):
        yield worker_pb2.CacheEvents(
            first_number=events.next_number,
            next_number=events.next_number,
            stored=b"".join(events.stored[start : start + MAX_PREFIX_BLOCKS]),
        )


def cache_events_from_wire(message: worker_pb2.CacheEvents) -> CacheEvents:
    """Return the cache events of a message. Raises MalformedMessage."""
    checked(message)
    return CacheEvents(
        message.first_number,
        message.next_number,
        split_hashes(message.stored),
        split_hashes(message.removed),
        message.cleared,
    )


def _timed_step(message: worker_pb2.TimedStep) -> TimedStep:
    return TimedStep(StepWork(message.num_new, message.attended, message.batch, message.context), message.seconds)


def _link_speed_from_wire(message: admin_pb2.LinkSpeed) -> LinkSpeed:
    return LinkSpeed(
        exporter=member_from_wire(message.exporter),
        transport=message.transport,
        bytes_per_s=message.bytes_per_s,
        latency_s=message.latency_s,
        slowdown=message.slowdown,
    )
