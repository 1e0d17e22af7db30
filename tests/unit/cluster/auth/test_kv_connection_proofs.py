"""The challenge and response with which a KV connection begins: a table of attacks on it."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.auth.connections import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    AcceptingConnection,
    GrantedRequest,
    GrantingConnection,
    OpeningConnection,
    is_sealed,
    seal,
)
from cluster.auth.keys import ClusterKeys, Secrets
from cluster.auth.sessions import Refusal
from cluster.errors import MemberRefused

OURS, THEIRS = b"o" * 32, b"t" * 32
IMPORTER, EXPORTER = "decode-0@1", "prefill-0@1"


def opening(secret: Secrets | bytes = OURS, importer: str = IMPORTER, exporter: str = EXPORTER) -> OpeningConnection:
    return OpeningConnection(ClusterKeys(secret), transport="tcp", importer=importer, exporter=exporter)


def accepting(secret: Secrets | bytes = OURS, exporter: str = EXPORTER, transport: str = "tcp") -> AcceptingConnection:
    return AcceptingConnection(ClusterKeys(secret), transport=transport, exporter=exporter)


def connect(ours: OpeningConnection, theirs: AcceptingConnection) -> None:
    theirs.verify(ours.prove(theirs.challenge(ours.hello)))


def refusal(attempt: Callable[[], object]) -> str:
    with pytest.raises(MemberRefused) as refused:
        attempt()
    return refused.value.refusal


def test_two_members_prove_themselves_to_each_other_in_three_messages() -> None:
    ours, theirs = opening(), accepting()
    challenge = theirs.challenge(ours.hello)
    proof = ours.prove(challenge)
    theirs.verify(proof)
    assert theirs.importer == IMPORTER
    assert [*map(len, (ours.hello, challenge, proof))] == [HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES]


def test_a_member_whose_name_is_long_is_proved_by_all_of_it() -> None:
    long = "decode-" + "ü" * 500
    connect(opening(importer=long + "@1"), accepting())
    ours = opening(importer=long + "@1")
    theirs = accepting()
    challenge = theirs.challenge(opening(importer=long + "@2").hello)
    assert refusal(lambda: ours.prove(challenge)) == Refusal.WRONG_PROOF


@pytest.mark.parametrize("exporter", ["prefill-0@2", "prefill-1@1", IMPORTER])
def test_an_importer_is_convinced_by_no_other_member_and_no_other_incarnation(exporter: str) -> None:
    assert refusal(lambda: connect(opening(), accepting(exporter=exporter))) == Refusal.WRONG_PROOF


def test_the_proofs_of_one_transport_are_of_no_use_on_another() -> None:
    assert refusal(lambda: connect(opening(), accepting(transport="nccl"))) == Refusal.WRONG_PROOF


def test_a_replayed_proof_is_refused_at_the_same_exporter_and_at_its_successor() -> None:
    ours, theirs = opening(), accepting()
    proof = ours.prove(theirs.challenge(ours.hello))
    theirs.verify(proof)
    assert refusal(lambda: theirs.verify(proof)) == Refusal.WRONG_PROOF
    for exporter in (EXPORTER, "prefill-0@2"):
        again = accepting(exporter=exporter)
        again.challenge(ours.hello)
        assert refusal(lambda: again.verify(proof)) == Refusal.WRONG_PROOF  # noqa: B023


def test_a_reflected_challenge_proves_nothing() -> None:
    """A stranger sends back what the exporter proved, also as the answer to a connection of the exporter's own."""
    theirs = accepting()
    challenge = theirs.challenge(opening().hello)
    assert refusal(lambda: theirs.verify(challenge[:4] + challenge[-32:])) == Refusal.WRONG_PROOF
    own = opening(importer=EXPORTER, exporter=EXPORTER)
    reflected = accepting(exporter=EXPORTER).challenge(own.hello)
    own.prove(reflected)  # a member that reached itself: the same incarnation
    other = opening(importer=EXPORTER, exporter="decode-0@1")
    assert refusal(lambda: other.prove(accepting().challenge(other.hello))) == Refusal.WRONG_PROOF


def test_challenges_and_proofs_of_another_connection_are_refused() -> None:
    one, two = (opening(), accepting()), (opening(importer="decode-1@1"), accepting())
    challenges = [theirs.challenge(ours.hello) for ours, theirs in (one, two)]
    assert refusal(lambda: one[0].prove(challenges[1])) == Refusal.WRONG_PROOF
    proofs = [ours.prove(challenge) for (ours, _), challenge in zip((one, two), challenges, strict=True)]
    assert refusal(lambda: one[1].verify(proofs[1])) == Refusal.WRONG_PROOF


def test_a_stranger_is_refused_at_its_first_message_and_receives_no_proof() -> None:
    assert refusal(lambda: accepting().challenge(opening(THEIRS).hello)) == Refusal.UNKNOWN_KEY
    assert refusal(lambda: accepting(THEIRS).challenge(opening().hello)) == Refusal.UNKNOWN_KEY
    hello = opening().hello
    claimed = opening(THEIRS)
    claimed.hello = hello[:8] + claimed.hello[8:]  # it names the secret of the cluster
    challenge = accepting().challenge(claimed.hello)
    assert refusal(lambda: claimed.prove(challenge)) == Refusal.WRONG_PROOF
    assert refusal(lambda: accepting().verify(b"TMP1" + bytes(32))) == Refusal.WRONG_PROOF


