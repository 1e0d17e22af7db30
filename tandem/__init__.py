"""The client library of Tandem: `from tandem import AsyncClient, Client, LocalCluster`.

The names are imported when they are first used, so that the stubs of the protocol can be imported without a client.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.client import AsyncClient, Client
    from tandem.local_cluster import LocalCluster

__all__ = ["AsyncClient", "Client", "LocalCluster"]

_MODULES = {"AsyncClient": "tandem.client", "Client": "tandem.client", "LocalCluster": "tandem.local_cluster"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
