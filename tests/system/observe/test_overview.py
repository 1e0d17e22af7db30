"""`Admin.Overview` over scripted workers: what operators watch is complete and given once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import grpc
import pytest

from cluster.clock import Clock, ManualClock
from cluster.member import MemberState
from cluster.messages import LinkSpeed, MemberId
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import ScaleTargets
from cluster.service_times import DecodeTimes, PrefillTimes, ServiceTimes, StepWork, TimedStep
from router.operator_commands import ScaleTargetView
from router.overview.overview import Overview
from router.running import running
from tandem.enum_words import REQUEST_PHASES, plain_object
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.polling import until
from tests.system.rigs.members.overview_rig import overview_of
from tests.system.rigs.members.router_harness import RouterUnderTest, answer_to, ask, router_under_test
from tests.system.rigs.members.served_router import collect, generate_request, served


async def overview(channel: grpc.aio.Channel, **fields: object) -> admin_pb2.OverviewResponse:
    request = admin_pb2.OverviewRequest(**fields)  # type: ignore[arg-type]
    found: admin_pb2.OverviewResponse = await admin_pb2_grpc.AdminStub(channel).Overview(request, timeout=10)
    return found


async def test_a_request_is_shown_with_its_phases_while_it_is_live_and_once_after_its_end() -> None:
    async with served() as (router, channel):
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        decode.pause_at = 4
        await router.connected()
        request = generate_request(request_id="mine", label="my label")
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=20)
        num_tokens = 0
        while num_tokens < 4:
            num_tokens += sum(len(delta.token_ids) for delta in (await call.read()).deltas)
        (own,) = (await overview(channel)).routers
        (live,) = own.live
        assert (own.num_live, live.request_id, live.label, live.outcome, live.num_tokens) == (
            1,
            "mine",
            "my label",
            "",
            4,
        )
        assert live.spans[-1].phase == inference_pb2.REQUEST_PHASE_DECODE
        decode.resumed.set()
        while await call.read() is not grpc.aio.EOF:
            pass
        shown = await until(lambda: overview(channel), lambda found: found.routers[0].ended, what="it has ended")
        (own,) = shown.routers
        (ended,) = own.ended
        assert (list(own.live), ended.outcome, ended.num_tokens, ended.num_prompt_tokens) == ([], "ok", 8, 4)
        assert (ended.prefill_member, ended.decode_member) == ("p0@p0-1", "d0@d0-1")
        assert sum(span.duration_s for span in ended.spans) == pytest.approx(ended.ledger.wall_s)
        assert ended.spans[-1].start_s + ended.spans[-1].duration_s == pytest.approx(ended.ledger.wall_s)
        assert own.time_s - 20 < ended.arrived_s < own.time_s
        again = await overview(channel, seen={own.router: own.position})
        assert list(again.routers[0].ended) == []


async def test_retries_and_refusals_are_shown_with_their_reasons() -> None:
    async with served() as (router, channel):
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        decode.handoff_failures = ["read_failed"]
        await router.connected()
        await collect(channel, generate_request(request_id="retried"))
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(channel, generate_request(request_id="refused", model="another"))
        (own,) = (await overview(channel)).routers
        retried, refused = own.ended
        assert (retried.outcome, retried.num_placements, list(retried.ledger.reasons)) == (
            "ok",
            2,
            ["handoff_read_failed"],
        )
        assert (refused.request_id, refused.outcome, refused.num_placements) == ("refused", "unknown_model", 0)


async def test_a_worker_that_does_not_answer_is_shown_without_figures_and_blocks_no_overview() -> None:
    async with served() as (router, channel):
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()

        async def members() -> dict[str, admin_pb2.MemberStatus]:
            return {member.member_id: member for member in (await overview(channel)).members}

        def are_silent(seen: dict[str, admin_pb2.MemberStatus]) -> dict[str, bool]:
            return {name: member.last_seen_s > 0.0 for name, member in seen.items()}

        answering, one = {"p0": False, "d0": False}, {"p0": False, "d0": True}
        await until(members, lambda seen: are_silent(seen) == answering, what="both answer")
        decode.door.close()
        found = await until(members, lambda seen: are_silent(seen) == one, what="the other one answers")
        assert set(found["d0"].figures) == {"step_s"}


async def test_an_overview_as_an_object_has_words_for_enums_and_no_unset_field() -> None:
    async with served() as (router, channel):
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        await collect(channel, generate_request(request_id="mine"))
        shown = plain_object(await overview(channel, only_this_router=True))
        (ended,) = shown["routers"][0]["ended"]
        assert "target" not in shown and shown["members"] == []
        assert {span["phase"] for span in ended["spans"]} <= set(REQUEST_PHASES.words)
        assert ended["ledger"]["phases"][0]["phase"] == "tokenize"
        assert shown["routers"][0]["position"]["ended"] == 1


@asynccontextmanager
async def watched(clock: Clock | None = None) -> AsyncIterator[tuple[RouterUnderTest, Overview]]:
    async with router_under_test() as router:
        registry = Registry(url="redis://127.0.0.1:1/0", cluster_name="nobody", ttl_s=5.0)  # it does not answer
        scaling = ScaleTargetView(ScaleTargets(registry), router.fleet.set_scale_target)
        yield router, overview_of(router, scaling, registry, clock=clock)
        await registry.close()


class _Empty(admin_pb2_grpc.AdminServicer):
    async def Overview(self, request: admin_pb2.OverviewRequest, context: object) -> admin_pb2.OverviewResponse:
        return admin_pb2.OverviewResponse()


async def test_a_router_that_answers_without_its_overview_is_listed_with_the_problem() -> None:
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServicer_to_server(_Empty(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with watched() as (router, overview):
        other = replace(router.member, id=MemberId("router-1", "1"), address=address)
        found = await overview._of_router(other, admin_pb2.OverviewRequest(), ())
        assert (found.router, found.problem) == ("router-1@1", "it answered with the overviews of 0 routers")
        await overview._close_channels()
    await server.stop(None)


class _Slow(admin_pb2_grpc.AdminServicer):
    """A router that answers once it may."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def Overview(self, request: admin_pb2.OverviewRequest, context: object) -> admin_pb2.OverviewResponse:
        self.asked.set()
        await self.may_answer.wait()
        return admin_pb2.OverviewResponse(routers=[admin_pb2.RouterOverview(router="router-1@1")])


