"""TLS between members and to clients: which callers are accepted, and the reason that a refused caller receives."""

import asyncio
import os
import ssl
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from cli import health
from cli.__main__ import main
from cli.connection import LastCluster, find_tls_ca, remember
from cli.verbs.access.certs import Pair
from cluster.accounts.audit import Audit
from cluster.auth.gate import MemberGate
from cluster.auth.keys import ClusterKeys
from cluster.auth.member_channel import open_member_channel
from cluster.errors import ConfigError
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from cluster.serving.serving import GrpcServer, is_serving, open_channel
from cluster.serving.tls import ClusterTls, load_tls
from cluster.settings.config import RouterConfig
from router.fleet.supervision import check_health
from tandem.channel import open_async_channel
from tandem.client import AsyncClient
from tandem.errors import Unavailable
from tandem.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.certificates import SERVER_NAME, Certificates, client_credentials, load, make_certificates

DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def serving(credentials: grpc.ServerCredentials | None) -> AsyncIterator[str]:
    server = GrpcServer(service_names=[], telemetry=Telemetry(), credentials=credentials)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    await server.set_ready(True)
    try:
        yield address
    finally:
        await server.stop(0.0)


async def refusal(channel: grpc.aio.Channel) -> str:
    """Return the reason why the server does not answer, or an empty text when it answers."""
    try:
        return (await check_health(channel)).problem
    finally:
        await channel.close()


async def test_members_of_the_same_authority_reach_each_other(certificates: Certificates) -> None:
    tls = certificates.loaded()
    async with serving(tls.member_credentials()) as address, open_channel(address, tls) as channel:
        assert await is_serving(channel, timeout_s=DEADLINE_S)


