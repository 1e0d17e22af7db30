"""`make compose-test`: the compose cluster, built, scaled, killed, drained and changed while clients compare answers.

    python -m tests.package.compose_run [--write]

Prints a transcript; with --write also into benchmarks/results/compose.md. Exits with 3 and the reason where no Docker
Engine can run. Removes the containers, networks and volumes of its own project at the end; images stay.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tandem import Client
from tandem.errors import TandemError, Unavailable
from tests.package.engine import REDIS_IMAGE, Engine, NoEngine, compose_command, docker_program, engine, torch_index
from tests.package.installed import ROOT

PROJECT = "tandemcomposetest"
PROMPTS = ("def read(path):\n", "import os\n", "class Reader:\n    def __init__(self", "for line in lines:\n")
TOKENS = 160
_DEADLINE_S = 600.0
_NO_ENGINE = 3
_PAGE = ROOT / "benchmarks" / "results" / "compose.md"
_HEAD = (
    "# The compose cluster under load",
    "Written by `make compose-test`",
    "Four clients ask all the\n"
    "time; each answer is compared with the one that the same prompt got before anything happened.",
)
# float32: an answer does not depend on which other sequences share its batch.
_OVERRIDE = (
    "services: {prefill: {environment: {TANDEM_DTYPE: float32}}, decode: {environment: {TANDEM_DTYPE: float32}}}\n"
)


class Transcript:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._started = time.monotonic()

    def add(self, text: str) -> None:
        line = f"{time.monotonic() - self._started:7.1f} s  {text}"
        self.lines.append(line)
        print(line, flush=True)


class Stack:
    """The containers of the project."""

    def __init__(self, docker: Engine, folder: Path, transcript: Transcript) -> None:
        self._docker, self._transcript = docker, transcript
        (folder / "float32.yaml").write_text(_OVERRIDE)
        self.http, self.grpc, self.prometheus = _free_port(), _free_port(), _free_port()
        docker.environment |= {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "REDIS_IMAGE": REDIS_IMAGE,
            "TANDEM_HTTP_PORT": str(self.http),
            "TANDEM_GRPC_PORT_ON_HOST": str(self.grpc),
            "PROMETHEUS_PORT": str(self.prometheus),
        }
        files = ("-f", "compose.yaml", "-f", str(folder / "float32.yaml"))
        self._command = (*compose_command(), *files)

    def compose(self, *arguments: str) -> str:
        self._transcript.add("$ docker compose " + " ".join(arguments))
        return self.run(*arguments)

    def tandem(self, *arguments: str) -> str:
        """Run an operator's command in the router's container, with the admin key that it finds there."""
        self._transcript.add("$ docker compose exec router tandem " + " ".join(arguments))
        return self.run("exec", "-T", "router", "tandem", *arguments).strip()

    def turn_on_tls(self) -> None:
        self._docker.environment["COMPOSE_PROFILES"] = "cpu,mtls"
        self.compose("up", "-d", "--no-build", "--force-recreate")

    def file(self, path: str) -> str:
        return self.run("exec", "-T", "router", "cat", path).strip()

    def ready(self) -> dict[str, str]:
        """Return the roles of ready workers by their member id, which has the incarnation."""
        members = json.loads(self.run("exec", "-T", "router", "tandem", "status", "--json"))["members"]
        return {
            member["member"]: member["role"]
            for member in members
            if member["state"] == "ready" and member["role"] in ("prefill", "decode")
        }

    def until(self, pools: Sequence[str], without: str = "") -> dict[str, str]:
        """Wait until exactly these roles are ready, none of them of the member `without`."""
        began = time.monotonic()
        while True:
            try:
                ready = self.ready()
            except subprocess.CalledProcessError:  # the router is not up yet
                ready = {}
            if sorted(ready.values()) == sorted(pools) and without not in ready:
                self._transcript.add(f"ready: {', '.join(sorted(ready))}")
                return ready
            if time.monotonic() - began > _DEADLINE_S:
                raise AssertionError(f"not ready: {ready}\n{self.run('logs', '--tail', '20')}")

    def kill(self, service: str) -> None:
        """Kill the member in the first container of a service, as a crash would: Docker restarts it."""
        container = self.run("ps", "-q", service).split()[0]
        pid = self._docker.docker("inspect", "-f", "{{.State.Pid}}", container)
        self._transcript.add(f"$ kill -9 {service} (process {pid} of {container[:12]})")
        subprocess.run(("kill", "-9", pid), check=True)

    def statuses(self) -> set[str]:
        containers = self.run("ps", "-q").split()
        return set(self._docker.docker("inspect", "-f", "{{.Name}} {{.State.ExitCode}}", *containers).splitlines())

    def remove(self) -> None:
        self.run("down", "-v", "-t", "60")

    def run(self, *arguments: str) -> str:
        ended = subprocess.run(
            (*self._command, *arguments),
            cwd=ROOT / "deploy" / "compose",
            env=self._docker.environment,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        if ended.returncode:
            raise subprocess.CalledProcessError(ended.returncode, arguments, ended.stdout, ended.stderr)
        return ended.stdout


class Load:
    """Clients that send requests without pause and compare each answer with the undisturbed one."""

    def __init__(self, address: str, key: str, tls_ca: str | None = None) -> None:
        self._client = Client(address, key, tls_ca=tls_ca, discover=False)
        self.expected = [self._answer(prompt) for prompt in PROMPTS]
        self.answers, self.wrong = 0, list[str]()
        self._changed, self._stopped = threading.Condition(), False
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(len(PROMPTS))]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def more(self, count: int) -> int:
        """Wait for `count` more answers. Return the number of all answers."""
        with self._changed:
            goal = self.answers + count
            self._changed.wait_for(lambda: self.answers >= goal or bool(self.wrong), _DEADLINE_S)
            assert not self.wrong, self.wrong[0]
            return self.answers

    def stop(self) -> None:
        self._stopped = True
        for thread in self._threads:
            if thread.ident:
                thread.join()
        self._client.close()

    def _ask(self, index: int) -> None:
        while not self._stopped and not self.wrong:
            try:
                answer = self._answer(PROMPTS[index])
                problem = "" if answer == self.expected[index] else f"{answer!r} for {self.expected[index]!r}"
            except TandemError as error:
                problem = f"{error.reason}: {error.message}"
            with self._changed:
                self.answers += 1
                self.wrong += [problem] if problem else []
                self._changed.notify_all()

    def _answer(self, prompt: str) -> tuple[int, ...]:
        options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
        return tuple(self._client.generate(prompt, **options).result().token_ids)  # type: ignore[arg-type]


def build_images(docker: Engine, folder: Path, transcript: Transcript) -> None:
    with torch_index(folder) as index:
        for target, tag in (("router", "tandem-router:latest"), ("worker-cpu", "tandem-worker:cpu")):
            transcript.add(f"$ docker build -f deploy/docker/Dockerfile --target {target} -t {tag}")
            docker.build(target, tag, index)
            transcript.add(_size(docker, tag))


def play(docker: Engine, folder: Path, transcript: Transcript) -> None:
    build_images(docker, folder, transcript)
    docker.build_redis()
    stack = Stack(docker, folder, transcript)
    with ExitStack() as cleanup:
        cleanup.callback(stack.remove)
        stack.compose("up", "-d", "--no-build")
        stack.until(["prefill", "decode"])
        load = Load(f"127.0.0.1:{stack.grpc}", stack.file("/keys/api.key"))
        cleanup.callback(load.stop)
        transcript.add(f"{len(PROMPTS)} undisturbed answers of {TOKENS} tokens are kept")
        load.start()
        _disturb(stack, load, transcript)
        load.stop()
        assert not load.wrong, load.wrong[0]
        transcript.add(
            f"{load.answers} answers while all this happened: 0 failed, 0 different from the undisturbed ones"
        )
        _check_tls(stack, load, folder / "ca.crt", transcript)
        mistakes(docker, transcript)
        stack.compose("stop", "-t", "60")
        transcript.add("stopped, with statuses: " + ", ".join(sorted(stack.statuses())))
        transcript.add("$ docker compose down -v")


def _disturb(stack: Stack, load: Load, transcript: Transcript) -> None:
    four = ["prefill", "prefill", "decode", "decode"]

    def step(act: Callable[[], object]) -> None:
        load.more(8)
        act()
        transcript.add(f"{load.more(8)} answers so far, all equal")

    step(
        lambda: stack.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "prefill=2", "--scale", "decode=2")
    )
    ready = stack.until(four)
    step(lambda: stack.kill("decode"))
    step(lambda: stack.kill("prefill"))
    ready = stack.until(four)
    drained = next(member for member, role in ready.items() if role == "decode")
    step(lambda: transcript.add(stack.tandem("drain", drained, "--wait")))
    ready = stack.until(four, without=drained)
    changed = next(member for member, role in ready.items() if role == "prefill")
    step(lambda: transcript.add(stack.tandem("role", changed, "decode")))
    stack.until(["prefill", "decode", "decode", "decode"])
    step(lambda: transcript.add(stack.tandem("role", changed, "prefill")))
    stack.until(four)
    step(
        lambda: stack.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "prefill=1", "--scale", "decode=1")
    )
    stack.until(["prefill", "decode"])


def _check_tls(stack: Stack, load: Load, ca: Path, transcript: Transcript) -> None:
    """Recreate the members with the profile mtls, and compare answers over TLS."""
    stack.turn_on_tls()
    stack.until(["prefill", "decode"])
    ca.write_text(stack.file("/keys/tls/ca.crt"))
    address, key = f"localhost:{stack.grpc}", stack.file("/keys/api.key")
    secured = Load(address, key, str(ca))
    secured.stop()
    assert secured.expected == load.expected, "answers over TLS differ"
    with Client(address, key, discover=False) as plaintext:
        try:
            plaintext.models()
        except Unavailable as error:
            transcript.add(f"{len(PROMPTS)} answers over TLS, all equal; without it: {error.message}")
        else:
            raise AssertionError("a port of the router serves plaintext")


# What an operator may get wrong -> words of the one line that the member ends with.
_MISTAKES = {
    "a wrong password of Redis": (("--redis", "redis://tandem:wrong@redis:6379/0"), "refuses the password; correct it"),
    "an unreachable Redis": (("--redis", "redis://127.0.0.1:1/0"), "start it, or correct --redis"),
    "a missing model": (("--model", "/models/none"), "there is no such folder; name one"),
    "a file that is no cluster key": (("--cluster-key-file", "/keys/api.key"), "must hold 64 hex digits"),
    "the key of another cluster": (("--cluster-key-file", "/tmp/key"), "copy their key file to it"),
    "a full disk": ((), "free some space"),
}


def mistakes(docker: Engine, transcript: Transcript) -> None:
    """Start a worker with each mistake in the network of the running project."""
    for mistake, (flags, words) in _MISTAKES.items():
        place = (
            "--network",
            f"{PROJECT}_members",
            "-v",
            f"{PROJECT}_keys:/keys:ro",
            "-v",
            f"{ROOT}/examples:/models:ro",
        )
        settings = {
            "CONFIG": "/keys/tandem.yaml",
            "CLUSTER_KEY_FILE": "/keys/cluster.key",
            "MODEL": "/models/demo_model",
        }
        environment = [word for name, value in settings.items() for word in ("-e", f"TANDEM_{name}={value}")]
        room = "4k,nr_inodes=1" if mistake == "a full disk" else "64m"  # no file can be created
        command = (
            "run",
            "--rm",
            "--read-only",
            "--cap-drop",
            "ALL",
            "--tmpfs",
            f"/tmp:size={room}",
            *place,
            *environment,
        )
        ended = subprocess.run(
            (docker_program(), *command, "tandem-worker:cpu", "tandem", "prefill-worker", *flags),
            env=docker.environment,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        lines = ended.stderr.splitlines()
        transcript.add(f"{mistake}: status {ended.returncode}: {lines[-1]}")
        assert ended.returncode in (1, 2, 4) and words in lines[-1], ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr


def _size(docker: Engine, tag: str) -> str:
    whole, base = (int(docker.docker("image", "inspect", "-f", "{{.Size}}", name)) for name in (tag, docker.base()))
    assert tag != "tandem-router:latest" or whole - base <= 120e6, whole - base
    return f"{tag}: {(whole - base) / 1e6:.0f} MB above its base"


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The compose cluster under load, on a Docker Engine.")
    parser.add_argument("--write", action="store_true", help="keep the transcript in benchmarks/results/compose.md")
    parsed = parser.parse_args(arguments)
    transcript = Transcript()
    with tempfile.TemporaryDirectory(prefix="tandem-compose-") as folder:
        try:
            with engine(Path(folder)) as docker:
                play(docker, Path(folder), transcript)
        except NoEngine as why:
            print(f"no compose test: {why}", file=sys.stderr)
            return _NO_ENGINE
        except subprocess.CalledProcessError as error:
            print(f"{error}\n{error.stderr}", file=sys.stderr)
            return 1
    if parsed.write:
        _PAGE.write_text(transcript_page(transcript, *_HEAD))
    return 0


def transcript_page(transcript: Transcript, title: str, written_by: str, what: str) -> str:
    """Return the page of a run, with the commit that it ran."""
    commit = subprocess.run(("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, capture_output=True, text=True).stdout
    text = "\n".join(transcript.lines)
    return f"{title}\n\n{written_by} at commit {commit.strip()}, on two busy cores. {what}\n\n```\n{text}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
