"""The registration of one process, from its start to its end, and its identity: member id and advertised address.

Owns the state of the member and the loop that renews the registration. The process must end when `keep` raises Fenced:
a newer incarnation has registered under its id.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from cluster.auth.key_file import key_path
from cluster.errors import ConfigError, Fenced, InvalidRequest, RegistryUnavailable
from cluster.member import Member, MemberState, fingerprint_difference
from cluster.messages import MemberId, Role
from cluster.registry.registry import Registry, jittered
from cluster.service_times import StepLimit
from cluster.settings.config import ClusterSettings

_LOG = logging.getLogger("tandem.registration")
_STALE_TTLS = 1.5  # registrations of a cluster that was killed have expired by then
_SHOWN = 100  # characters of an id that stands in Redis


class Registration:
    def __init__(
        self, registry: Registry, member: Member, *, on_role: Callable[[Role], None] = lambda role: None
    ) -> None:
        """`on_role` is called with each new role, in the order in which they are registered."""
        self._registry, self._on_role = registry, on_role
        self._writing = asyncio.Lock()  # writes on two connections to Redis could change their order
        self._changes: set[asyncio.Task[Role]] = set()  # of the role, in progress
        self._registered_role: Role | None = None  # that the registry has, while it may not have the present one
        self._state = member.state
        self._is_unhealthy = False
        self.member = member

    async def join(self) -> None:
        """Register, then compare fingerprints with the registered workers.

        The member takes the role for which the scale target counts it: an operator may have changed the role of the
        process that it replaces. Raises RegistryUnavailable, and ConfigError (after leaving again) when a worker has
        another model, layout or fine-tune.
        """
        counted = await self._registry.register(self.member)
        if counted is not self.member.role:
            self._set_role(counted)
        others = await self._registry.members()
        try:
            refuse_unequal(self.member, others)
        except ConfigError:
            await self._registry.deregister(self.member)
            raise

    async def join_unless(self, stop: asyncio.Event) -> None:
        """Join as soon as the registry answers, without a timeout: a loaded model is not discarded because Redis is
        down. Returns when `stop` is set. Raises ConfigError as `join` does."""
        is_waiting = False
        while not stop.is_set():
            try:
                await self.join()
            except RegistryUnavailable as error:
                if not is_waiting:
                    _LOG.warning(
                        "the registry is unreachable; this process joins when it is back", extra={"error": str(error)}
                    )
                is_waiting = True
            else:
                if is_waiting:
                    _LOG.info("the registry is reachable again; joined")
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(jittered(self._registry.ttl_s / 3)):
                    await stop.wait()

    async def set_state(self, state: MemberState) -> None:
        """Register the state now or, while the registry is unreachable, with the next renewal. Raises Fenced."""
        self._state = state
        await self._register_state()

    async def set_role(self, role: Role) -> Role:
        """Register another role as `set_state` does, and move the scale target with it where its follower counts roles.
        Return the former role. Raises Fenced, and InvalidRequest if no other ready worker would decode or the target
        has no room for the change; if that is found with a later renewal, the member returns to its former role."""
        changing = asyncio.create_task(self._change_role(role), name="change the role")
        self._changes.add(changing)
        changing.add_done_callback(self._on_changed)
        return await asyncio.shield(changing)  # if the caller leaves, it goes on until it is known to be refused or not

    def set_step_target(self, limit: StepLimit) -> None:
        """Register a worker's target for steps with the next renewal."""
        assert self.member.capacity is not None, "only workers have a target"
        capacity = replace(self.member.capacity, slo_tpot_us=limit.target_us)
        self.member = replace(self.member, capacity=capacity)

    async def set_unhealthy(self, is_unhealthy: bool) -> None:
        """Register the unhealthy state as `set_state` does. While the member is unhealthy, no other state is
        registered. Raises Fenced."""
        self._is_unhealthy = is_unhealthy
        await self._register_state()

    async def keep(self) -> None:
        """Renew three times per TTL until cancelled. While the registry is unreachable, keep trying; the member keeps
        working. Raises Fenced."""
        reachable = True
        while True:
            await asyncio.sleep(jittered(self._registry.ttl_s / 3))
            try:
                await self._renew()
            except RegistryUnavailable as error:
                if reachable:
                    _LOG.warning("the registry is unreachable; continuing without it", extra={"error": str(error)})
                reachable = False
            else:
                if not reachable:
                    _LOG.info("the registry is reachable again; registered")
                reachable = True

    async def deregister(self) -> None:
        """Delete the registration, best-effort: it would expire by itself."""
        try:
            async with self._writing:
                await self._registry.deregister(self.member)
        except (RegistryUnavailable, Fenced) as error:
            _LOG.info("this member left without deleting its registration", extra={"error": str(error)})

    def _set_role(self, role: Role) -> None:
        self.member = replace(self.member, role=role)
        self._on_role(role)

    async def _change_role(self, role: Role) -> Role:
        async with self._writing:  # a role that may be refused is in no other renewal
            former = self.member.role
            if self._registered_role is None:
                self._registered_role = former
            self._set_role(role)
            try:
                await self._write_state()
            except InvalidRequest:
                self._take_back_role()
                raise
            return former

    def _take_back_role(self) -> None:
        assert self._registered_role is not None, "only a role that is not registered yet is refused"
        self._set_role(self._registered_role)
        self._registered_role = None

    def _on_changed(self, changing: "asyncio.Task[Role]") -> None:
        self._changes.discard(changing)
        if not changing.cancelled():
            changing.exception()  # the caller raises it, unless it has left

    async def _register_state(self) -> None:
        async with self._writing:
            await self._write_or_take_back(self._write_state)

    async def _write_state(self) -> None:
        state = MemberState.UNHEALTHY if self._is_unhealthy else self._state
        self.member = self.member.with_state(state)
        try:
            await self._write()
        except RegistryUnavailable as error:
            fields = {"state": state, "role": self.member.role, "error": str(error)}
            _LOG.warning("the registry does not have this member's new state yet", extra=fields)

    async def _renew(self) -> None:
        async with self._writing:
            await self._write_or_take_back(self._write)

    async def _write_or_take_back(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write, and again with the registered role if the registry refuses the new one."""
        try:
            await write()
        except InvalidRequest as error:
            refused = self.member.role
            self._take_back_role()
            fields = {"role": self.member.role, "refused_role": refused, "error": str(error)}
            _LOG.warning("the registry refuses this member's new role; it returns to its former one", extra=fields)
            await write()

    async def _write(self) -> None:
        await self._registry.renew(self.member, may_refuse=self._registered_role is not None)
        self._registered_role = None


async def check_registry(registry: Registry, settings: ClusterSettings) -> None:
    """Check, before anything else is done, that Redis answers and that this process has the cluster's key.

    Without the key it would wait forever: no member would call it. It is refused when all registrations have another
    key for longer than the registrations of a dead cluster last. Once it runs, no registration ends it, because every
    program that can write to Redis could forge one. Raises RegistryUnavailable, ConfigError."""
    await registry.ping()
    until_s = asyncio.get_running_loop().time() + _STALE_TTLS * registry.ttl_s
    while strangers := await registry.strangers():
        if asyncio.get_running_loop().time() > until_s:
            shown = ", ".join(name[:_SHOWN] for name in strangers[:3])
            raise ConfigError(
                f"cluster key {key_path(settings)} is not that of the {len(strangers)} registered member(s) of cluster"
                f" {settings.cluster_name!r} ({shown}); copy their key file to it, or choose another --cluster-name"
            )
        await asyncio.sleep(registry.ttl_s / 5)


def refuse_unequal(member: Member, others: tuple[Member, ...]) -> None:
    """Raise ConfigError, with both values, if a registered worker has another model, layout or fine-tune. Workers that
    are still starting count only if no worker is ready, because they may be the wrong ones.
    """
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
                f"this worker supports protocol {member.protocol_oldest} to {member.protocol_newest}; {other.role} "
                f"worker {other.id} supports {other.protocol_oldest} to {other.protocol_newest}"
            )


_ANY_ADDRESS = ("0.0.0.0", "::", "")


def new_member_id(settings: ClusterSettings, role: Role) -> MemberId:
    """Return a new incarnation of the configured member id, or of a random one."""
    return MemberId(settings.member_id or f"{role}-{secrets.token_hex(3)}", secrets.token_hex(8))


def advertised_host(settings: ClusterSettings) -> str:
    """Return the address at which other members reach this process: as configured, else the bound one, else the
    host's.
    """
    if settings.advertise_host:
        return settings.advertise_host
    if settings.host not in _ANY_ADDRESS:
        return settings.host
    return socket.gethostbyname(socket.gethostname())


def scraped_host(settings: ClusterSettings, advertised: str) -> str:
    """Return the address at which metrics are read: that of the process, or the loopback address if no other machine
    may read them.
    """
    return advertised if settings.metrics_host == settings.host else settings.metrics_host
