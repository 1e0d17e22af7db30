"""The members of the compose file, started as processes with its commands, its variables and its generated files."""

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from cli import health
from cli.verbs.access.certs import Pair
from tandem.client import Client
from tandem.errors import Unavailable
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.certificates import client_credentials
from tests.package.composed import ComposedMembers

_DEADLINE_S = 120.0
_MEMBERS = ("router", "prefill", "decode")


def until_healthy(members: ComposedMembers, processes: Mapping[str, "subprocess.Popen[str]"]) -> None:
    """Ask each member's health port, as the containers' health check does."""
    deadline = time.monotonic() + _DEADLINE_S
    for name in _MEMBERS:
        while health.main([f"{members.host(name)}:50052"]):
            assert processes[name].poll() is None and time.monotonic() < deadline, members.log(name)


def tandem(members: ComposedMembers, *arguments: str) -> str:
    """Return the output of a command that runs as `docker compose exec router tandem ...` does."""
    command, environment = (members.tandem, *arguments), members.environment("router")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr + members.log("router")
    return ended.stdout


@pytest.mark.parametrize("profiles", ["cpu", "cpu,mtls"])
def test_members_of_the_compose_file_serve_operators_grpc_and_http_and_leave(profiles: str, tmp_path: Path) -> None:
    members = ComposedMembers(tmp_path, profiles)
    members.make_secrets()
    with members.running(*_MEMBERS) as processes:
        until_healthy(members, processes)
        listed = json.loads(tandem(members, "status", "--json"))["members"]
        assert sorted(member["role"] for member in listed) == ["decode", "prefill", "router"]
        answer = json.loads(tandem(members, "generate", "import os", "--max-tokens", "4", "--json"))
        assert answer["usage"]["completion_tokens"] == 4
        (tmp_path / "in").write_text(
            json.dumps({"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "import os", "max_tokens": 4}})
        )
        http = ("--http-address", f"{members.host('router')}:8000", "--max-attempts", "1")
        assert "1 ok" in tandem(members, "batch", str(tmp_path / "in"), str(tmp_path / "out"), *http)
        if "mtls" in profiles:
            _check_strangers(members)
        for name in _MEMBERS:
            processes[name].terminate()
            assert processes[name].wait(_DEADLINE_S) == 0, members.log(name)


def _check_strangers(members: ComposedMembers) -> None:
    """No port of a request or of KV serves plaintext, and workers serve no caller without the members' certificate."""
    key = (members.keys / "api.key").read_text()
    with Client(f"{members.host('router')}:50051", key, discover=False) as plaintext:
        with pytest.raises(Unavailable, match="may require TLS"):
            plaintext.models()
    folder = members.keys / "tls"
    authority, member = Pair(folder / "ca.crt", folder / "none"), Pair(folder / "member.crt", folder / "member.key")
    for certificate, refusal in ((None, "UNAVAILABLE"), (member, "UNAUTHENTICATED")):
        credentials = client_credentials(authority, certificate)
        for worker in ("prefill", "decode"):
            assert _refusal(f"{members.host(worker)}:50051", credentials) == refusal


def _refusal(address: str, credentials: grpc.ChannelCredentials) -> str:
    options = [("grpc.ssl_target_name_override", "localhost")]
    with grpc.secure_channel(address, credentials, options) as channel, pytest.raises(grpc.RpcError) as error:
        worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=10)
    return str(error.value.code().name)
