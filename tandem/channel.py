"""A client's channel to a router: plaintext, or TLS that the client asks for. Says in words what TLS did not like.

A router's certificate must be of an authority in `tls_ca`, or of one that is publicly trusted with `secure` alone, and
must name the host that is dialled.
"""

from pathlib import Path

import grpc

_OPTIONS = (
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 10_000),  # a router that is frozen or cut off is given up after both
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # where this is left at its minute, that has no effect
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the longest that connecting may take
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # the address is dialled as it is given, whatever the environment says
)

# What gRPC says, and what it means.
_MEANINGS = (
    ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "its certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "its certificate is not valid yet; compare the clocks"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of an authority that is trusted here; look at --tls-ca"),
    ("Hostname Verification Check failed", "its certificate does not name this host: the subjectAltName lacks it"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
    ("Failed parsing HTTP/2", "it does not speak gRPC; a router's gRPC port is another one than its HTTP port"),
    ("Socket closed", "it closed the connection at once: it may want TLS, or a certificate of its own authority"),
)


def open_channel(address: str, *, tls_ca: str | None = None, secure: bool = False) -> grpc.Channel:
    """`tls_ca`: PEM file with the authorities that may have signed the router's certificate; `secure`: TLS, with the
    publicly trusted ones where no file is given. Raises OSError when the file cannot be read."""
    credentials = _credentials(tls_ca, secure)
    if credentials is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, credentials, options=_OPTIONS)


def open_async_channel(address: str, *, tls_ca: str | None = None, secure: bool = False) -> grpc.aio.Channel:
    """As open_channel, on the running loop."""
    credentials = _credentials(tls_ca, secure)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


def explained(details: str) -> str:
    """A failed call's details; where it failed at TLS, what that means before them."""
    if "failed to connect" not in details and "Handshake" not in details:
        return details
    meaning = next((meaning for word, meaning in _MEANINGS if word in details), None)
    return f"{meaning} ({details})" if meaning is not None else details


def _credentials(tls_ca: str | None, secure: bool) -> grpc.ChannelCredentials | None:
    if tls_ca:
        return grpc.ssl_channel_credentials(Path(tls_ca).read_bytes())
    return grpc.ssl_channel_credentials() if secure else None
