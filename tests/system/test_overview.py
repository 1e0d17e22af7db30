"""`Admin.Overview` over scripted workers: what operators watch is complete and given once."""

import grpc
import pytest

from tandem.enum_words import REQUEST_PHASES
from tandem.plain_objects import plain_object
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.system.test_router_service import collect, generate_request, served


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
        (own,) = (await overview(channel)).routers
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
        found = {member.member_id: member for member in (await overview(channel)).members}
        assert {name: member.last_seen_s for name, member in found.items()} == {"p0": 0.0, "d0": 0.0}
        decode.door.close()
        while not found["d0"].last_seen_s:
            found = {member.member_id: member for member in (await overview(channel)).members}
        assert set(found["d0"].figures) == {"step_s"}
        assert found["p0"].last_seen_s == 0.0


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
