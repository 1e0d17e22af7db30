"""The gRPC health service follows the readiness of the router."""

import asyncio
from types import SimpleNamespace

from router.app import Router
from router.running import ChangeSignal, running


class _Server:
    """A server whose health service is busy with a client that watches it, until it may go on."""

    def __init__(self) -> None:
        self.asked, self.may_go_on, self.is_ready = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def set_ready(self, ready: bool) -> None:
        self.asked.set()
        await self.may_go_on.wait()
        if ready:
            self.is_ready.set()


async def test_a_change_while_the_health_service_is_busy_is_not_missed() -> None:
    server, changes, pipeline = _Server(), ChangeSignal(), SimpleNamespace(is_ready=False)

    async def changed() -> None:
        await changes.wait()

    fleet = SimpleNamespace(changes=changes, changed=changed)
    app = SimpleNamespace(_ports=SimpleNamespace(grpc=server), _pipeline=pipeline, _fleet=fleet)
    async with running(Router._follow_readiness(app)):  # type: ignore[arg-type]
        await server.asked.wait()
        pipeline.is_ready = True
        changes.set()
        server.may_go_on.set()
        await asyncio.wait_for(server.is_ready.wait(), 10.0)
