"""A search through all orders in which hand-offs wait for blocks at both of their workers.

In `tests.unit.kvtransfer.handoff_model.explore` a lease that ends also ends a wait. Here nothing expires and nothing
fails, so a state in which no event can happen and a hand-off has not ended is a violation: the workers wait for each
other. Each worker is a production scheduler with a small pool and a fake runner. Only four messages of a hand-off
exist: its export and its reservation, which arrive in any order, the announcement that its exporter computes, and the
end of its read. A worker runs all steps that it can between two messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from cluster.messages import Role
from engine.scheduling.commands import Announce, SetRole
from tests.unit.engine.rigs.export_bench import export_job, limits
from tests.unit.engine.rigs.scheduler_bench import HandOff, SchedulerBench

_BLOCK_SIZE = 2
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Moved(NamedTuple):
    """A prompt that one worker computes and another one decodes, or one worker both."""

    exporter: int  # a worker's place in `PoolScenario.num_blocks`
    importer: int
    num_prompt: int = 2  # tokens
    num_output: int = 1  # tokens, of which the exporter draws the first


@dataclass(frozen=True)
class PoolScenario:
    """Workers and what they do. Each has the role of what it does."""

    name: str
    num_blocks: tuple[int, ...]  # of each worker's pool
    moved: tuple[Moved, ...]
    num_longest: int = 1  # blocks of a sequence of the maximum length
    watermark: float = 0.0


class Message(NamedTuple):
    kind: str  # export, reserve, announce or read; local: a prompt that its worker decodes too
    number: int  # the place in `PoolScenario.moved`

    def __str__(self) -> str:
        return f"{self.kind} {_NAMES[self.number]}"


class Stuck(Exception):
    """Hand-offs wait for each other. The message tells how it came to that."""


def explore_pools(scenario: PoolScenario, *, most_states: int = 100_000) -> int:
    """Deliver the messages in every order. Return the number of states. Raises Stuck with a story in which hand-offs
    wait for each other."""
    seen: set[object] = set()
    stories: list[tuple[Message, ...]] = [()]
    pools = _Pools(scenario)
    while stories:
        story = stories.pop()
        if pools.delivered == story[:-1]:
            pools.deliver(*story[-1:])
        else:
            pools = _Pools(scenario)
            pools.deliver(*story)
        if pools.key() in seen:
            continue
        seen.add(pools.key())
        assert len(seen) <= most_states, f"{scenario.name}: more than {most_states} states"
        messages = list(pools.messages())
        stories += ((*story, message) for message in messages)
        if not messages:
            pools.check_end()
    return len(seen)


def walk_pools(scenario: PoolScenario, dice: Random) -> None:
    """Deliver the messages in one random order. Raises Stuck as `explore_pools` does."""
    pools = _Pools(scenario)
    while messages := list(pools.messages()):
        pools.deliver(dice.choice(messages))
    pools.check_end()


class _Pools:
    """The workers after some messages."""

    def __init__(self, scenario: PoolScenario) -> None:
        self._moved = scenario.moved
        self._workers = [
            SchedulerBench(
                limits(
                    num_blocks=num_blocks,
                    block_size=_BLOCK_SIZE,
                    max_model_len=_BLOCK_SIZE * scenario.num_longest,
                    watermark=scenario.watermark,
                )
            )
            for num_blocks in scenario.num_blocks
        ]
        for place, worker in enumerate(self._workers):
            worker.apply(SetRole(self._role(place)))
        self._tickets: dict[int, bytes] = {}
        self._handoffs: dict[int, HandOff] = {}
        self._handles: dict[int, list[int]] = {}
        self.delivered: tuple[Message, ...] = ()

    def _role(self, place: int) -> Role:
        decodes = any(moved.importer == place for moved in self._moved)
        prefills = any(moved.exporter == place != moved.importer for moved in self._moved)
        return Role.BOTH if decodes and prefills else Role.DECODE if decodes else Role.PREFILL

    def messages(self) -> Iterator[Message]:
        """Return the messages that may be delivered next. Of equal hand-offs, the earlier ones begin first."""
        begun = {message.number for message in self.delivered}
        about_to_begin: set[Moved] = set()
        for number, moved in enumerate(self._moved):
            if number not in begun:
                if moved in about_to_begin:
                    continue
                about_to_begin.add(moved)
            yield from (m for m in self._possible(number, moved) if m not in self.delivered)

    def _possible(self, number: int, moved: Moved) -> Iterator[Message]:
        if moved.exporter == moved.importer:
            yield Message("local", number)
            return
        yield Message("export", number)
        yield Message("reserve", number)
        announce = Message("announce", number)
        if number in self._handoffs and number in self._tickets and self._is_computed(number):
            yield announce
        if announce in self.delivered and self._handoffs[number].block_ids is not None:
            yield Message("read", number)

    def _is_computed(self, number: int) -> bool:
        return self._exporter(number).tickets[self._tickets[number]].finished is not None

    def deliver(self, *messages: Message) -> None:
        """Deliver messages, and after each let its workers compute what they can."""
        for message in messages:
            self._deliver(message)

    def _deliver(self, message: Message) -> None:
        self.delivered += (message,)
        kind, number = message
        moved = self._moved[number]
        importer = self._workers[moved.importer]
        prompt = range(10 * number, 10 * number + moved.num_prompt)
        if kind == "export":
            self._tickets[number] = self._exporter(number).admit_export(export_job(prompt))
        elif kind == "announce":
            importer.apply(Announce(self._handoffs[number].handoff_id))
        elif kind == "read":
            importer.finish(self._handoffs[number])
            self._exporter(number).release_export(self._tickets[number])
        else:
            job = importer.job(prompt, max_tokens=moved.num_output)
            self._handles[number] = [start.handle for start in job.sequences]
            if kind == "local":
                importer.admit(job)
            else:
                self._handoffs[number] = importer.reserve(job, is_announced=False)
        for place in {moved.exporter, moved.importer}:
            self._workers[place].run()

    def _exporter(self, number: int) -> SchedulerBench:
        return self._workers[self._moved[number].exporter]

    def key(self) -> object:
        """Return what the future depends on: the messages that were delivered, and the order of those that wait."""
        waiting = tuple(message for message in self.delivered if self._waits(message))
        return frozenset(self.delivered), waiting

    def _waits(self, message: Message) -> bool:
        match message:
            case ("export", number):
                return not self._is_computed(number)
            case ("reserve", number):
                return self._handoffs[number].block_ids is None
            case ("local", number):
                return not self._has_ended(number)
        return False

    def _has_ended(self, number: int) -> bool:
        choices = self._workers[self._moved[number].importer].choices
        return all(handle in choices and choices[handle].ended for handle in self._handles.get(number, [-1]))

    def check_end(self) -> None:
        """Raise Stuck unless all prompts have been decoded to their end. Then no block is in use."""
        unfinished = [_NAMES[number] for number in range(len(self._moved)) if not self._has_ended(number)]
        if unfinished:
            raise Stuck(f"{', '.join(unfinished)} do not end after: {', '.join(map(str, self.delivered))}")
        for worker in self._workers:
            worker.assert_idle()
