"""Starts a worker from its settings. What can be refused without a model is refused before torch is imported."""

import asyncio
from collections.abc import Callable
from functools import partial
from importlib import import_module

from cluster.messages import Role
from cluster.process import lasting
from cluster.settings.config import WorkerConfig
from worker.life import WorkerLife

_SERVICES = tuple(f"tandem.internal.v1.{name}" for name in ("PrefillWorker", "DecodeWorker", "Worker", "KvTransfer"))


async def run(config: WorkerConfig, role: Role, *, stop: asyncio.Event, announce: Callable[..., None]) -> None:
    """Serve until `stop` is set, then drain. Raises ConfigError, ModelRefused, RegistryUnavailable, Fenced and
    DrainIncomplete."""
    life = WorkerLife(config, role=role, service_names=_SERVICES, stop=stop)
    await life.check_registry()
    with lasting():
        app = await life.unless_stopped(partial(import_module, "worker.app"))
    if app is not None:
        await app.serve(life, announce=announce)
