"""API keys of two routers that share a Redis, as operators and the real openai client use them."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from cli.command import run
from tandem.v1 import admin_pb2, admin_pb2_grpc
from tests.polling import until
from tests.system.rigs.processes.local_cluster import LocalCluster

_ADMIN_KEY = "the operators' key"


async def _tandem(cluster: LocalCluster, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run an operator's command at the first router and return what it prints as JSON."""
    address = cluster.members["router0"].grpc_address
    assert await asyncio.to_thread(run, [*words, "--json", "--address", address]) == 0
    return json.loads(capsys.readouterr().out)


def _client(cluster: LocalCluster, router: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://{cluster.members[router].ready['http']}/v1",
        api_key=key,
        max_retries=0,
        timeout=30,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )


async def _status(cluster: LocalCluster, router: str, key: str) -> int:
    async with _client(cluster, router, key) as client:
        try:
            await client.models.list()
        except openai.APIStatusError as error:
            return error.status_code
        return 200


async def test_a_recorded_key_has_its_rights_at_every_router_until_it_is_revoked(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_ADMIN_KEY", _ADMIN_KEY)
    audit = tmp_path / "audit.jsonl"
    cluster = LocalCluster(redis_url, tmp_path, environment={"TANDEM_ADMIN_KEY": _ADMIN_KEY, "TANDEM_KEYS": "redis"})
    try:
        await cluster.start(prefill=0, decode=0, routers=2, router_flags=("--audit-file", str(audit)))
        added = await _tandem(cluster, capsys, "keys", "add", "--tenant", "acme", "--max-sequences", "3")
        key = added["key"]
        for router in ("router0", "router1"):
            await until(partial(_status, cluster, router, key), lambda status: status == 200, what="the key is valid")
            assert await _status(cluster, router, "wrong") == 401
        await _other_surfaces_are_closed(cluster, key)
        async with _client(cluster, "router0", key) as client:
            with pytest.raises(openai.RateLimitError) as limited:
                await client.completions.create(model="demo_model", prompt=["x", "y"], n=2)
            assert (limited.value.code, limited.value.param) == ("limit_reached", "max_sequences")
        assert await _tandem(cluster, capsys, "usage") == {"keys": []}

        stub = admin_pb2_grpc.AdminStub(cluster.channel("router1"))
        shown = [("authorization", f"Bearer {_ADMIN_KEY}")]
        listed = await stub.ListKeys(admin_pb2.ListKeysRequest(), metadata=shown, timeout=20)
        assert [record.tenant for record in listed.records] == ["acme"]
        await stub.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=added["key_id"]), metadata=shown, timeout=20)
        assert await _status(cluster, "router1", key) == 401, "the router that revokes a key refuses it at once"
        await until(lambda: _status(cluster, "router0", key), lambda status: status == 401, what="it is revoked")
    finally:
        await cluster.stop()
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    events = [(line["what"], line["outcome"], (line["who"] or {}).get("key")) for line in lines]
    assert ("AddKey", "ok", "admin-key") in events and ("RevokeKey", "ok", "admin-key") in events
    assert ("Drain", "permission_denied", added["key_id"]) in events and ("Drain", "unauthenticated", None) in events
    page = [event for event in events if event[0] == "GET /admin/explain"]
    assert [event[1:] for event in page] == [("unauthenticated", None), ("permission_denied", added["key_id"])]
    for secret in (key, _ADMIN_KEY):
        assert secret not in audit.read_text() and secret not in cluster.output()


_EXPLAIN = "/admin/explain?name=x"
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
_ADMIN_METHODS = [f"/{_ADMIN.full_name}/{method.name}" for method in _ADMIN.methods]


async def _refusal(channel: grpc.aio.Channel, method: str, metadata: Sequence[tuple[str, str]]) -> grpc.StatusCode:
    """Return the status with which an empty request is refused."""
    calling: Any = channel.unary_stream(method)
    call = calling(b"", metadata=metadata, timeout=20)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    code: grpc.StatusCode = await call.code()
    return code


async def _other_surfaces_are_closed(cluster: LocalCluster, key: str) -> None:
    channel = cluster.channel()
    for metadata, code in (
        ((), grpc.StatusCode.UNAUTHENTICATED),
        ((("authorization", f"Bearer {key}"),), grpc.StatusCode.PERMISSION_DENIED),
    ):
        assert {method: await _refusal(channel, method, metadata) for method in _ADMIN_METHODS} == dict.fromkeys(
            _ADMIN_METHODS, code
        )
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    # Without a question: gRPC reports INTERNAL if a refusal arrives while it writes one.
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    with pytest.raises(grpc.aio.AioRpcError, match="send an API key"):
        await reflection.ServerReflectionInfo(timeout=20).read()
    async with httpx.AsyncClient(base_url=f"http://{cluster.members['router0'].ready['http']}", timeout=20) as http:
        statuses = {
            path: [(await http.get(path, headers=headers)).status_code for headers in ({}, _bearer(key))]
            for path in ("/health", "/docs", "/openapi.json", "/version", "/metrics", "/v1/models", _EXPLAIN)
        }
        assert statuses == {
            "/health": [200, 200],
            "/docs": [401, 404],
            _EXPLAIN: [401, 403],
            "/openapi.json": [401, 200],
            "/version": [401, 200],
            "/metrics": [401, 403],
            "/v1/models": [401, 200],
        }
        assert (await http.get("/metrics", headers=_bearer(_ADMIN_KEY))).status_code == 200


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
