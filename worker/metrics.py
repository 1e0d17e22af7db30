"""Publishes what the step thread counts as metrics of the worker."""

from collections.abc import Mapping

from cluster.observe.telemetry import Telemetry
from cluster.service_times import StepWork
from engine.scheduling.commands import Inspected

_IDLE_BLOCKS = ("free", "cached")
_SEQUENCES = ("running", "waiting", "frozen")
# Figures of the scheduler that only grow, with the counters that they become.
_TOTALS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("tokens_computed", "tandem_computed_tokens_total", {}),
    ("preemptions", "tandem_preemptions_total", {}),
    ("blocks_evicted", "tandem_evicted_blocks_total", {}),
    ("swapped_out", "tandem_swaps_total", {"action": "swapped_out"}),
    ("swapped_in", "tandem_swaps_total", {"action": "swapped_in"}),
    ("recomputed", "tandem_swaps_total", {"action": "recomputed"}),
    ("draft_tokens", "tandem_draft_tokens_total", {"outcome": "all"}),
    ("draft_tokens_accepted", "tandem_draft_tokens_total", {"outcome": "accepted"}),
)


class WorkerMetrics:
    def __init__(self, telemetry: Telemetry, *, vllm_model_name: str = "") -> None:
        """`vllm_model_name`: publish vLLM's names too, with this model; empty: do not."""
        self._telemetry = telemetry
        self._vllm_model_name = vllm_model_name
        self._counted: dict[str, float] = {}  # of each figure in _TOTALS, as published

    def publish(self, inspected: Inspected) -> None:
        """Publish an inspection. Each one is newer than the one before."""
        blocks, figures = inspected.blocks, inspected.figures
        for state, number in blocks.items():
            self._telemetry.gauge("tandem_kv_blocks", number, state=state)
        usage = 1 - sum(blocks[state] for state in _IDLE_BLOCKS) / sum(blocks.values())
        self._telemetry.gauge("tandem_kv_cache_usage_ratio", usage)
        for state in _SEQUENCES:
            self._telemetry.gauge("tandem_sequences", figures[state], state=state)
        for name, metric, labels in _TOTALS:
            total = figures.get(name, 0.0)
            self._telemetry.count(metric, total - self._counted.get(name, 0.0), **labels)
            self._counted[name] = total
        if model_name := self._vllm_model_name:
            self._telemetry.gauge("vllm:num_requests_running", figures["running"], model_name=model_name)
            self._telemetry.gauge("vllm:num_requests_waiting", figures["waiting"], model_name=model_name)
            self._telemetry.gauge("vllm:kv_cache_usage_perc", usage, model_name=model_name)

    def record_step(self, work: StepWork, seconds: float) -> None:
        """Record a step that has ended. Any thread may call this."""
        kind = "mixed" if work.is_mixed else "prefill" if work.num_new else "decode"
        self._telemetry.observe("tandem_step_seconds", seconds, work=kind)
