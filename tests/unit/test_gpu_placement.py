"""Workers of one host go round its GPUs, and know how many they share theirs with."""

import pytest

from cli.local.layout import Layout, Pools
from cli.local.pool_plan import Slot
from cluster.messages import Role
from engine.model.gpu_placement import device_for, num_sharing


def placed(world_size: int, num_gpus: int, wanted: str = "cuda") -> list[tuple[str, int]]:
    return [
        (device_for(wanted, rank, world_size, num_gpus), num_sharing(wanted, rank, world_size, num_gpus))
        for rank in range(world_size)
    ]


def test_workers_go_round_the_gpus_of_their_host() -> None:
    assert placed(2, 1) == [("cuda:0", 2), ("cuda:0", 2)]
    assert placed(3, 2) == [("cuda:0", 2), ("cuda:1", 1), ("cuda:0", 2)]
    assert placed(2, 8) == [("cuda:0", 1), ("cuda:1", 1)]


def test_a_gpu_that_was_named_is_every_workers() -> None:
    assert placed(2, 8, "cuda:5") == [("cuda:5", 2), ("cuda:5", 2)]


def test_a_worker_alone_takes_the_choice_of_torch() -> None:
    assert placed(1, 8) == [("cuda", 1)]


def test_who_joins_later_counts_those_that_were_there() -> None:
    assert (device_for("cuda", 3, 2, 1), num_sharing("cuda", 3, 2, 1)) == ("cuda:0", 4)
    assert (device_for("cuda", 3, 2, 8), num_sharing("cuda", 3, 2, 8)) == ("cuda:3", 1)


@pytest.mark.parametrize("pools", [Pools(1, 1), Pools(3, 2), Pools(0, 2)], ids=str)
def test_workers_of_tandem_up_are_numbered_apart_also_those_that_come_later(pools: Pools) -> None:
    later = [Slot(Role.PREFILL, pools.num_prefill + n) for n in range(3)]
    later += [Slot(Role.DECODE, pools.num_decode + n) for n in range(3)]
    ranks = [pools.rank(slot) for slot in (*pools.slots(), *later)]
    assert ranks[: pools.num_workers] == list(range(pools.num_workers))
    assert len(set(ranks)) == len(ranks)


def test_tandem_up_tells_each_worker_its_number_whatever_was_given() -> None:
    layout = Layout(flags={"model": "m", "local_rank": 7}, num_threads=1, first=Pools(1, 1))
    for rank, slot in enumerate(layout.first.slots()):
        arguments = layout.worker(slot).arguments
        assert f"--local-rank={rank}" in arguments and "--local-world-size=2" in arguments
