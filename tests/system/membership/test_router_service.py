"""The router's gRPC services as clients use them: statuses, reasons, keys, limits, and operators' calls."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.clock import ManualClock
from cluster.member import MemberState
from cluster.messages import MemberId
from cluster.serving.rpc_errors import RETRY_AFTER_S
from cluster.serving.serving import open_channel
from router.grammars import compile_turns
from router.grpc_api.service import address_of
from router.request.live_table import STOPPED_S
from tandem.enum_words import MEMBER_ROLES
from tandem.keepalive import KEEPALIVE_KEY
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.system.rigs.members.router_harness import (
    ask,
    expected_tokens,
    pass_time,
    router_under_test,
)
from tests.system.rigs.members.served_router import (
    MAX_MESSAGE_BYTES,
    collect,
    generate_request,
    listening,
    read_to_the_end,
    reason_of,
    served,
)


async def test_a_generation_streams_and_ends_with_usage_and_ledger() -> None:
    async with served() as (router, channel):
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        prefill.num_cached = 3
        await router.connected()
        request = generate_request(request_id="mine", logprobs=1, cache_salt="tenant", priority=-3, is_batch=True)
        responses = await collect(channel, request)
        for job in (prefill.jobs[0], decode.jobs[0]):
            assert (job.cache_salt, job.priority, job.is_batch) == ("tenant", -3, True)
        deltas = [delta for response in responses for delta in response.deltas]
        tokens = [token_id for delta in deltas for token_id in delta.token_ids]
        assert tokens == expected_tokens(router, ask())
        assert all(response.request_id == "mine" for response in responses)
        assert [logprobs.chosen.token_id for delta in deltas for logprobs in delta.logprobs] == tokens
        assert deltas[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
        usage, ledger = responses[-1].summary.usage, responses[-1].summary.ledger
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (4, 8, 3)
        assert sum(phase.duration_s for phase in ledger.phases) == pytest.approx(ledger.wall_s, rel=0.02)
        assert not any(response.HasField("summary") for response in responses[:-1])


async def test_a_client_that_asks_for_keep_alive_messages_gets_them_while_no_token_comes() -> None:
    async with served() as (router, channel):
        worker = await router.add_decode("d0")
        worker.pause_at = 3
        await router.connected()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            generate_request(request_id="mine"), timeout=20, metadata=((KEEPALIVE_KEY, "0.1"),)
        )
        assert dict(await call.initial_metadata())[KEEPALIVE_KEY] == "0.1"
        await worker.paused.wait()
        empty = inference_pb2.GenerateResponse(request_id="mine")
        num_signs, num_tokens = 0, 0
        async for response in call:
            num_tokens += sum(len(delta.token_ids) for delta in response.deltas)
            num_signs += response == empty
            if num_signs == 2:
                worker.resumed.set()
        assert (num_tokens, response.HasField("summary")) == (8, True)


async def test_only_clients_that_ask_with_a_number_get_keep_alive_messages() -> None:
    async with served() as (router, channel):
        await router.add_decode("d0")
        await router.connected()
        for metadata in ((), ((KEEPALIVE_KEY, "often"),)):
            call = inference_pb2_grpc.InferenceStub(channel).Generate(generate_request(), timeout=20, metadata=metadata)
            assert KEEPALIVE_KEY not in dict(await call.initial_metadata())
            responses = [response async for response in call]
            assert responses.pop(0).HasField("accepted")
            assert all(response.deltas or response.HasField("summary") for response in responses)


async def test_grammars_of_one_address_have_a_budget_of_compile_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_turns, "_MOST_CPU_S", 1e-6)
    monkeypatch.setattr(compile_turns, "_CPU_S_PER_S", 1e-9)  # a busy machine does not fill it before the next call
    async with served() as (_, channel):
        reasons = []
        for regex in ("(a", "(b", "(a"):
            grammar = inference_pb2.Grammar(kind=inference_pb2.GRAMMAR_KIND_REGEX, text=regex)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(channel, generate_request(grammar=grammar))
            reasons.append((error.value.code(), reason_of(error.value)))
            if regex == "(b":
                assert float(dict(error.value.trailing_metadata() or ())[RETRY_AFTER_S]) > 0
                assert compile_turns.COMPILE_LIMIT in str(error.value.details())
        known, limited = (
            (grpc.StatusCode.INVALID_ARGUMENT, "invalid_grammar"),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "limit_reached"),
        )
        assert reasons == [known, limited, known], "a grammar that was compiled before costs nothing"


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.0.0.1:50051", "10.0.0.1"), ("ipv6:%5B2001:db8::1%5D:50051", "2001:db8::1"), ("unix:", "")],
)
def test_the_address_of_a_caller_is_that_of_its_host(peer: str, address: str) -> None:
    assert address_of(peer) == address


@pytest.mark.parametrize(
    ("fields", "code", "reason", "message"),
    [
        ({"model": "gpt-5"}, grpc.StatusCode.NOT_FOUND, "unknown_model", "demo_model"),
        ({"n": 500}, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request", "n must be"),
        ({"max_tokens": 5000}, grpc.StatusCode.INVALID_ARGUMENT, "context_length_exceeded", "5000"),
    ],
)
async def test_a_refusal_has_its_status_its_reason_and_the_remedy(
    fields: dict[str, object], code: grpc.StatusCode, reason: str, message: str
) -> None:
    async with served() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError, match=message) as refusal:
            await collect(channel, generate_request(**fields))  # type: ignore[arg-type]
        assert (refusal.value.code(), reason_of(refusal.value)) == (code, reason)


async def test_a_request_without_a_prompt_or_with_an_empty_one_is_refused() -> None:
    async with served() as (_, channel):
        for request in (
            inference_pb2.GenerateRequest(),
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await collect(channel, request)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_malformed_or_oversized_message_is_a_clear_error_and_the_router_keeps_serving() -> None:
    async with served() as (router, channel):
        await router.add_decode("d0")
        await router.connected()
        raw: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/tandem.v1.Inference/Generate")
        with pytest.raises(grpc.aio.AioRpcError, match="malformed") as malformed:
            await raw(b"\xff\xff\xff", timeout=10).read()
        assert malformed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as oversized:
            await collect(channel, inference_pb2.GenerateRequest(text="x" * (MAX_MESSAGE_BYTES + 4)))
        assert oversized.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(await collect(channel, generate_request())) > 1


async def test_a_refusal_for_overload_has_a_retry_time() -> None:
    async with served(max_live_requests=1) as (router, channel):
        decode = await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 1
        first = asyncio.create_task(collect(channel, generate_request()))
        async with asyncio.timeout(10):
            await decode.paused.wait()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await collect(channel, generate_request())
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert float(str(dict(refusal.value.trailing_metadata() or ())[RETRY_AFTER_S])) > 0
        decode.resumed.set()
        await first


@pytest.mark.parametrize("timeout_s", [12.0, 150.2, 1001.0])
async def test_a_passed_deadline_is_reported_with_the_phase(timeout_s: float) -> None:
    """The router's own deadline is a little before the client's, at which gRPC ends the call without a reason. gRPC
    transmits the client's rounded up by as much as a hundredth. The router may still be writing the first token when
    the time passes, so a client may stall for longer."""
    async with served(silence_s=10 * timeout_s, client_stall_s=10 * timeout_s) as (router, channel):
        decode = await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 3
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate_request(), timeout=timeout_s)
        while not (await call.read()).deltas:
            pass
        pass_time(timeout_s)
        with pytest.raises(grpc.aio.AioRpcError, match="in phase decode") as late:
            await read_to_the_end(call)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        own = re.search(r"the request's ([0-9.]+) s passed", str(late.value.details()))
        assert own is not None and 0.98 * timeout_s - 0.25 < float(own[1]) < timeout_s - 0.2
        async with asyncio.timeout(10):
            await decode.cancelled.wait()


async def test_a_call_that_is_cancelled_frees_the_worker() -> None:
    async with served() as (router, channel):
        decode = await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 3
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate_request(), timeout=20)
        await call.read()
        call.cancel()
        async with asyncio.timeout(10):
            await decode.cancelled.wait()


async def test_every_method_but_health_needs_the_api_key() -> None:
    async with served(api_key="secret") as (_, channel):
        stub, admin = inference_pb2_grpc.InferenceStub(channel), admin_pb2_grpc.AdminStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
            for call in (
                stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata),
                admin.Status(admin_pb2.StatusRequest(), metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="authorization: Bearer") as refusal:
                    await call
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        models = await stub.ListModels(
            inference_pb2.ListModelsRequest(), metadata=(("authorization", "Bearer secret"),)
        )
        assert [model.id for model in models.models] == ["demo_model"]
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_tokenize_and_detokenize_are_each_others_inverse() -> None:
    async with served() as (router, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(text="def f():\n    return 1\n"))
        text = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
        assert text.text == "def f():\n    return 1\n"
        message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="hi")
        chat = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=inference_pb2.ChatPrompt(messages=[message])))
        assert len(chat.token_ids) > 1
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[99_999]))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(router.workers) == 0, "neither needs a worker"


async def test_status_lists_members_with_their_own_figures() -> None:
    async with served() as (router, channel):
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        status = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=10)
        by_name = {member.member_id: member for member in status.members}
        assert set(by_name) == {"p0", "d0"}
        for worker in (prefill, decode):
            member = by_name[worker.id.id]
            assert (member.incarnation, MEMBER_ROLES.word(member.role)) == (worker.id.incarnation, worker.role)
            assert member.state == admin_pb2.MEMBER_STATE_READY
            assert member.address == worker.address
            assert member.figures["blocks_free"] == 10
            assert member.figures["running"] == 2


async def test_routers_count_as_members_with_their_states() -> None:
    async with router_under_test() as router:
        decode = await router.add_decode("d0")
        other = replace(router.member, id=MemberId("router-1", "1"), state=MemberState.DRAINING)
        router.membership.tell((replace(router.member, state=MemberState.READY), other, decode.member))
        while len(router.fleet.members()) < 3:
            await router.fleet.changed()
        counted = router.telemetry.by_labels("tandem_members")
        present = {labels: number for labels, number in counted.items() if number}
        assert present == {("router", "ready"): 1, ("router", "draining"): 1, ("decode", "ready"): 1}


async def test_drain_reaches_the_worker_that_is_named() -> None:
    async with served() as (router, channel):
        first, second = await router.add_decode("d0"), await router.add_decode("d1")
        await router.connected()
        admin = admin_pb2_grpc.AdminStub(channel)
        await admin.Drain(admin_pb2.DrainRequest(member_id="d1"), timeout=10)
        assert second.drained.is_set() and not first.drained.is_set()
        assert second.state is MemberState.DRAINING
        with pytest.raises(grpc.aio.AioRpcError, match=r"no member 'd7' .* there are: d0, d1"):
            await admin.Drain(admin_pb2.DrainRequest(member_id="d7"), timeout=10)


async def test_the_drain_of_the_last_worker_of_a_pool_is_made_and_logged_as_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as (router, channel):
        for add, names in ((router.add_prefill, ("p0",)), (router.add_decode, ("d0", "d1"))):
            for name in names:
                await add(name)
        await router.connected()
        admin = admin_pb2_grpc.AdminStub(channel)
        warned: dict[str, list[str]] = {}
        for name in ("d1", "p0", "d0"):
            caplog.clear()
            await admin.Drain(admin_pb2.DrainRequest(member_id=name), timeout=10)
            router.register()
            lines = [record for record in caplog.records if record.name == "tandem.router.drains"]
            warned[name] = [line.getMessage() for line in lines if line.levelname == "WARNING"]
            while name in {member.id.id for member in router.fleet.available()}:
                await router.fleet.changed()
        assert warned == {
            "d1": [],
            "p0": ["no other prefill worker is there: workers that decode compute the prompts"],
            "d0": ["no other worker decodes: requests wait until one does, or for their deadlines"],
        }
        assert all(worker.drained.is_set() for worker in router.workers)


async def test_an_operator_sees_every_live_request_its_phase_and_its_workers() -> None:
    async with served() as (router, channel):
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        admin = admin_pb2_grpc.AdminStub(channel)
        decode.pause_at = 4
        call = inference_pb2_grpc.InferenceStub(channel).Generate(generate_request(request_id="mine"), timeout=20)
        num_tokens = 0
        while num_tokens < 4:
            response = await call.read()
            num_tokens += sum(len(delta.token_ids) for delta in response.deltas)
        (listed,) = (await admin.Requests(admin_pb2.RequestsRequest(), timeout=5)).requests
        assert (listed.request_id, listed.phase, listed.num_tokens) == ("mine", inference_pb2.REQUEST_PHASE_DECODE, 4)
        assert (listed.prefill_member, listed.decode_member) == (str(prefill.id), str(decode.id))
        assert listed.age_s > 0 and not listed.reasons
        decode.resumed.set()
        await read_to_the_end(call)
        assert not (await admin.Requests(admin_pb2.RequestsRequest(), timeout=5)).requests


@asynccontextmanager
async def _reading_little(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Connect a client that takes 16 KiB of what it does not read."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


async def test_a_call_whose_client_reads_nothing_is_cut_and_frees_its_place() -> None:
    async with listening(client_stall_s=0.5) as (router, address), _reading_little(address) as channel:
        await router.add_decode("d0")
        await router.connected()
        request = generate_request(max_tokens=200, n=8, logprobs=20)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        async with asyncio.timeout(40):
            await call.read()
            await router.pipeline.drain()
        assert router.telemetry.value("tandem_stalled_clients_total", surface="grpc") == 1
        assert len(router.live_requests) == 0
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await read_to_the_end(call)
        assert reason_of(told.value) == "slow_client"


async def test_a_call_whose_client_does_not_read_its_prompts_scores_is_cut_when_the_buffers_are_full() -> None:
    num_positions, num_values, clock = 899, 899 * 21, ManualClock()
    request = generate_request(max_tokens=1, prompt_logprobs=20)
    request.token_ids.ids[:] = [5] * (num_positions + 1)
    async with (
        listening(max_buffered_tokens=num_values + 1000, outbox_clock=clock) as (router, address),
        open_channel(address) as channel,
        _reading_little(address) as slow,
    ):
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        unread = inference_pb2_grpc.InferenceStub(slow).Generate(request, timeout=60)
        async with asyncio.timeout(40):
            while not any(
                share.stopped_s(clock.now_s()) >= STOPPED_S for share in router.live_requests.buffers._shares
            ):
                clock.advance(STOPPED_S / 10)
                await asyncio.sleep(0.01)
        assert router.live_requests.num_buffered_tokens >= num_values
        responses = await collect(channel, request)
        assert sum(len(response.prompt_logprobs.tokens) for response in responses) == num_positions
        assert router.telemetry.value("tandem_stalled_clients_total", surface="grpc") == 1
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await read_to_the_end(unread)
        assert reason_of(told.value) == "slow_client"
    assert router.live_requests.num_buffered_tokens == 0
