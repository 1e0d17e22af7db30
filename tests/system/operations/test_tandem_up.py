"""`tandem up`, and how commands find the cluster that it started last."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from cli.__main__ import main
from cli.connection import LastCluster, find_address, forget, remember
from cli.local.layout import threads_per_worker
from cli.verbs.clusters.up import pools_from
from cluster.errors import ConfigError
from tandem import Client, LocalCluster
from tandem.errors import Unavailable
from tests.system.rigs.processes.up_command import DEADLINE_S, ROOT, Up

PROMPT = "def read(path):\n"


def test_a_dead_worker_is_replaced_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    up = Up(tmp_path, "--colocated", "1", "--redis", "", "--log-level", "warning")
    try:
        address = up.until("ready http=").split("grpc=")[1].strip()
        children = up.children()
        assert sorted(children) == ["cli.local.fork_server", "redis-server", "router", "worker"]
        assert are_forked(children)
        os.kill(children["worker"], signal.SIGKILL)
        assert "killed by signal 9; starting it again" in up.until("colocated-0 was killed")
        up.until("colocated-0 is back")
        assert are_forked(up.children())
        with Client(address) as client:
            assert len(answered(client)) == 4
        handles = [os.pidfd_open(pid) for pid in up.pids()]
        assert len(handles) == 5  # with two fork servers
        assert up.end() == 0
        for handle in handles:
            ends = select.poll()
            ends.register(handle, select.POLLIN)
            assert ends.poll(0), "a child is left"
            os.close(handle)
        with pytest.raises(ConfigError, match="no cluster runs on this machine"):
            find_address(None, up.environment)
    finally:
        up.end()


def are_forked(children: dict[str, int]) -> bool:
    """Return whether the members are forks: the environment of a program would have the URL of Redis."""
    environments = [Path(f"/proc/{children[name]}/environ").read_bytes() for name in ("worker", "router")]
    return all(b"TANDEM_REDIS" not in environment for environment in environments)


def answered(client: Client) -> tuple[int, ...]:
    """Wait until the router has the worker's new incarnation. Until then it reports that there is none."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            return client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True).result().token_ids
        except Unavailable:
            if time.monotonic() > deadline_s:
                raise


def test_a_port_in_use_is_reported_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        up = Up(tmp_path, "--port", port)
        try:
            assert port in up.until("cannot listen on")
            assert up.process.wait(DEADLINE_S) == 2
            assert up.lines == [up.until("cannot listen on")]  # before anything was started
        finally:
            up.end()


