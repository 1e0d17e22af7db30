"""Every decoder withstands its seeds, its corpus, and inputs that Hypothesis draws; `make fuzz` draws more."""

import random
import resource
from pathlib import Path

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.all_targets import GROUPS, all_targets, corpus
from tests.fuzz.target import Found, Target
from tests.unit.cluster.protocol.member_messages import FILES

_TARGETS = list(all_targets())
_CORPUS = corpus()


@pytest.mark.parametrize("target", _TARGETS, ids=lambda target: target.name.replace(" ", "-"))
def test_no_input_of_a_decoder_raises_anything_but_its_refusals(target: Target) -> None:
    known = [*target.seeds, *_CORPUS.get(target.name, ())]
    for data in known:
        target.try_input(data)

    @settings(max_examples=8, derandomize=True, database=None)
    @given(seed=st.integers(0, (1 << 64) - 1))
    def withstands(seed: int) -> None:
        target.try_input(target.input(random.Random(seed), known))

    withstands()


def test_every_message_between_members_has_a_fuzzer() -> None:
    names = {target.name for target in _TARGETS}
    assert len(names) == len(_TARGETS), "two targets of one name would share a corpus"
    for file in FILES:
        for name in file.DESCRIPTOR.message_types_by_name:
            assert f"message {name}" in names
    assert set(_CORPUS) <= names, "the corpus of a decoder that no longer exists"
    assert {path.stem for path in (Path(__file__).parent / "corpus").glob("*.txt")} <= set(GROUPS)


def test_the_seeds_of_a_decoder_pass_its_first_check() -> None:
    """A fuzzer whose seeds are refused would test the refusal only."""
    for target in _TARGETS:
        assert any(target.try_input(seed).startswith("accepted") for seed in target.seeds), target.name


def test_a_decoder_that_raises_is_found() -> None:
    def run(data: bytes) -> Message:
        raise IndexError(data)

    with pytest.raises(Found, match=r"test_fuzz.py.*IndexError"):
        Target("broken", [b"x"], run).try_input(b"x")


def test_a_decoder_that_takes_memory_is_found() -> None:
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Found, match="grew by"):
        Target("greedy", [b"x"], lambda data: len(bytearray((peak_kib << 10) + (100 << 20)))).try_input(b"x")
