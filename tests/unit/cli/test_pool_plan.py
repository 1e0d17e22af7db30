"""The workers that are started and retired to reach a target."""

import pytest

from cli.local.layout import PoolPlan, Ports, Slot, pool_plan, router_ports
from cli.verbs.clusters.up import UpConfig, routers_from
from cluster.errors import ConfigError
from cluster.messages import Role
from cluster.registry.scale_registry import worker_load
from cluster.registry.scale_target import POOLS, ScaleTarget


def slots(*names: str) -> list[Slot]:
    return [Slot.parse(name) for name in names]


def counted(*words: str) -> dict[Slot, Role]:
    """Return the roles for which workers count, given as NAME, or as NAME:POOL after a change of the role."""
    pairs = [word.partition(":") for word in words]
    return {Slot.parse(name): POOLS[pool] if pool else Slot.parse(name).role for name, _, pool in pairs}


def plan(
    staying: str, target: tuple[int, int] | tuple[int, int, int], *, leaving: str = "", **busy: float
) -> tuple[list[str], list[str]]:
    """Return the plan. `staying` as in `counted`; `busy` by name, with _ for -."""
    found = pool_plan(
        counted(*staying.split()),
        slots(*leaving.split()),
        ScaleTarget(*target),
        {Slot.parse(name.replace("_", "-")): value for name, value in busy.items()},
    )
    return [str(slot) for slot in found.starts], [str(slot) for slot in found.retires]


def test_pools_at_their_target_size_are_not_changed() -> None:
    found = pool_plan(counted("prefill-0", "decode-0", "decode-4"), [], ScaleTarget(1, 2), {})
    assert found == PoolPlan() and not found


def test_new_workers_get_the_lowest_free_names_and_never_the_name_of_a_draining_worker() -> None:
    assert plan("prefill-0 decode-1", (2, 4), leaving="decode-0") == (
        ["decode-2", "decode-3", "decode-4", "prefill-1"],
        [],
    )


def test_the_least_busy_worker_is_retired_and_of_idle_ones_the_newest() -> None:
    assert plan("decode-0 decode-1 decode-2", (0, 2), decode_0=9, decode_1=2, decode_2=5) == ([], ["decode-1"])
    assert plan("decode-0 decode-1 decode-2", (0, 1)) == ([], ["decode-2", "decode-1"])
    assert plan("prefill-0 decode-0", (0, 1), prefill_0=99) == ([], ["prefill-0"])


def test_colocated_workers_are_a_pool_of_their_own() -> None:
    assert plan("decode-0 colocated-0", (0, 1, 2)) == (["colocated-1"], [])
    assert plan("prefill-0 decode-0 colocated-0", (0, 0, 1)) == ([], ["decode-0", "prefill-0"])


def test_a_worker_counts_for_the_pool_of_its_role_and_not_of_its_name() -> None:
    changed = "prefill-0 decode-0 decode-1:prefill"
    assert plan(changed, (2, 1)) == ([], [])
    assert plan(changed, (1, 2), decode_1=1) == (["decode-2"], ["prefill-0"])
    assert plan(changed, (1, 1), prefill_0=1) == ([], ["decode-1"]), "the only worker that decodes stays"
    assert plan("decode-0 decode-1:colocated", (0, 1, 2)) == (["colocated-0"], [])


def test_a_draining_worker_does_not_count() -> None:
    assert plan("decode-1", (0, 1), leaving="decode-0") == ([], [])
    assert plan("decode-1", (0, 2), leaving="decode-0") == (["decode-2"], [])


def test_blocks_in_use_and_waiting_requests_make_a_worker_busy() -> None:
    assert worker_load({"blocks_free": 10, "blocks_cached": 5, "running": 2}) == 0
    assert worker_load({"blocks_free": 7, "blocks_held": 3, "blocks_leased": 2, "waiting": 4}) == 9


def test_a_slot_is_parsed_from_its_name() -> None:
    for name, slot in (("prefill-12", Slot(Role.PREFILL, 12)), ("colocated-1", Slot(Role.BOTH, 1))):
        assert (Slot.parse(name), str(slot)) == (slot, name)


def test_routers_that_share_the_http_port_all_serve_it() -> None:
    config = UpConfig(share_port="on", metrics_port=9090)
    assert routers_from(2, config) == [Ports(8000, 50051, 0, 9090), Ports(8000, 50052, 0, 9091)]
    assert routers_from(2, UpConfig(share_port="on", port=0))[1] == Ports(0, 50052)


def test_routers_take_the_ports_after_the_first_ones() -> None:
    assert router_ports(Ports(8000, 50051), 3) == [Ports(8000, 50051), Ports(8001, 50052), Ports(8002, 50053)]
    assert router_ports(Ports(0, 0), 2) == [Ports(0, 0), Ports(0, 0)]
    every = Ports(8000, 50051, 50061, 9090)
    assert router_ports(every, 2) == [every, Ports(8001, 50052, 50062, 9091)]
    with pytest.raises(ConfigError, match="--port 8000 and --grpc-port 8000 must be different ports"):
        router_ports(Ports(8000, 8000), 1)
    for clash in (Ports(8000, 8001), Ports(65535, 0), Ports(8000, 50051, 50052), Ports(0, 0, 0, 65535)):
        with pytest.raises(ConfigError, match="leave no room for 2 routers"):
            router_ports(clash, 2)