async def test_the_channel_to_a_router_that_left_is_closed_after_the_answer_in_flight() -> None:
    server, service = grpc.aio.server(), _Slow()
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with watched() as (router, overview):
        other = replace(router.member, id=MemberId("router-1", "1"), address=address, state=MemberState.READY)
        router.membership.tell((router.member, other))
        while len(router.fleet.members()) < 2:
            await router.fleet.changed()
        async with (
            running(overview.run()),
            running(overview.of_cluster(admin_pb2.OverviewRequest(), ())) as asking,
        ):
            await service.asked.wait()
            (channel,) = overview._channels.values()
            router.membership.tell((router.member,))

            async def is_forgotten() -> bool:
                return not overview._channels

            async def state() -> grpc.ChannelConnectivity:
                return channel.get_state()

            await until(is_forgotten, what="the overview notices it")
            service.may_answer.set()
            answer = await asking
            assert [(each.router, each.problem) for each in answer.routers[1:]] == [("router-1@1", "")]
            await until(state, lambda seen: seen is grpc.ChannelConnectivity.SHUTDOWN, what="it is closed")
    await server.stop(None)


async def test_callers_that_poll_in_the_same_second_share_an_answer() -> None:
    clock = ManualClock()
    async with watched(clock) as (router, overview):
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()

        async def poll(last: admin_pb2.OverviewResponse | None, key: str = "a") -> admin_pb2.OverviewResponse:
            seen = {each.router: each.position for each in last.routers} if last is not None else {}
            return await overview.of_cluster(admin_pb2.OverviewRequest(seen=seen), [("authorization", key)])

        async def pass_half_a_second() -> None:
            await answer_to(router, ask())
            clock.advance(0.5)

        early = await poll(None)
        await pass_half_a_second()
        late = await poll(None)
        await pass_half_a_second()
        early = await poll(early)
        for _ in range(3):
            await pass_half_a_second()
            before, late = late, await poll(late)
            assert len(late.routers[0].ended) == 2, "each request is shown once"
            await pass_half_a_second()
            early = await poll(early)
            assert early is late, "half a second later the second caller asks and gets the same"
        other_key = await poll(before, key="b")
        assert other_key is not late and other_key == late


