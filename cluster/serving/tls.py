"""Mutual TLS between members: each process has a certificate and a key, and all trust the same authorities.

Owns the conversion of three PEM files to the credentials of gRPC and of sockets, and the error messages for files that
do not work. The files are read once, at start. Without them all traffic between members is plaintext.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from cluster.errors import ConfigError
from cluster.settings.config import ClusterSettings

_MAX_HANDSHAKE_TURNS = 16


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """The TLS files of one process. `load_tls` creates it after a successful handshake with them."""

    cert_file: str
    key_file: str
    ca_file: str
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)

    def member_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a port for members: a caller needs a certificate of the cluster's authorities."""
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)

    def public_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a port for clients, which authenticate with an API key instead of a certificate."""
        return grpc.ssl_server_credentials([(self.key, self.cert)])

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a channel to a member, whose certificate must be signed by the cluster's authorities
        and name the host that was dialled."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def server_context(self) -> ssl.SSLContext:
        """Return the credentials of `member_credentials` as a context for server sockets."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the credentials of `channel_credentials` as a context for sockets that pass `server_hostname`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.hostname_checks_common_name = False  # gRPC does not look at it either
        context.load_verify_locations(cadata=self.ca.decode("ascii"))
        context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        return context


def load_tls(settings: ClusterSettings, host: str) -> ClusterTls | None:
    """Read the TLS files; return None if the settings name none. `host`: the address at which members reach this
    process.

    Raises ConfigError at start for everything that would later fail at each peer: files that are not PEM, a key that
    does not match, a certificate that has expired, is signed by another authority or names another host.
    """
    if not settings.tls_cert:
        return None
    tls = ClusterTls(
        cert_file=settings.tls_cert,
        key_file=settings.tls_key,
        ca_file=settings.tls_ca,
        cert=_read("--tls-cert", settings.tls_cert),
        key=_read("--tls-key", settings.tls_key),
        ca=_read("--tls-ca", settings.tls_ca),
    )
    _try_authorities(tls)
    try:
        server, client = tls.server_context(), tls.client_context()
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ConfigError(_no_pair(tls, error)) from error
    try:
        _shake_hands(server, client, host)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(_not_accepted(tls, host, error)) from error
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-cert {tls.cert_file} does not work for TLS: {error.reason or error}") from error
    return tls


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}") from error


def _no_password() -> str:
    """Refuse an encrypted key; without this, OpenSSL would ask for the password on the terminal."""
    raise ValueError("the key is encrypted; give it without a password")


def _try_authorities(tls: ClusterTls) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=tls.ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"--tls-ca {tls.ca_file} holds no certificate in PEM form") from error


def _no_pair(tls: ClusterTls, error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"--tls-key {tls.key_file} is not the key of --tls-cert {tls.cert_file}"
    if isinstance(error, ValueError) and not isinstance(error, ssl.SSLError):
        return f"--tls-key {tls.key_file}: {error}"
    return f"--tls-cert {tls.cert_file} and --tls-key {tls.key_file} must be a certificate and its key in PEM form"


def _not_accepted(tls: ClusterTls, host: str, error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message.rstrip(".")
    lower = said.lower()
    if "mismatch" in lower:
        return (
            f"--tls-cert {tls.cert_file} does not name {host}, the address at which members reach this process: use a "
            f"certificate with that host or IP address as subjectAltName, or set --advertise-host ({said})"
        )
    if "issuer" in lower or "self-signed" in lower or "self signed" in lower:
        return f"--tls-cert {tls.cert_file} is not signed by an authority of --tls-ca {tls.ca_file} ({said})"
    return f"other members would not accept --tls-cert {tls.cert_file}: {said}"


def _shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext, host: str) -> None:
    """Make one handshake in memory with this process's own files, with the checks that each peer makes. Raises
    ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    for _ in range(_MAX_HANDSHAKE_TURNS):
        waiting = [side for side in waiting if not _is_done(side)]
        if not waiting:
            return
    raise ssl.SSLError("the handshake did not end")


def _is_done(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
