"""A change that happens again and again, for which many tasks wait together with something else."""

import asyncio


class ChangeSignal:
    """Every wait is for the next change only. `next` costs a waiter no task, because all waiters share one future."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> "asyncio.Future[None]":
        """Return the future of the next change. It is shared: give it to asyncio.wait, and never await it directly,
        because cancelling the task would cancel it for all."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    async def wait(self) -> None:
        """Wait for the next change."""
        await asyncio.shield(self.next())

    def set(self) -> None:
        """The change has happened: wake every task that waits for it."""
        changed, self._next = self._next, None
        if changed is not None:
            changed.set_result(None)
