"""The two members of the benchmark, what both agree on, and their transports by name."""

import importlib
from pathlib import Path
from types import ModuleType

from cluster.auth.keys import ClusterKeys
from cluster.messages import Epoch, LayoutFingerprint, MemberId
from cluster.observe.telemetry import Telemetry
from cluster.serving.tls import ClusterTls
from cluster.serving.tls import load_tls as load_cluster_tls
from cluster.settings.config import RouterConfig
from kvtransfer.memory import PoolMemory
from kvtransfer.transports.base import TransportSetup
from kvtransfer.transports.proven_connections import ConnectionProofs

HOST = "127.0.0.1"
KEY = ClusterKeys(b"k" * 32)
PROMPT_HASH = b"h" * 16
EXPORTER = MemberId("prefill-0", "a1")
IMPORTER = MemberId("decode-0", "b2")
EPOCH = Epoch(EXPORTER, b"t" * 16, 1)
LAYOUT = LayoutFingerprint("weights", "config", "bfloat16", "table")
_TIMEOUT_S = 30.0


def module_of(transport: str) -> ModuleType:
    folder = "cuda" if transport == "cuda_ipc" else transport
    return importlib.import_module(f"kvtransfer.transports.{folder}.transport")


def means_of(member: MemberId, memory: PoolMemory, tls: ClusterTls | None) -> TransportSetup:
    return TransportSetup(
        member=member,
        proofs=ConnectionProofs(KEY, member, Telemetry()),
        memory=memory,
        host=HOST,
        advertise_host=HOST,
        timeout_s=_TIMEOUT_S,
        server_tls=tls.server_context if tls else None,
        client_tls=tls.wrap_client if tls else None,
    )


def load_tls(folder: str) -> ClusterTls | None:
    """Load `member.crt`, `member.key` and `ca.crt` from a folder; without a folder, no TLS."""
    if not folder:
        return None
    cert, key, authority = (str(Path(folder) / name) for name in ("member.crt", "member.key", "ca.crt"))
    return load_cluster_tls(RouterConfig(model="-", tls_cert=cert, tls_key=key, tls_ca=authority), HOST)
