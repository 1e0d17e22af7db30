"""Count how often simulated schedules reach each transition, failure reason and row of docs/failover.md.

Wraps production code where it makes a transition or counts a reason, without changing what it does. Every name is
"group: what". `KNOWN` lists the names that a report shows even with a count of 0.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from cluster.errors import HandOffFailed, HandOffReason, TandemError
from cluster.fair_queue import FairQueue
from cluster.member import Member, MemberState
from cluster.observe.telemetry import Telemetry
from engine.scheduling.batching.block_tables import SwapSpace
from engine.scheduling.batching.preemption import Preemption
from engine.scheduling.batching.queues import SequenceQueues
from engine.scheduling.batching.reservations import Reservations
from engine.scheduling.batching.sequences import Sequence
from engine.scheduling.export_waits import ExportWaits
from engine.scheduling.exports import PromptExports, TicketLeases
from engine.scheduling.step import PromptTime, StepPlan
from engine.scheduling.steps_in_flight import StepsInFlight
from kvtransfer.protocol import export_machine, import_state, leases
from router.fleet.worker_stream import WorkerStream
from router.policies import breakers
from router.policies.placement import PlacementReason
from router.request.account import RequestAccount
from tests.chaos.simulated.machine import frame_calls
from tests.chaos.simulated.members import proofs

LABELS = ("side", "leg", "action", "source", "finder", "outcome", "reason")  # those that name a cause
_NOT_COUNTED = frozenset({"tandem_http_responses_total"})
_SCHEDULER_MOVES = {
    SequenceQueues: (
        "start_running",
        "add_ready",
        "add_waiting",
        "move_to_ready",
        "freeze",
        "thaw",
        "remove",
        "remove_choice",
    ),
    Preemption: ("_preempt",),
    SwapSpace: ("swap_in", "abandon"),
    TicketLeases: ("lease", "extend", "lease_prefix", "lease_for_copy", "release"),
    Reservations: ("grant", "discard", "reserve_pull"),
    ExportWaits: ("_break_cycle",),
    PromptExports: ("admit", "start", "_finish", "_abort", "drain", "_lease_tail"),
}
_PHRASES = {  # parts of the details of WorkerLost, which no counter counts
    "and another one does": "prompt left a silent worker",
    "did not accept a start message within": "decode start: late",
}
# What one step may compute: sequences decoded here, prompts of such sequences, and prompts for export.
_STEP_WORK = ("decode", "own prompt", "export")
_SWAP_OUTCOMES = ("swapped_out", "recomputed", "recompute_cheaper", "swap_full")

Count = Callable[[str], None]


def error_kinds(base: type[TandemError] = TandemError) -> Iterator[type[TandemError]]:
    """Return every class of cluster/errors.py that declares a reason."""
    if "reason" in vars(base) and base.__module__ == TandemError.__module__:
        yield base
    for kind in base.__subclasses__():
        yield from error_kinds(kind)


def known() -> tuple[str, ...]:
    """Return the names of everything that can be reached."""
    names = [f"error: {kind.reason}" for kind in error_kinds()]
    names += [f"hand-off reason: {reason}" for reason in HandOffReason]
    tables: dict[str, Mapping[Any, Any]] = {
        "import machine": import_state.MOVES,
        "export machine": export_machine._MOVES,
        "lease": leases._MOVES,
        "breaker": breakers._MOVES,
    }
    for name, table in tables.items():
        names += [f"{name}: {before} > {after}" for before, following in table.items() for after in sorted(following)]
    names += [f"scheduler: {method.strip('_')}" for methods in _SCHEDULER_MOVES.values() for method in methods]
    names += [f"swap: {outcome}" for outcome in _SWAP_OUTCOMES]
    names += [f"member: {state}" for state in MemberState if state is not MemberState.STARTING]
    works = [works for number in (1, 2, 3) for works in itertools.combinations(_STEP_WORK, number)]
    names += [f"step: {' + '.join(work)}" for work in works]
    names += ["prompt time: limited", *(f"counted: placement_decisions {reason}" for reason in PlacementReason)]
    names += ["direct request: ok", "flip: ok", "scored prompt: ok", "scored prompt: direct", "tenants: ordered"]
    names += (*frame_calls.KNOWN, *proofs.KNOWN)
    names.remove("lease: running > running")
    return (*dict.fromkeys(names), "lease: renewed")


@contextmanager
def counted(counts: Callable[[], Counter[str] | None]) -> Iterator[None]:
    """Wrap production code so that it counts. `counts` returns the counter of the running world, or None."""

    def count(name: str) -> None:
        reached = counts()
        if reached is not None:
            reached[name] += 1

    with ExitStack() as stack:
        for owner, name, wrapper in _wrappers(count):
            stack.enter_context(mock.patch.object(owner, name, wrapper(getattr(owner, name))))
        yield


def _wrappers(count: Count) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    yield TandemError, "__init__", lambda made: _before(made, functools.partial(_count_error, count))
    yield HandOffFailed, "__init__", lambda made: _before(made, _counting_hand_off(count))
    yield RequestAccount, "add_reason", lambda noted: _before(noted, lambda _, reason: count(f"ledger: {reason}"))
    yield Telemetry, "count", lambda told: _before(told, _counting_label(count))
    yield Member, "with_state", lambda changed: _before(changed, lambda _, state: count(f"member: {state}"))
    yield import_state.ImporterState, "to", functools.partial(_before, before=_counting_phase(count, "import machine"))
    yield export_machine, "_to", functools.partial(_before, before=_counting_phase(count, "export machine"))
    yield leases, "_moved", functools.partial(_before, before=_counting_phase(count, "lease"))
    yield leases, "renew", functools.partial(_counting_renewals, count)
    yield breakers._Breaker, "move", functools.partial(_before, before=_counting_breaker(count))
    yield WorkerStream, "_converse", functools.partial(_counting_streams, count)
    yield SwapSpace, "swap_out", functools.partial(_counting_swaps, count)
    yield StepsInFlight, "begin", lambda begun: _before(begun, functools.partial(_count_step, count))
    yield FairQueue, "places", lambda places: _before(places, lambda *_: count("tenants: ordered"))
    yield PromptTime, "take", functools.partial(_counting_limits, count)
    yield from frame_calls.wrappers(count)
    for owner, methods in _SCHEDULER_MOVES.items():
        for method in methods:
            yield owner, method, functools.partial(_after, count=count, name=f"scheduler: {method.strip('_')}")


def _before(function: Any, before: Callable[..., object]) -> Any:
    @functools.wraps(function)
    def counting(*arguments: Any, **keywords: Any) -> Any:
        before(*arguments, **keywords)
        return function(*arguments, **keywords)

    return counting


def _after(function: Any, count: Count, name: str) -> Any:
    """Count a call, unless its result is that nothing had to be done."""

    @functools.wraps(function)
    def counting(*arguments: Any, **keywords: Any) -> Any:
        answer = function(*arguments, **keywords)
        if not (answer is False or answer == () or answer == []):
            count(name)
        return answer

    return counting


def _count_error(count: Count, error: TandemError, message: str, **_: object) -> None:
    count(f"error: {error.reason}")
    for phrase, name in _PHRASES.items():
        if phrase in message:
            count(name)


def _count_step(count: Count, _: StepsInFlight, plan: StepPlan, sequences: tuple[Sequence, ...], now_s: float) -> None:
    """Count a step by the kinds of its work."""
    works = set()
    for sequence, chunk in zip(sequences, plan.chunks, strict=True):
        is_decoded = chunk.samples and chunk.end - chunk.num_draft_tokens > sequence.group.num_prompt
        works.add("export" if sequence.group.export is not None else "decode" if is_decoded else "own prompt")
    if works:  # else the step only swaps
        count(f"step: {' + '.join(work for work in _STEP_WORK if work in works)}")


def _counting_limits(count: Count, take: Any) -> Any:
    """Count prompts that get less than the step's tokens because of the time between tokens."""

    @functools.wraps(take)
    def counting(prompt_time: PromptTime, num_tokens: int, *arguments: Any) -> int:
        taken: int = take(prompt_time, num_tokens, *arguments)
        if taken < num_tokens:
            count("prompt time: limited")
        return taken

    return counting


