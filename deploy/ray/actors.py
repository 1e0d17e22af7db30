"""One Ray actor per member: the same application as `python -m prefill_worker`, inside a process that Ray owns.

Ray places it, restarts it when it dies, and ends it; everything else (registry, hand-offs, streams) is Tandem's own and
does not know of Ray. A restarted actor is a new incarnation.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping

import ray

from cluster.errors import ConfigError
from cluster.messages import Role
from cluster.settings.config import RouterConfig, WorkerConfig
from cluster.settings.config_sources import load_config

_LOG = logging.getLogger("tandem.ray")


class MemberProcess:
    """Runs one member on a thread of its own, because an actor's own loop belongs to Ray's calls."""

    def __init__(self, role: str, settings: Mapping[str, object]) -> None:
        self._ready = threading.Event()
        self._ready_line = ""
        self._refusal: ConfigError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._draining = False
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        values = {"advertise_host": node, **settings}
        self._thread = threading.Thread(target=self._run, args=(Role(role), values), name=role, daemon=True)
        self._thread.start()

    def ready(self, timeout_s: float) -> str:
        """The member's ready line. Raises TimeoutError, and ConfigError when it can never be ready as it is."""
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"not ready after {timeout_s} s")
        if self._refusal is not None:
            raise self._refusal
        return self._ready_line

    def pid(self) -> int:
        return os.getpid()

    def drain(self, timeout_s: float) -> bool:
        """Finishes the present work and ends the member; the actor stays until it is killed. False: too slow."""
        self._draining = True
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, role: Role, values: Mapping[str, object]) -> None:
        try:
            asyncio.run(self._serve(role, values))
        except ConfigError as error:  # the next start would end the same way: whoever asks for readiness hears it
            self._refusal = error
            self._ready.set()
            return
        except Exception:  # noqa: BLE001 -- the thread's edge: logged here, answered by the next start
            _LOG.exception("%s ended", role)
        if not self._draining:
            logging.shutdown()
            os._exit(1)  # a member that ended by itself: Ray starts the next one

    async def _serve(self, role: Role, values: Mapping[str, object]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if role is Role.ROUTER:
            from router import app as router_app

            config = load_config(RouterConfig, {}, _as_environment(values))
            await router_app.run(config, stop=self._stop, announce=self._announce)
        elif role is Role.PREFILL:
            from prefill_worker import start as prefill_start

            await prefill_start.run(
                load_config(WorkerConfig, {}, _as_environment(values)), stop=self._stop, announce=self._announce
            )
        else:
            from decode_worker import start as decode_start

            await decode_start.run(
                load_config(WorkerConfig, {}, _as_environment(values)), stop=self._stop, announce=self._announce
            )

    def _announce(self, **fields: object) -> None:
        self._ready_line = " ".join(["ready", *(f"{name}={value}" for name, value in fields.items())])
        self._ready.set()


def _as_environment(values: Mapping[str, object]) -> dict[str, str]:
    """Settings that came as text become what they are, as variables do."""
    return {f"TANDEM_{name.upper()}": str(value) for name, value in values.items()}
