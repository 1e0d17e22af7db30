"""`tandem up --ray` on a Ray cluster of three nodes under load: no request is lost, whatever happens to the nodes."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.__main__ import main

pytest.importorskip("ray", reason="ray is not installed: it is the extra [ray]")

from tests.polling import until
from tests.system.rigs.processes.ray_rig import RayNodes, load
from tests.system.rigs.processes.up_command import Up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_NUM_CLIENTS = 4
_DEADLINE_S = 120.0


@pytest.fixture
def nodes(redis_url: str, cluster_name: str) -> Iterator[RayNodes]:
    started = RayNodes(redis_url, cluster_name, [{"CPU": 1, "left": 1}, {"CPU": 3, "right": 3}, {"CPU": 3, "right": 3}])
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def arguments(nodes: RayNodes, redis_url: str, cluster_name: str) -> list[str]:
    on_ray = ["--ray", nodes.address, "--ray-resources", "prefill=CPU:1,left:1", "decode=CPU:1,right:1"]
    return [*on_ray, "--redis", redis_url, "--cluster-name", cluster_name, "--dtype", "float32"]


async def test_no_request_is_lost_while_nodes_and_workers_come_and_go(
    nodes: RayNodes, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = Up(tmp_path, *arguments)
    monkeypatch.setenv("XDG_RUNTIME_DIR", up.environment["XDG_RUNTIME_DIR"])

    try:
        address = up.until("ready http=").split("grpc=")[1].strip()
        assert set(nodes.members(0)) == {"prefill-0"}
        assert set(await _decoders(nodes, 1)) == {"decode-0"}
        async with load(address, _NUM_CLIENTS) as asked:
            await _scale(3)
            assert len(await _decoders(nodes, 3)) == 3
            await asked.more(20)
            await _scale(1)
            await _decoders(nodes, 1)
            await asked.more(20)
            assert asked.lost == [], "1, 3 and 1 workers"

            (decoder,) = await _decoders(nodes, 1)
            os.kill((await _decoders(nodes, 1))[decoder], signal.SIGKILL)
            await asked.more(20)
            assert asked.lost == [], "a worker was killed"

            await _scale(2)
            killed = nodes.node_of(decoder)
            nodes.kill(killed)
            nodes.nodes[killed] = nodes.add(killed)
            await _decoders(nodes, 2)
            await asked.more(20)
            assert asked.lost == [], "a node was killed"

            drained = nodes.node_of(next(iter(await _decoders(nodes, 2))))
            nodes.drain(drained, within_s=60.0)
            await until(
                lambda: _members_of(nodes, drained), lambda found: not found, what="no worker", deadline_s=_DEADLINE_S
            )
            await asked.more(20)
            assert asked.lost == [], "a node was drained"

            nodes.stop_head()
            await asked.more(20)
            nodes.start_head()
            await _scale(3)
            await _scale(1)
            await asked.more(20)
            assert asked.lost == [], "Ray's head was restarted"
            print(f"requests served: {asked.num_served}, lost: {len(asked.lost)}")
    finally:
        print("".join(up.lines))
        status = up.end()
    assert status == 0
    assert [nodes.members(number) for number in range(2)] == [{}, {}]


async def _scale(size: int) -> None:
    assert await asyncio.to_thread(main, ["scale", f"decode={size}"]) == 0


async def _decoders(nodes: RayNodes, count: int) -> dict[str, int]:
    async def look() -> dict[str, int]:
        return nodes.members(1) | nodes.members(2)

    return await until(look, lambda found: len(found) == count, what=f"{count} decode workers", deadline_s=100.0)


async def _members_of(nodes: RayNodes, number: int) -> dict[str, int]:
    return nodes.members(number)
