"""A Prometheus that scrapes a cluster and evaluates our alerts, as an operator runs it."""

import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import yaml

from cluster.process import die_with_parent
from deploy.observability.__main__ import FOLDER
from tests.system.local_cluster import LocalCluster
from tests.system.polling import until

_SCRAPE = "5s"
_END_S = 60.0


class LivePrometheus:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def firing(self, alert: str, label: str) -> set[str]:
        """Return the values of a label for which an alert fires."""
        answer = await self._http.get("/api/v1/alerts")
        alerts = answer.raise_for_status().json()["data"]["alerts"]
        return {
            each["labels"][label]
            for each in alerts
            if each["labels"]["alertname"] == alert and each["state"] == "firing"
        }

    async def targets_up(self) -> int:
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
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(_settings(cluster)))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    flags = (f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}")
    with _running((program, *flags), folder / "prometheus.log"):
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=_END_S) as http:
            prometheus, num_members = LivePrometheus(http), len(cluster.members)
            await until(
                prometheus.targets_up, lambda up: up == num_members, what="every member is scraped", pause_s=0.2
            )
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


def _settings(cluster: LocalCluster) -> dict[str, object]:
    targets = [
        {"targets": [member.ready["metrics"]], "labels": {"instance": name}} for name, member in cluster.members.items()
    ]
    return {
        "global": {"scrape_interval": _SCRAPE, "evaluation_interval": _SCRAPE},
        "rule_files": [str(FOLDER / "rules.yaml")],
        "scrape_configs": [{"job_name": "tandem", "static_configs": targets}],
    }
