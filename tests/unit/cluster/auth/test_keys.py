"""Keys that are derived from the cluster's secrets."""

import itertools

import pytest

from cluster.auth.keys import KEY_ID_BYTES, SIGNATURE_BYTES, CachePurpose, ClusterKeys, Purpose, Secrets, hkdf

OLD, NEW = b"o" * 32, b"n" * 32


@pytest.mark.parametrize(
    ("secret", "salt", "info", "num_bytes", "expected"),
    [
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            42,
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)).hex(),
            bytes(range(0x60, 0xB0)).hex(),
            bytes(range(0xB0, 0x100)).hex(),
            82,
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            "0b" * 22,
            "",
            "",
            42,
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_hkdf_computes_the_test_vectors_of_rfc_5869(
    secret: str, salt: str, info: str, num_bytes: int, expected: str
) -> None:
    derived = hkdf(bytes.fromhex(secret), bytes.fromhex(info), num_bytes, salt=bytes.fromhex(salt))
    assert derived.hex() == expected


def test_no_two_purposes_and_no_two_secrets_share_a_key() -> None:
    keys = [ClusterKeys(OLD), ClusterKeys(NEW)]
    derived = {each.sign(purpose, b"")[KEY_ID_BYTES:] for each in keys for purpose in Purpose}
    derived |= {each.cache_key(purpose) for each in keys for purpose in CachePurpose}
    derived |= {hkdf(secret, b"") for secret in (OLD, NEW)} | {OLD, NEW}
    assert len(derived) == 2 * (len(Purpose) + len(CachePurpose)) + 4


def test_a_signature_is_valid_for_its_purpose_message_and_secret_only() -> None:
    keys = ClusterKeys(OLD)
    signature = keys.sign(Purpose.TICKETS, b"message")
    assert len(signature) == SIGNATURE_BYTES
    for purpose, message in itertools.product(Purpose, (b"message", b"massage")):
        is_valid = (purpose, message) == (Purpose.TICKETS, b"message")
        assert keys.verify(purpose, message, signature) == is_valid
    assert not ClusterKeys(NEW).verify(Purpose.TICKETS, b"message", signature)


def test_every_changed_or_missing_byte_of_a_signature_is_found() -> None:
    keys = ClusterKeys(Secrets(NEW, OLD))
    signature = keys.sign(Purpose.TICKETS, b"message")
    for index in range(SIGNATURE_BYTES):
        changed = bytearray(signature)
        changed[index] ^= 1
        assert not keys.verify(Purpose.TICKETS, b"message", bytes(changed))
        assert not keys.verify(Purpose.TICKETS, b"message", signature[:index])
    assert not keys.verify(Purpose.TICKETS, b"message", signature + b"x")


def test_two_secrets_are_valid_at_once_and_the_current_one_signs() -> None:
    old, both, new = ClusterKeys(OLD), ClusterKeys(Secrets(NEW, OLD)), ClusterKeys(NEW)
    for signer, accepted in ((old, True), (new, True), (ClusterKeys(b"x" * 32), False)):
        assert both.verify(Purpose.TICKETS, b"m", signer.sign(Purpose.TICKETS, b"m")) == accepted
    assert both.sign(Purpose.TICKETS, b"m") == new.sign(Purpose.TICKETS, b"m")


def test_the_keys_of_caches_depend_on_their_own_secret_and_generation_only() -> None:
    first = ClusterKeys(Secrets(OLD, caches=b"c" * 32))
    rotated = ClusterKeys(Secrets(NEW, OLD, caches=b"c" * 32))
    assert first.hash_key == rotated.hash_key
    assert first.hash_key != ClusterKeys(Secrets(OLD, caches=b"c" * 32, generation=2)).hash_key


def test_secrets_do_not_appear_in_their_representation() -> None:
    assert "6f6f" not in repr(Secrets(OLD))
    assert "oooo" not in repr(Secrets(OLD))
