"""Which transports this process has, out of those that its settings allow, best first, and why not the others.

A transport's module says of itself: `NAME`, `unavailable(means)`, `exporter(means)`, `importer(means)`. It imports its
library inside of these, so that a missing one is a reason and no crash.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from cluster.errors import ConfigError
from cluster.settings.transfer_settings import TRANSPORTS, TransferSettings
from kvtransfer.transports.base import ExporterTransport, ImporterTransport, TransportMeans
from kvtransfer.transports.cuda import transport as cuda_ipc
from kvtransfer.transports.nccl import transport as nccl
from kvtransfer.transports.nixl import transport as nixl
from kvtransfer.transports.shm import transport as shm
from kvtransfer.transports.tcp import transport as tcp

_MODULES: Mapping[str, ModuleType] = {module.NAME: module for module in (cuda_ipc, nccl, nixl, shm, tcp)}
# Why one that could work is left out all the same, unless the settings name it.
_RESERVATIONS: Mapping[str, Callable[[TransportMeans], str]] = {
    nccl.NAME: nccl.not_worth_it,
    nixl.NAME: nixl.not_worth_it,
}


@dataclass(frozen=True, slots=True)
class Available:
    """Both lists are best first; `missing` has a reason for each other transport."""

    exporters: tuple[ExporterTransport, ...]
    importers: tuple[ImporterTransport, ...]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(transport.name for transport in self.importers)


def available_transports(settings: TransferSettings, means: TransportMeans) -> Available:
    """Raises ConfigError when a transport that the settings name cannot work here."""
    missing: dict[str, str] = {}
    for name in TRANSPORTS:
        if settings.forced_transports and name not in settings.forced_transports:
            missing[name] = "not among --kv-transports"
        elif name not in _MODULES:
            missing[name] = "not part of this version"
        elif reason := _why_not(name, settings, means):
            missing[name] = reason
    impossible = [name for name in settings.forced_transports if name in missing]
    if impossible:
        reasons = "; ".join(f"{name}: {missing[name]}" for name in impossible)
        raise ConfigError(f"--kv-transports: {reasons}")
    names = [name for name in settings.forced_transports or TRANSPORTS if name not in missing]
    modules = [_MODULES[name] for name in names]
    return Available(
        tuple(module.exporter(means) for module in modules),
        tuple(module.importer(means) for module in modules),
        missing,
    )


def _why_not(name: str, settings: TransferSettings, means: TransportMeans) -> str:
    if not settings.forced_transports and name in _RESERVATIONS and (reason := _RESERVATIONS[name](means)):
        return reason
    reason = _MODULES[name].unavailable(means)
    assert isinstance(reason, str)
    return reason
