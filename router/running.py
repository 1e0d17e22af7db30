"""Tasks that live exactly as long as the block that started them."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

Answer = TypeVar("Answer")


@asynccontextmanager
async def running(work: Coroutine[None, None, Answer]) -> AsyncIterator[asyncio.Task[Answer]]:
    """`work` runs beside the block, and no longer."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def branches() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks that are started one by one. The block ends when all have; the first error, of a task or of the block,
    ends the others and is the one raised."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors


async def all_of(works: Iterable[Coroutine[None, None, None]]) -> None:
    """All at once; the first error ends the others and is the one raised."""
    async with branches() as group:
        for work in works:
            group.create_task(work)
