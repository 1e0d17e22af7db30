"""A breadth-first search through all states of two hand-offs in a small model of the cluster, with every fault.

The machines are the production ones: kvtransfer.protocol.export_machine, with its leases, and
kvtransfer.protocol.import_machine. The world around them contains everything that they must survive:

- one prefill worker with a small pool, which reserves whole prompts, oldest first, computes one block per chunk, and
reuses freed blocks, so that a late read finds another prompt's KV there; - one or two decode workers with small pools,
which grant whole reservations, oldest first, above a watermark; - control messages that arrive in any order, each at
most twice, or are lost; - reads that copy what the remote block holds when they land, which may be late: after a
cancel, after the exporter has reused the block, after it died; a read whose error was reported may still land, unless
its channel was destroyed; - workers that are stopped (nothing of theirs happens but reads landing and time passing) and
wake, or die; - clocks: every machine has its own; it moves to the machine's next deadline when nothing else can happen,
or earlier, which is the fault "expiry". A deadline may have passed before its owner checks it.

A fault is a loss, an expiry, a cancel (of either leg), a stop, a death, or, where a scenario has it, a corrupted read
or a broken call. `Violation` is raised for the first step that breaks a promise; its story has the fewest faults, and
of those the fewest steps.

World states are tuples of small numbers: machine states and messages are numbered once, and what a machine does with an
event is looked up after the first time. Three reductions keep the space small and lose nothing: messages to machines
that are gone are dropped; a duplicate is dropped when it can change nothing (what a machine ignores once, it ignores
for ever, Renew excepted); and an importer that only waits for quiet forgets what was offered to it.
"""

import gc
from array import array
from dataclasses import dataclass, field

from kvtransfer.protocol.handoff import GUARDS, Guards
from tests.unit.kvtransfer.handoff_model.model import Model
from tests.unit.kvtransfer.handoff_model.scenario import Label, Scenario, Violation, World
from tests.unit.kvtransfer.handoff_model.story import describe, tell


@dataclass
class Report:
    scenario: Scenario
    num_states: int
    num_steps: int
    num_ends: int
    story: list[str] = field(default_factory=list)  # of the first violation

    def __str__(self) -> str:
        return f"{self.scenario.name}: {self.num_states:,} states, {self.num_steps:,} steps, {self.num_ends} ends"


def explore(scenario: Scenario, guards: Guards = GUARDS, *, most_states: int = 2_000_000) -> Report:
    """Explore all reachable states up to the first violation: first those without a fault, then with one, then with
    two, each breadth first. A state that was reached with fewer faults is not visited again, because more faults can
    follow there. A state from which no good end can be reached without another fault is a violation.
    """
    was_collecting = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and scanning a million tuples again and again would double the time
    try:
        return _explore(scenario, guards, most_states)
    finally:
        if was_collecting:
            gc.enable()


def _explore(scenario: Scenario, guards: Guards, most_states: int) -> Report:
    model = Model(scenario, guards)
    numbers: dict[World, int] = {}
    worlds: list[World] = []
    came_from: list[tuple[int, Label]] = []
    sources, targets = array("I"), array("I")  # steps that are no faults
    num_steps = 0

    def story(number: int, *last: str) -> list[str]:
        lines = list(last)
        while number > 0:
            number, label = came_from[number]
            lines.insert(0, tell(model.machines, label))
        return lines

    here = 0
    begun: list[tuple[World, int, Label]] = [(model.first(), 0, ())]
    for num_faults in range(scenario.faults + 1):
        after_fault: list[tuple[World, int, Label]] = []
        for world, source, label in begun:
            if numbers.setdefault(world, len(worlds)) == len(worlds):
                worlds.append(world)
                came_from.append((source, label))
        while here < len(worlds):
            assert len(worlds) <= most_states, f"{scenario.name}: more than {most_states} states"
            try:
                for label, is_fault, world in model.steps(worlds[here], with_faults=num_faults < scenario.faults):
                    num_steps += 1
                    if is_fault:
                        if world not in numbers:
                            after_fault.append((world, here, label))
                        continue
                    there = numbers.setdefault(world, len(worlds))
                    if there == len(worlds):
                        worlds.append(world)
                        came_from.append((here, label))
                    if there != here:
                        sources.append(here)
                        targets.append(there)
            except (Violation, AssertionError) as broken:
                return Report(
                    scenario, len(worlds), num_steps, 0, story(here, tell(model.machines, model.blamed), f"=> {broken}")
                )
            here += 1
        begun = after_fault
    ends, stuck = _ends(model, worlds, sources, targets)
    report = Report(scenario, len(worlds), num_steps, ends)
    if stuck is not None:
        why = f"=> from here no end is reached with everything free: {describe(model.machines, worlds[stuck])}"
        report.story = story(stuck, why)
    return report


def _ends(model: Model, queue: list[World], sources: "array[int]", targets: "array[int]") -> tuple[int, int | None]:
    """Return the states in which everything has ended with free pools, and the first state from which none of them can
    be reached.
    """
    has_way_out = bytearray(len(queue))
    for source in sources:
        has_way_out[source] = 1
    good = bytearray(len(queue))
    num_ends = 0
    for number, world in enumerate(queue):
        if not has_way_out[number] and model.is_good_end(world):
            good[number] = 1
            num_ends += 1
    changed = True
    while changed:
        changed = False
        for step in range(len(sources) - 1, -1, -1):
            if good[targets[step]] and not good[sources[step]]:
                good[sources[step]] = 1
                changed = True
    stuck = next((number for number, is_good in enumerate(good) if not is_good), None)
    return num_ends, None if stuck is None else _trap(stuck, sources, targets)


def _trap(stuck: int, sources: "array[int]", targets: "array[int]") -> int:
    """Return the first state on every path from `stuck` that is never left."""
    following: dict[int, list[int]] = {}
    for source, target in zip(sources, targets, strict=True):
        following.setdefault(source, []).append(target)

    def reach(number: int) -> set[int]:
        reached, todo = {number}, [number]
        while todo:
            fresh = set(following.get(todo.pop(), ())) - reached
            reached |= fresh
            todo += fresh
        return reached

    while True:
        reached = reach(stuck)
        if stuck in reach(max(reached)):
            return min(reached)
        stuck = max(reached)
