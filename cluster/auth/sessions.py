"""Proofs of membership: the handshake that opens a session between two members, and the proof of each call in it.

The caller sends its name, a random number and a signature; the callee answers with its name, which includes its
incarnation, two random numbers and a proof of its own. Both derive the session's key from all of these and a key of the
cluster, so neither can be replayed: a restarted callee, another callee and another caller have another key. A call's
proof covers the method, its one request and a counter, which the callee accepts once. No clock is used.

A stream's messages are not in its proof: it opens one stream once. Pure but for random numbers; knows no gRPC.
"""

import hmac
import secrets
import struct
from collections import OrderedDict
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256

from cluster.auth.keys import KEY_ID_BYTES, ClusterKeys, Purpose, purpose_key
from cluster.errors import MemberRefused
from cluster.messages import MemberId
from tandem.internal.v1 import worker_pb2

NONCE_BYTES = 32
SESSION_ID_BYTES = 16
_PROOF = struct.Struct(">16sQ32s")  # session id, counter, HMAC-SHA256
_COUNTER = struct.Struct(">Q")
WINDOW = 4096  # calls of one session that may overtake each other
_MAX_UNUSED = 1024  # sessions without a call yet: a replayed handshake leaves one
_MAX_SESSIONS = 16_384


class Refusal(StrEnum):
    """The reasons for which a caller is refused as a member."""

    NO_PROOF = "no_proof"
    UNKNOWN_KEY = "unknown_key"  # of another cluster, or a secret that was dropped
    WRONG_PROOF = "wrong_proof"
    UNKNOWN_SESSION = "unknown_session"  # of an earlier incarnation, or too old: the caller opens another one
    REPLAYED = "replayed"


