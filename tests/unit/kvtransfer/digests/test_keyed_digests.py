"""Keyed digests find every change, chosen or not, and a tag is valid for one place of one ticket."""

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.auth.keys import ClusterKeys, Secrets, key_id
from cluster.messages import MemberId
from kvtransfer import digests
from kvtransfer.digests import KNOWN_DIGESTS, VerifyMode, digest_blocks
from kvtransfer.keyed_digests import (
    TAIL,
    BlockTags,
    DigestDefinition,
    accepted_definitions,
    exported_definition,
)
from tests.contract.rigs.kv_pools import random_pool
from tests.examples import num_examples
from tests.unit.kvtransfer.digests.test_digests import FORGED_CHANGE, PIECE, digests_by

OLD, NEW = b"o" * 32, b"n" * 32
EXPORTER, TICKET = MemberId("p0", "a1"), b"t" * 16
_seeds = st.binary(min_size=32, max_size=32)


@pytest.fixture(params=["compiled", "reference"])
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    with digests_by(request.param):
        yield


class _Pool:
    memfd = None

    def __init__(self, *blocks: bytes) -> None:
        self.raw = torch.from_numpy(np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(len(blocks), -1).copy())
        self.num_blocks, self.block_bytes = self.raw.shape


def keyed(*blocks: bytes, seed: bytes) -> tuple[bytes, ...]:
    return digest_blocks(_Pool(*blocks), range(len(blocks)), seed)


def written_out(data: bytes, seed: bytes) -> bytes:
    """Compute the definition step by step, without the optimisations."""

    def summed(data: bytes, fold: int) -> bytes:
        stream = hashlib.shake_256(seed + fold.to_bytes(4, "little")).digest(PIECE * 16)
        matrix = np.array([byte | 1 for byte in stream], dtype=np.uint8).view(np.int8).reshape(PIECE, 16)
        padded = np.frombuffer(data + bytes(-len(data) % PIECE), dtype=np.int8).astype(np.int64)
        return bytes((padded.reshape(-1, PIECE) @ matrix.astype(np.int64)).astype("<i4").tobytes())

    sums, folds = summed(data, 0), 0
    while len(sums) > 128:
        folds += 1
        sums = summed(sums, folds)
    hashed = len(data).to_bytes(8, "little") + sums
    return hashlib.blake2b(hashed, digest_size=16, person=b"tandem kv folded").digest()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num_bytes", [1, PIECE + 1, 200_003, (2 << 20) + 1])
def test_digests_of_secret_coefficients_follow_the_definition(num_bytes: int) -> None:
    block = np.random.default_rng(5).bytes(num_bytes)
    assert keyed(block, seed=OLD) == (written_out(block, OLD),)


@settings(max_examples=num_examples(suite=10, search=30))
@given(_seeds)
def test_the_change_that_keeps_every_public_sum_is_found_under_any_secret(seed: bytes) -> None:
    original = bytearray(bytes(3 * PIECE))
    original[PIECE : PIECE + len(FORGED_CHANGE)] = bytes([64]) * len(FORGED_CHANGE)
    forged = bytearray(original)
    for place, change in enumerate(FORGED_CHANGE):
        forged[PIECE + place] += change
    assert len(set(keyed(bytes(original), bytes(forged), seed=digests.PUBLIC))) == 1
    assert len(set(keyed(bytes(original), bytes(forged), seed=seed))) == 2


@settings(max_examples=num_examples(suite=10, search=30))
@given(_seeds, st.dictionaries(st.integers(0, 3 * PIECE - 1), st.integers(1, 255), min_size=1, max_size=60))
def test_any_change_moves_the_digest_under_any_secret(seed: bytes, changes: dict[int, int]) -> None:
    original = np.random.default_rng(1).bytes(3 * PIECE)
    changed = bytearray(original)
    for place, change in changes.items():
        changed[place] ^= change
    assert len(set(keyed(original, bytes(changed), seed=seed))) == 2


@pytest.mark.parametrize("step", [1, 2, 64, 127])
def test_a_chosen_difference_cancels_in_one_of_128_secret_sums_for_every_power_of_two(step: int) -> None:
    """The bound of one sum; a piece has 16 that are independent. The difference is `step` at one byte and minus `step`
    at the next, which cancels exactly where the two coefficients are equal."""
    num_equal = num_sums = 0
    for seed in range(8):
        rows = torch.zeros(256, PIECE, dtype=torch.int8)
        for row in range(256):
            rows[row, 32 * row], rows[row, 32 * row + 1] = step, -step
        sums = digests.host_sums(rows.view(torch.uint8), 0, bytes([seed]))
        num_equal, num_sums = num_equal + int((sums == 0).sum()), num_sums + sums.numel()
    assert 0.8 < num_equal / num_sums * 128 < 1.2


