"""Certificates and settings change while a process runs; files that do not work change nothing and are reported."""

import asyncio
import dataclasses
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from cli.verbs.access.certs import Pair, make_certificate
from cluster.observe.telemetry import Telemetry
from cluster.serving.serving import GrpcServer, is_serving, open_channel
from cluster.serving.tls import ClusterTls
from cluster.settings.config import RouterConfig, WorkerConfig
from cluster.settings.reload import SettingsReload, SettingsSource, settings_source
from router.running import running
from tests.certificates import HOSTS, Certificates, load, make_certificates
from tests.polling import until

_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def pair(tmp_path: Path, made: Certificates) -> Pair:
    return renewed(tmp_path, made)


@pytest.fixture(autouse=True)
def root_level() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def renewed(folder: Path, made: Certificates) -> Pair:
    """Write a new certificate and key of a member to the same two files."""
    return make_certificate(folder, made.authority, "renewed", HOSTS, days=2)


def following(
    tls: ClusterTls | None, source: SettingsSource[RouterConfig] | None = None
) -> SettingsReload[RouterConfig]:
    source = source or settings_source(RouterConfig, "router", ["--model", "-"], asyncio.Event())
    return SettingsReload(source.read(), source, setters={}, tls=tls)


async def test_grpc_ports_show_a_new_certificate_and_keep_connections(
    tmp_path: Path, made: Certificates, pair: Pair
) -> None:
    tls = load(pair, made.authority)
    client = load(pair, made.authority)
    server = GrpcServer(service_names=[], telemetry=Telemetry(), credentials=tls.member_credentials())
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    await server.set_ready(True)
    try:
        async with open_channel(address, client) as before:
            assert await is_serving(before, timeout_s=_DEADLINE_S)
            old = await shown(address, client.client_context())
            renewed(tmp_path, made)
            following(tls).look()
            new = await shown(address, client.client_context())
            assert new != old and new == await shown(address, client.client_context())
            assert before.get_state() is grpc.ChannelConnectivity.READY
            assert await is_serving(before, timeout_s=_DEADLINE_S)
    finally:
        await server.stop(0.0)


async def test_a_channel_of_before_shows_the_new_certificate_at_its_next_call(
    tmp_path: Path, made: Certificates, pair: Pair
) -> None:
    """Members stop trusting the authority of the old certificate, as they would refuse an expired one."""
    stranger = Pair(tmp_path / "moving.crt", tmp_path / "moving.key")
    write(stranger, made.stranger)
    authorities = tmp_path / "both.crt"
    authorities.write_bytes(made.authority.cert.read_bytes() + made.other_authority.cert.read_bytes())
    caller = load(stranger, Pair(authorities, authorities))
    server_tls = load(pair, Pair(authorities, authorities))
    server = GrpcServer(service_names=[], telemetry=Telemetry(), credentials=server_tls.member_credentials())
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    await server.set_ready(True)
    try:
        async with open_channel(address, caller) as channel:
            assert await is_serving(channel, timeout_s=_DEADLINE_S)
            authorities.write_bytes(made.authority.cert.read_bytes())
            following(server_tls).look()
            write(stranger, made.member)
            following(caller).look()
            assert await is_serving(channel, timeout_s=_DEADLINE_S)
        async with open_channel(address, load(made.stranger, made.other_authority)) as refused:
            with pytest.raises(grpc.aio.AioRpcError):
                await is_serving(refused, timeout_s=_DEADLINE_S)
    finally:
        await server.stop(0.0)


