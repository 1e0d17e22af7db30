"""A Prometheus that scrapes a cluster and evaluates our alerts, as an operator runs it."""

import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.process import die_with_parent
from deploy.observability.__main__ import FOLDER
from tests.polling import until
from tests.system.rigs.processes.local_cluster import LocalCluster

_SCRAPE = "5s"
_END_S = 60.0
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus (Debian: apt-get install prometheus)"
)


async def scrapes_of(cluster: LocalCluster) -> dict[str, str]:
    """Return the text of each member's metrics."""
    async with httpx.AsyncClient(timeout=60) as http:
        return {
            name: (await http.get(f"http://{member.ready['metrics']}/metrics")).text
            for name, member in cluster.members.items()
        }


class LivePrometheus:
    def __init__(self, http: httpx.AsyncClient, targets: Path) -> None:
        self._http, self._targets = http, targets

    async def scrape(self, cluster: LocalCluster) -> None:
        """Scrape the cluster's present members, and wait until each was scraped."""
        addresses = [member.ready["metrics"] for member in cluster.members.values()]
        written = self._targets.with_suffix(".new")
        written.write_text(json.dumps([{"targets": addresses}]))
        written.rename(self._targets)  # at once, since Prometheus watches the file
        await until(
            self._num_up, lambda up: up == len(addresses), what="every member is scraped", deadline_s=120, pause_s=0.2
        )

    async def firing(self, alert: str) -> list[Mapping[str, str]]:
        """Return the labels of each alert of this name that fires."""
        answer = await self._http.get("/api/v1/alerts")
        alerts = answer.raise_for_status().json()["data"]["alerts"]
        return [each["labels"] for each in alerts if each["labels"]["alertname"] == alert and each["state"] == "firing"]

    async def _num_up(self) -> int:
        """Return the number of members that were scraped; 0 while Prometheus does not answer yet."""
        try:
            answer = await self._http.get("/api/v1/targets")
        except httpx.TransportError:
            return 0
        if answer.status_code != httpx.codes.OK:
            return 0
        return sum(target["health"] == "up" for target in answer.json()["data"]["activeTargets"])


@asynccontextmanager
async def prometheus_of(cluster: LocalCluster, folder: Path) -> AsyncIterator[LivePrometheus]:
    """Run Debian's Prometheus with our rules beside a cluster, until every member was scraped."""
    program = shutil.which("prometheus")
    assert program is not None, "needs prometheus (Debian: prometheus)"
    file, targets = folder / "prometheus.yml", folder / "targets.json"
    file.write_text(yaml.safe_dump(_settings(targets)))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    flags = (f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}")
    with _running((program, *flags), folder / "prometheus.log"):
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=_END_S) as http:
            prometheus = LivePrometheus(http, targets)
            await prometheus.scrape(cluster)
            yield prometheus


@contextmanager
def _running(command: Sequence[str], log_file: Path) -> Iterator[None]:
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        yield
    finally:
        process.terminate()
        process.wait(_END_S)


def _settings(targets: Path) -> dict[str, object]:
    found = {"files": [str(targets)], "refresh_interval": "1s"}
    return {
        "global": {"scrape_interval": _SCRAPE, "evaluation_interval": _SCRAPE},
        "rule_files": [str(FOLDER / "rules.yaml")],
        "scrape_configs": [{"job_name": "tandem", "file_sd_configs": [found]}],
    }
