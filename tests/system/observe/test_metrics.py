"""The metrics of a real cluster that has served a request, as Prometheus' own parser reads them."""

import re

import httpx
import openai
import pytest_asyncio
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.observe.metrics import EVERY_PROCESS, METRICS, ROUTER, WORKER
from deploy.observability.__main__ import expressions
from tandem.v1 import admin_pb2, admin_pb2_grpc
from tests.system.rigs.processes.local_cluster import LocalCluster

_PROMPT = "a prompt of more than one block, so that a hand-off has blocks to read " * 3

Scrape = dict[str, Metric]


@pytest_asyncio.fixture(loop_scope="session")
async def scrapes(cluster: LocalCluster) -> dict[str, Scrape]:
    """Return the metrics that each member publishes after a request."""
    url = f"http://{cluster.members['router0'].ready['http']}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        await client.completions.create(model="", prompt=_PROMPT, max_tokens=8)
    async with httpx.AsyncClient() as http:
        texts = {
            name: (await http.get(f"http://{member.ready['metrics']}/metrics")).text
            for name, member in cluster.members.items()
        }
    return {name: _parsed(text) for name, text in texts.items()}


def _parsed(text: str) -> Scrape:
    families = list(text_string_to_metric_families(text))
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}


async def test_each_documented_metric_is_in_a_scrape_and_no_other_one(scrapes: dict[str, Scrape]) -> None:
    for name, scrape in scrapes.items():
        declared = EVERY_PROCESS | (ROUTER if name.startswith("router") else WORKER)
        assert {metric for metric in scrape if not metric.startswith("process_")} == set(declared), name
        for metric, family in scrape.items():
            if metric.startswith("process_"):
                continue
            labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
            assert labels <= {frozenset(METRICS[metric].labels)}, metric
            assert family.documentation == METRICS[metric].help


async def test_the_parts_of_steps_sum_to_the_steps_and_a_hand_off_has_a_bandwidth(scrapes: dict[str, Scrape]) -> None:
    workers = [scrape for name, scrape in scrapes.items() if not name.startswith("router")]
    parts = [sample for scrape in workers for sample in scrape["tandem_step_part_seconds_total"].samples]
    assert {sample.labels["part"] for sample in parts} == {"plan", "run", "complete"}
    read = {
        metric: sum(sample.value for scrape in workers for sample in scrape[metric].samples)
        for metric in ("tandem_kv_bytes_total", "tandem_kv_read_seconds_total")
    }
    assert read["tandem_kv_bytes_total"] > 0
    assert read["tandem_kv_read_seconds_total"] > 0


async def test_the_blocks_in_the_figures_of_a_worker_are_those_of_its_pool(
    cluster: LocalCluster, scrapes: dict[str, Scrape]
) -> None:
    async with cluster.channel() as channel:
        status = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=60)
    workers = {member.member_id: member.figures for member in status.members if member.figures}
    for name, figures in workers.items():
        size = sum(sample.value for sample in scrapes[name]["tandem_kv_blocks"].samples)
        assert sum(value for figure, value in figures.items() if figure.startswith("blocks_")) == size > 0, name
    assert any(figures.get("verified_blocks") for figures in workers.values()), "which are in no pool of their own"


async def test_every_process_publishes_its_identity_and_its_clock_skew_to_redis(
    scrapes: dict[str, Scrape],
) -> None:
    for name, scrape in scrapes.items():
        [build] = scrape["tandem_build_info"].samples
        assert build.labels["member"] == name
        assert name.startswith(build.labels["role"])
        [skew] = scrape["tandem_clock_skew_seconds"].samples
        assert skew.value != 0  # one machine has one clock, and microseconds pass until Redis answers


async def test_each_metric_of_the_dashboard_and_the_alerts_is_in_a_scrape(scrapes: dict[str, Scrape]) -> None:
    samples = {sample.name for scrape in scrapes.values() for family in scrape.values() for sample in family.samples}
    published = samples | {metric for scrape in scrapes.values() for metric in scrape}
    used = {name for expression in expressions() for name in re.findall(r"\b(?:tandem|process)_\w+", expression)}
    histograms = {
        f"{name}_{part}" for name, metric in METRICS.items() for part in ("bucket", "sum", "count") if metric.buckets
    }
    assert used - histograms <= published
    assert {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in used & histograms} <= published
