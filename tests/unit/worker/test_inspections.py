"""An inspection finds blocks without a living owner, and does not report a release in flight as a leak."""

import asyncio
from collections.abc import Iterable

from engine.scheduling.commands import Inspect, Inspected
from engine.steps.questions import Questions
from worker.service import Inspections


class _Worker:
    """A step thread that holds blocks for some names, and an event loop on which some owners are alive."""

    def __init__(self, *holders: str, alive: Iterable[str] = ()) -> None:
        self.holders, self.alive = set(holders), set(alive)
        self.releases: list[str] = []  # posted, and applied before the next inspection
        self.violation = ""
        self.num_asked = 0
        self._questions = Questions(self._post)
        self.inspections = Inspections(self._questions, lambda: self.alive)

    def _post(self, command: Inspect) -> None:
        self.num_asked += 1
        self.holders -= set(self.releases)
        event = Inspected(command.inspection_id, {"held": 1}, {}, self.violation, frozenset(self.holders))
        asyncio.get_running_loop().call_soon(self._questions.settle, (event,))

    async def end(self, name: str) -> None:
        """End an owner, which posts the release of its blocks, while an inspection is in flight."""
        self.releases.append(name)
        self.alive.discard(name)


async def test_blocks_without_a_living_owner_are_a_violation() -> None:
    worker = _Worker("hand-off 1", "hand-off 2", "ticket ab", alive=["hand-off 1"])
    examined = await worker.inspections.examine()
    assert examined.violation == "no living owner holds the blocks of hand-off 2, ticket ab"


async def test_an_inspection_with_only_live_owners_needs_one_question() -> None:
    worker = _Worker("hand-off 1", alive=["hand-off 1", "hand-off 2"])
    assert (await worker.inspections.examine()).violation == ""
    assert worker.num_asked == 1


async def test_a_release_in_flight_is_no_leak() -> None:
    worker = _Worker("hand-off 1", alive=["hand-off 1"])
    examining = asyncio.create_task(worker.inspections.examine())
    await asyncio.sleep(0)  # the question is out
    await worker.end("hand-off 1")
    assert (await examining).violation == ""
    assert worker.num_asked == 2


async def test_a_violation_found_by_check_is_reported_first() -> None:
    worker = _Worker("hand-off 1")
    worker.violation = "states sum to 3"
    assert (await worker.inspections.examine()).violation == "states sum to 3"
