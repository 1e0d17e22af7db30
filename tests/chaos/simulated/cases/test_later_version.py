"""Whole clusters whose messages have unknown fields at every level: behaviour is unchanged, under failures too."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.chaos.simulated.machine.calls import Call, Stream
from tests.chaos.simulated.machine.machine import simulated_machine
from tests.chaos.simulated.machine.served_calls import Served
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap, Phase
from tests.chaos.simulated.schedules.schedule import Ask, Schedule, make_schedule, plain_schedule
from tests.chaos.simulated.world import Result, run_schedule
from tests.later_version import UNKNOWN, suspended, with_unknown_fields

pytestmark = suspended

_SEEDS = range(500, 506)
_CALLS = {f"Worker/{name}" for name in ("Inspect", "SubscribeCacheEvents")}
_CALLS |= {f"DecodeWorker/{name}" for name in ("Start", "Connect", "Freeze")}
_CALLS |= {"Inference/Generate", "Admin/Migrate", "PrefillWorker/Prefill", "KvTransfer/HandOff"}
_OF_MANY_KINDS = ("/HandOff", "/Connect", "/Prefill")  # streams whose messages are cases of a oneof


@contextmanager
def unknown_fields() -> Iterator[None]:
    """Add unknown fields to every message between members."""
    send, answer = Call._send, Served._answer

    def send_more(call: Call, message: Any) -> None:
        send(call, with_unknown_fields(message))

    def answer_more(served: Served, handler: Any, response: Any) -> None:
        answer(served, handler, with_unknown_fields(response))

    with mock.patch.object(Call, "_send", send_more), mock.patch.object(Served, "_answer", answer_more):
        yield


@contextmanager
def unknown_messages() -> Iterator[None]:
    """Send a message of an unknown kind after each message of a stream with several kinds."""
    to_client, to_server = Call.heard, Served.heard

    def client_hears(call: Call, message: bytes) -> None:
        to_client(call, message)
        if isinstance(call, Stream) and call.method.endswith(_OF_MANY_KINDS):
            to_client(call, UNKNOWN)

    def server_hears(served: Served, message: bytes | None) -> None:
        to_server(served, message)
        if message is not None and served.method.endswith(_OF_MANY_KINDS[:2]):
            to_server(served, UNKNOWN)

    with mock.patch.object(Call, "heard", client_hears), mock.patch.object(Served, "heard", server_hears):
        yield


def test_unknown_fields_change_no_message_of_any_run() -> None:
    called: set[str] = set()
    with simulated_machine():
        for schedule in (_moves(), *map(make_schedule, _SEEDS)):
            plain = run_schedule(schedule)
            with unknown_fields():
                later = run_schedule(schedule)
            assert later.violations == plain.violations == (), f"seed {schedule.seed}"
            assert repr(later.trace) == repr(plain.trace), f"seed {schedule.seed}"
            called.update(_called(plain))
    assert called >= _CALLS, f"not in these schedules: {sorted(_CALLS - called)}"


def test_messages_of_an_unknown_kind_are_ignored() -> None:
    """Without failures no retry happens."""
    with simulated_machine(), ExitStack() as stack:
        peaceful = [replace(make_schedule(seed), mishaps=(), read_faults=False) for seed in _SEEDS]
        legs = [_legs(run_schedule(schedule)) for schedule in peaceful]
        stack.enter_context(unknown_fields())
        stack.enter_context(unknown_messages())
        for schedule, wanted in zip(peaceful, legs, strict=True):
            result = run_schedule(schedule)
            assert result.violations == () and _legs(result) == wanted, f"seed {schedule.seed}"
        for schedule in (_moves(), *map(make_schedule, _SEEDS)):
            assert run_schedule(schedule).violations == (), f"seed {schedule.seed}"


def _moves() -> Schedule:
    """Return a schedule in which running sequences move from one decode worker to another."""
    schedule = replace(plain_schedule(0), num_routers=1, num_prefills=1, num_decodes=2)
    asks = tuple(Ask(0.0, 0, 0, 0, num_tokens=20, max_tokens=24) for _ in range(4))
    mishaps = (Mishap(Kind.MOVE, "decode", 0, at_s=0.0, for_s=0.0, phase=Phase.DECODING, occurrence=4),)
    return replace(schedule, latency_s=0.003, step_s=0.1, asks=asks, mishaps=mishaps)


def _called(result: Result) -> set[str]:
    return {method.removeprefix("/tandem.v1.").removeprefix("/tandem.internal.v1.") for _, method, *_ in result.trace}


def _legs(result: Result) -> Counter[str]:
    """Return how often each leg of a request began and ended successfully."""
    kinds = Counter(kind for *_, kind in result.trace)
    return Counter({kind: kinds[kind] for kind in ("PrefillRequest", "StartRequest", "attach", "settle", "settled")})
