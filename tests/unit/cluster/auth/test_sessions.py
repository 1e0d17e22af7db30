"""The handshake between two members, and the proofs of calls in a session: a table of attacks on them."""

import hmac
import random
from collections.abc import Callable

import pytest

from cluster.auth import sessions
from cluster.auth.keys import ClusterKeys, Secrets
from cluster.auth.sessions import WINDOW, OpeningSession, Refusal, Session, SessionTable, Window
from cluster.errors import MemberRefused
from cluster.messages import MemberId

OURS, THEIRS = b"o" * 32, b"t" * 32
CALLEE = MemberId("decode-0", "1")


def opened(table: SessionTable, keys: ClusterKeys, caller: str = "router-0@1") -> Session:
    opening = OpeningSession(keys, caller)
    return opening.opened(table.open(opening.request()))


def refusal(attempt: Callable[[], object]) -> str:
    with pytest.raises(MemberRefused) as refused:
        attempt()
    return refused.value.refusal


@pytest.fixture
def table() -> SessionTable:
    return SessionTable(ClusterKeys(OURS), CALLEE)


@pytest.fixture
def session(table: SessionTable) -> Session:
    return opened(table, ClusterKeys(OURS))


def test_a_proof_admits_its_call_once(table: SessionTable, session: Session) -> None:
    for body in (b"one", b"one", b"two"):
        table.admit(session.prove("/Start", body), "/Start", body)
    proof = session.prove("/Start", b"one")
    table.admit(proof, "/Start", b"one")
    assert refusal(lambda: table.admit(proof, "/Start", b"one")) == Refusal.REPLAYED
    assert session.peer == str(CALLEE)


def test_a_proof_is_not_valid_for_another_method_body_session_or_counter(table: SessionTable, session: Session) -> None:
    proof, other = session.prove("/Start", b"body"), opened(table, ClusterKeys(OURS), "router-1@1")
    foreign = other.prove("/Start", b"body")
    for changed, method, body in (
        (proof, "/Drain", b"body"),
        (proof, "/Start", b"another"),
        (proof, "/Startb", b"ody"),
        (foreign[:16] + proof[16:], "/Start", b"body"),
        (proof[:16] + (9).to_bytes(8) + proof[24:], "/Start", b"body"),
        (proof[:-1] + bytes([proof[-1] ^ 1]), "/Start", b"body"),
    ):
        assert refusal(lambda c=changed, m=method, b=body: table.admit(c, m, b)) == Refusal.WRONG_PROOF  # type: ignore[misc]
    table.admit(proof, "/Start", b"body")


@pytest.mark.parametrize("body", [b"", b"body", b"x" * 5000])
def test_a_proof_has_the_hmac_sha256_of_counter_method_and_body(body: bytes) -> None:
    session = Session(b"i" * 16, b"k" * 32, str(CALLEE), b"id")
    for counter in range(2):
        covered = counter.to_bytes(8) + len("/Start").to_bytes(2) + b"/Start" + body
        mac = hmac.digest(b"k" * 32, covered, "sha256")
        assert session.prove("/Start", body) == b"i" * 16 + counter.to_bytes(8) + mac


def test_a_proof_is_not_valid_at_another_incarnation_or_another_member(session: Session) -> None:
    for callee in (MemberId("decode-0", "2"), MemberId("decode-1", "1")):
        elsewhere = SessionTable(ClusterKeys(OURS), callee)
        opened(elsewhere, ClusterKeys(OURS))
        assert refusal(lambda t=elsewhere: t.admit(session.prove("/S", b""), "/S", b"")) == Refusal.UNKNOWN_SESSION  # type: ignore[misc]


@pytest.mark.parametrize("proof", [None, b"", b"x", b"x" * 55, b"x" * 57])
def test_a_call_without_a_proof_is_refused(table: SessionTable, proof: bytes | None) -> None:
    assert refusal(lambda: table.admit(proof, "/S", b"")) == Refusal.NO_PROOF


def test_a_member_of_another_cluster_opens_no_session(table: SessionTable) -> None:
    assert refusal(lambda: opened(table, ClusterKeys(THEIRS))) == Refusal.UNKNOWN_KEY
    assert len(table) == 0


def test_a_handshake_in_the_name_of_another_member_is_refused(table: SessionTable) -> None:
    request = OpeningSession(ClusterKeys(OURS), "router-0@1").request()
    request.caller = "router-1@1"
    assert refusal(lambda: table.open(request)) == Refusal.WRONG_PROOF


def test_a_replayed_handshake_opens_a_session_that_no_caller_can_use(table: SessionTable) -> None:
    opening = OpeningSession(ClusterKeys(OURS), "router-0@1")
    session = opening.opened(table.open(opening.request()))
    proof = session.prove("/S", b"")
    table.admit(proof, "/S", b"")
    again = table.open(opening.request())
    assert refusal(lambda: table.admit(again.session_id + proof[16:], "/S", b"")) == Refusal.WRONG_PROOF
    assert refusal(lambda: table.admit(proof, "/S", b"")) == Refusal.REPLAYED


def test_a_callee_without_the_key_is_refused_by_its_caller(table: SessionTable) -> None:
    opening = OpeningSession(ClusterKeys(OURS), "router-0@1")
    answer = table.open(opening.request())
    for field, value in (
        ("callee", "decode-1@1"),
        ("nonce", b"x" * 32),
        ("session_id", b"x" * 16),
        ("proof", b"x" * 32),
    ):
        changed = type(answer)()
        changed.CopyFrom(answer)
        setattr(changed, field, value)
        assert refusal(lambda c=changed: opening.opened(c)) == Refusal.WRONG_PROOF  # type: ignore[misc]


def test_the_flood_of_handshakes_forgets_no_session_that_has_a_call(table: SessionTable, session: Session) -> None:
    table.admit(session.prove("/S", b""), "/S", b"")
    request = OpeningSession(ClusterKeys(OURS), "router-0@1").request()
    for _ in range(sessions._MAX_UNUSED + 10):
        table.open(request)
    assert len(table) == sessions._MAX_UNUSED + 1
    table.admit(session.prove("/S", b""), "/S", b"")


def test_sessions_of_a_dropped_secret_end_and_those_of_both_valid_ones_live() -> None:
    secrets = [Secrets(OURS, THEIRS)]
    table = SessionTable(ClusterKeys(secrets[0], lambda is_urgent: secrets[0]), CALLEE)
    of_old, of_new = opened(table, ClusterKeys(THEIRS)), opened(table, ClusterKeys(OURS))
    for session in (of_old, of_new):
        table.admit(session.prove("/S", b""), "/S", b"")
    secrets[0] = Secrets(OURS)
    table.admit(of_new.prove("/S", b""), "/S", b"")
    assert refusal(lambda: table.admit(of_old.prove("/S", b""), "/S", b"")) == Refusal.UNKNOWN_SESSION


def test_the_window_accepts_each_counter_once_in_any_order_within_its_size() -> None:
    counters = list(range(3 * WINDOW))
    dice = random.Random(7)
    for start in range(0, len(counters), WINDOW // 2):
        part = counters[start : start + WINDOW // 2]
        dice.shuffle(part)
        counters[start : start + WINDOW // 2] = part
    window = Window()
    assert all(window.accept(counter) for counter in counters)
    assert not any(window.accept(counter) for counter in counters)


def test_a_counter_older_than_the_window_is_refused() -> None:
    window = Window()
    assert window.accept(WINDOW)
    assert window.accept(1)
    assert not window.accept(0)
    assert window.accept(1 << 63)
    assert not window.accept(WINDOW + 1)