def test_a_file_that_does_not_work_keeps_the_certificate_of_before_and_is_reported_once(
    made: Certificates, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    tls = load(pair, made.authority)
    contexts = tls.server_context(), tls.client_context(), tls.public_context()
    reload = following(tls)
    with caplog.at_level(logging.INFO):
        reload.look()
        assert caplog.records == [], "nothing has changed"
        pair.key.write_bytes(made.stranger.key.read_bytes())
        reload.look()
        reload.look()
    (record,) = caplog.records
    assert "the present TLS files stay in use: --tls-key" in record.getMessage()
    assert "is not the key of" in record.getMessage()
    assert contexts == (tls.server_context(), tls.client_context(), tls.public_context()) and tls.version == 0
    write(pair, made.member)
    reload.look()
    assert tls.version == 1 and tls.client_context() is not contexts[1]


def test_a_setting_that_can_change_changes_and_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tandem.yaml"
    seen: list[int] = []
    file.write_text("max_live_requests: 8\nadmin_key: first\n")
    source = settings_source(RouterConfig, "router", ["--model", "-", "--config", str(file)], asyncio.Event())
    reload = SettingsReload(source.read(), source, setters={"max_live_requests": seen.append}, tls=None)
    with caplog.at_level(logging.INFO):
        reload.look()
        file.write_text("max_live_requests: 16\nport: 81\nadmin_key: second\n")
        reload.look()
        reload.look()
        file.write_text("max_live_requests: 0\n")
        reload.look()
        file.write_text("max_live_requests: 16\nport: 81\nadmin_key: second\n# a comment\n")
        reload.look()
    assert seen == [16]
    assert [record.getMessage() for record in caplog.records] == [
        "--port cannot change while the process runs: restart it to use 81",
        "--admin-key cannot change while the process runs: restart it to use ***",
        "--max-live-requests is now 16",
        "the present settings stay in use: --max-live-requests must be at least 1, not 0",
    ]


def test_a_setting_that_cannot_be_applied_is_logged_and_the_others_are_followed_further(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tandem.yaml"
    seen: list[float] = []

    def refuse(_: int) -> None:
        raise RuntimeError("our own fault")

    file.write_text("max_live_requests: 8\nrequest_timeout_s: 10\n")
    source = settings_source(RouterConfig, "router", ["--model", "-", "--config", str(file)], asyncio.Event())
    setters = {"max_live_requests": refuse, "request_timeout_s": seen.append}
    reload = SettingsReload(source.read(), source, setters=setters, tls=None)
    for timeout_s in (20, 30):
        file.write_text(f"max_live_requests: 16\nrequest_timeout_s: {timeout_s}\n# {timeout_s * 'x'}\n")
        reload.look()
    assert seen == [20, 30]
    failed = [record.getMessage() for record in caplog.records if record.exc_info]
    assert failed == 2 * ["--max-live-requests could not be changed to 16; the next change of the file tries it again"]


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, UnicodeError])
async def test_any_error_while_files_are_read_is_logged_and_they_are_followed_further(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the following of a worker without a line in the log, and a router altogether."""
    asked, changed = asyncio.Event(), asyncio.get_running_loop().create_future()
    config = WorkerConfig(model="m")
    answers: Iterator[Exception | WorkerConfig] = iter(
        [error("our own fault"), dataclasses.replace(config, log_level="debug")]
    )
    source = SettingsSource(lambda: _given(next(answers)), lambda: None, asked)
    reload = SettingsReload(config, source, setters={"log_level": changed.set_result}, tls=_BrokenTls(error))
    async with running(reload.run()) as following_it:
        asked.set()
        await until(_failures(caplog), lambda failures: len(failures) >= 2, what="both failures are logged")
        asked.set()
        await asyncio.wait((changed, following_it), return_when=asyncio.FIRST_COMPLETED)
        assert changed.result() == "debug"
    assert (await _failures(caplog)())[:2] == [
        "the present TLS files stay in use: the new ones could not be read",
        "the present settings stay in use: the new ones could not be read",
    ]


class _BrokenTls:
    """TLS files that can never be read."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def reload(self, *, is_forced: bool = False) -> bool:
        raise self._error("our own fault")


def _given(answer: Exception | WorkerConfig) -> WorkerConfig:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _failures(caplog: pytest.LogCaptureFixture) -> Callable[[], Awaitable[list[str]]]:
    """Return a function that returns the messages that were logged with an error."""

    async def failures() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.exc_info]

    return failures


async def test_sighup_reads_files_again_that_did_not_seem_to_change(
    tmp_path: Path, made: Certificates, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, changed = asyncio.Event(), asyncio.get_running_loop().create_future()
    source = settings_source(WorkerConfig, "worker", ["--model", "-"], asked)
    reload = SettingsReload(source.read(), source, setters={"log_level": changed.set_result}, tls=None)
    monkeypatch.setenv("TANDEM_LOG_LEVEL", "debug")
    following_it = asyncio.create_task(reload.run())
    asked.set()
    assert await asyncio.wait_for(changed, _DEADLINE_S) == "debug"
    following_it.cancel()


def write(to: Pair, source: Pair) -> None:
    to.cert.write_bytes(source.cert.read_bytes())
    to.key.write_bytes(source.key.read_bytes())


async def shown(address: str, context: ssl.SSLContext) -> object:
    """Return the serial number of the certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    connecting = partial(asyncio.open_connection, host, int(port), ssl=context, server_hostname=host)
    reader, writer = await asyncio.wait_for(connecting(), _DEADLINE_S)
    try:
        return writer.get_extra_info("peercert")["serialNumber"]
    finally:
        writer.transport.abort()
        assert reader is not None
