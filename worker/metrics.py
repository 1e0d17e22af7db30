"""Publishes what the step thread counts as metrics of the worker."""

from collections.abc import Mapping

from cluster.observe.telemetry import Telemetry
from cluster.service_times import StepWork
from engine.scheduling.commands import Inspected
from engine.steps.step_loop import StepTime

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


# Figures that become gauges; of the caches, only where the worker has them.
_GAUGES: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("handoffs_waiting", "tandem_handoffs_waiting", {}),
    ("swap_slots_used", "tandem_swap_slots_used", {}),
    ("blocks_in_host_tier", "tandem_prefix_tier_used_blocks", {"tier": "host"}),
    ("blocks_on_disk_tier", "tandem_prefix_tier_used_blocks", {"tier": "disk"}),
)


class WorkerMetrics:
    def __init__(self, telemetry: Telemetry, *, vllm_model_name: str = "") -> None:
        """`vllm_model_name`: publish vLLM's names too, with this model; empty: do not."""
        self._telemetry = telemetry
        self._vllm_model_name = vllm_model_name
        self._counted: dict[str, float] = {}  # of each figure in _TOTALS, as published
        self._part_s = dict.fromkeys(("plan", "run", "complete"), 0.0)  # of all steps; written by the step thread
        self._published_s = dict(self._part_s)

    def publish(self, inspected: Inspected, caches: Mapping[str, float] | None = None) -> None:
        """Publish an inspection, and the figures of the prefix caches. Each one is newer than the one before."""
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
        for name, metric, labels in _GAUGES:
            value = figures.get(name, (caches or {}).get(name))
            if value is not None:
                self._telemetry.gauge(metric, value, **labels)
        for part, seconds in tuple(self._part_s.items()):
            self._telemetry.count("tandem_step_part_seconds_total", seconds - self._published_s[part], part=part)
            self._published_s[part] = seconds
        if model_name := self._vllm_model_name:
            self._telemetry.gauge("vllm:num_requests_running", figures["running"], model_name=model_name)
            self._telemetry.gauge("vllm:num_requests_waiting", figures["waiting"], model_name=model_name)
            self._telemetry.gauge("vllm:kv_cache_usage_perc", usage, model_name=model_name)

    def record_step(self, work: StepWork, time: StepTime) -> None:
        """Record a step that has ended, on the step thread. Its parts are published with the next inspection."""
        kind = "mixed" if work.is_mixed else "prefill" if work.num_new else "decode"
        self._telemetry.observe("tandem_step_seconds", time.seconds, work=kind)
        self._part_s["plan"] += time.plan_s
        self._part_s["run"] += time.run_s
        self._part_s["complete"] += time.complete_s
