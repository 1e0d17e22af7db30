"""The counters in the proofs of calls between members: callers that skip some and use them later, and an eavesdropper
that sends accepted calls again.

A callee must accept each counter once. A refused caller opens another session and makes its call again, so no request
is lost; a call of the eavesdropper must never be served.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import grpc

from cluster.auth.gate import PROOF
from cluster.auth.sessions import WINDOW, Session
from cluster.errors import MemberRefused
from cluster.serving.rpc_errors import REASON
from tests.chaos.simulated.machine.calls import Channel
from tests.chaos.simulated.machine.loop import Process, current

if TYPE_CHECKING:
    from tests.chaos.simulated.world import World

KNOWN = tuple(
    f"proofs: {what}" for what in ("far ahead", "overtaken", "replayed", "unknown_session", "of a call sent again")
)
_SKIPS = (1, 1, 2, 2, 100, WINDOW - 1, WINDOW, WINDOW + 1, 1 << 40)
_MAX_KEPT = 64  # accepted calls that the eavesdropper has
_ANSWER_S = 5.0
_MET_S = 1.0  # the eavesdropper sends a call again within this time

Call = tuple[str, str, bytes, bytes]  # place of the callee, method, request, proof
Prove = Callable[[Session, str, bytes], bytes]
Verify = Callable[[Session, bytes, str, bytes], None]


class Proofs:
    """The counters of one world."""

    def __init__(self, world: "World") -> None:
        self._world, self._faults = world, world.schedule.mix.proofs
        self._dice = Random(f"{world.schedule.seed} counters")
        self._skipped: dict[bytes, list[int]] = {}  # by session
        self._accepted: list[Call] = []
        has_replays = self._faults is not None and self._faults.num_replays
        self.eavesdroppers = [Process("eavesdropper")] if has_replays else []

    def prove(self, session: Session, method: str, body: bytes, prove: Prove) -> bytes:
        """Return the proof of a call, whose counter may be out of turn."""
        if self._faults is None or self._dice.random() >= self._faults.out_of_turn_share:
            return prove(session, method, body)
        skipped = self._skipped.setdefault(session.id, [])
        if skipped and self._dice.random() < 0.5:
            turn, session._counter = session._counter, skipped.pop(self._dice.randrange(len(skipped)))
            proof = prove(session, method, body)
            session._counter = turn
            return proof
        skipped.append(session._counter)
        session._counter += self._dice.choice(_SKIPS)
        return prove(session, method, body)

    def verify(self, session: Session, proof: bytes, method: str, body: bytes, verify: Verify) -> None:
        """Verify a proof, and count what its counter shows. Raises MemberRefused."""
        before = session._window._highest
        try:
            verify(session, proof, method, body)
        except MemberRefused as refusal:
            self._world.reached[f"proofs: {refusal.refusal}"] += 1
            raise
        counter = int.from_bytes(proof[16:24], "big")
        if counter > before + WINDOW:
            self._world.reached["proofs: far ahead"] += 1
        elif counter < before:
            self._world.reached["proofs: overtaken"] += 1
        if self._faults is not None and self._faults.num_replays:
            self._accepted = [*self._accepted[1 - _MAX_KEPT :], (current().place, method, body, proof)]

    async def eavesdrop(self) -> None:
        """Send accepted calls again, and check that every one of them is refused."""
        for _ in range(self._faults.num_replays if self._faults is not None else 0):
            await asyncio.sleep(self._dice.random() * _MET_S)
            if self._accepted:
                await self._send_again(*self._dice.choice(self._accepted))

    async def _send_again(self, place: str, method: str, body: bytes, proof: bytes) -> None:
        world = self._world
        channel = Channel(world.network, world.members[place].address, lambda *about: about[-1])
        call: Any = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        try:
            await call(body, timeout=_ANSWER_S, metadata=((PROOF, proof),))
        except grpc.aio.AioRpcError as error:
            if (REASON, MemberRefused.reason) in tuple(error.trailing_metadata() or ()):
                world.reached["proofs: of a call sent again"] += 1
                return
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return  # the member has ended, or is stopped or cut off
        world.wrong(f"{place} serves a call of {method} again that an eavesdropper has recorded")
