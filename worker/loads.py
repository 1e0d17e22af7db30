"""The load of each worker of a cluster, as its routers report it."""

from collections.abc import Mapping, Sequence

import grpc

from cluster.serving.serving import open_channel
from cluster.serving.tls import ClusterTls
from tandem.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 5.0
_IDLE_BLOCKS = ("blocks_free", "blocks_cached")


class WorkerLoads:
    def __init__(self, routers: Sequence[str], api_key: str, tls: ClusterTls | None) -> None:
        self._routers = tuple(routers)
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._tls = tls

    async def ask(self) -> Mapping[str, float]:
        """Return the load of each worker by member id (see `load`); {} if no router answers."""
        for router in self._routers:
            async with open_channel(router, self._tls) as channel:
                try:
                    status = await admin_pb2_grpc.AdminStub(channel).Status(
                        admin_pb2.StatusRequest(), timeout=_TIMEOUT_S, metadata=self._metadata
                    )
                except grpc.aio.AioRpcError:
                    continue
            return {member.member_id: load(member.figures) for member in status.members if member.figures}
        return {}


def load(figures: Mapping[str, float]) -> float:
    blocks = sum(value for name, value in figures.items() if name.startswith("blocks_") and name not in _IDLE_BLOCKS)
    return blocks + figures.get("waiting", 0.0)
