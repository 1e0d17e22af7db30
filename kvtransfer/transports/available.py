"""Determines which transports work in this process, of those that its settings allow, best first, and why the others do
not.

A transport's module declares `NAME`, `unavailable(setup)`, `exporter(setup)` and `importer(setup)`. It imports its
library inside these functions, so that a missing library is a reason instead of a crash.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from cluster.errors import ConfigError
from cluster.settings.worker_settings import TRANSPORTS, TransferSettings
from kvtransfer.transports.base import ExporterTransport, ImporterTransport, TransportSetup
from kvtransfer.transports.cuda import transport as cuda_ipc
from kvtransfer.transports.nccl import transport as nccl
from kvtransfer.transports.nixl import transport as nixl
from kvtransfer.transports.shm import transport as shm
from kvtransfer.transports.tcp import transport as tcp

_MODULES: Mapping[str, ModuleType] = {module.NAME: module for module in (cuda_ipc, nccl, nixl, shm, tcp)}
# The reason why a transport that works is used only if the settings name it.
_RESERVATIONS: Mapping[str, Callable[[TransportSetup], str]] = {
    nccl.NAME: nccl.not_worth_it,
    nixl.NAME: nixl.not_worth_it,
}


@dataclass(frozen=True, slots=True)
class Available:
    """The transports of this process, best first, and the reason for each one that is missing."""

    exporters: tuple[ExporterTransport, ...]
    importers: tuple[ImporterTransport, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(transport.name for transport in self.importers)


def available_transports(settings: TransferSettings, setup: TransportSetup) -> Available:
    """Return the transports that work here. Raises ConfigError if one that the settings name does not."""
    missing: dict[str, str] = {}
    for name in TRANSPORTS:
        if settings.forced_transports and name not in settings.forced_transports:
            missing[name] = "not among --kv-transports"
        elif name not in _MODULES:
            missing[name] = "not part of this version"
        elif reason := _why_not(name, settings, setup):
            missing[name] = reason
    impossible = [name for name in settings.forced_transports if name in missing]
    if impossible:
        reasons = "; ".join(f"{name}: {missing[name]}" for name in impossible)
        raise ConfigError(f"--kv-transports: {reasons}")
    names = [name for name in settings.forced_transports or TRANSPORTS if name not in missing]
    modules = [_MODULES[name] for name in names]
    return Available(
        tuple(module.exporter(setup) for module in modules),
        tuple(module.importer(setup) for module in modules),
        missing,
    )


def _why_not(name: str, settings: TransferSettings, setup: TransportSetup) -> str:
    if not settings.forced_transports and name in _RESERVATIONS and (reason := _RESERVATIONS[name](setup)):
        return reason
    reason = _MODULES[name].unavailable(setup)
    assert isinstance(reason, str)
    return reason