async def test_with_tls_a_caller_connects_to_no_port_for_frames_which_are_plaintext(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[asyncio.StreamWriter] = []
    listener = await asyncio.start_server(lambda reader, writer: came.append(writer), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    monkeypatch.setattr(GrpcServer, "frame_port", property(lambda server: port))
    tls, keys, telemetry = certificates.loaded(), ClusterKeys(b"k" * 32), Telemetry()
    gate = MemberGate(keys, MemberId("decode-0", "1"), telemetry, Audit())
    server = GrpcServer(service_names=[], telemetry=telemetry, gate=gate, credentials=tls.member_credentials())
    gate.serve(server)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    try:
        async with listener, open_member_channel(address, keys=keys, caller="router-0@1", tls=tls) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as answered:
                await worker_pb2_grpc.WorkerStub(channel).Inspect(worker_pb2.InspectRequest(), timeout=DEADLINE_S)
            assert answered.value.code() is grpc.StatusCode.UNIMPLEMENTED  # the session was opened; there is no service
            assert not came
    finally:
        await server.stop(0.0)


async def test_a_member_of_another_authority_is_refused_by_both_sides(certificates: Certificates) -> None:
    ours, theirs = certificates.loaded(), load(certificates.stranger, certificates.other_authority)
    async with serving(ours.member_credentials()) as address:
        assert "not signed by a trusted authority" in await refusal(open_channel(address, theirs))
        # A client that does not verify our certificate still has no certificate that we trust.
        gullible = client_credentials(certificates.authority, certificates.stranger)
        assert "closed the connection" in await refusal(grpc.aio.secure_channel(address, gullible))


async def test_a_member_port_refuses_plaintext_and_callers_without_a_certificate(certificates: Certificates) -> None:
    async with serving(certificates.loaded().member_credentials()) as address:
        without = client_credentials(certificates.authority)
        assert "closed the connection" in await refusal(grpc.aio.secure_channel(address, without))
        assert "may require TLS" in await refusal(open_channel(address))


async def test_a_client_needs_no_certificate_but_the_authority(certificates: Certificates) -> None:
    ca = str(certificates.authority.cert)
    async with serving(certificates.loaded().public_credentials()) as address:
        assert await refusal(open_async_channel(address, tls_ca=ca)) == ""
        other = open_async_channel(address, tls_ca=str(certificates.other_authority.cert))
        assert "not signed by a trusted authority" in await refusal(other)
        assert "not signed by a trusted authority" in await refusal(open_async_channel(address, secure=True))
        assert "may require TLS" in await refusal(open_async_channel(address))


async def test_the_client_library_names_a_server_without_tls_and_a_missing_file(certificates: Certificates) -> None:
    async with serving(None) as address:
        async with AsyncClient(address, tls_ca=str(certificates.authority.cert)) as client:
            with pytest.raises(Unavailable, match="the server does not use TLS"):
                await client.models()
    with pytest.raises(FileNotFoundError):
        AsyncClient("127.0.0.1:1", tls_ca="/nowhere/ca.crt")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda made: made.expired, "the server's certificate has expired"),
        (lambda made: made.nameless, "does not name this host in its subjectAltName"),
        (lambda made: made.elsewhere, "does not name this host in its subjectAltName"),
        (lambda made: made.stranger, "not signed by a trusted authority"),
    ],
)
async def test_a_caller_gets_the_reason_why_a_members_certificate_is_refused(
    certificates: Certificates, wrong: Callable[[Certificates], Pair], said: str
) -> None:
    """The member started without the check of its certificate."""
    ours, pair = certificates.loaded(), wrong(certificates)
    careless = [(pair.key.read_bytes(), pair.cert.read_bytes())]
    authorities = certificates.authority.cert.read_bytes()
    async with serving(grpc.ssl_server_credentials(careless, authorities, require_client_auth=True)) as address:
        assert said in await refusal(open_channel(address, ours))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda made: made.expired, "would not accept --tls-cert .*: certificate has expired"),
        (lambda made: made.nameless, "does not name 127.0.0.1, .* subjectAltName"),
        (lambda made: made.elsewhere, "does not name 127.0.0.1, .* subjectAltName"),
        (lambda made: made.stranger, "is not signed by an authority of --tls-ca"),
        (lambda made: Pair(made.member.cert, made.stranger.key), "is not the key of --tls-cert"),
        (lambda made: Pair(made.member.key, made.member.key), "must be a certificate and its key in PEM form"),
        (lambda made: Pair(made.member.cert, Path("/nowhere/key")), "cannot read --tls-key /nowhere/key"),
    ],
)
def test_a_certificate_that_other_members_would_refuse_is_refused_at_start(
    certificates: Certificates, wrong: Callable[[Certificates], Pair], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(wrong(certificates), certificates.authority)


def test_the_certificate_must_name_the_advertised_host(certificates: Certificates) -> None:
    load(certificates.elsewhere, certificates.authority, host="elsewhere.example")
    with pytest.raises(ConfigError, match=r"does not name 10\.0\.0\.7"):
        load(certificates.member, certificates.authority, host="10.0.0.7")


async def test_members_verify_their_common_name_instead_of_the_address(certificates: Certificates) -> None:
    """A pod has an address that no certificate can name, because it is made before the pod."""
    shared = load(certificates.shared, certificates.authority, host="10.0.0.7", server_name=SERVER_NAME)
    by_address = certificates.loaded()
    elsewhere = load(certificates.elsewhere, certificates.authority, server_name="elsewhere.example")
    async with serving(shared.member_credentials()) as address:
        assert await refusal(open_channel(address, shared)) == ""
        for other in (by_address, elsewhere):
            assert "does not name this host in its subjectAltName" in await refusal(open_channel(address, other))
    async with serving(by_address.member_credentials()) as address:
        assert "does not name this host in its subjectAltName" in await refusal(open_channel(address, shared))


async def test_a_client_verifies_the_name_that_it_is_given(certificates: Certificates) -> None:
    ca = str(certificates.authority.cert)
    shared = load(certificates.shared, certificates.authority, server_name=SERVER_NAME)
    async with serving(shared.public_credentials()) as address:
        assert await refusal(open_async_channel(address, tls_ca=ca, tls_server_name=SERVER_NAME)) == ""
        for name in (None, "elsewhere.example"):
            said = await refusal(open_async_channel(address, tls_ca=ca, tls_server_name=name))
            assert "see --tls-server-name" in said


def test_a_certificate_without_the_common_name_of_members_is_refused_at_start(certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match=f"does not name {SERVER_NAME}, .* --tls-server-name"):
        load(certificates.member, certificates.authority, server_name=SERVER_NAME)
    with pytest.raises(ConfigError, match="--tls-server-name needs --tls-cert"):
        RouterConfig(model="-", tls_server_name=SERVER_NAME)


def test_authorities_must_be_certificates(certificates: Certificates) -> None:
    with pytest.raises(ConfigError, match="holds no certificate"):
        load(certificates.member, Pair(certificates.member.key, certificates.member.key))


def test_without_files_there_is_no_tls() -> None:
    assert load_tls(RouterConfig(model="-"), "127.0.0.1") is None
    with pytest.raises(ConfigError, match="belong together"):
        RouterConfig(model="-", tls_ca="ca.crt")


def test_a_private_key_is_not_in_the_logged_settings(certificates: Certificates) -> None:
    assert "PRIVATE" not in repr(certificates.loaded())


async def test_sockets_of_members_verify_certificates_on_both_sides(certificates: Certificates) -> None:
    ours, theirs = certificates.loaded(), load(certificates.stranger, certificates.other_authority)
    assert await echoed(ours.server_context(), ours.client_context()) == b"hello"
    with pytest.raises(ssl.SSLError):
        await echoed(ours.server_context(), theirs.client_context())
    without = ssl.create_default_context(cafile=str(certificates.authority.cert))
    with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
        await echoed(ours.server_context(), without)


async def echoed(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> bytes:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(5))
        writer.close()

    async with asyncio.timeout(DEADLINE_S):
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_context) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context)
            writer.write(b"hello")
            try:
                return await reader.readexactly(5)
            finally:
                writer.close()