@pytest.mark.parametrize("message", [b"", b"TMP1", *map(bytes, (HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES))])
def test_another_message_is_no_proof(message: bytes) -> None:
    assert refusal(lambda: accepting().challenge(message)) == Refusal.NO_PROOF
    assert refusal(lambda: opening().prove(message)) == Refusal.NO_PROOF
    assert refusal(lambda: accepting().verify(message)) == Refusal.NO_PROOF


def test_both_secrets_of_a_rotation_are_accepted_in_every_combination_of_its_steps() -> None:
    steps = (Secrets(OURS), Secrets(OURS, THEIRS), Secrets(THEIRS, OURS), Secrets(THEIRS))
    for here, there in ((a, b) for a in range(4) for b in range(4)):
        if abs(here - there) <= 1:  # members read their file within a second, and an operator waits between steps
            connect(opening(steps[here]), accepting(steps[there]))
    assert refusal(lambda: connect(opening(steps[0]), accepting(steps[3]))) == Refusal.UNKNOWN_KEY


def test_a_secret_that_is_dropped_during_the_handshake_ends_it() -> None:
    now = [Secrets(OURS, THEIRS)]
    keys = ClusterKeys(now[0], lambda is_urgent: now[0])
    ours = OpeningConnection(keys, transport="tcp", importer=IMPORTER, exporter=EXPORTER)
    challenge = accepting().challenge(ours.hello)
    now[0] = Secrets(THEIRS)
    assert refusal(lambda: ours.prove(challenge)) == Refusal.UNKNOWN_KEY


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_change_of_any_bit_of_any_message_is_accepted(data: st.DataObject) -> None:
    ours, theirs = opening(), accepting()
    changed = data.draw(st.integers(0, 2))

    def sent(number: int, message: bytes) -> bytes:
        if number != changed:
            return message
        bits = int.from_bytes(message) ^ data.draw(st.integers(1, (1 << 8 * len(message)) - 1))
        return bits.to_bytes(len(message))

    refusal(lambda: theirs.verify(sent(2, ours.prove(sent(1, theirs.challenge(sent(0, ours.hello)))))))


def test_a_sealed_endpoint_is_of_one_exporter_transport_and_content() -> None:
    keys = ClusterKeys(OURS)
    signature = seal(keys, transport="nixl", exporter=EXPORTER, content=b"endpoint")
    rotated = ClusterKeys(Secrets(THEIRS, OURS))
    assert is_sealed(rotated, signature, transport="nixl", exporter=EXPORTER, content=b"endpoint")
    for transport, exporter, content in (
        ("tcp", EXPORTER, b"endpoint"),
        ("nixl", "prefill-0@2", b"endpoint"),
        ("nixl", EXPORTER, b"endpoinT"),
        ("nixl" + EXPORTER[0], EXPORTER[1:], b"endpoint"),
    ):
        assert not is_sealed(keys, signature, transport=transport, exporter=exporter, content=content)
    assert not is_sealed(ClusterKeys(THEIRS), signature, transport="nixl", exporter=EXPORTER, content=b"endpoint")


GRANT, CONTENT = b"g" * 16, b"ticket"


def request(
    secret: Secrets | bytes = OURS, exporter: str = EXPORTER, transport: str = "shm", grant: bytes = GRANT
) -> GrantedRequest:
    keys = ClusterKeys(secret)
    return GrantedRequest(keys, transport=transport, importer=IMPORTER, exporter=exporter, grant=grant, content=CONTENT)


def answer(message: bytes, secret: Secrets | bytes = OURS, exporter: str = EXPORTER) -> bytes:
    granting = GrantingConnection(ClusterKeys(secret), transport="shm", exporter=exporter)
    content, answered = granting.answer(message, lambda content: GRANT if content == CONTENT else None)
    assert content == CONTENT and granting.importer == IMPORTER
    return answered


def test_a_grant_proves_both_sides_in_two_messages() -> None:
    asked = request()
    asked.verify(answer(asked.message))
    assert refusal(lambda: asked.verify(answer(request().message))) == Refusal.WRONG_PROOF, "of another request"
    assert refusal(lambda: asked.verify(asked.message[-PROOF_BYTES:])) == Refusal.WRONG_PROOF, "reflected"


def test_a_request_is_for_one_exporter_transport_and_grant() -> None:
    for other in (
        request(exporter="prefill-0@2"),
        request(exporter=IMPORTER),
        request(transport="cuda_ipc"),
        request(grant=b"h" * 16),
    ):
        assert refusal(lambda sent=other.message: answer(sent)) == Refusal.WRONG_PROOF  # type: ignore[misc]
    assert refusal(lambda: answer(request(THEIRS).message)) == Refusal.UNKNOWN_KEY
    assert refusal(lambda: answer(request(b"x" * 32).message, Secrets(OURS, THEIRS))) == Refusal.UNKNOWN_KEY
    rotated = request(THEIRS)
    rotated.verify(answer(rotated.message, Secrets(OURS, THEIRS)))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_change_of_any_bit_of_a_request_or_its_answer_is_accepted(data: st.DataObject) -> None:
    asked = request()
    bits = data.draw(st.integers(1, (1 << 8 * len(asked.message)) - 1))
    changed = (int.from_bytes(asked.message) ^ bits).to_bytes(len(asked.message))
    assert refusal(lambda: answer(changed)) in (*Refusal,)
    told = answer(asked.message)
    bits = data.draw(st.integers(1, (1 << 8 * len(told)) - 1))
    refusal(lambda: asked.verify((int.from_bytes(told) ^ bits).to_bytes(len(told))))
