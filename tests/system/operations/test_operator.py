"""The operator scales Deployments to the scale target, through every documented answer of the API server.

The registry is a real Redis; the API server is `FakeApiServer`, because no control plane runs here.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress

import pytest
from redis.asyncio import Redis

from cluster.errors import ConfigError, Unavailable
from cluster.messages import Role
from cluster.process import ExitStatus
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import Following, ScaleTargets, WorkerUse
from cluster.registry.scale_target import ScaleTarget
from deploy.operator.api_server import Access, ApiError, ApiServer
from deploy.operator.pools import COST, DeploymentFollower, Pools
from tests.system.rigs.processes.kubernetes_api import AUTOSCALERS, NAMESPACE, SCALED_OBJECTS, FakeApiServer

_DEADLINE_S = 60.0


@pytest.fixture
def fake() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        yield server


@pytest.fixture
async def registry(redis_url: str, cluster_name: str) -> AsyncIterator[Registry]:
    made = Registry(url=redis_url, cluster_name=cluster_name, ttl_s=5.0)
    yield made
    await made.close()


def api_of(fake: FakeApiServer) -> ApiServer:
    return ApiServer(Access(fake.url), first_backoff_s=0.001)


def follower(
    fake: FakeApiServer, registry: Registry, loads: Mapping[str, WorkerUse] | None = None
) -> DeploymentFollower:
    async def ask() -> Mapping[str, WorkerUse]:
        return loads or {}

    api = api_of(fake)
    pools = Pools(api, NAMESPACE, ask)
    return DeploymentFollower(
        api=api,
        pools=pools,
        registry=registry,
        namespace=NAMESPACE,
        name="the operator",
        announce=lambda: None,
        retry_s=0.05,
    )


@asynccontextmanager
async def following(
    fake: FakeApiServer, registry: Registry, loads: Mapping[str, WorkerUse] | None = None
) -> AsyncIterator[ScaleTargets]:
    """Run a follower until it has reached its first target, the present sizes."""
    running = asyncio.create_task(follower(fake, registry, loads).run())
    targets = ScaleTargets(registry)
    try:
        await reached(targets, running)
        yield targets
        assert not running.done()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def reached(targets: ScaleTargets, running: asyncio.Future[None] | None = None) -> ScaleTarget:
    """Wait until the follower has reached the newest target."""
    async with asyncio.timeout(_DEADLINE_S):
        async for target in targets.watch():
            if target is not None and target.follower and target.reached == target.version:
                return target
            if running is not None and running.done():
                running.result()
    raise AssertionError("unreachable")


async def test_the_scale_target_becomes_the_replicas_of_each_pool(fake: FakeApiServer, registry: Registry) -> None:
    async with following(fake, registry) as targets:
        first = await targets.read()
        assert first is not None and (first.prefill, first.decode) == (2, 2), "it begins with what is there"
        await targets.set({Role.PREFILL: 3, Role.DECODE: 1})
        await reached(targets)
        assert (fake.replicas("tandem-prefill"), fake.replicas("tandem-decode")) == (3, 1)
    with pytest.raises(Unavailable, match="no process follows"):
        await targets.set({Role.DECODE: 2})


async def test_a_pool_that_shrinks_loses_the_worker_with_the_fewest_blocks(
    fake: FakeApiServer, registry: Registry
) -> None:
    loads = {
        "tandem-decode-0": WorkerUse(Role.DECODE, 40.0),
        "tandem-decode-1": WorkerUse(Role.BOTH, 7.0),
        "tandem-prefill-0": WorkerUse(Role.PREFILL, 0.0),
    }
    async with following(fake, registry, loads) as targets:
        await targets.set({Role.DECODE: 1})
        await reached(targets)
    assert fake.removed == ["tandem-decode-1"]
    costs = {name: pod["metadata"].get("annotations", {}).get(COST) for name, pod in fake.pods().items()}
    assert costs == {"tandem-decode-0": "40", "tandem-prefill-0": None, "tandem-prefill-1": None}


async def test_a_pool_that_shrinks_loses_the_worker_that_has_another_role_now(
    fake: FakeApiServer, registry: Registry
) -> None:
    loads = {"tandem-decode-0": WorkerUse(Role.PREFILL, 40.0), "tandem-decode-1": WorkerUse(Role.DECODE, 7.0)}
    async with following(fake, registry, loads) as targets:
        await targets.set({Role.DECODE: 1})
        await reached(targets)
    assert fake.removed == ["tandem-decode-0"], "the other one is the last that decodes"


async def test_what_another_changes_is_changed_back_and_a_conflict_is_read_again(
    fake: FakeApiServer, registry: Registry
) -> None:
    async with following(fake, registry) as targets:
        fake.before_write = lambda: fake.set_deployment("tandem-decode", 5)
        await targets.set({Role.DECODE: 3})
        await reached(targets)
        assert fake.replicas("tandem-decode") == 3
        writes = [path for method, path in fake.requests if method == "PUT"]
        assert len(writes) == 2, "the first write met a newer resourceVersion"
        fake.set_deployment("tandem-prefill", 7)
        async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(replicas(fake, "tandem-prefill", 2))


async def test_errors_old_versions_and_cut_watches_only_delay_it(fake: FakeApiServer, registry: Registry) -> None:
    async with following(fake, registry) as targets:
        for statuses, is_cut, is_forgotten in (
            ((500, 503, 429), False, False),
            ([504] * 8, False, False),  # longer than one call retries
            ((), True, False),
            ((), True, True),
        ):
            fake.fail_next(*statuses)
            if is_forgotten:
                fake.forget_events()
            if is_cut:
                fake.cut_watches()
            size = 1 + fake.replicas("tandem-prefill")
            await targets.set({Role.PREFILL: size})
            await reached(targets)
            assert fake.replicas("tandem-prefill") == size
        lists = [path for method, path in fake.requests if method == "GET" and path.endswith("/deployments")]
        assert len(lists) >= 2, "after 410 the list is read again"


@pytest.mark.parametrize(
    ("path", "spec", "says"),
    [
        (AUTOSCALERS, {"scaleTargetRef": {"kind": "Deployment", "name": "tandem-decode"}}, "HorizontalPodAutoscaler x"),
        (SCALED_OBJECTS, {"scaleTargetRef": {"name": "tandem-prefill"}}, "ScaledObject x sets .* tandem-prefill"),
    ],
)
async def test_the_operator_refuses_to_start_where_an_autoscaler_owns_a_pool(
    fake: FakeApiServer, registry: Registry, path: str, spec: dict[str, object], says: str
) -> None:
    fake.add(path, "x", spec)
    with pytest.raises(ConfigError, match=says):
        await follower(fake, registry).run()
    assert await ScaleTargets(registry).read() is None, "it has not become the follower"


async def test_the_operator_ends_when_an_autoscaler_claims_a_pool(fake: FakeApiServer, registry: Registry) -> None:
    running = asyncio.create_task(follower(fake, registry).run())
    await reached(ScaleTargets(registry), running)
    fake.add(AUTOSCALERS, "other", {"scaleTargetRef": {"kind": "StatefulSet", "name": "tandem-decode"}})
    fake.add(AUTOSCALERS, "late", {"scaleTargetRef": {"kind": "Deployment", "name": "tandem-decode"}})
    fake.set_deployment("tandem-decode", 2)  # a change, so that it looks
    with pytest.raises(ConfigError, match="HorizontalPodAutoscaler late"):
        await asyncio.wait_for(running, _DEADLINE_S)


async def test_the_operator_refuses_to_start_where_another_process_follows_the_target(
    fake: FakeApiServer, registry: Registry
) -> None:
    other = Following(registry, "tandem up on a laptop", ScaleTarget(1, 1))
    assert await other.report(1) == ""
    with pytest.raises(ConfigError, match="tandem up on a laptop follows the scale target"):
        await follower(fake, registry).run()
    assert (fake.replicas("tandem-prefill"), fake.replicas("tandem-decode")) == (2, 2)


async def test_an_operator_that_another_process_has_replaced_scales_no_pool(
    fake: FakeApiServer, registry: Registry, redis_url: str, cluster_name: str
) -> None:
    running = asyncio.create_task(follower(fake, registry).run())
    await reached(ScaleTargets(registry), running)
    fake.fail_next(*[503] * 5)  # while it is busy with these, its registration expires and another one follows
    fake.set_deployment("tandem-decode", 5)
    async with Redis.from_url(redis_url) as client:
        await client.delete(f"{{{cluster_name}}}:scale:follower")
    assert await Following(registry, "the next operator", ScaleTarget(2, 5)).report(0) == ""
    with pytest.raises(ConfigError, match="the next operator follows the scale target now"):
        await asyncio.wait_for(running, _DEADLINE_S)
    assert fake.replicas("tandem-decode") == 5, "the other process owns the pools"


async def test_a_forbidden_call_reports_the_message_of_the_api_server(fake: FakeApiServer) -> None:
    fake.fail_next(403)
    with pytest.raises(ApiError, match="403: as the test wishes"):
        await api_of(fake).get("/api/v1/namespaces/tandem/pods")


async def test_an_operator_process_without_the_right_to_follow_ends_with_one_line(
    fake: FakeApiServer, redis_url: str, cluster_name: str
) -> None:
    fake.add(AUTOSCALERS, "x", {"scaleTargetRef": {"kind": "Deployment", "name": "tandem-decode"}})
    settings = {"TANDEM_REDIS": redis_url, "TANDEM_CLUSTER_NAME": cluster_name, "TANDEM_HOST": "0.0.0.0"}
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "deploy.operator",
            "--follow",
            "on",
            "--api-server",
            fake.url,
            "--namespace",
            NAMESPACE,
        ),
        env={name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")} | settings,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), _DEADLINE_S)
    assert process.returncode == ExitStatus.CONFIG
    (line,) = errors.decode().splitlines()
    assert line.startswith("operator: config: HorizontalPodAutoscaler x sets the replicas of tandem-decode"), line


async def replicas(fake: FakeApiServer, name: str, size: int) -> None:
    async for found in api_of(fake).watch(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"):
        if found[name]["spec"]["replicas"] == size:
            return
