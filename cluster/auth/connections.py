"""Proofs of membership at the start of a connection on which KV moves: a mutual challenge and response.

    importer -> exporter   hello      id of the secret, a random number, the importer's name
    exporter -> importer   challenge  a random number, MAC("exporter", transcript)
    importer -> exporter   proof      MAC("importer", transcript)

An importer with a *grant*, a random number of the exporter that came in a proved call and admits one connection, needs
two messages, because the exporter's random number is known:

    importer -> exporter   request    hello, content, MAC("granted importer", transcript and content)
    exporter -> importer   answer     MAC("granted exporter", transcript and content)

The transcript is the transport, the hello, the exporter's name and its random number; a name includes an incarnation.
A replayed or spliced proof is about other random numbers, and a reflected one has the other label, so all are wrong.
The importer reveals nothing that is worth forwarding before the exporter's MAC was right. The MAC is HMAC-SHA256 under
the secret that the hello names, so both secrets of a rotation are accepted. No clock is used. A connection that was
proved under a secret that is dropped later stays open: each read on it needs the token of a ticket, which only a call
with a proof under a valid secret obtains.

This is the protocol MAP1 of Bellare and Rogaway, "Entity Authentication and Key Distribution" (1993), with both names
in each MAC. Pure but for random numbers; knows no sockets.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from typing import Any

from cluster.auth.keys import KEY_ID_BYTES, ClusterKeys, Purpose, purpose_key
from cluster.auth.sessions import NONCE_BYTES, Refusal, refused

_MAGIC = b"TMP1"
_MAC_BYTES = 32
_MAX_NAME_BYTES = 255
_HELLO = struct.Struct(f">4s{KEY_ID_BYTES}s{NONCE_BYTES}sB{_MAX_NAME_BYTES}s")  # with the length of the name
_CHALLENGE = struct.Struct(f">4s{NONCE_BYTES}s{_MAC_BYTES}s")
_PROOF = struct.Struct(f">4s{_MAC_BYTES}s")
MAGIC_BYTES, HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES = len(_MAGIC), _HELLO.size, _CHALLENGE.size, _PROOF.size


class OpeningConnection:
    """The importer's side. It sends `hello`, then what `prove` returns."""

    def __init__(self, keys: ClusterKeys, *, transport: str, importer: str, exporter: str) -> None:
        """`exporter`: the name, with the incarnation, of the member that must answer."""
        self._keys, self._transport, self._exporter = keys, transport, exporter
        self._key_id = keys.current_id
        self.hello = _hello(self._key_id, importer)

    def prove(self, challenge: bytes) -> bytes:
        """Verify the exporter and return the importer's proof. Raises MemberRefused: NO_PROOF, UNKNOWN_KEY,
        WRONG_PROOF."""
        nonce, mac = _fields(_CHALLENGE, challenge)
        secret = self._keys.secret_of(self._key_id)
        if secret is None:
            raise refused(Refusal.UNKNOWN_KEY, "the secret was dropped during the handshake")
        transcript = _transcript(self._transport, self.hello, self._exporter, nonce)
        if not hmac.compare_digest(mac, _mac(secret, b"exporter", transcript)):
            raise refused(Refusal.WRONG_PROOF, f"the peer does not prove that it is {self._exporter}")
        return _PROOF.pack(_MAGIC, _mac(secret, b"importer", transcript))


class AcceptingConnection:
    """The exporter's side. It answers a hello with a challenge, then verifies the proof."""

    def __init__(self, keys: ClusterKeys, *, transport: str, exporter: str) -> None:
        self._keys, self._transport, self._exporter = keys, transport, exporter
        self._expected: bytes | None = None
        self.importer = ""  # the name in the hello; true once its proof was verified

    def challenge(self, hello: bytes) -> bytes:
        """Read a hello and return the challenge. Raises MemberRefused: NO_PROOF, UNKNOWN_KEY."""
        key_id, _, length, name = _fields(_HELLO, hello)
        self.importer = name[:length].decode(errors="replace")
        secret = self._keys.secret_of(key_id)
        if secret is None:
            raise refused(Refusal.UNKNOWN_KEY, "the peer does not have the key of this cluster")
        nonce = secrets.token_bytes(NONCE_BYTES)
        transcript = _transcript(self._transport, hello, self._exporter, nonce)
        self._expected = _mac(secret, b"importer", transcript)
        return _CHALLENGE.pack(_MAGIC, nonce, _mac(secret, b"exporter", transcript))

    def verify(self, proof: bytes) -> None:
        """Verify the importer's proof. Raises MemberRefused: NO_PROOF, WRONG_PROOF."""
        (mac,) = _fields(_PROOF, proof)
        expected, self._expected = self._expected, None  # one proof for each challenge
        if expected is None or not hmac.compare_digest(mac, expected):
            raise refused(Refusal.WRONG_PROOF, f"the peer does not prove that it is {self.importer!r}")