def _counting_hand_off(count: Count) -> Callable[..., None]:
    return lambda _, reason, *__: count(f"hand-off reason: {reason}")


def _counting_label(count: Count) -> Callable[..., None]:
    def told(_: Telemetry, name: str, value: float = 1, **labels: str) -> None:
        causes = [str(labels[label]) for label in LABELS if labels.get(label)]
        if causes and value and name not in _NOT_COUNTED:
            count(f"counted: {name.removeprefix('tandem_').removesuffix('_total')} {' '.join(causes)}")
        if "reason" in labels and labels["reason"] in HandOffReason.__members__.values():
            count(f"hand-off reason: {labels['reason']}")

    return told


def _counting_phase(count: Count, name: str) -> Callable[..., None]:
    return lambda state, phase: count(f"{name}: {state.phase} > {phase}")


def _counting_breaker(count: Count) -> Callable[..., None]:
    return lambda breaker, state: count(f"breaker: {breaker.state} > {state}")


def _counting_streams(count: Count, converse: Any) -> Any:
    """Count each stream's reconnections, and the timeouts that ended a connection."""

    @functools.wraps(converse)
    async def counting(stream: WorkerStream, hello_deadline_s: float) -> str:
        was_connected = getattr(stream, "was_connected", False)
        try:
            detail: str = await converse(stream, hello_deadline_s)
            return detail
        except TimeoutError:
            if stream.connected.is_set():
                count("stream: silent")
            raise
        finally:
            if stream.connected.is_set():
                if was_connected:
                    count("stream: came back")
                setattr(stream, "was_connected", True)  # noqa: B010 -- production code has no such attribute

    return counting


def _counting_renewals(count: Count, renew: Any) -> Any:
    @functools.wraps(renew)
    def counting(before: leases.TicketLeases, *arguments: Any, **keywords: Any) -> leases.TicketLeases:
        after: leases.TicketLeases = renew(before, *arguments, **keywords)
        if after is not before:
            count("lease: renewed")
        return after

    return counting


def _counting_swaps(count: Count, swap_out: Any) -> Any:
    @functools.wraps(swap_out)
    def counting(space: SwapSpace, *arguments: Any) -> None:
        before = space.figures
        swap_out(space, *arguments)
        for outcome in _SWAP_OUTCOMES:
            if space.figures[outcome] > before[outcome]:
                count(f"swap: {outcome}")

    return counting
