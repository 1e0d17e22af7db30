"""HandOff calls of one importer: made when they are needed, and one kept ready for each exporter it lately had KV from.

To begin a call costs both sides more than to speak on it. So as one ends in order, the next one is begun, and waits a
while for its hand-off. Owns the calls that wait; a call that was taken is the hand-off's.
"""

import asyncio

from kvtransfer.importer.import_call import CallMeans, ImportCall

READY_S = 5.0  # exporters refuse a call on which nobody attaches within ten


class ReadyCalls:
    def __init__(self, means: CallMeans) -> None:
        self._means = means
        self._ready: dict[str, ImportCall] = {}  # by address
        self._timers: dict[ImportCall, asyncio.TimerHandle] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._ready)

    def take(self, address: str) -> ImportCall:
        """For one hand-off: the one that is ready, or a new one."""
        call = self._ready.pop(address, None)
        if call is None:
            return ImportCall(self._means, address, self._over)
        self._timers.pop(call).cancel()
        return call

    async def close(self) -> None:
        self._is_closed = True
        waiting = [call.task for call in self._ready.values()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _over(self, call: ImportCall) -> None:
        """A call has ended: one that waited is gone; one that served a hand-off well has a successor."""
        if self._ready.get(call.address) is call:
            self._forget(call)
        elif call.has_served and not call.error and not self._is_closed and call.address not in self._ready:
            following = self._ready[call.address] = ImportCall(self._means, call.address, self._over)
            loop = asyncio.get_running_loop()
            self._timers[following] = loop.call_later(READY_S, self._dismiss, following)

    def _dismiss(self, call: ImportCall) -> None:
        self._forget(call)
        call.half_close()

    def _forget(self, call: ImportCall) -> None:
        del self._ready[call.address]
        self._timers.pop(call).cancel()