def test_secret_coefficients_are_odd_take_every_value_and_differ_between_folds_and_secrets() -> None:
    matrices = [digests.coefficients(fold, seed) for fold in (0, 1) for seed in (OLD, NEW, digests.PUBLIC)]
    values = set(range(-127, 128, 2))
    assert all(set(matrix.flatten().tolist()) == values for matrix in matrices)
    equal = [float((one == other).float().mean()) for i, one in enumerate(matrices) for other in matrices[:i]]
    assert max(equal) < 1.3 / 128


def _tag(
    *,
    secret: bytes = OLD,
    exporter: MemberId = EXPORTER,
    ticket_id: bytes = TICKET,
    place: int = 3,
    digest: bytes = b"d" * 16,
    is_unverified: bool = False,
) -> bytes:
    definition = exported_definition(VerifyMode.KEYED, KNOWN_DIGESTS[0], ClusterKeys(secret))
    return BlockTags(definition, exporter, ticket_id).tag(place, digest, is_unverified=is_unverified)


def test_a_tag_is_valid_for_one_secret_exporter_incarnation_ticket_place_provenance_and_digest() -> None:
    tags = {
        _tag(),
        _tag(secret=NEW),
        _tag(exporter=MemberId("p1", "a1")),
        _tag(exporter=MemberId("p0", "a2")),
        _tag(exporter=MemberId("p", "0a1")),
        _tag(ticket_id=b"u" * 16),
        _tag(place=4),
        _tag(place=TAIL),
        _tag(digest=b"e" * 16),
        _tag(is_unverified=True),
    }
    assert len(tags) == 10 and {len(tag) for tag in tags} == {16}
    assert _tag() == _tag()
    assert _tag(digest=b"") == b"", "of a block that is not verified"


def test_equal_blocks_have_different_tags_that_reveal_nothing() -> None:
    """Sums and digests are equal for equal blocks; what travels is not."""
    assert len({_tag(place=place) for place in range(1_000)}) == 1_000


def test_both_secrets_of_a_rotation_are_accepted_and_the_present_one_is_used() -> None:
    keys = ClusterKeys(Secrets(current=NEW, other=OLD))
    exported = exported_definition(VerifyMode.KEYED, KNOWN_DIGESTS[0], keys)
    before = exported_definition(VerifyMode.KEYED, KNOWN_DIGESTS[0], ClusterKeys(OLD))
    accepted = accepted_definitions(VerifyMode.KEYED, KNOWN_DIGESTS, keys)
    assert exported.name == f"keyed-sums {key_id(NEW).hex()}"
    assert list(accepted.values()) == [exported, before]
    assert before.name not in accepted_definitions(VerifyMode.KEYED, KNOWN_DIGESTS, ClusterKeys(NEW))


@pytest.mark.parametrize("mode", [VerifyMode.ALL, VerifyMode.SAMPLE, VerifyMode.OFF])
def test_other_modes_export_without_a_key_and_accept_both(mode: VerifyMode) -> None:
    keys = ClusterKeys(OLD)
    assert exported_definition(mode, KNOWN_DIGESTS[0], keys) == DigestDefinition("folded-sums")
    assert list(accepted_definitions(mode, KNOWN_DIGESTS, keys)) == ["folded-sums", f"keyed-sums {key_id(OLD).hex()}"]
    tags = BlockTags(DigestDefinition("folded-sums"), EXPORTER, TICKET)
    assert tags.tag(0, b"d" * 16, is_unverified=True) == b"d" * 16


def test_the_representation_of_a_definition_has_no_key() -> None:
    exported = exported_definition(VerifyMode.KEYED, KNOWN_DIGESTS[0], ClusterKeys(OLD))
    assert repr(exported) == f"DigestDefinition(name='keyed-sums {key_id(OLD).hex()}')"


def test_keyed_digests_of_a_pool_are_in_the_given_order() -> None:
    pool = random_pool(6, seed=1)
    found = digest_blocks(pool, [4, 0, 4], OLD)
    assert found == (*digest_blocks(pool, [4], OLD), *digest_blocks(pool, [0], OLD), found[0])
    assert not set(found) & set(digest_blocks(pool, [4, 0], NEW)) and not set(found) & set(digest_blocks(pool, [4, 0]))
