"""The identity of a process in its cluster: its member id and its advertised address."""

import secrets
import socket

from cluster.messages import MemberId, Role
from cluster.settings.config import ClusterSettings

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def new_member_id(settings: ClusterSettings, role: Role) -> MemberId:
    """A new incarnation of the configured member id, or of a random one."""
    return MemberId(settings.member_id or f"{role}-{secrets.token_hex(3)}", secrets.token_hex(8))


def advertised_host(settings: ClusterSettings) -> str:
    """The address at which other members reach this process: as configured, else the bound address, else the host's."""
    if settings.advertise_host:
        return settings.advertise_host
    if settings.host not in _ANY_ADDRESS:
        return settings.host
    return socket.gethostbyname(socket.gethostname())


def scraped_host(settings: ClusterSettings, advertised: str) -> str:
    """The address at which metrics are read: that of the process, or this machine's own where no other may."""
    return advertised if settings.metrics_host == settings.host else settings.metrics_host
