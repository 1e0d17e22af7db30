"""The `tandem` command on a real cluster that it started itself."""

import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.__main__ import main
from cli.local.last_cluster import LastCluster, find_address, forget, remember
from cli.local.layout import threads_per_worker
from cli.verbs.clusters.up import pools_from
from cluster.errors import ConfigError
from tandem import Client, LocalCluster
from tandem.errors import Unavailable
from tests.system.up_command import DEADLINE_S, ROOT, Up

PROMPT = "def read(path):\n"
Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One prefill and one decode worker with the demo model in float32."""
    started = Up(tmp_path_factory.mktemp("up"), "--dtype", "float32", "--placement", "least-loaded")
    started.until("ready http=")
    yield started
    assert started.end() == 0


@pytest.fixture
def tandem(up: Up, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a client command in the directory where that cluster was started last, and return its status and output."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", up.environment["XDG_RUNTIME_DIR"])

    def command(*arguments: str) -> tuple[int, str]:
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return command


def test_generate_finds_the_cluster_and_reports_everything_about_one_answer(tandem: Command) -> None:
    status, output = tandem("generate", PROMPT, "--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--json")
    answer = json.loads(output)
    assert status == 0
    assert len(answer["token_ids"]) == 12
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["ledger"]["transport"] == "shm"
    assert sum(answer["ledger"]["phases"].values()) == pytest.approx(answer["ledger"]["wall_s"], rel=0.02)


def test_streamed_text_is_the_text(tandem: Command) -> None:
    words = ("generate", PROMPT, "--max-tokens", "12", "--temperature", "0", "--ignore-eos")
    _, whole = tandem(*words, "--json")
    status, streamed = tandem(*words)
    assert (status, streamed) == (0, json.loads(whole)["text"] + "\n")


def test_a_conversation_from_a_pipe_is_answered_message_by_message(
    tandem: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("chat", "--max-tokens", "8", "--temperature", "0", "--system", "Be brief.")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/clear\nhello\n\nhello\n"))
    status, output = tandem(*words)
    answers = output.splitlines()
    assert status == 0 and len(answers) >= 3
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    _, alone = tandem(*words)
    assert output.startswith(alone + alone), "what /clear forgets changes no later answer"


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(up: Up) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "cli", "chat", "--temperature", "0"]
    chat = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=up.environment,
        cwd=ROOT,
        preexec_fn=interruptible,
    )
    os.close(theirs)
    screen = Screen(ours)
    try:
        screen.until("> ")
        os.write(ours, b"def\n")
        screen.until("def\r\n")
        screen.more()  # the answer has begun
        chat.send_signal(signal.SIGINT)
        screen.until("[stopped]\r\n> ")
        os.write(ours, b"\x04")
        assert chat.wait(DEADLINE_S) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)


def interruptible() -> None:
    """Let a process react to Ctrl-C, as one that a shell starts in the foreground, even if these tests run in the
    background.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Screen:
    """The output of a program in a terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._text = ""

    def until(self, part: str) -> None:
        while part not in self._text:
            self.more()
        self._text = self._text.partition(part)[2]

    def more(self) -> None:
        ready, _, _ = select.select([self._terminal], [], [], DEADLINE_S)
        assert ready, f"nothing after {self._text!r}"
        self._text += os.read(self._terminal, 65536).decode()


def test_a_batch_is_answered_and_a_second_run_asks_only_what_is_left(tandem: Command, tmp_path: Path) -> None:
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    wrong = {"model": "", "prompt": PROMPT, "max_tokens": -1}
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(3)]
    lines.append({"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": wrong})
    source.write_text("".join(json.dumps(each) + "\n" for each in lines[:2]))
    status, output = tandem("batch", str(source), str(answers))
    assert (status, output.splitlines()[-1]) == (0, f"2 asked: 2 ok, 0 failed; answers in {answers}")
    source.write_text("".join(json.dumps(each) + "\n" for each in lines))
    status, output = tandem("batch", str(source), str(answers))
    assert status == 1 and "2 of 4 requests have an answer" in output and "2 asked: 1 ok, 1 failed" in output
    assert "bad: HTTP status 400" in output
    found = {each["custom_id"]: each for each in map(json.loads, answers.read_text().splitlines())}
    assert set(found) == {"r0", "r1", "r2", "bad"}
    texts = {found[name]["response"]["body"]["choices"][0]["text"] for name in ("r0", "r1", "r2")}
    assert len(texts) == 1 and found["r0"]["response"]["status_code"] == 200


def test_the_version_and_a_shells_completion_are_printed(tandem: Command) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    status, script = tandem("completion", "bash")
    assert status == 0 and "generate" in script and "--max-tokens" in script


@pytest.mark.slow
def test_a_script_starts_a_cluster_of_its_own_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    flags = ("--cluster-key-file", str(tmp_path / "key"))
    with LocalCluster(colocated=1, flags=flags, environment=environment) as cluster, cluster.client() as client:
        assert client.generate(PROMPT, max_tokens=4, ignore_eos=True).result().usage.completion_tokens == 4
        assert cluster.http.startswith("http://127.0.0.1:")
    with pytest.raises(Unavailable, match="--decode must be at least 1"):
        LocalCluster(decode=0, environment=environment)


def test_the_ledger_is_shown_as_a_table_that_sums_up(tandem: Command) -> None:
    _, output = tandem("generate", PROMPT, "--max-tokens", "4", "--ledger")
    assert "decode_queue" in output
    assert "100.0 %" in output
    assert "by shm" in output


def test_token_ids_choices_and_seeds_reach_the_worker(tandem: Command) -> None:
    words = ("generate", "--prompt-token-ids", "5,6,7", "--n", "2", "--seed", "3", "--max-tokens", "5", "--ignore-eos")
    _, first = tandem(*words, "--temperature", "1", "--json")
    _, second = tandem(*words, "--temperature", "1", "--json")
    answer = json.loads(first)
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        c["token_ids"] for c in json.loads(second)["choices"]
    ]
    assert answer["choices"][0]["token_ids"] != answer["choices"][1]["token_ids"]
    assert answer["usage"]["prompt_tokens"] == 3


def test_status_lists_every_member_with_its_blocks(tandem: Command) -> None:
    _, output = tandem("status", "--json")
    members = {member["member"]: member for member in json.loads(output)["members"]}
    assert {"prefill-0", "decode-0"} <= set(members)
    assert {member["state"] for member in members.values()} == {"ready"}
    assert members["decode-0"]["figures"]["blocks_free"] > 0
    _, text = tandem("status")
    assert "prefill-0" in text


def test_bench_measures_what_it_sent(tandem: Command) -> None:
    load = ("--rate", "20", "--num-requests", "6", "--prompt-tokens", "20", "--output-tokens", "4")
    status, output = tandem("bench", *load, "--slo-ttft-s", "60", "--slo-itl-s", "60", "--json")
    figures = json.loads(output)
    assert status == 0
    assert figures["requests"] == {"sent": 6, "ok": 6, "failed": 0, "errors": {}}
    assert figures["goodput"]["share"] == 1.0
    assert 0 < figures["ttft_s"]["p50"] <= figures["e2e_s"]["p50"]


def test_doctor_measures_every_transport_of_a_pair_and_explains_missing_ones(tandem: Command) -> None:
    status, output = tandem("doctor", "--json")
    told = json.loads(output)
    assert status == 0, told
    (pair,) = told["pairs"]
    assert (pair["importer"], pair["exporter"], pair["chosen"]) == ("decode-0", "prefill-0", "shm")
    paths = {path["transport"]: path for path in pair["paths"]}
    for name in ("shm", "tcp"):
        assert paths[name]["bytes_per_s"] > 0 and paths[name]["reason"] == ""
    for name in ("cuda_ipc", "nccl", "nixl"):
        assert paths[name]["bytes_per_s"] == 0 and paths[name]["reason"]
    assert {"python", "torch", "RDMA devices", "transport shm"} <= {found["subject"] for found in told["machine"]}
    status, text = tandem("doctor", "--pair", "decode-0", "prefill-0", "--blocks", "8")
    assert status == 0 and "decode-0 reads prefill-0" in text and "GB/s" in text
    status, text = tandem("doctor", "--pair", "decode-0", "nobody")
    assert status == 2 and "no worker nobody" in text


def test_requests_are_undisturbed_during_a_link_check(up: Up, tandem: Command) -> None:
    address = up.until("ready http=").split("grpc=")[1].strip()
    with Client(address) as client:

        def outputs(count: int) -> list[tuple[int, ...]]:
            prompts = (tuple(range(5 + number, 105 + number)) for number in range(count))
            running = [
                client.generate(token_ids=ids, max_tokens=6, temperature=0.0, ignore_eos=True) for ids in prompts
            ]
            return [generation.result().token_ids for generation in running]

        # These first: what was asked before is not moved again.
        beside: list[list[tuple[int, ...]]] = []
        requests = threading.Thread(target=lambda: beside.append(outputs(6)))
        requests.start()
        statuses = [tandem("doctor", "--pair", "decode-0", "prefill-0")[0] for _ in range(2)]
        requests.join(DEADLINE_S)
        assert beside == [outputs(6)]
    assert statuses == [0, 0]
    _, output = tandem("status", "--json")
    blocks = {member["member"]: member["figures"] for member in json.loads(output)["members"]}
    for member in ("prefill-0", "decode-0"):
        assert blocks[member]["blocks_held"] == blocks[member]["blocks_quarantined"] == 0


def test_measurements_of_link_checks_are_published(tandem: Command) -> None:
    """They arrive with the decode worker's next heartbeat."""
    assert tandem("doctor", "--blocks", "8")[0] == 0
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        _, output = tandem("status", "--json")
        members = {member["member"]: member for member in json.loads(output)["members"]}
        links = {link["transport"]: link for link in members["decode-0"]["links"]}
        if {"shm", "tcp"} <= set(links) or time.monotonic() > deadline_s:
            break
    assert links["tcp"]["bytes_per_s"] > 0 and links["tcp"]["latency_s"] >= 0
    assert links["shm"]["exporter"] == f"prefill-0@{members['prefill-0']['incarnation']}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate",), "either a prompt or --prompt-token-ids"),
        (("generate", PROMPT, "--temperature", "9"), "temperature"),
        (("generate", "--prompt-token-ids", "-1"), "token_ids must be integers from 0"),
        (("generate", "--prompt-token-ids", "999999"), "999999"),
        (("generate", PROMPT, "--model", "another"), "another"),
        (("generate", PROMPT, "--address", "nowhere"), "host:port"),
        (("status", "--address", "127.0.0.1:1"), "127.0.0.1:1"),
        (("staus",), "unknown command 'staus'; did you mean status?"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line(tandem: Command, words: tuple[str, ...], said: str) -> None:
    status, output = tandem(*words)
    assert status in (1, 2)
    assert said in output
    assert len(output.splitlines()) == 1


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "/nowhere/model"), "there is no such folder"),
        (("--colocated", "0"), "--colocated must be at least 1"),
        (("--decode", "0"), "--decode must be at least 1"),
        (("--block-size", "0"), "--block-size"),
        (("--kv-transports", "pigeon"), "pigeon"),
        (("--redis", "http://127.0.0.1:1"), "--redis must be a URL"),
        (("--redis", "redis://127.0.0.1:1/0"), "cannot reach Redis at 127.0.0.1:1"),
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
        (("certs", "/proc/nowhere"), "cannot write to /proc/nowhere"),
        (("certs", "unused", "--days", "0"), "--days must be at least 1, not 0"),
        (("estimate", "--model", "/nowhere/model"), "there is no such folder"),
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
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        http, grpc = (server.getsockname()[1] for server in (one, other))
        remember(LastCluster(f"127.0.0.1:{grpc}", f"127.0.0.1:{http}", os.getpid()))
        assert main(["up", "--port", str(http), "--grpc-port", str(grpc)]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in (f":{http} ", f":{grpc} ", f"process {os.getpid()}", "--port and --grpc-port"))
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
