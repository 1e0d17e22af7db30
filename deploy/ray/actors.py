"""Runs one member per Ray actor: the application of `python -m prefill_worker` in a process that Ray manages.

Ray places, restarts and ends the process. Registry, hand-offs and streams do not depend on Ray. A restarted actor is a
new incarnation.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping

import ray

from cluster.errors import ConfigError, DeadlineExceeded
from cluster.messages import Role
from cluster.settings.config import RouterConfig, WorkerConfig
from cluster.settings.config_sources import load_config

_LOG = logging.getLogger("tandem.ray")


class MemberProcess:
    """Runs one member on a separate thread, because Ray uses the actor's own event loop for calls."""

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
        """Wait for the member's ready line. Raises DeadlineExceeded, and ConfigError for wrong settings."""
        if not self._ready.wait(timeout_s):
            context = ray.get_runtime_context()
            raise DeadlineExceeded(
                f"Ray actor {context.get_actor_name()} on node {context.get_node_id()} is not ready after"
                f" {timeout_s:g} s: its {self._thread.name} member still loads its model or waits for Redis; its log"
                " has the reason"
            )
        if self._refusal is not None:
            raise self._refusal
        return self._ready_line

    def pid(self) -> int:
        return os.getpid()

    def drain(self, timeout_s: float) -> bool:
        """Let the member finish its work and end; the actor itself stays. Return False on a timeout."""
        self._draining = True
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, role: Role, values: Mapping[str, object]) -> None:
        try:
            asyncio.run(self._serve(role, values))
        except ConfigError as error:  # a restart would fail again: `ready` raises it
            self._refusal = error
            self._ready.set()
            return
        except Exception:  # noqa: BLE001 -- the end of the thread: logged, then Ray restarts the process
            _LOG.exception("%s ended", role)
        if not self._draining:
            logging.shutdown()
            os._exit(1)  # the member ended by itself: Ray restarts it

    async def _serve(self, role: Role, values: Mapping[str, object]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if role is Role.ROUTER:
            from router import app as router_app

            config = load_config(RouterConfig, {}, _as_environment(values))
            await router_app.run(config, stop=self._stop, announce=self._announce)
        else:
            from worker.life import run_worker

            worker_config = load_config(WorkerConfig, {}, _as_environment(values))
            await run_worker(worker_config, role, stop=self._stop, announce=self._announce)

    def _announce(self, **fields: object) -> None:
        self._ready_line = " ".join(["ready", *(f"{name}={value}" for name, value in fields.items())])
        self._ready.set()


def _as_environment(values: Mapping[str, object]) -> dict[str, str]:
    """Return the settings as environment variables, because their text is parsed into the right types."""
    return {f"TANDEM_{name.upper()}": str(value) for name, value in values.items()}
