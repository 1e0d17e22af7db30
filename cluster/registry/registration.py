"""One process's own place in the registry, from its start to its end.

Owns the member's present state and the loop that renews its lease. The process that runs it must end when Fenced comes
out of `keep`: somebody newer has its name.
"""

import asyncio
import logging
from contextlib import suppress

from cluster.errors import ConfigError, Fenced, RegistryUnavailable
from cluster.member import Member, MemberState, fingerprint_difference
from cluster.registry.registry import Registry, jittered

_LOG = logging.getLogger("tandem.registration")


class Registration:
    def __init__(self, registry: Registry, member: Member) -> None:
        self._registry = registry
        self._state = member.state
        self._is_unhealthy = False
        self.member = member

    async def join(self) -> None:
        """Registers, then compares fingerprints with the workers that are there.

        Raises ConfigError when one of them has another model, layout or fine-tune, and leaves again;
        RegistryUnavailable.
        """
        await self._registry.register(self.member)
        others = await self._registry.members()
        try:
            refuse_unequal(self.member, others)
        except ConfigError:
            await self._registry.leave(self.member)
            raise

    async def join_unless(self, stop: asyncio.Event) -> None:
        """Joins when the registry answers, be it gone for ever so long: what this process has loaded is not thrown away
        for it. Once `stop` is set it waits no more. Raises ConfigError as `join` does."""
        is_waiting = False
        while not stop.is_set():
            try:
                await self.join()
            except RegistryUnavailable as error:
                if not is_waiting:
                    _LOG.warning("registry is gone; joining when it is back", extra={"error": str(error)})
                is_waiting = True
            else:
                if is_waiting:
                    _LOG.info("registry is back; joined")
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(jittered(self._registry.lease_s / 3)):
                    await stop.wait()

    async def set_state(self, state: MemberState) -> None:
        """Tells the registry now, or, while it is gone, with the next renewal that reaches it. Raises Fenced."""
        self._state = state
        await self._tell_state()

    async def set_unhealthy(self, is_unhealthy: bool) -> None:
        """Likewise. While it is unhealthy no other state is told. Raises Fenced."""
        self._is_unhealthy = is_unhealthy
        await self._tell_state()

    async def keep(self) -> None:
        """Renews until cancelled, three times within a lease. While the registry is gone it goes on trying: the member
        works on. Raises Fenced."""
        reachable = True
        while True:
            await asyncio.sleep(jittered(self._registry.lease_s / 3))
            try:
                await self._registry.renew(self.member)
            except RegistryUnavailable as error:
                if reachable:
                    _LOG.warning("registry is gone; going on without", extra={"error": str(error)})
                reachable = False
            else:
                if not reachable:
                    _LOG.info("registry is back; registered again")
                reachable = True

    async def leave(self) -> None:
        """Best effort: the lease would lapse by itself."""
        try:
            await self._registry.leave(self.member)
        except (RegistryUnavailable, Fenced) as error:
            _LOG.info("left without telling the registry", extra={"error": str(error)})

    async def _tell_state(self) -> None:
        state = MemberState.UNHEALTHY if self._is_unhealthy else self._state
        self.member = self.member.with_state(state)
        try:
            await self._registry.renew(self.member)
        except RegistryUnavailable as error:
            _LOG.warning("registry does not know the new state yet", extra={"state": state, "error": str(error)})


def refuse_unequal(member: Member, others: tuple[Member, ...]) -> None:
    """A worker of another model, layout or fine-tune has no business here: raises ConfigError with both values. Those
    that are starting too are asked only where nobody has been accepted yet: they may be the ones that do not belong."""
    accepted = [other for other in others if other.state is not MemberState.STARTING and other.fingerprint is not None]
    for other in accepted or others:
        if other.id.id == member.id.id or member.fingerprint is None or other.fingerprint is None:
            continue
        difference = fingerprint_difference(member.fingerprint, other.fingerprint)
        if difference:
            raise ConfigError(
                f"this worker ({member.model}) cannot join: {other.role} worker {other.id} ({other.model}) runs with "
                f"another fingerprint. {difference}. Start both with the same model, dtype and block size, or use "
                "another --cluster-name"
            )
        if not member.speaks_with(other):
            raise ConfigError(
                f"this worker speaks protocol {member.protocol_oldest} to {member.protocol_newest}; {other.role} "
                f"worker {other.id} speaks {other.protocol_oldest} to {other.protocol_newest}"
            )