def test_a_full_disk_is_reported_in_one_line_with_the_remedy(tmp_path: Path) -> None:
    """No file may have a byte, so no folder for temporary files is usable."""
    key = tmp_path / "key"
    key.write_text("0" * 64)
    key.chmod(0o600)
    up = Up(tmp_path, program=("prlimit", "--fsize=0", sys.executable, "-m", "cli"))
    try:
        assert up.process.wait(DEADLINE_S) == 1
        assert up.lines == [up.until("free some space in one of them, or set TMPDIR")]
    finally:
        up.end()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "/nowhere/model"), "there is no such folder; name one"),
        (("--model", str(Path(__file__).parent)), "the folder holds no config.json; name one that holds a model"),
        (("--colocated", "0"), "--colocated must be at least 1"),
        (("--decode", "0"), "--decode must be at least 1"),
        (("--block-size", "0"), "--block-size"),
        (("--kv-transports", "pigeon"), "pigeon"),
        (("--redis", "http://127.0.0.1:1"), "--redis must be a URL"),
        (("--cluster-key-file", "/etc/hostname"), "is readable by other users; run: chmod 600 /etc/hostname"),
        (("--cluster-key-file", "/proc/nowhere/key"), "choose another --cluster-key-file"),
        (("--redis", "redis://127.0.0.1:1/0"), "cannot reach Redis at 127.0.0.1:1"),
        (("--host", "192.0.2.1", "--api-key", "k"), "cannot listen on --host 192.0.2.1: "),
        (("--host", "nowhere.invalid", "--api-key", "k"), "cannot listen on --host nowhere.invalid: "),
        (("--api-key-file", "/nowhere/key"), "cannot read --api-key-file /nowhere/key: No such file or directory"),
        (("--metrics-key-file", "/nowhere/key"), "cannot read --metrics-key-file /nowhere/key: No such file"),
        (("--audit-file", "/nowhere/log"), "cannot write to --audit-file /nowhere/log: No such file"),
        (("--tool-call-parser", "pigeon"), "--tool-call-parser pigeon is not known; choose one of hermes, "),
        (("--start-timeout-s", "nan"), "--start-timeout-s must be a positive number of seconds, not nan"),
    ],
)
def test_an_impossible_cluster_is_refused_before_it_starts(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--port", "0", "--grpc-port", "0", *words]) in (1, 2)
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("up", "--prefill", "-1"), "--prefill must not be negative, not -1"),
        (("demo", "--cluster-key-file", "/proc/nowhere/key"), "choose another --cluster-key-file"),
        (("certs", "/proc/nowhere"), "cannot write to /proc/nowhere"),
        (("certs", "unused", "--days", "0"), "--days must be a whole number from 1 to 36500"),
        (("estimate", "--model", "/nowhere/model"), "there is no such folder; name one"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_it(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_estimate_needs_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--tokens", "1024", "--kv-cache-memory", "1MiB", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bytes_per_token"] == 4 * 2 * 2 * 32 * 2  # layers, K and V, KV heads, head size, bytes of bf16
    assert figures["lengths"] == [{"tokens": 1024, "request_bytes": 1 << 20, "sequences": 1}]


def test_the_example_of_sizing_prints_the_figures_of_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(
        r"```console\n\$ tandem (.*)\n((?:.*\n)*?)```", (ROOT / "docs" / "operate" / "sizing.md").read_text()
    )
    (tmp_path / "llama-3.1-8b").mkdir()
    layers = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    config = {**layers, "dtype": "bfloat16", "max_position_embeddings": 131072}
    (tmp_path / "llama-3.1-8b" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert main(example[0].split()) == 0
    assert capsys.readouterr().out.split() == example[1].split()


def test_estimate_shows_no_length_beyond_the_models_longest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--json"]) == 0
    assert [row["tokens"] for row in json.loads(capsys.readouterr().out)["lengths"]] == [256, 1024]


def test_an_address_is_taken_from_the_flag_then_the_variable_then_the_last_cluster(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(ConfigError, match="tandem up"):
        find_address(None, environment)
    remember(LastCluster("127.0.0.1:7", "127.0.0.1:8", os.getpid()), environment)
    assert find_address(None, environment) == "127.0.0.1:7"
    assert find_address(None, environment | {"TANDEM_ADDRESS": "h:1"}) == "h:1"
    assert find_address("g:2", environment | {"TANDEM_ADDRESS": "h:1"}) == "g:2"


def test_commands_use_all_routers_of_the_last_cluster_or_every_given_address(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    remember(LastCluster("h:7", "h:8", os.getpid(), more_grpc=("h:9",)), environment)
    assert find_address(None, environment) == "h:7,h:9"
    assert find_address("g:1, g:2", environment) == "g:1, g:2"
    with pytest.raises(ConfigError, match="'g2'"):
        find_address("g:1,g2", environment)


def test_commands_address_the_cluster_that_was_started_last(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        pass
    for address, pid in (("h:1", os.getppid()), ("h:2", os.getpid()), ("h:3", ended.pid)):
        remember(LastCluster(address, "h:9", pid), environment)
    assert find_address(None, environment) == "h:2", "one that was killed is not asked"
    forget(os.getpid(), environment)
    assert find_address(None, environment) == "h:1"
    forget(os.getppid(), environment)
    with pytest.raises(ConfigError, match="no cluster runs on this machine"):
        find_address(None, environment)


def test_a_cluster_whose_record_cannot_be_written_still_runs(tmp_path: Path) -> None:
    """The disk may be full, for example. The command reports why, and later commands say which flags they need."""
    (tmp_path / "file").touch()
    environment = {"XDG_RUNTIME_DIR": str(tmp_path / "file")}
    assert str(tmp_path) in remember(LastCluster("h:1", "h:2", os.getpid()), environment)
    forget(os.getpid(), environment)
    with pytest.raises(ConfigError, match="--address"):
        find_address(None, environment)


def test_all_ports_in_use_are_named_with_their_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a user who starts a second cluster would get one error after another."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as open_servers:
        servers = [open_servers.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        http, grpc, health, metrics = (server.getsockname()[1] for server in servers)
        remember(LastCluster(f"127.0.0.1:{grpc}", f"127.0.0.1:{http}", os.getpid()))
        flags = {"--port": http, "--grpc-port": grpc, "--health-port": health, "--metrics-port": metrics}
        assert main(["up", *(f"{flag}={port}" for flag, port in flags.items())]) == 2
    told = capsys.readouterr().err
    assert all(f":{port} " in told for port in flags.values())
    assert f"process {os.getpid()}" in told and " and ".join(flags) in told
    assert len(told.splitlines()) == 1


def test_ctrl_c_while_the_command_is_still_being_imported_is_no_stack_trace() -> None:
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from cli.__main__ import main\n"
        "sys.exit(main(['status']))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_children_are_forked_without_the_handlers_of_grpc() -> None:
    """With the handlers, one child in eight aborted before it became its program. gRPC reads the setting when it is
    imported."""
    program = (
        "import os, sys\n"
        "class Seen:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc': os._exit(7 if os.environ.get('GRPC_ENABLE_FORK_SUPPORT') == 'false' else 8)\n"
        "sys.meta_path.insert(0, Seen())\n"
        "from cli.__main__ import main\n"
        "sys.exit(main(['status']))\n"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, cwd=ROOT, timeout=DEADLINE_S, env={"PATH": ""}).returncode == 7


def test_workers_share_the_cores_and_pools_have_the_configured_sizes() -> None:
    assert [threads_per_worker(cores, 2) for cores in (1, 2, 3, 8)] == [1, 1, 1, 4]
    assert str(pools_from(None, None, None)) == "1 prefill, 1 decode"
    assert str(pools_from(2, 3, None)) == "2 prefill, 3 decode"
    assert str(pools_from(None, None, 2)) == "2 colocated"
    assert str(pools_from(1, None, 2)) == "1 prefill, 0 decode, 2 colocated"


@pytest.mark.slow
def test_the_demo_answers_also_where_the_environment_asks_for_an_api_key(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TANDEM_API_KEY": "k"}
    command = (sys.executable, "-m", "cli", "demo", "--colocated", "1", "--cluster-key-file", str(tmp_path / "key"))
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    assert "stopped; nothing is left running" in ended.stderr


@pytest.mark.slow
def test_a_script_starts_a_cluster_of_its_own_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    flags = ("--cluster-key-file", str(tmp_path / "key"))
    made = LocalCluster(colocated=1, flags=flags, environment=environment, start_timeout_s=400)
    arguments = Path(f"/proc/{made._process.pid}/cmdline").read_bytes().split(b"\0")
    assert b"--start-timeout-s=400" in arguments, "else the cluster ends after its own 300 s"
    with made as cluster, cluster.client() as client:
        assert client.generate(PROMPT, max_tokens=4, ignore_eos=True).result().usage.completion_tokens == 4
        assert cluster.http.startswith("http://127.0.0.1:")
    with pytest.raises(Unavailable, match="--decode must be at least 1"):
        LocalCluster(decode=0, environment=environment)
