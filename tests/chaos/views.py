"""Reads the reports of members: a router's live requests, a worker's blocks."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from tandem.enum_words import REQUEST_PHASES
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tandem.v1 import admin_pb2, admin_pb2_grpc

_ANSWER_S = 3.0


@dataclass(frozen=True, slots=True)
class Listed:
    """A live request as its router lists it. Workers are given by name, without incarnation; empty: none."""

    request_id: str
    router: str
    phase: str
    age_s: float
    prefill: str
    decode: str
    num_tokens: int

    def is_with(self, role: str, name: str) -> bool:
        return {"router": self.router, "prefill": self.prefill, "decode": self.decode}[role] == name

    @property
    def is_handed_over(self) -> bool:
        """Return whether its prefill worker has finished its part."""
        return self.phase not in ("prefill_queue", "prefill", "transfer")


class Views:
    """Calls to members, over channels that are opened for each round."""

    def __init__(self, channels: dict[str, grpc.aio.Channel]) -> None:
        """`channels`: by member name."""
        self._channels = channels
        routers = [name for name in channels if name.startswith("router")]
        self._admins = {name: admin_pb2_grpc.AdminStub(channels[name]) for name in routers}
        self._workers = {name: worker_pb2_grpc.WorkerStub(channels[name]) for name in channels.keys() - routers}

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def listing(self, besides: Iterable[str] = ()) -> list[Listed]:
        """Return the live requests of all routers except these, the oldest first. Raises grpc.RpcError."""
        names = [name for name in self._admins if name not in set(besides)]
        answers = await asyncio.gather(*(self._listing(name) for name in names))
        return sorted((one for answer in answers for one in answer), key=lambda one: -one.age_s)

    async def inspect(self, name: str) -> worker_pb2.InspectResponse:
        """Raises grpc.RpcError."""
        answer: worker_pb2.InspectResponse = await self._workers[name].Inspect(
            worker_pb2.InspectRequest(), timeout=_ANSWER_S
        )
        return answer

    async def _listing(self, router: str) -> list[Listed]:
        answer = await self._admins[router].Requests(admin_pb2.RequestsRequest(), timeout=_ANSWER_S)
        return [
            Listed(
                request_id=one.label or one.request_id,  # over HTTP the client names it by a label alone
                router=router,
                phase=REQUEST_PHASES.word(one.phase),
                age_s=one.age_s,
                prefill=one.prefill_member.partition("@")[0],
                decode=one.decode_member.partition("@")[0],
                num_tokens=one.num_tokens,
            )
            for one in answer.requests
        ]
