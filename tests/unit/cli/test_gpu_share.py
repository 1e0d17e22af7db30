"""Workers of one host use its GPUs in turn, and count the workers that share their GPU."""

import pytest

from cli.local.layout import Layout, Pools, Slot
from cluster.messages import Role
from engine.model.loading import device_for, num_sharing


def placed(world_size: int, num_gpus: int, wanted: str = "cuda") -> list[tuple[str, int]]:
    return [
        (device_for(wanted, rank, world_size, num_gpus), num_sharing(wanted, rank, world_size, num_gpus))
        for rank in range(world_size)
    ]


def test_workers_are_spread_over_the_gpus_of_their_host_in_turn() -> None:
    assert placed(2, 1) == [("cuda:0", 2), ("cuda:0", 2)]
    assert placed(3, 2) == [("cuda:0", 2), ("cuda:1", 1), ("cuda:0", 2)]
    assert placed(2, 8) == [("cuda:0", 1), ("cuda:1", 1)]


def test_a_gpu_named_by_the_setting_is_used_by_every_worker() -> None:
    assert placed(2, 8, "cuda:5") == [("cuda:5", 2), ("cuda:5", 2)]


def test_a_single_worker_uses_the_default_device_of_torch() -> None:
    assert placed(1, 8) == [("cuda", 1)]


def test_a_worker_that_joins_later_counts_existing_workers() -> None:
    assert (device_for("cuda", 3, 2, 1), num_sharing("cuda", 3, 2, 1)) == ("cuda:0", 4)
    assert (device_for("cuda", 3, 2, 8), num_sharing("cuda", 3, 2, 8)) == ("cuda:3", 1)


@pytest.mark.parametrize("pools", [Pools(1, 1), Pools(3, 2), Pools(0, 2), Pools(1, 1, 2), Pools(0, 0, 2)], ids=str)
def test_workers_of_tandem_up_get_distinct_numbers_even_when_added_later(pools: Pools) -> None:
    later = [Slot(Role.PREFILL, pools.num_prefill + n) for n in range(3)]
    later += [Slot(Role.DECODE, pools.num_decode + n) for n in range(3)]
    later += [Slot(Role.BOTH, pools.num_colocated + n) for n in range(3)]
    ranks = [pools.rank(slot) for slot in (*pools.slots(), *later)]
    assert ranks[: pools.num_workers] == list(range(pools.num_workers))
    assert len(set(ranks)) == len(ranks)


def test_tandem_up_gives_each_worker_its_own_number_despite_other_settings() -> None:
    layout = Layout(flags={"model": "m", "local_rank": 7}, num_threads=1, first=Pools(1, 1))
    for rank, slot in enumerate(layout.first.slots()):
        arguments = layout.worker(slot).arguments
        assert f"--local-rank={rank}" in arguments and "--local-world-size=2" in arguments
