"""A Docker Engine for tests: the one of this machine, or one that is started for them and ends with them.

Images come from registries where there is one. Elsewhere the base is made with debootstrap, Redis from Debian's
package. A build uses the host's network, certificates and wheels.
"""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cluster.process import die_with_parent
from tests.package.installed import ROOT

PYTHON_IMAGE = "python:3.11-slim-bookworm"
REDIS_IMAGE = "tandem-test-redis"
_BASE = "tandem-test-base"
_PROMETHEUS = "tandem-test-prometheus"
_DEBIAN = "python3,python3-venv,python-is-python3,ca-certificates"
_BUILD_S = 3600.0


class NoEngine(Exception):
    """No Docker Engine can be used on this machine. The message is a short reason."""


class Engine:
    """Runs commands of Docker. `environment`: names the engine."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.environment, self._folder = {**environment, "DOCKER_BUILDKIT": "1"}, folder

    def docker(self, *arguments: str, text: str | None = None) -> str:
        """Raises CalledProcessError with Docker's own words on stderr."""
        command = (docker_program(), *arguments)
        ended = subprocess.run(
            command, env=self.environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, input=text, timeout=_BUILD_S
        )
        ended.check_returncode()
        return ended.stdout.strip()

    def has(self, image: str) -> bool:
        command = (docker_program(), "image", "inspect", image)
        return subprocess.run(command, env=self.environment, capture_output=True).returncode == 0

    def build(self, target: str, tag: str, index: str) -> None:
        arguments = ("BASE=" + self.base(), "WHEEL_INDEX=" + index)
        flags = [word for argument in arguments for word in ("--build-arg", argument)]
        file = ("-f", "deploy/docker/Dockerfile", "--target", target, "-t", tag)
        self.docker("build", "-q", "--network", "host", *file, *flags, ".")

    def base(self) -> str:
        """Return an image with Python that trusts the authorities that this machine trusts."""
        if not self.has(_BASE):
            if not self.has(PYTHON_IMAGE):
                self._make_python_image()
            authorities = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))
            context = self._folder / "base"
            context.mkdir()
            shutil.copyfile(authorities, context / "authorities.crt")
            (context / "pip.conf").write_text("[global]\ncert = /etc/ssl/certs/authorities.crt\n")
            lines = (f"FROM {PYTHON_IMAGE}", "COPY authorities.crt /etc/ssl/certs/", "COPY pip.conf /etc/pip.conf")
            (context / "Dockerfile").write_text("\n".join(lines))
            self.docker("build", "-q", "-t", _BASE, str(context))
        return _BASE

    def build_redis(self) -> None:
        if not self.has(REDIS_IMAGE):
            run = "RUN apt-get update && apt-get install -y --no-install-recommends redis-server"
            lines = f"FROM {self.base()}\n{run}\n"
            self.docker("build", "-q", "--network", "host", "-t", REDIS_IMAGE, "-", text=lines)

    def build_prometheus(self) -> str:
        """Build an image of Debian's Prometheus, which starts it as the official one does. Return its name."""
        if not self.has(_PROMETHEUS):
            run = "RUN apt-get update && apt-get install -y --no-install-recommends prometheus"
            lines = f'FROM {self.base()}\n{run}\nENTRYPOINT ["prometheus"]\n'
            self.docker("build", "-q", "--network", "host", "-t", _PROMETHEUS, "-", text=lines)
        return _PROMETHEUS

    def can_pull(self, image: str) -> bool:
        """Return whether the image is here or a registry gives it."""
        if self.has(image):
            return True
        return subprocess.run((docker_program(), "pull", "-q", image), env=self.environment).returncode == 0

    def _make_python_image(self) -> None:
        if self.can_pull(PYTHON_IMAGE):
            return
        if shutil.which("debootstrap") is None:
            raise NoEngine(f"{PYTHON_IMAGE} cannot be pulled, and debootstrap is not installed")
        tree = self._folder / "debian"
        subprocess.run(
            ("debootstrap", "--variant=minbase", f"--include={_DEBIAN}", "bookworm", tree),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with subprocess.Popen(("tar", "-C", tree, "-c", "."), stdout=subprocess.PIPE) as archive:
            command = (docker_program(), "import", "-", PYTHON_IMAGE)
            subprocess.run(command, env=self.environment, stdin=archive.stdout, stdout=subprocess.DEVNULL, check=True)


def docker_program() -> str:
    """Return the `docker` program: Debian's client if there is one, because it fits Debian's engine and has the plugin
    for BuildKit.
    """
    debian = Path("/usr/bin/docker")
    return str(debian) if debian.exists() else shutil.which("docker") or "docker"


def compose_command() -> Sequence[str]:
    """Raises NoEngine."""
    if subprocess.run((docker_program(), "compose", "version"), capture_output=True).returncode == 0:
        return (docker_program(), "compose")
    if found := shutil.which("docker-compose"):
        return (found,)
    raise NoEngine("docker compose is not installed")


@contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """Raises NoEngine."""
    if shutil.which("docker") is None:
        raise NoEngine("docker is not installed")
    environment = dict(os.environ)
    if _answers(environment):
        yield Engine(environment, folder)
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        raise NoEngine("no Docker Engine answers, and this user cannot start one")
    socket = f"unix://{folder}/docker.sock"
    environment["DOCKER_HOST"] = socket
    roots = ("--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid", "-H", socket)
    with (folder / "dockerd.log").open("w") as log:
        daemon = subprocess.Popen(("dockerd", *roots), stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        _until_it_answers(daemon, environment, folder)
        yield Engine(environment, folder)
    finally:
        daemon.terminate()
        daemon.wait(60)


@contextmanager
def torch_index(folder: Path) -> Iterator[str]:
    """Serve the wheel of torch that pip finds for this machine, as an index for builds. Yield its URL, or that of
    TANDEM_WHEEL_INDEX if it is set."""
    if given := os.environ.get("TANDEM_WHEEL_INDEX"):
        yield given
        return
    wheels = folder / "index" / "torch"
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-c", ROOT / "constraints.txt")
    subprocess.run((*pip, "-d", wheels, "torch"), check=True, timeout=_BUILD_S)
    handler = partial(_QuietHandler, directory=str(wheels.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def _answers(environment: dict[str, str]) -> bool:
    return subprocess.run((docker_program(), "info"), env=environment, capture_output=True).returncode == 0


def _until_it_answers(daemon: "subprocess.Popen[bytes]", environment: dict[str, str], folder: Path) -> None:
    log = folder / "dockerd.log"
    while not _answers(environment):
        if daemon.poll() is not None:
            raise NoEngine(f"dockerd does not run here: {log.read_text().splitlines()[-1:]}")
