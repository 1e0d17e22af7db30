"""The `tandem` command on a real cluster that it started itself."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.__main__ import main
from tandem import Client
from tests.input import readable
from tests.system.rigs.processes.up_command import DEADLINE_S, ROOT, Up

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


@pytest.mark.parametrize("text", ["grün", "日本語😀"])
def test_tokens_without_a_text_of_their_own_do_not_show_as_ids(tandem: Command, text: str) -> None:
    """The end has no text, and of a character of several tokens only the last one has."""
    assert tandem("generate", "hi", "--regex", text, "--n", "2") == (0, f"{text}\n--- choice 1\n{text}\n")


@pytest.mark.parametrize("verb", [("generate", "-"), ("chat",)])
def test_input_that_is_no_text_is_answered_in_one_line(
    tandem: Command, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8"))
    assert tandem(*verb) == (2, "tandem: stdin is not utf-8 text, from byte 2 on\n")


def test_a_conversation_with_a_value_that_no_message_can_carry_is_refused_in_one_line(
    tandem: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    status, output = tandem("chat", "--max-tokens", "-1")
    assert (status, len(output.splitlines())) == (2, 1) and "-1" in output


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
        assert readable([self._terminal], DEADLINE_S), f"nothing after {self._text!r}"
        self._text += os.read(self._terminal, 65536).decode()


def test_a_batch_is_answered_and_a_second_run_sends_only_the_rest(tandem: Command, tmp_path: Path) -> None:
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


def test_the_ledger_is_shown_as_a_table_that_sums_up(tandem: Command) -> None:
    _, output = tandem("generate", PROMPT, "--max-tokens", "4", "--ignore-eos", "--ledger")
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
    (row,) = [line for line in text.splitlines() if " decode-0 " in line]
    num_blocks = sum(n for name, n in members["decode-0"]["figures"].items() if name.startswith("blocks_"))
    assert row.split()[2] == "ready" and row.split()[4:7] == ["-", "0", "0"] and f"/{num_blocks:.0f}" in row, row
    assert max(map(len, text.splitlines())) < 160, "a line fits a wide terminal; --json has all figures"


def test_bench_measures_the_requests_that_it_sent(tandem: Command) -> None:
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
        (("generate", PROMPT, "--timeout-s", "nan"), "--timeout-s must be positive, not nan"),
        (("generate", PROMPT, "--timeout-s", "0"), "--timeout-s must be positive, not 0"),
        (("generate", "--prompt-token-ids", "-1"), "token_ids must be integers from 0"),
        (("generate", "--prompt-token-ids", "999999"), "999999"),
        (("generate", PROMPT, "--logit-bias", "-7=1"), "--logit-bias needs a value; one that begins with -"),
        (("generate", PROMPT, "--logit-bias=-7=1"), "must be a token id and a number, such as 7=-100, not '-7=1'"),
        (("generate", PROMPT, "--model", "another"), "another"),
        (("generate", PROMPT, "--address", "nowhere"), "host:port"),
        (("status", "--address", "127.0.0.1:1"), "127.0.0.1:1"),
        (("staus",), "unknown command 'staus'; did you mean status?"),
        (("role", "decode-0", "idle"), "role must be one of prefill, decode, both, not 'idle'; tandem role --help"),
        (("role",), "missing: MEMBER, role; tandem role --help"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line(tandem: Command, words: tuple[str, ...], said: str) -> None:
    status, output = tandem(*words)
    assert status in (1, 2)
    assert said in output
    assert len(output.splitlines()) == 1
