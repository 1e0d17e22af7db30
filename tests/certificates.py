"""Certificates for tests, made by the same code as `tandem certs`: right ones, and each kind of wrong one."""

import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grpc
import pytest

from cli.verbs.access.certs import Pair, make_authority, make_certificate
from cluster.serving.tls import ClusterTls, load_tls
from cluster.settings.config import RouterConfig

HOSTS = ("localhost", "127.0.0.1")
SERVER_NAME = "members.tandem.example"


@dataclass(frozen=True, slots=True)
class Certificates:
    """The certificates of a test. `member` is valid; `shared` (of workers) and `router` are valid where members verify
    SERVER_NAME; `stranger` is valid under another authority; each of the others has one defect.
    """

    authority: Pair
    other_authority: Pair
    member: Pair
    shared: Pair
    router: Pair
    stranger: Pair
    expired: Pair
    nameless: Pair
    elsewhere: Pair

    def flags(self) -> tuple[str, ...]:
        return tls_flags(self.member, self.authority)

    def worker_flags(self) -> tuple[str, ...]:
        """Return the flags of a worker whose certificate does not name its address."""
        return (*tls_flags(self.shared, self.authority), "--tls-server-name", SERVER_NAME)

    def router_flags(self) -> tuple[str, ...]:
        """Return the flags of a router of such workers."""
        return (*tls_flags(self.router, self.authority), "--tls-server-name", SERVER_NAME)

    def stranger_flags(self) -> tuple[str, ...]:
        """Return the flags of a process with a certificate of another authority, which it trusts."""
        return tls_flags(self.stranger, self.other_authority)

    def loaded(self) -> ClusterTls:
        return load(self.member, self.authority)


@cache
def certificates_of_the_run() -> Certificates:
    """Return certificates that all tests of this process share. Their files are removed at its end."""
    return make_certificates(Path(_folder_of_the_run().name))


@cache
def _folder_of_the_run() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="tandem-tls-")


def make_certificates(folder: Path) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command makes the certificates, and is not here")
    authority, other = make_authority(folder / "ours", days=2), make_authority(folder / "other", days=2)
    return Certificates(
        authority=authority,
        other_authority=other,
        member=make_certificate(folder, authority, "member", HOSTS, days=2),
        shared=make_certificate(folder, authority, "shared", (SERVER_NAME,), days=2),
        router=make_certificate(folder, authority, "router", (SERVER_NAME, *HOSTS), days=2),
        stranger=make_certificate(folder, other, "stranger", HOSTS, days=2),
        expired=make_certificate(folder, authority, "expired", HOSTS, days=-1),
        nameless=make_certificate(folder, authority, "nameless", (), days=2),
        elsewhere=make_certificate(folder, authority, "elsewhere", ("elsewhere.example",), days=2),
    )


def tls_flags(member: Pair, authority: Pair) -> tuple[str, ...]:
    return ("--tls-cert", str(member.cert), "--tls-key", str(member.key), "--tls-ca", str(authority.cert))


def load(member: Pair, authority: Pair, host: str = "127.0.0.1", server_name: str = "") -> ClusterTls:
    """Load the certificates as a member does at its start."""
    settings = RouterConfig(
        model="-",
        tls_cert=str(member.cert),
        tls_key=str(member.key),
        tls_ca=str(authority.cert),
        tls_server_name=server_name,
    )
    tls = load_tls(settings, host)
    assert tls is not None
    return tls


def client_credentials(authority: Pair, member: Pair | None = None) -> grpc.ChannelCredentials:
    """Return the credentials of a caller that trusts `authority` and, with `member`, presents that member's
    certificate."""
    if member is None:
        return grpc.ssl_channel_credentials(authority.cert.read_bytes())
    return grpc.ssl_channel_credentials(authority.cert.read_bytes(), member.key.read_bytes(), member.cert.read_bytes())