async def test_the_first_overview_shows_requests_that_ended_in_the_same_second() -> None:
    async with watched(ManualClock()) as (router, overview):
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        for num_ended in (1, 2):
            await answer_to(router, ask())
            shown = await overview.of_cluster(admin_pb2.OverviewRequest(), [])
            assert len(shown.routers[0].ended) == num_ended


async def test_a_failed_call_is_no_event_of_a_worker_that_passes_the_health_check_after_it() -> None:
    async with watched() as (router, overview):
        decode = await router.add_decode("d0")
        await router.connected()
        peer = router.fleet.connected_peer(decode.id)

        async def texts() -> list[str]:
            shown = await overview.of_cluster(admin_pb2.OverviewRequest(only_this_router=True), [])
            return [event.text for event in shown.routers[0].events if event.member == str(decode.id)]

        async with running(overview.run()):
            await asyncio.sleep(0)  # the first view is made
            num_cleared = peer.num_cleared
            peer.suspect()
            while peer.num_cleared == num_cleared:
                await router.fleet.changed()
            assert await texts() == []
            await decode.die()
            assert await until(texts, what="the router notices it") == ["d0 does not answer"]


def _decodes_in(seconds: float) -> ServiceTimes:
    times = ServiceTimes(PrefillTimes(0.01, 1e-4, 0.0, 0.0), DecodeTimes(seconds, 0.0, 0.0, 0.0))
    return replace(times, typical_decode=TimedStep(StepWork(batch=4, context=400), seconds))


async def test_a_slow_link_is_named_and_published_as_a_metric_unless_its_worker_has_left() -> None:
    async with watched() as (router, overview):
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        slow = LinkSpeed(prefill.id, "tcp", 1e9, 0.0, slowdown=9.0)
        decode.links = (slow, replace(slow, exporter=MemberId("gone", "1")))
        await router.connected()

        async def ratios() -> dict[tuple[str, ...], float]:
            return router.telemetry.by_labels("tandem_link_slowdown_ratio")

        async with running(overview.run()):
            assert await until(ratios, what="it is published") == {("d0", "p0", "tcp"): 9.0}
            shown = await overview.of_cluster(admin_pb2.OverviewRequest(), [])
            assert list(shown.routers[0].slow) == ["d0 reads KV from p0 by tcp 9.0 times slower than at its fastest"]


async def test_the_speed_of_each_worker_is_a_metric_while_it_is_compared() -> None:
    async with watched() as (router, overview):
        for name, seconds in (("d0", 0.01), ("d1", 0.02)):
            (await router.add_decode(name)).service_times = _decodes_in(seconds)
        await router.connected()
        await router.knows_speeds()

        async def ratio(worker: str) -> float:
            return router.telemetry.value("tandem_worker_slowdown_ratio", worker=worker, leg="decode")

        async with running(overview.run()):
            assert await until(partial(ratio, "d1"), what="it is published") == pytest.approx(2.0)
            assert await ratio("d0") == pytest.approx(0.5)
            router.workers = router.workers[:1]
            router.register()
            await until(partial(ratio, "d1"), lambda value: not value, what="a worker that left has no series")