class Window:
    """The counters that a session has accepted: the highest one and the WINDOW before it."""

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit n: highest - n was accepted

    def accept(self, counter: int) -> bool:
        """Return whether the counter is new and not too old, and remember it."""
        ahead = counter - self._highest
        if ahead > 0:
            self._seen = (self._seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self._highest = counter
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


class Session:
    """An open session on one of its sides. The caller proves its calls, the callee verifies them."""

    __slots__ = ("_counter", "_inner", "_outer", "_window", "id", "key_id", "peer")

    def __init__(self, identifier: bytes, key: bytes, peer: str, key_id: bytes) -> None:
        """`peer`: the name of the other side. `key_id`: of the secret that the session rests on."""
        self.id, self.peer, self.key_id = identifier, peer, key_id
        # HMAC-SHA256 (RFC 2104) as far as it depends on the key only: each call saves two of its four blocks.
        self._inner, self._outer = (sha256(bytes(byte ^ pad for byte in key.ljust(64, b"\0"))) for pad in (0x36, 0x5C))
        self._counter = 0
        self._window = Window()

    def prove(self, method: str, body: bytes) -> bytes:
        """Return the proof of the next call. `body`: its serialized request; empty for a stream of requests."""
        counter, self._counter = self._counter, self._counter + 1
        return _PROOF.pack(self.id, counter, self._mac(counter, method, body))

    def verify(self, proof: bytes, method: str, body: bytes) -> None:
        """Accept a proof, once. Raises MemberRefused: WRONG_PROOF, REPLAYED."""
        _, counter, mac = _PROOF.unpack(proof)
        if not hmac.compare_digest(mac, self._mac(counter, method, body)):
            raise refused(Refusal.WRONG_PROOF, f"the proof of {self.peer} is not for this call")
        if not self._window.accept(counter):
            raise refused(Refusal.REPLAYED, f"{self.peer} has made this call already")

    def _mac(self, counter: int, method: str, body: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(_COUNTER.pack(counter) + _called(method) + body)
        outer.update(inner.digest())
        return outer.digest()


class OpeningSession:
    """The caller's side of a handshake."""

    def __init__(self, keys: ClusterKeys, caller: str) -> None:
        self._keys, self._caller = keys, caller
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._signature = keys.sign(Purpose.CALLS, _hello(caller, self._nonce))

    def request(self) -> worker_pb2.OpenSessionRequest:
        return worker_pb2.OpenSessionRequest(caller=self._caller, nonce=self._nonce, signature=self._signature)

    def opened(self, answer: worker_pb2.OpenSessionResponse) -> Session:
        """Verify the callee's proof. Raises MemberRefused."""
        key_id = self._signature[:KEY_ID_BYTES]
        secret = self._keys.secret_of(key_id)
        if secret is None:
            raise refused(Refusal.UNKNOWN_KEY, "the secret was dropped during the handshake")
        key = _session_key(secret, self._caller, answer.callee, self._nonce, answer.nonce, answer.session_id)
        if not hmac.compare_digest(answer.proof, _answer_proof(key)):
            raise refused(Refusal.WRONG_PROOF, f"{answer.callee} does not prove that it has the cluster's key")
        return Session(answer.session_id, key, answer.callee, key_id)


class SessionTable:
    """The callee's side: its open sessions. When there are too many, a session that has served no call is dropped
    first.
    """

    def __init__(self, keys: ClusterKeys, callee: MemberId) -> None:
        self._keys, self._callee = keys, str(callee)
        self._unused: OrderedDict[bytes, Session] = OrderedDict()
        self._used: OrderedDict[bytes, Session] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._unused) + len(self._used)

    def open(self, request: worker_pb2.OpenSessionRequest) -> worker_pb2.OpenSessionResponse:
        """Answer a handshake. Raises MemberRefused: UNKNOWN_KEY, WRONG_PROOF."""
        key_id = request.signature[:KEY_ID_BYTES]
        secret = self._keys.secret_of(key_id)
        if secret is None:
            raise refused(Refusal.UNKNOWN_KEY, f"{request.caller} does not have the key of this cluster")
        if not self._keys.verify(Purpose.CALLS, _hello(request.caller, request.nonce), request.signature):
            raise refused(Refusal.WRONG_PROOF, f"the signature of {request.caller} is wrong")
        nonce, identifier = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(SESSION_ID_BYTES)
        key = _session_key(secret, request.caller, self._callee, request.nonce, nonce, identifier)
        self._unused[identifier] = Session(identifier, key, request.caller, key_id)
        if len(self._unused) > _MAX_UNUSED:
            self._unused.popitem(last=False)
        return worker_pb2.OpenSessionResponse(
            callee=self._callee, nonce=nonce, session_id=identifier, proof=_answer_proof(key)
        )

    def find(self, proof: bytes | None) -> Session:
        """Return the session that a proof names, before its call is read. Raises MemberRefused: NO_PROOF,
        UNKNOWN_SESSION."""
        if proof is None or len(proof) != _PROOF.size:
            raise refused(Refusal.NO_PROOF, "the call carries no proof that its caller is a member of the cluster")
        identifier = proof[:SESSION_ID_BYTES]
        session = self._used.get(identifier) or self._unused.get(identifier)
        if session is None or self._keys.secret_of(session.key_id) is None:
            self._used.pop(identifier, None)
            self._unused.pop(identifier, None)
            raise refused(Refusal.UNKNOWN_SESSION, f"{self._callee} has no such session; open another one")
        return session

    def admit(self, proof: bytes | None, method: str, body: bytes) -> bytes:
        """Verify the proof of a call and accept it, once. Return the id of the secret that it rests on. Raises
        MemberRefused."""
        session = self.find(proof)
        assert proof is not None
        session.verify(proof, method, body)
        self._unused.pop(session.id, None)
        self._used[session.id] = session
        self._used.move_to_end(session.id)
        if len(self._used) > _MAX_SESSIONS:
            self._used.popitem(last=False)
        return session.key_id


def signature_refusal(keys: ClusterKeys, purpose: Purpose, message: bytes, signature: bytes) -> Refusal | None:
    """Return why a signature is refused; None if a member made it."""
    if not signature:
        return Refusal.NO_PROOF
    if keys.secret_of(signature[:KEY_ID_BYTES]) is None:
        return Refusal.UNKNOWN_KEY
    return None if keys.verify(purpose, message, signature) else Refusal.WRONG_PROOF


def refused(reason: Refusal, detail: str) -> MemberRefused:
    return MemberRefused(f"{reason}: {detail}", refusal=reason)


@lru_cache(256)
def _called(method: str) -> bytes:
    """Return the method with its length in front, so that no part of it can be read as the beginning of a request."""
    called = method.encode()
    return len(called).to_bytes(2) + called


def _hello(caller: str, nonce: bytes) -> bytes:
    return b"hello\0" + nonce + caller.encode()


def _answer_proof(key: bytes) -> bytes:
    return hmac.digest(key, b"answer", "sha256")


def _session_key(
    secret: bytes, caller: str, callee: str, caller_nonce: bytes, callee_nonce: bytes, identifier: bytes
) -> bytes:
    parts = (caller.encode(), callee.encode(), caller_nonce, callee_nonce, identifier)
    transcript = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return hmac.digest(purpose_key(secret, Purpose.CALLS), b"session\0" + transcript, "sha256")
