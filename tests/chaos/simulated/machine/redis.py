"""A simulation of the registry's Redis: its scripts, its messages, and expiry by simulated time. It can be killed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from redis.exceptions import ConnectionError as RedisGone

from cluster.registry import registry, scale_registry
from router import accounts
from tests.chaos.simulated.machine.loop import current
from tests.chaos.simulated.machine.network import Network

PLACE = "redis"
Script = Callable[[Sequence[str], Sequence[Any]], Awaitable[Any]]


@dataclass(slots=True)
class _Kept:
    value: str
    until_s: float


class RedisServer:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._keys: dict[str, _Kept] = {}
        self._sets: dict[str, dict[str, None]] = {}
        self.is_up = True
        self.listeners: dict[News, None] = {}

    def kill(self) -> None:
        """End Redis. All its data is lost."""
        self.is_up = False
        self.empty()
        for news in self.listeners:
            news.tell(None)

    def empty(self) -> None:
        self._keys.clear()
        self._sets.clear()

    def start(self) -> None:
        self.is_up = True

    async def reach(self) -> None:
        """Wait for one round trip. Raises ConnectionError."""
        await asyncio.sleep(self._network.latency_s())
        while self._network.is_cut(current().place, PLACE):
            await self._network.until_changed()
        if not self.is_up:
            raise RedisGone("Connection refused.")

    def get(self, key: str) -> str | None:
        kept = self._keys.get(key)
        if kept is None or kept.until_s <= self._network.loop.now_s:
            return None
        return kept.value

    def put(self, key: str, value: str, milliseconds: int) -> None:
        self._keys[key] = _Kept(value, self._network.loop.now_s + milliseconds / 1000)

    def holder(self, keys: Sequence[str], values: Sequence[Any]) -> tuple[str, str, str, str]:
        holder, time_us = self.get(keys[0]) or "", round(self._network.loop.now_s * 1e6)
        seconds, microseconds = divmod(time_us, 1_000_000)
        return holder, holder, str(seconds), str(microseconds)

    def register(self, keys: Sequence[str], values: Sequence[Any]) -> list[str]:
        if (self.get(keys[1]) or "") != values[7]:
            return []
        self._write(keys, values)
        return [""]  # no follower of a scale target counts this member

    def _write(self, keys: Sequence[str], values: Sequence[Any]) -> bool:
        """Write a registration and return whether the previous one had expired."""
        lease, incarnation, members = keys[:3]
        before = self.get(lease)
        self.put(incarnation, values[1], values[4])
        self.put(lease, values[2], values[3])
        self._sets.setdefault(members, {})[values[0]] = None
        if before != values[2]:
            self._publish()
        return before is None

    def renew(self, keys: Sequence[str], values: Sequence[Any]) -> tuple[str, int]:
        if holder := self._other_holder(keys, values):
            return holder, 0
        return "", int(self._write(keys, values))

    def deregister(self, keys: Sequence[str], values: Sequence[Any]) -> tuple[str, int]:
        if holder := self._other_holder(keys, values):
            return holder, 0
        self._keys.pop(keys[0], None)
        self._sets.get(keys[2], {}).pop(values[0], None)
        self._publish()
        return "", 0

    def _other_holder(self, keys: Sequence[str], values: Sequence[Any]) -> str:
        holder = self.get(keys[1]) or ""
        is_other = holder and holder.split()[0] != values[1].split()[0]
        return holder if is_other and int(holder.split()[1]) >= int(values[5]) and values[7] != "1" else ""

    def members(self, keys: Sequence[str], values: Sequence[Any]) -> list[str]:
        ids = self._sets.get(keys[0], {})
        found = {member_id: self.get(values[0] + member_id) for member_id in ids}
        for member_id in [member_id for member_id, text in found.items() if text is None]:
            del ids[member_id]
        return [word for id_and_text in found.items() if id_and_text[1] is not None for word in id_and_text if word]

    def share_use(self, keys: Sequence[str], values: Sequence[Any]) -> list[str]:
        """Keep a router's report of what its tenants use, and return those of the others."""
        router, report, expires_ms = values
        self.put(f"{keys[0]} {router}", report, expires_ms)
        others = [key for key in self._keys if key.startswith(f"{keys[0]} ") and not key.endswith(f" {router}")]
        reports = {key.partition(" ")[2]: self.get(key) for key in others}
        return [word for pair in reports.items() if pair[1] is not None for word in pair if word is not None]

    def nothing(self, keys: Sequence[str], values: Sequence[Any]) -> list[str]:
        """Answer scripts of what no schedule has: scale targets, and sums of usage that are read."""
        return []

    def _publish(self) -> None:
        for news in self.listeners:
            news.tell("changes")


class RedisClient:
    """The part of cluster/registry/redis_client.py that the registry uses."""

    place = PLACE

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._scripts = {
            registry._HOLDER: server.holder,
            registry._REGISTER: server.register,
            registry._RENEW: server.renew,
            registry._DEREGISTER: server.deregister,
            registry._MEMBERS: server.members,
            scale_registry._ANSWER: server.nothing,
            accounts._SHARE: server.share_use,
            accounts._ADD: server.nothing,
        }

    def register_script(self, text: str) -> Script:
        run = self._scripts[text]

        async def call(keys: Sequence[str], values: Sequence[Any]) -> Any:
            await self._server.reach()
            return run(keys, values)

        return call

    def pubsub(self) -> "News":
        return News(self._server)

    async def subscribe(self, news: "News", channel: str) -> None:
        await news.subscribe()

    async def drop_idle(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class News:
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._process = current()
        self._told: asyncio.Queue[str | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.listeners.pop(self, None)

    async def subscribe(self) -> None:
        await self._server.reach()
        self._server.listeners[self] = None

    def tell(self, message: str | None) -> None:
        """Deliver a message. None: the connection broke."""
        network = self._server._network
        if not network.is_cut(self._process.place, PLACE):
            network.loop.call_later(network.latency_s(), self._told.put_nowait, message, context=self._process.context)

    async def get_message(self, timeout: float) -> str | None:
        try:
            async with asyncio.timeout(timeout):
                message = await self._told.get()
        except TimeoutError:
            return None
        if message is None:
            raise RedisGone("Connection closed by server.")
        return message