class GrantedRequest:
    """The importer's side under a grant. It sends `message`, then verifies the answer."""

    def __init__(
        self, keys: ClusterKeys, *, transport: str, importer: str, exporter: str, grant: bytes, content: bytes
    ) -> None:
        """`exporter`: the name, with the incarnation, of the member that must answer. `content`: what is asked for."""
        identifier = keys.current_id
        # Without the secret, which was dropped this moment, the exporter refuses the request.
        self._secret, self._exporter = keys.secret_of(identifier) or b"", exporter
        hello = _hello(identifier, importer)
        self._transcript = _transcript(transport, hello, exporter, grant) + content
        self.message = hello + content + _PROOF.pack(_MAGIC, self._mac(b"granted importer"))

    def verify(self, answer: bytes) -> None:
        """Verify the exporter's proof. Raises MemberRefused: NO_PROOF, WRONG_PROOF."""
        (mac,) = _fields(_PROOF, answer)
        if not hmac.compare_digest(mac, self._mac(b"granted exporter")):
            raise refused(Refusal.WRONG_PROOF, f"the peer does not prove that it is {self._exporter}")

    def _mac(self, label: bytes) -> bytes:
        return _mac(self._secret, label, self._transcript)


class GrantingConnection:
    """The exporter's side of a connection that a grant allows. It answers a request that names the grant."""

    def __init__(self, keys: ClusterKeys, *, transport: str, exporter: str) -> None:
        self._keys, self._transport, self._exporter = keys, transport, exporter
        self.importer = ""  # the name in the hello; true once `answer` has returned

    def answer(self, request: bytes, grant_of: Callable[[bytes], bytes | None]) -> tuple[bytes, bytes]:
        """Verify a request and return (content, answer). `grant_of` returns the grant for a content, or None; it must
        not return this one again. Raises MemberRefused: NO_PROOF, UNKNOWN_KEY, UNKNOWN_SESSION, WRONG_PROOF."""
        hello, content, proof = request[:HELLO_BYTES], request[HELLO_BYTES:-PROOF_BYTES], request[-PROOF_BYTES:]
        key_id, _, length, name = _fields(_HELLO, hello)
        (mac,) = _fields(_PROOF, proof)
        self.importer = name[:length].decode(errors="replace")
        secret, grant = self._keys.secret_of(key_id), grant_of(content)
        if secret is None:
            raise refused(Refusal.UNKNOWN_KEY, "the peer does not have the key of this cluster")
        if grant is None:
            raise refused(Refusal.UNKNOWN_SESSION, f"{self.importer!r} asks for what is not, or no longer, granted")
        transcript = _transcript(self._transport, hello, self._exporter, grant) + content
        if not hmac.compare_digest(mac, _mac(secret, b"granted importer", transcript)):
            raise refused(Refusal.WRONG_PROOF, f"the peer does not prove that it is {self.importer!r}")
        return content, _PROOF.pack(_MAGIC, _mac(secret, b"granted exporter", transcript))


def is_magic(first: bytes) -> bool:
    """Return whether these are the first MAGIC_BYTES of a message of this protocol."""
    return first == _MAGIC


def seal(keys: ClusterKeys, *, transport: str, exporter: str, content: bytes) -> bytes:
    """Return a signature of what an exporter hands to importers of a transport without connections of its own."""
    return keys.sign(Purpose.KV_CONNECTIONS, _sealed(transport, exporter, content))


def is_sealed(keys: ClusterKeys, signature: bytes, *, transport: str, exporter: str, content: bytes) -> bool:
    """Return whether `exporter`, with its incarnation, made this signature."""
    return keys.verify(Purpose.KV_CONNECTIONS, _sealed(transport, exporter, content), signature)


def _hello(key_id: bytes, importer: str) -> bytes:
    name = importer.encode()
    if len(name) > _MAX_NAME_BYTES:
        name = hashlib.sha256(name).hexdigest().encode()
    return _HELLO.pack(_MAGIC, key_id, secrets.token_bytes(NONCE_BYTES), len(name), name)


def _fields(form: struct.Struct, message: bytes) -> tuple[Any, ...]:
    """Return the fields after the magic. Raises MemberRefused."""
    if len(message) != form.size or not message.startswith(_MAGIC):
        raise refused(Refusal.NO_PROOF, "the peer does not begin with a proof that it is a member of the cluster")
    return form.unpack(message)[1:]


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(purpose_key(secret, Purpose.KV_CONNECTIONS), label + b"\0" + transcript, "sha256")


def _transcript(transport: str, hello: bytes, exporter: str, nonce: bytes) -> bytes:
    return _joined(transport.encode(), hello, exporter.encode(), nonce)


def _sealed(transport: str, exporter: str, content: bytes) -> bytes:
    return b"sealed\0" + _joined(transport.encode(), exporter.encode(), content)


def _joined(*parts: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)
