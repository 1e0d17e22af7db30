"""Mutual TLS between members: each process has a certificate and a key, and all trust the same authorities.

Owns the conversion of three PEM files to the credentials of gRPC and of sockets, and the error messages for files that
do not work. The files are read again when they change: connections that exist go on, and each later handshake uses the
new files. Files that do not work are reported and not used. Without files all traffic between members is plaintext.
"""

import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from cluster.errors import ConfigError
from cluster.settings.config import ClusterSettings
from cluster.settings.reload import file_version

_MAX_HANDSHAKE_TURNS = 16


class ClusterTls:
    """The TLS files of one process. `load_tls` creates it. Any thread may call its methods: handshakes happen on
    several. Ask for a context at each connection, because `reload` replaces it."""

    def __init__(self, settings: ClusterSettings, host: str) -> None:
        """Raises ConfigError."""
        self._files = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
        self.server_name = settings.tls_server_name  # of every member; empty: members' certificates name their hosts
        self._own_name = self.server_name or host
        self._lock = threading.Lock()
        self._seen = self._files.versions()
        self._verified = _verified(self._files, self._own_name)
        self.version = 0  # grows with each reload

    @property
    def ca_file(self) -> str:
        return self._files.ca

    def reload(self, *, is_forced: bool = False) -> bool:
        """Use the files from now on, if they have changed since they were last read, and return whether they are new.
        Raises ConfigError for files that do not work; the previous ones stay in use.
        """
        with self._lock:
            versions = self._files.versions()
            if versions == self._seen and not is_forced:
                return False
            self._seen = versions
            verified = _verified(self._files, self._own_name)
            if verified.pem == self._verified.pem:
                return False
            self._verified = verified
            self.version += 1
            return True

    def member_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a port for members: a caller needs a certificate of the cluster's authorities. They
        serve one port."""
        return self._server_credentials(lambda pem: pem.ca, asks_for_certificate=True)

    def public_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a port for clients, which authenticate with an API key instead of a certificate. They
        serve one port."""
        return self._server_credentials(lambda pem: None, asks_for_certificate=False)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a channel to a member, whose certificate must be signed by the cluster's authorities.
        A channel's credentials cannot change: open another channel after a reload."""
        pem = self._verified.pem
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    def server_context(self) -> ssl.SSLContext:
        """Return the credentials of `member_credentials` as a context for server sockets."""
        return self._verified.server

    def client_context(self) -> ssl.SSLContext:
        """Return the credentials of `channel_credentials` as a context for sockets that pass `server_hostname`."""
        return self._verified.client

    def wrap_client(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Make the handshake on a socket that is connected to a member at `host`. Its certificate must name
        `server_name`, or `host` if members have no common name. Raises OSError (ssl.SSLError is)."""
        return self.client_context().wrap_socket(connection, server_hostname=self.server_name or host)

    def public_context(self) -> ssl.SSLContext:
        """Return the credentials of `public_credentials` as a context for server sockets."""
        return self._verified.public

    def _server_credentials(
        self, ca_of: "Callable[[Pem], bytes | None]", *, asks_for_certificate: bool
    ) -> grpc.ServerCredentials:
        def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], ca_of(pem))

        used = self._verified.pem

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Return new credentials, or None if they are unchanged. gRPC calls this at each handshake."""
            nonlocal used
            now = self._verified.pem
            if now is used:
                return None
            used = now
            return configuration(now)

        return grpc.dynamic_ssl_server_credentials(configuration(used), changed, asks_for_certificate)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of a process's certificate chain, its key, and the authorities that it trusts."""

    cert: str
    key: str
    ca: str

    def versions(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return values that differ when a file was written or replaced; None for one that cannot be found."""
        return tuple(map(file_version, (self.cert, self.key, self.ca)))


@dataclass(frozen=True, slots=True)
class Pem:
    """The content of three PEM files: a certificate chain, its private key and the authorities. They match."""

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Verified:
    """Files with which a handshake was made. All contexts come from the same content."""

    pem: Pem
    server: ssl.SSLContext
    client: ssl.SSLContext
    public: ssl.SSLContext


def load_tls(settings: ClusterSettings, host: str) -> ClusterTls | None:
    """Read the TLS files; return None if the settings name none. `host`: the address at which members reach this
    process, which its certificate must name if the settings have no `tls_server_name`.

    Raises ConfigError at start for everything that would later fail at each peer: files that are not PEM, a key that
    does not match, a certificate that has expired, is signed by another authority or has another name.
    """
    return ClusterTls(settings, host) if settings.tls_cert else None


def _verified(files: TlsFiles, name: str) -> _Verified:
    """Read the files and make a handshake with their content, as a caller that verifies `name`. Raises ConfigError."""
    pem = _read_all(files)
    _try_authorities(files, pem)
    try:
        server, client = _context(files, pem, ssl.PROTOCOL_TLS_SERVER), _context(files, pem, ssl.PROTOCOL_TLS_CLIENT)
        public = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        public.load_cert_chain(files.cert, files.key, password=_no_password)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ConfigError(_no_pair(files, error)) from error
    if _read_all(files) != pem:  # contexts take a chain from its file only
        raise ConfigError(f"--tls-cert {files.cert} changed while it was read")
    server.verify_mode = ssl.CERT_REQUIRED
    try:
        _shake_hands(server, client, name)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(_not_accepted(files, name, error)) from error
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-cert {files.cert} does not work for TLS: {error.reason or error}") from error
    return _Verified(pem, server, client, public)


def _context(files: TlsFiles, pem: Pem, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.hostname_checks_common_name = False  # gRPC does not look at it either
    context.load_verify_locations(cadata=pem.ca.decode("ascii"))
    context.load_cert_chain(files.cert, files.key, password=_no_password)
    return context


def _read_all(files: TlsFiles) -> Pem:
    return Pem(_read("--tls-cert", files.cert), _read("--tls-key", files.key), _read("--tls-ca", files.ca))


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {flag} {path}: {error.strerror}") from error


def _no_password() -> str:
    """Refuse an encrypted key; without this, OpenSSL would ask for the password on the terminal."""
    raise ValueError("the key is encrypted; give it without a password")


def _try_authorities(files: TlsFiles, pem: Pem) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"--tls-ca {files.ca} holds no certificate in PEM form") from error


def _no_pair(files: TlsFiles, error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"--tls-key {files.key} is not the key of --tls-cert {files.cert}"
    if isinstance(error, ValueError) and not isinstance(error, ssl.SSLError):
        return f"--tls-key {files.key}: {error}"
    return f"--tls-cert {files.cert} and --tls-key {files.key} must be a certificate and its key in PEM form"


def _not_accepted(files: TlsFiles, name: str, error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message.rstrip(".")
    lower = said.lower()
    if "mismatch" in lower:
        return (
            f"--tls-cert {files.cert} does not name {name}, which other members verify: use a certificate with it as "
            f"subjectAltName, or set --tls-server-name, or else --advertise-host, to a name that it has ({said})"
        )
    if "issuer" in lower or "self-signed" in lower or "self signed" in lower:
        return f"--tls-cert {files.cert} is not signed by an authority of --tls-ca {files.ca} ({said})"
    return f"other members would not accept --tls-cert {files.cert}: {said}"


def _shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext, name: str) -> None:
    """Make one handshake in memory with this process's own files, with the checks that each peer makes. Raises
    ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    for _ in range(_MAX_HANDSHAKE_TURNS):
        waiting = [side for side in waiting if not _is_done(side)]
        if not waiting:
            return
    raise ssl.SSLError("the handshake did not end in time")


def _is_done(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
