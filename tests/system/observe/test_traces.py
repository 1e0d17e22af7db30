"""The spans of requests, as a real OTLP receiver gets them from a router of a real cluster."""

import asyncio
import json
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider

from cluster.errors import QueueFull
from cluster.observe.spans import SpanExport
from cluster.observe.trace_context import TRACE_PARENT_KEY, parse_trace_parent
from router.request.span_sender import SpanSender
from router.request.traces import Traces
from router.requests import GenerateRequest
from tandem.client import AsyncClient
from tandem.generation import trace_context
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from tests.polling import until
from tests.system.rigs.members.asking import question
from tests.system.rigs.members.planted import planted_bodies
from tests.system.rigs.members.router_harness import RouterUnderTest, answer_to, ask, router_under_test
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_PROMPT = "a secret prompt of more than one block, so that a hand-off has blocks to read " * 3
_USAGE = ("input_tokens", "output_tokens", "cache_read.input_tokens")
_PHASES = {"tokenize", "admit", "prefill_queue", "prefill", "transfer", "decode_queue", "decode", "retry"}


@dataclass(slots=True)
class Receiver:
    """A receiver of OTLP over HTTP."""

    port: int = 0
    spans: list[Span] = field(default_factory=list)
    received: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            with suppress(asyncio.IncompleteReadError):
                await self._take(reader, writer)
        writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/traces")
        length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
        request = ExportTraceServiceRequest.FromString(await reader.readexactly(int(length.split(b":")[1])))
        async with self.received:
            self.spans += [s for part in request.resource_spans for scope in part.scope_spans for s in scope.spans]
            self.received.notify_all()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    async def until_received(self, trace_id: str, num_roots: int = 1) -> None:
        async with asyncio.timeout(60), self.received:
            await self.received.wait_for(lambda: len(self.of(trace_id).get("root", ())) == num_roots)

    def of(self, trace_id: str) -> dict[str, list[Span]]:
        """Return the spans of a trace by name; those of its root under "root"."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.trace_id.hex() == trace_id:
                found.setdefault("root" if span.kind == Span.SPAN_KIND_SERVER else span.name, []).append(span)
        return found


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.handle, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    yield receiver
    server.close()


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def traced(shm_cluster: LocalCluster, receiver: Receiver) -> AsyncIterator[dict[str, str]]:
    """Start one more router, which sends spans, and yield its ready line."""
    await shm_cluster.mend()
    flags = ("--port", "0", "--grpc-port", "0", "--trace-sample-ratio", "0", "--placement", "least-loaded")
    endpoint = ("--otlp-endpoint", f"http://127.0.0.1:{receiver.port}")
    member = await shm_cluster.start_member("tracing-router", "router", (*flags, *endpoint))
    yield member.ready
    member.send_signal(signal.SIGTERM)
    assert await member.exit_code() == 0
    del shm_cluster.members[member.name]


def _attributes(found: Span | Span.Event) -> dict[str, object]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in found.attributes}


def traced_ask(router: RouterUnderTest, trace_id: str) -> GenerateRequest:
    trace = router.live_requests.begin_trace(f"00-{trace_id}-{secrets.token_hex(8)}-00")
    return replace(ask(), trace=trace)


def _seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


async def test_the_spans_of_a_sampled_request_add_up_to_its_ledger(traced: dict[str, str], receiver: Receiver) -> None:
    trace_id, client_span = secrets.token_hex(16), secrets.token_hex(8)
    async with openai.AsyncOpenAI(base_url=f"http://{traced['http']}/v1", api_key="none") as client:
        response = await client.completions.with_raw_response.create(
            model="",
            prompt=_PROMPT,
            max_tokens=8,
            extra_headers={"traceparent": f"00-{trace_id}-{client_span}-01", "x-tandem-ledger": "1"},
        )
    await receiver.until_received(trace_id)
    answer = response.parse()
    extra = answer.model_extra
    assert extra is not None
    spans, [ledger] = receiver.of(trace_id), extra["ledger"]
    [root] = spans["root"]
    assert root.parent_span_id.hex() == client_span
    assert response.headers["traceparent"] == f"00-{trace_id}-{root.span_id.hex()}-01"
    assert all(s.parent_span_id == root.span_id for name, several in spans.items() if name != "root" for s in several)
    assert _seconds(root) == pytest.approx(ledger["wall_s"], rel=0.02, abs=1e-4)
    phases = {name: sum(map(_seconds, spans[name])) for name in _PHASES & set(spans)}
    assert sum(phases.values()) == pytest.approx(ledger["wall_s"], rel=0.02, abs=1e-4)
    assert {"prefill", "decode"} <= set(phases)
    for hand_off in map(_attributes, spans["hand-off"]):
        assert hand_off["tandem.transport"] == "shm" and int(str(hand_off["tandem.kv_bytes"])) > 0
        assert float(str(hand_off["tandem.exposed_s"])) >= 0
    num_computed = sum(int(str(_attributes(chunk)["tandem.num_tokens"])) for chunk in spans["prefill chunk"])
    usage = {name: int(str(_attributes(root)[f"gen_ai.usage.{name}"])) for name in _USAGE}
    assert usage["output_tokens"] == 8
    num_needed = usage["input_tokens"] - usage["cache_read.input_tokens"]
    assert num_computed >= num_needed if ledger["reasons"] else num_computed == num_needed
    decision, candidate, *_ = map(_attributes, root.events)
    assert [event.name for event in root.events[:2]] == ["placement", "placement candidate"]
    chosen = [each for each in map(_attributes, root.events) if each.get("tandem.candidate.is_chosen")]
    assert {name: decision[f"tandem.placement.{name}"] for name in ("prefill", "decode")} in [
        {name: each[f"tandem.candidate.{name}"] for name in ("prefill", "decode")} for each in chosen
    ]
    assert int(str(candidate["tandem.candidate.depth"])) >= 0
    text = str([MessageToDict(span) for several in spans.values() for span in several])
    assert "secret" not in text and answer.choices[0].text not in text


async def _figures(router: str, worker: str) -> dict[str, float]:
    """Return what the router learns from the worker itself."""
    async with grpc.aio.insecure_channel(router) as channel:
        status = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=60)
    return {name: value for each in status.members if each.member_id == worker for name, value in each.figures.items()}


async def test_a_worker_adds_spans_of_the_decode_steps_of_sampled_requests_alone(
    traced: dict[str, str], receiver: Receiver, shm_cluster: LocalCluster
) -> None:
    endpoint = ("--otlp-endpoint", f"http://127.0.0.1:{receiver.port}")
    flags = (*shm_cluster.joining_flags(), *endpoint)
    worker = await shm_cluster.start_member("tracing-decode", "decode_worker", flags)
    await until(partial(_figures, traced["grpc"], worker.name), what="the router is connected to the worker")
    ids = {is_sampled: [secrets.token_hex(16) for _ in range(6)] for is_sampled in (False, True)}

    async def send(http: httpx.AsyncClient, trace_id: str, *, is_sampled: bool) -> None:
        context = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-0{int(is_sampled)}"}
        body = {"prompt": list(range(20, 40)), "max_tokens": 40, "ignore_eos": True}
        assert (await http.post("/v1/completions", json=body, headers=context)).status_code == 200

    async with httpx.AsyncClient(base_url=f"http://{traced['http']}", timeout=60) as http:
        for is_sampled in (False, True):  # at once, so that least-loaded placement sends some to each worker
            await asyncio.gather(*(send(http, each, is_sampled=is_sampled) for each in ids[is_sampled]))
    for trace_id in ids[True]:
        await receiver.until_received(trace_id)
    worker.send_signal(signal.SIGTERM)  # it sends what is left
    assert await worker.exit_code() == 0
    del shm_cluster.members[worker.name]
    found = [spans for trace_id in ids[True] if "decode steps" in (spans := receiver.of(trace_id))]
    assert 0 < len(found) < 6, "on this worker, and not on the others"
    for spans in found:
        [root], steps = spans["root"], spans["decode steps"]
        assert {span.parent_span_id for span in steps} == {root.span_id}
        shown = [_attributes(span) for span in steps]
        assert [each["tandem.num_steps"] for each in shown] == [16, 16, 7]
        assert sum(int(str(each["tandem.num_tokens"])) for each in shown) == 39, "prefill drew the first one"
        assert all(before.end_time_unix_nano == after.start_time_unix_nano for before, after in pairwise(steps))
        assert sum(map(_seconds, steps)) <= _seconds(root)
        longest_s = [float(str(each["tandem.longest_step_s"])) for each in shown]
        assert all(0 < most_s <= _seconds(span) for most_s, span in zip(longest_s, steps, strict=True))
    assert not any("decode steps" in receiver.of(trace_id) for trace_id in ids[False])


async def test_a_failed_request_is_sent_though_nothing_samples_it(traced: dict[str, str], receiver: Receiver) -> None:
    trace_id = secrets.token_hex(16)
    async with openai.AsyncOpenAI(base_url=f"http://{traced['http']}/v1", api_key="none", max_retries=0) as client:
        failing = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-00"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="", prompt=_PROMPT * 1000, max_tokens=1, extra_headers=failing)
    await receiver.until_received(trace_id)
    [root] = receiver.of(trace_id)["root"]
    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert refused.value.response.headers["traceparent"] == f"00-{trace_id}-{root.span_id.hex()}-00"
    assert _attributes(root)["error.type"] == root.status.message


async def test_prompts_and_outputs_are_in_no_span(traced: dict[str, str], receiver: Receiver) -> None:
    planted = "xyzzy plugh 7302"
    texts = [planted]
    async with httpx.AsyncClient(base_url=f"http://{traced['http']}", timeout=60) as http:
        for path, body in planted_bodies(planted):
            trace_id = secrets.token_hex(16)
            context = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
            answer = await http.post(path, json={"model": "demo_model", "temperature": 0} | body, headers=context)
            for choice in answer.json().get("choices", []) if answer.status_code == 200 else []:
                texts.append(choice.get("text") or choice["message"]["content"])
            if answer.status_code == 200 and "traceparent" in answer.headers:
                await receiver.until_received(trace_id)
        trace_id = secrets.token_hex(16)
        context = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
        await http.post("/v1/completions", json={"model": "", "prompt": planted * 1000}, headers=context)
        await receiver.until_received(trace_id)  # of a refused request; spans leave in the order of their ends
    long = [text.strip() for text in texts if len(text.strip()) >= len(planted)]
    assert len(long) > 1, "answers are long enough to be told from what a span says"
    exported = json.dumps([MessageToDict(span) for span in receiver.spans])
    assert not [text for text in long if json.dumps(text)[1:-1] in exported]


async def test_a_stream_of_grpc_has_its_trace_in_its_metadata_and_explain_finds_it(traced: dict[str, str]) -> None:
    trace_id = secrets.token_hex(16)
    request = question(range(20, 40), max_tokens=2)
    async with grpc.aio.insecure_channel(traced["grpc"]) as channel:
        client = {TRACE_PARENT_KEY: f"00-{trace_id}-{secrets.token_hex(8)}-00"}
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=tuple(client.items()), timeout=60)
        metadata = dict(await call.initial_metadata())
        async for _ in call:
            pass
        named = admin_pb2.ExplainRequest(request=trace_id)
        explained = await admin_pb2_grpc.AdminStub(channel).Explain(named, timeout=60)
    trace = parse_trace_parent(str(metadata[TRACE_PARENT_KEY]))
    assert trace is not None and f"{trace.trace_id:032x}" == trace_id and not trace.is_sampled
    assert [each.trace_id for each in explained.requests] == [trace_id]


async def test_a_generation_belongs_to_the_trace_of_the_span_in_which_the_client_started_it(
    traced: dict[str, str], receiver: Receiver
) -> None:
    tracer = TracerProvider().get_tracer("a program that asks")
    async with AsyncClient(traced["grpc"]) as client:
        with tracer.start_as_current_span("ask") as asking:
            generation = client.generate(token_ids=range(20, 40), max_tokens=2)
        await generation.result()
    trace_id = f"{asking.get_span_context().trace_id:032x}"
    await receiver.until_received(trace_id)  # its program samples the span
    [root] = receiver.of(trace_id)["root"]
    assert root.parent_span_id.hex() == f"{asking.get_span_context().span_id:016x}"
    assert trace_context() == ()


async def test_a_router_without_traces_sends_no_context(traced: dict[str, str], shm_cluster: LocalCluster) -> None:
    context = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}
    body = {"prompt": list(range(20, 40)), "max_tokens": 2}
    plain = shm_cluster.members["router0"].ready["http"]
    async with httpx.AsyncClient(timeout=60) as http:
        for address, has_context in ((plain, False), (traced["http"], True)):
            answer = await http.post(f"http://{address}/v1/completions", json=body, headers=context)
            assert answer.status_code == 200 and ("traceparent" in answer.headers) == has_context
        assert "traceparent" not in (await http.get(f"http://{traced['http']}/v1/models")).headers


async def test_several_prompts_of_one_call_are_requests_of_one_trace(
    traced: dict[str, str], receiver: Receiver
) -> None:
    trace_id = secrets.token_hex(16)
    body = {"prompt": [[20, 21, 22], [30, 31, 32]], "max_tokens": 2}
    async with httpx.AsyncClient(timeout=60) as http:
        context = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
        answer = await http.post(f"http://{traced['http']}/v1/completions", json=body, headers=context)
    await receiver.until_received(trace_id, num_roots=2)
    roots = {root.span_id.hex() for root in receiver.of(trace_id)["root"]}
    assert len(roots) == 2 and answer.headers["traceparent"].split("-")[2] in roots


async def test_of_unsampled_requests_a_retried_one_is_sent_and_calls_to_workers_carry_the_context(
    receiver: Receiver,
) -> None:
    export = SpanExport(f"http://127.0.0.1:{receiver.port}", service="tandem-router", member="r1")
    sender = SpanSender(export, model="demo_model")
    async with router_under_test(traces=Traces(sender, sample_ratio=0.0, slow_s=60.0)) as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        trace_id, other = secrets.token_hex(16), secrets.token_hex(16)
        await answer_to(router, traced_ask(router, other))
        prefill.refusals = [QueueFull("256 wait here")]
        await answer_to(router, traced_ask(router, trace_id))
    await router.live_requests.close()
    await receiver.until_received(trace_id)
    [root] = receiver.of(trace_id)["root"]
    assert "queue_full" in str(_attributes(root)["tandem.reasons"])
    assert not receiver.of(other)  # it ended well, and before
    carried = [job.trace_parent for worker in (prefill, decode) for job in worker.jobs]
    assert carried.count(f"00-{trace_id}-{root.span_id.hex()}-00") == len(carried) - 2
    assert sum(each.startswith(f"00-{other}-") for each in carried) == 2
