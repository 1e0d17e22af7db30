"""What a router remembers of who was given what."""

from cluster.messages import MemberId
from router.policies.prefix_memory import PrefixMemory

_P, _D = MemberId("prefill", "1"), MemberId("decode", "1")
_CHAIN = [b"a", b"ab", b"abc", b"abcd"]


def test_the_longest_beginning_comes_first_and_gaps_end_it() -> None:
    memory = PrefixMemory()
    memory.remember(_CHAIN[:2], _P)
    memory.remember(_CHAIN[:3], _D)
    memory.remember(_CHAIN[3:], _P)

    assert memory.holders(_CHAIN) == [(_D, 3), (_P, 2)]
    assert memory.holders([b"x", *_CHAIN]) == []
    assert memory.holders([]) == []


def test_a_restarted_worker_replaces_its_predecessor() -> None:
    memory = PrefixMemory()
    memory.remember(_CHAIN, _P)
    memory.remember(_CHAIN[:1], MemberId("prefill", "2"))

    assert memory.holders(_CHAIN) == [(MemberId("prefill", "2"), 1)]


def test_what_was_longest_not_asked_about_is_forgotten_from_its_end() -> None:
    memory = PrefixMemory(max_blocks=5)
    memory.remember(_CHAIN, _P)
    memory.remember([b"x"], _P)
    memory.holders([b"x"])
    memory.remember([b"y", b"yz"], _D)

    assert len(memory) == 5
    assert memory.holders(_CHAIN) == [(_P, 2)]
    assert memory.holders([b"x"]) == [(_P, 1)]
    assert memory.holders([b"y", b"yz"]) == [(_D, 2)]


def test_a_block_names_its_latest_holders_only() -> None:
    memory = PrefixMemory()
    for number in range(9):
        memory.remember([b"a"], MemberId(f"prefill{number}", "1"))

    assert [member.id for member, _ in memory.holders([b"a"])] == ["prefill8", "prefill7", "prefill6", "prefill5"]
