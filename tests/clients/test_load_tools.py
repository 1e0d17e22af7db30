"""Load tools complete all their requests without an error."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Run
from tests.system.rigs.processes.local_cluster import DEMO_MODEL

_NUM_REQUESTS = 8


@pytest.mark.parametrize("request_format", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_completes_all_requests(url: str, run_client: Run, tmp_path: Path, request_format: str) -> None:
    run_client(
        "guidellm",
        "run",
        f"--backend=kind=openai_http,target={url},model=demo_model,request_format={request_format}",
        "--profile=kind=synchronous",
        f"--constraint=kind=max_requests,count={_NUM_REQUESTS}",
        f"--tokenizer=kind=huggingface_auto,model={DEMO_MODEL}",
        "--data=kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output=kind=json,path=report.json",
        "--disable-console",
        environment={"HF_HUB_OFFLINE": "1"},
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (_NUM_REQUESTS, 0)
    requests = benchmark["requests"]["successful"]
    assert all(request["output_metrics"]["text_tokens"] for request in requests)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf_completes_all_requests(url: str, run_client: Run, tmp_path: Path, kind: str) -> None:
    run_client(
        "aiperf",
        "profile",
        "--model=demo_model",
        f"--url={url}",
        f"--endpoint-type={kind}",
        "--streaming",
        f"--tokenizer={DEMO_MODEL}",
        f"--request-count={_NUM_REQUESTS}",
        "--concurrency=2",
        "--isl=64",
        "--osl=16",
        "--artifact-dir=report",
        "--ui=none",
    )
    report = json.loads((tmp_path / "report" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == _NUM_REQUESTS
    assert report["error_summary"] == []
