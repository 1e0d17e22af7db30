"""This router's view of the scale target: what it was last, and the operators' wish to change it.

Owns the task that follows it. Decides nothing: whoever runs the workers follows the target by itself.
"""

import asyncio
from contextlib import aclosing

from cluster.registry.scale_registry import ScaleTargets
from cluster.registry.scale_target import ScaleTarget
from tandem.v1 import admin_pb2


class Scaling:
    def __init__(self, targets: ScaleTargets) -> None:
        self._targets = targets
        self._changed = asyncio.Event()
        self.target: ScaleTarget | None = None  # as it was known last

    async def run(self) -> None:
        """Follows the target until cancelled. While the registry is gone the last one stands."""
        async with aclosing(self._targets.watch()) as targets:
            async for target in targets:
                self._take(target)

    async def set(self, prefill: int | None, decode: int | None) -> ScaleTarget:
        """None: as it is. Raises InvalidRequest, Unavailable, RegistryUnavailable."""
        target = await self._targets.set(prefill, decode)
        self._take(target)
        return target

    async def changed(self) -> None:
        await self._changed.wait()

    def _take(self, target: ScaleTarget | None) -> None:
        if target != self.target:
            self.target = target
            self._changed.set()
            self._changed = asyncio.Event()


def target_to_wire(target: ScaleTarget | None) -> admin_pb2.ScaleTarget | None:
    if target is None:
        return None
    return admin_pb2.ScaleTarget(
        prefill=target.prefill,
        decode=target.decode,
        version=target.version,
        follower=target.follower,
        reached=target.reached,
        problem=target.problem,
    )
