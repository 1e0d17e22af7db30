"""An evacuation moves each sequence of a draining worker once at a time."""

import asyncio
from types import SimpleNamespace

from router.fleet.decode_events import MoveOutcome
from router.pipeline.migration import _WorkerEvacuation
from router.policies.prediction.work_ahead import SequenceProgress

_HANDLE = 1


class _Migrations:
    """Migrations that have ended, but whose callers have not resumed yet."""

    def __init__(self) -> None:
        self.num_moves = 0
        self.may_end = asyncio.Event()

    async def move(self, *_: object, **__: object) -> MoveOutcome:
        self.num_moves += 1
        await self.may_end.wait()
        return MoveOutcome.KEPT


async def test_a_sequence_whose_move_is_about_to_end_is_not_moved_a_second_time() -> None:
    progress = {_HANDLE: SequenceProgress(100)}
    stream = SimpleNamespace(running_progress=lambda: progress, unstarted=list, preempted=list)
    peer = SimpleNamespace(stream=stream, drain_deadline_s=asyncio.get_running_loop().time() + 60)
    migrations = _Migrations()
    evacuation = _WorkerEvacuation(peer, SimpleNamespace(), migrations)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as moves:
        evacuation._move_work(moves)
        await asyncio.sleep(0)
        evacuation._move_work(moves)
        await asyncio.sleep(0)
        migrations.may_end.set()
    assert migrations.num_moves == 1
