"""Proofs that a request was accepted in the cluster: who has one, for what, and for how long."""

import pytest

from router.requests import GenerateRequest, ResumedChoice, TokenPrompt
from router.resumption import ResumptionProofs

PROMPT = (5, 6, 7)
BEGAN_S = 1000.0


def shown(
    proof: bytes,
    *,
    key: bytes = b"key",
    request_id: str = "r",
    prompt: tuple[int, ...] = PROMPT,
    resume_from: tuple[ResumedChoice, ...] | None = (ResumedChoice((9,)),),
    wall_s: float = BEGAN_S,
) -> bool:
    request = GenerateRequest(TokenPrompt(prompt), request_id, resume_from=resume_from, resume_proof=proof)
    return ResumptionProofs(key, lambda: wall_s).is_shown(request, prompt)


@pytest.fixture
def proof() -> bytes:
    return ResumptionProofs(b"key", lambda: BEGAN_S).make("r", PROMPT, timeout_s=600)


def test_another_router_of_the_cluster_takes_it_until_the_request_ends(proof: bytes) -> None:
    assert shown(proof)
    assert shown(proof, wall_s=BEGAN_S + 600), "clocks differ"
    assert not shown(proof, wall_s=BEGAN_S + 6000)


def test_it_is_good_for_one_request_of_one_cluster(proof: bytes) -> None:
    assert not shown(proof, key=b"another")
    assert not shown(proof, request_id="s")
    assert not shown(proof, prompt=(*PROMPT, 8))
    assert not shown(proof, resume_from=None)


def test_no_byte_of_it_can_be_changed(proof: bytes) -> None:
    for place in range(len(proof)):
        changed = bytearray(proof)
        changed[place] ^= 1
        assert not shown(bytes(changed))
    assert not shown(b"")
    assert not shown(proof + b"\0")
