"""The overview of a router in this process."""

from cluster.clock import Clock, MonotonicClock
from cluster.registry.registry import Registry
from cluster.serving.serving import open_channel
from router.operator_commands import ScaleTargetView
from router.overview.overview import Overview, Watched
from tests.system.rigs.members.router_harness import RouterUnderTest


def overview_of(
    router: RouterUnderTest,
    scaling: ScaleTargetView,
    registry: Registry,
    placement: str = "least-loaded",
    clock: Clock | None = None,  # None: the machine's
) -> Overview:
    watched = Watched(
        router=router.member,
        fleet=router.fleet,
        live_requests=router.live_requests,
        pairs=router.pipeline.pairs,
        scaling=scaling,
        telemetry=router.telemetry,
        registry_age_s=lambda: registry.age_s,
        placement=placement,
    )
    return Overview(watched, connect=open_channel, clock=clock or MonotonicClock())
