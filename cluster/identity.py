"""Who this process is in its cluster: its name, its address for others, and the key it shares with them."""

import os
import secrets
import socket
from pathlib import Path

from cluster.messages import MemberId, Role
from cluster.protocol.keys import load_cluster_key
from cluster.settings.config import ClusterSettings

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def new_member_id(settings: ClusterSettings, role: Role) -> MemberId:
    """A fresh incarnation of the configured name, or of a random one."""
    return MemberId(settings.member_id or f"{role}-{secrets.token_hex(3)}", secrets.token_hex(8))


def advertised_host(settings: ClusterSettings) -> str:
    """Under which others reach this process: as told; where it binds; bound to all, its host's own address."""
    if settings.advertise_host:
        return settings.advertise_host
    if settings.host not in _ANY_ADDRESS:
        return settings.host
    return socket.gethostbyname(socket.gethostname())


def cluster_key(settings: ClusterSettings) -> bytes:
    """From the configured file, or from one per user and cluster name; made at first start. Raises ConfigError."""
    if settings.cluster_key_file:
        return load_cluster_key(Path(settings.cluster_key_file))
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return load_cluster_key(home / "tandem" / f"{settings.cluster_name}.key")
