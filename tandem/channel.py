"""A client's channel to a router, plaintext or TLS, and explanations of TLS failures.

An authority in `tls_ca` (or a publicly trusted one, with `secure` alone) must have signed the router's certificate, and
the certificate must name the host that is dialled, or `tls_server_name`.
"""

import re
from pathlib import Path
from urllib.parse import unquote

import grpc

_OPTIONS = (
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 10_000),  # a router that is frozen or cut off is lost after both times
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # its default of one minute would override keepalive_timeout
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the timeout of connecting
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # the environment's proxy settings are ignored
    # The library retries. Where gRPC 1.85 retries by itself, a call whose connection closes as it begins may never end:
    # 5 of 100 blocking readers waited for ever.
    ("grpc.enable_retries", 0),
)

_CERTIFICATE = b"CERTIFICATE-----"  # in a PEM file

REFUSED = "no process accepts connections at"  # followed by the address
_REFUSED_ADDRESS = re.compile(r"(?:ipv4|ipv6|unix):(\S+): .*Connection refused")
_UNKNOWN_HOST = re.compile(r"errors resolving (\S+): ")
# Parts of gRPC's messages, and explanations.
_MEANINGS = (
    ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "the server's certificate has expired"),
    (
        "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid",
        "the server's certificate is not valid yet; check clocks",
    ),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not signed by a trusted authority; see --tls-ca"),
    (
        "Hostname Verification Check failed",
        "the server's certificate does not name this host in its subjectAltName; see --tls-server-name",
    ),
    ("WRONG_VERSION_NUMBER", "the server does not use TLS"),
    ("Failed parsing HTTP/2", "the server does not use gRPC; a router's gRPC port is not its HTTP port"),
)
# With TLS missing on one side; also where the server is ending.
_CLOSED = (
    "Socket closed",
    "the server closed the connection at once; it may require TLS or its authority's certificate",
)


def open_channel(
    address: str, *, tls_ca: str | None = None, tls_server_name: str | None = None, secure: bool = False
) -> grpc.Channel:
    """`tls_ca`: PEM file with the authorities that may have signed the router's certificate; `tls_server_name`: what it
    must name instead of the host; `secure`: TLS, with the publicly trusted ones where no file is given. Raises OSError
    when the file cannot be read, and ValueError if it holds no certificate."""
    credentials = channel_credentials(tls_ca, secure)
    if credentials is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, credentials, options=_tls_options(tls_server_name))


def open_async_channel(
    address: str, *, tls_ca: str | None = None, tls_server_name: str | None = None, secure: bool = False
) -> grpc.aio.Channel:
    """Open a channel as `open_channel` does, on the running event loop."""
    credentials = channel_credentials(tls_ca, secure)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_tls_options(tls_server_name))


def channel_credentials(tls_ca: str | None, secure: bool) -> grpc.ChannelCredentials | None:
    """Return the credentials for TLS, None without it. Raises as `open_channel`."""
    if not tls_ca:
        return grpc.ssl_channel_credentials() if secure else None
    authorities = Path(tls_ca).read_bytes()
    if _CERTIFICATE not in authorities:  # gRPC would write lines of its own to stderr
        raise ValueError(f"{tls_ca} holds no certificate; give a PEM file with the authorities of the routers")
    return grpc.ssl_channel_credentials(authorities)


def explained(details: str) -> str:
    """Return the details of a failed call, with an explanation in front if TLS failed. The explanation stands alone if
    no process listens at the address, or if its host has no address."""
    if refused := _REFUSED_ADDRESS.search(details):
        return f"{REFUSED} {unquote(refused[1])}"
    if unknown := _UNKNOWN_HOST.search(details):
        return f"the host of {unknown[1]} has no address: its name is not known here"
    if not _is_of_connecting(details):
        return details
    meaning = next((meaning for word, meaning in (*_MEANINGS, _CLOSED) if word in details), None)
    return f"{meaning} ({details})" if meaning is not None else details


def is_failed_handshake(details: str) -> bool:
    """Return whether the server responds and its certificate or its protocol is not the expected one, which waiting
    does not end. A server that closes the connection may be ending."""
    return _is_of_connecting(details) and any(word in details for word, _ in _MEANINGS)


def _is_of_connecting(details: str) -> bool:
    return "failed to connect" in details or "Handshake" in details


def _tls_options(server_name: str | None) -> tuple[tuple[str, object], ...]:
    return (*_OPTIONS, ("grpc.ssl_target_name_override", server_name)) if server_name else _OPTIONS