def test_the_authority_is_taken_from_the_flag_then_the_variable_then_the_last_cluster(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert find_tls_ca(None, "h:1", environment) is None
    remember(LastCluster("h:1", "h:2", os.getpid(), tls_ca="/last/ca.crt"), environment)
    assert find_tls_ca(None, "h:1", environment) == "/last/ca.crt"
    assert find_tls_ca(None, "elsewhere:1", environment) is None, "another cluster's is no authority for this one"
    assert find_tls_ca(None, "h:1", environment | {"TANDEM_TLS_CA": "/a"}) == "/a"
    assert find_tls_ca("/b", "h:1", environment | {"TANDEM_TLS_CA": "/a"}) == "/b"


def test_tandem_certs_writes_private_keys_and_certificates_that_members_accept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", str(tmp_path), "--host", "10.0.0.7", "--name", "node"]) == 0
    assert f"--tls-cert {tmp_path}/node.crt" in capsys.readouterr().out
    ca = (tmp_path / "ca.crt").read_bytes()
    assert main(["certs", str(tmp_path), "--host", "10.0.0.8", "--name", "other-node"]) == 0
    assert (tmp_path / "ca.crt").read_bytes() == ca
    authority = Pair(tmp_path / "ca.crt", tmp_path / "ca.key")
    tls = load(Pair(tmp_path / "node.crt", tmp_path / "node.key"), authority, host="10.0.0.7")
    assert isinstance(tls, ClusterTls)
    load(Pair(tmp_path / "other-node.crt", tmp_path / "other-node.key"), authority, host="10.0.0.8")
    for key in tmp_path.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert main(["certs", str(tmp_path), "--host", "a,DNS:b"]) == 2


async def test_a_containers_health_check_shows_the_members_own_certificate(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(certificates.loaded().member_credentials()) as address:
        assert await asyncio.to_thread(health.main, [address]) == 1
        files = {"CA": certificates.authority.cert, "CERT": certificates.member.cert, "KEY": certificates.member.key}
        for name, path in files.items():
            monkeypatch.setenv(f"TANDEM_TLS_{name}", str(path))
        assert await asyncio.to_thread(health.main, [address]) == 0
        monkeypatch.setenv("TANDEM_TLS_SERVER_NAME", SERVER_NAME)
        assert await asyncio.to_thread(health.main, [address]) == 1
    shared = load(certificates.shared, certificates.authority, server_name=SERVER_NAME)
    async with serving(shared.member_credentials()) as address:
        assert await asyncio.to_thread(health.main, [address]) == 0


def test_a_failed_health_check_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main(["127.0.0.1:1", "liveness"]) == 1
    assert capsys.readouterr().err.startswith("127.0.0.1:1: UNAVAILABLE: ")
