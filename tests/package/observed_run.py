"""The compose profile `observability` in containers: every query of the dashboard and every alert is evaluated once.

    python -m tests.package.observed_run [--write]

Prints a transcript; with --write also into benchmarks/results/compose_observability.md. Exits with 3 and the reason
where no Docker Engine can run. Prometheus is that of Debian where no registry is reached; Grafana, which Debian lacks,
is then left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deploy.observability.__main__ import ROWS
from deploy.observability.alerts import ALERTS
from tests.package.compose_run import Load, Stack, Transcript, build_images, transcript_page
from tests.package.engine import Engine, NoEngine, engine
from tests.package.installed import ROOT

_PAGE = ROOT / "benchmarks" / "results" / "compose_observability.md"
_GRAFANA = "grafana/grafana:12.1.0"
_MEMBERS = ("router", "prefill", "decode")
_DEADLINE_S = 300.0
_ANSWERS = 24
_HEAD = (
    "# The compose profile `observability`",
    "Written by `python -m tests.package.observed_run --write`",
    "Each query of the\n"
    "dashboard and each alert was evaluated by Prometheus while clients sent requests, and Redis was stopped until\n"
    "its alert was raised.",
)
# Read in the container of Prometheus, which has Debian's Python.
_WITHOUT_KEY = (
    "import urllib.request as r, urllib.error as e\n"
    "try: print(r.urlopen('http://router:9090/metrics', timeout=9).status)\n"
    "except e.HTTPError as refused: print(refused.code)"
)


class Prometheus:
    """The container's HTTP API, at its published port."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **query: str) -> Any:
        """Raises OSError; AssertionError if Prometheus refuses the query."""
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def num_up(self) -> int:
        return sum(target["health"] == "up" for target in self.get("targets")["activeTargets"])

    def num_series(self, expression: str) -> int:
        return len(self.get("query", query=expression.replace("$__rate_interval", "1m"))["result"])

    def alert_state(self, name: str) -> str:
        (group,) = self.get("rules")["groups"]
        return str(next(rule["state"] for rule in group["rules"] if rule["name"] == name))


def play(docker: Engine, folder: Path, transcript: Transcript) -> None:
    build_images(docker, folder, transcript)
    docker.build_redis()
    docker.environment |= {"COMPOSE_PROFILES": "cpu,observability", "PROMETHEUS_IMAGE": docker.build_prometheus()}
    stack = Stack(docker, folder, transcript)
    services = ["router", "prefill", "decode", "prometheus"]
    if docker.can_pull(_GRAFANA):
        services.append("grafana")
    else:
        transcript.add(f"{_GRAFANA} cannot be pulled here, so no container of it is started")
    with ExitStack() as cleanup:
        cleanup.callback(stack.remove)
        stack.compose("up", "-d", "--no-build", *services)
        stack.until(["prefill", "decode"])
        load = Load(f"127.0.0.1:{stack.grpc}", stack.file("/keys/api.key"))
        cleanup.callback(load.stop)
        load.start()
        prometheus = Prometheus(stack.prometheus)
        _until(lambda: prometheus.num_up() == len(_MEMBERS), "every member is scraped")
        transcript.add(f"{len(_MEMBERS)} members are scraped with the key of metrics")
        _check_secrets(stack, transcript)
        transcript.add(f"{load.more(_ANSWERS)} answers so far, all equal")
        _until(lambda: prometheus.num_series("rate(tandem_requests_total[1m])") > 0, "rates exist")
        _check_queries(prometheus, transcript)
        _check_alert(stack, prometheus, load, transcript)
        _check_refusal(stack, transcript)
        transcript.add("$ docker compose down -v")


def _check_secrets(stack: Stack, transcript: Transcript) -> None:
    """Prometheus has its own key and no other secret; without the key there are no metrics."""
    files = stack.run("exec", "-T", "prometheus", "ls", "/keys").split()
    assert files == ["metrics.key"], files
    status = stack.run("exec", "-T", "prometheus", "python", "-c", _WITHOUT_KEY).strip()
    assert status == "401", status
    transcript.add(f"/keys of Prometheus: {' '.join(files)}; /metrics of the router without it: {status}")


def _check_queries(prometheus: Prometheus, transcript: Transcript) -> None:
    for row, panels in ROWS:
        empty = [panel.title for panel in panels if not sum(prometheus.num_series(query) for query, _ in panel.queries)]
        transcript.add(
            f"row {row}: {len(panels)} panels, {sum(len(panel.queries) for panel in panels)} queries; without data:"
            f" {', '.join(empty) or 'none'}"
        )
        assert len(empty) < len(panels), f"no panel of {row} has data"
    (group,) = prometheus.get("rules")["groups"]
    rules = {rule["name"]: rule["health"] for rule in group["rules"]}
    assert rules == {alert.name: "ok" for alert in ALERTS}, rules
    raised = [rule["name"] for rule in group["rules"] if rule["state"] != "inactive"]
    transcript.add(f"{len(rules)} alerts are evaluated; raised: {', '.join(raised) or 'none'}")


def _check_alert(stack: Stack, prometheus: Prometheus, load: Load, transcript: Transcript) -> None:
    """Stop Redis until the alert is raised, and start it again; requests go on."""
    stack.compose("stop", "-t", "1", "redis")
    _until(lambda: prometheus.alert_state("TandemRedisAway") != "inactive", "TandemRedisAway is raised")
    transcript.add(f"TandemRedisAway is {prometheus.alert_state('TandemRedisAway')}")
    transcript.add(f"{load.more(8)} answers so far, all equal")
    stack.compose("start", "redis")
    _until(lambda: prometheus.alert_state("TandemRedisAway") == "inactive", "TandemRedisAway ends")
    transcript.add(f"TandemRedisAway is inactive; {load.more(8)} answers, all equal")


def _check_refusal(stack: Stack, transcript: Transcript) -> None:
    """`--profile mtls` without the variable ends with one line that says what to do."""
    transcript.add("$ docker compose --profile mtls up -d tls")
    try:
        stack.run("--profile", "mtls", "up", "-d", "--no-build", "tls")
    except subprocess.CalledProcessError:
        said = stack.run("logs", "--no-log-prefix", "tls-check").strip().splitlines()[-1]
        transcript.add(f"it fails; the log of tls-check: {said}")
        assert "COMPOSE_PROFILES=cpu,mtls" in said
    else:
        raise AssertionError("up succeeds, and members do not use TLS")


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while True:
        try:
            if condition():
                return
        except OSError:
            pass  # Prometheus is not up yet
        assert time.monotonic() < deadline_s, f"not within {_DEADLINE_S:g} s: {what}"
        time.sleep(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The compose profile `observability`, on a Docker Engine.")
    parser.add_argument("--write", action="store_true", help=f"keep the transcript in {_PAGE.name}")
    parsed = parser.parse_args(arguments)
    transcript = Transcript()
    with tempfile.TemporaryDirectory(prefix="tandem-observed-") as folder:
        try:
            with engine(Path(folder)) as docker:
                play(docker, Path(folder), transcript)
        except NoEngine as why:
            print(f"no compose test: {why}", file=sys.stderr)
            return 3
        except subprocess.CalledProcessError as error:
            print(f"{error}\n{error.stderr}", file=sys.stderr)
            return 1
    if parsed.write:
        _PAGE.write_text(transcript_page(transcript, *_HEAD))
    return 0


if __name__ == "__main__":
    sys.exit(main())
