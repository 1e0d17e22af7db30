"""A prefill worker accepts a bounded number of calls, and refuses another call before any question to the step
thread.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.auth.keys import ClusterKeys
from cluster.errors import QueueFull
from cluster.messages import TenantShare
from cluster.observe.telemetry import Telemetry
from cluster.outstanding_work import OutstandingWork
from cluster.protocol import wire
from engine.grammar.compiled_grammars import CompiledGrammars
from prefill_worker.service import PrefillService
from tests.prefill_jobs import prefill_job

_JOB = prefill_job((1, 2, 3), max_tokens=8)


class _Steps:
    def __init__(self) -> None:
        self.posted: list[object] = []

    def post(self, command: object) -> None:
        self.posted.append(command)


class _Exporter:
    def fail(self, ticket_id: bytes, **_: object) -> None:
        pass


def _service(steps: _Steps, telemetry: Telemetry) -> PrefillService:
    parts: dict[str, Any] = dict.fromkeys(("pulls", "tiers", "cache_events"))
    return PrefillService(
        steps=steps,  # type: ignore[arg-type]
        exporter=_Exporter(),  # type: ignore[arg-type]
        vocab_size=100,
        outstanding=OutstandingWork(),
        max_calls=2,
        keys=ClusterKeys(b"key"),
        grammars=CompiledGrammars(None),
        refuse_if_unhealthy=lambda: None,
        telemetry=telemetry,
        **parts,
    )


def _call(service: PrefillService, tenant: str = "") -> Any:
    job = replace(_JOB, tenant=TenantShare(tenant))
    return service.Prefill(wire.prefill_job_to_wire(job), None)  # type: ignore[arg-type]


async def test_a_prefill_call_beyond_the_limit_is_refused_before_the_step_thread() -> None:
    steps, telemetry = _Steps(), Telemetry()
    service = _service(steps, telemetry)
    waiting = [asyncio.create_task(anext(_call(service))) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert service.num_calls == 2
    num_posted = len(steps.posted)
    with pytest.raises(QueueFull) as refusal:
        await anext(_call(service))
    assert refusal.value.retry_after_s is not None
    assert len(steps.posted) == num_posted
    assert telemetry.value("tandem_prefill_refused_total", reason="queue_full") == 1
    waiting.append(asyncio.create_task(anext(_call(service, "below its share"))))
    for _ in range(10):
        await asyncio.sleep(0)
    assert service.num_calls == 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert service.num_calls == 0
