"""What shows that a request which comes back was accepted in this cluster, and is not over yet.

Workers put a stream that was interrupted before prompts that had no turn. So that nobody gets there by claiming tokens
that nobody drew, the router that accepts a request signs its id, its prompt and its end with the cluster's key, and who
resumes it shows that.
"""

import hashlib
import hmac
import struct
import time
from collections.abc import Callable, Sequence

from cluster.wire import pack_ids
from router.requests import GenerateRequest

_CLOCK_LEEWAY_S = 60.0  # between the routers of a cluster
_HEAD = struct.Struct(">dI")  # end by the wall clock, length of the id
_END = struct.Struct(">d")


class ResumptionProofs:
    """A proof is its end, then the signature."""

    def __init__(self, key: bytes, wall_clock: Callable[[], float] = time.time) -> None:
        """`key`: the cluster's."""
        self._key = key
        self._wall_clock = wall_clock

    def make(self, request_id: str, prompt_token_ids: Sequence[int], timeout_s: float) -> bytes:
        """Good for so long."""
        return self._signed(request_id, prompt_token_ids, self._wall_clock() + timeout_s)

    def is_shown(self, request: GenerateRequest, prompt_token_ids: Sequence[int]) -> bool:
        """Its proof may be anything: it came from outside."""
        proof = request.resume_proof
        if request.resume_from is None or len(proof) != _END.size + hashlib.sha256().digest_size:
            return False
        (ends_at_s,) = _END.unpack_from(proof)
        if not hmac.compare_digest(proof, self._signed(request.request_id, prompt_token_ids, ends_at_s)):
            return False
        return bool(self._wall_clock() <= ends_at_s + _CLOCK_LEEWAY_S)

    def _signed(self, request_id: str, prompt_token_ids: Sequence[int], ends_at_s: float) -> bytes:
        named = request_id.encode()
        head = b"tandem resumption\0" + _HEAD.pack(ends_at_s, len(named)) + named
        signature = hmac.new(self._key, head + pack_ids(prompt_token_ids), hashlib.sha256).digest()
        return _END.pack(ends_at_s) + signature
