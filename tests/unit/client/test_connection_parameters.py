"""Addresses, API keys and authorities that a client cannot use are refused before the first call."""

import os
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import main
from cli.connection import LastCluster, find_admin_key, find_http_address, find_key_file, find_tls_ca, remember
from cluster.errors import ConfigError
from cluster.process import ExitStatus
from tandem.client import AsyncClient, Client
from tandem.routers import addresses

_WRONG = (
    "localhost",
    "h:",
    ":1",
    "h:0",
    "h:65536",  # gRPC dials port 0
    "h:-1",
    "h:\u0967",  # a digit that is not ASCII
    "h:1/",
    "h h:1",
    "http://h:1",
    "::1:1",
    "[::1]",
)


@pytest.mark.parametrize("wrong", _WRONG)
def test_an_address_that_is_not_host_and_port_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="an address must be host:port"):
        Client(["h:1", wrong])
    assert main(["status", "--address", f"h:1,{wrong}"]) == ExitStatus.CONFIG
    assert "an address must be host:port" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="an address must be host:port"):
        find_http_address(wrong, {})


def test_hosts_by_name_or_number_and_other_names_of_grpc_are_addresses() -> None:
    given = ("router-0.tandem:50051", "127.0.0.1:1", "[::1]:65535", "dns:///h:1", "unix:/run/tandem.sock")
    assert addresses(given) == given


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(("key", "error"), [("k\u00e9y", ValueError), ("key\n", ValueError), (b"key", TypeError)])
def test_an_api_key_that_no_call_can_carry_is_refused(kind: type[Any], key: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="an API key must"):
        kind("127.0.0.1:1", key)


@pytest.mark.parametrize("words", [("status",), ("generate", "x"), ("batch", "in", "out")])
def test_a_command_names_the_flag_of_an_api_key_that_no_call_can_carry(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").touch()
    flag = "--http-address" if words[0] == "batch" else "--address"
    assert main([*words, flag, "127.0.0.1:1", "--api-key", "key\n"]) == ExitStatus.CONFIG
    assert capsys.readouterr().err.startswith("tandem: --api-key: an API key must consist of printable ASCII")


def test_a_file_without_a_certificate_is_no_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC wrote four lines to stderr, and the error was that no security handshaker could be created."""
    empty = tmp_path / "ca.crt"
    empty.write_text("no certificate")
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=r"ca\.crt holds no certificate"):
            kind("127.0.0.1:1", tls_ca=str(empty))
        with pytest.raises(FileNotFoundError):
            kind("127.0.0.1:1", tls_ca=str(tmp_path / "missing"))
    for path, problem in ((empty, f"--tls-ca {empty} holds no"), (tmp_path, f"cannot read --tls-ca {tmp_path}: Is a")):
        assert main(["status", "--address", "127.0.0.1:1", "--tls-ca", str(path)]) == ExitStatus.CONFIG
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("address", ["h:1", "h:2", "h:3", "h:4", "h:3,h:1", "h:1, h:3"])
def test_a_local_cluster_is_recognised_by_any_of_its_routers_in_any_order(tmp_path: Path, address: str) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    remember(LastCluster("h:1", "h:2", os.getpid(), "/ca", ("h:3",), "secret", "/key", ("h:4",)), environment)
    assert find_admin_key(address, environment) == "secret"
    assert find_tls_ca(None, address, environment) == "/ca"
    assert find_key_file(None, address, environment) == Path("/key")
    assert find_admin_key(f"{address},elsewhere:1", environment) == "", "the key is sent to this cluster only"
