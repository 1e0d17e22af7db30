"""The self-observation of a worker and its reports: inspections, health, canaries, heartbeats and metrics.

`watch_over` builds the watch over the step thread from the settings of the worker. `Heartbeats` sends every router the
step counter, the load and the free blocks. `WorkerMetrics` publishes the figures of the step thread.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.clock import Clock
from cluster.errors import Unavailable, Unhealthy
from cluster.observe.stalls import StallLimits
from cluster.observe.telemetry import Telemetry
from cluster.outstanding_work import PromptWork, SequenceWork
from cluster.protocol.report_wire import service_times_to_wire
from cluster.service_times import ServiceTimes, StepWork
from cluster.settings.config import WorkerConfig
from engine.scheduling import commands
from engine.scheduling.commands import Inspected
from engine.steps.step_loop import StepLoop, StepTime
from tandem.internal.v1 import worker_pb2
from tandem.v1 import admin_pb2
from worker.health import Canaries, CanaryGeneration, WorkerHealth
from worker.life import WorkerLife
from worker.service import Inspections

_CANARY_FACTOR = 5.0  # times the timeout of a step: the first step may compile kernels


@dataclass(frozen=True, slots=True)
class WorkerWatch:
    inspections: Inspections
    health: WorkerHealth
    canaries: Canaries


def canary_timeout_s(config: WorkerConfig) -> float:
    return _CANARY_FACTOR * config.step_timeout_s


def watch_over(
    steps: StepLoop[commands.Command, commands.Event],
    runner: CanaryGeneration,
    *,
    life: WorkerLife,
    clock: Clock,
    end_work: Callable[[Unhealthy], None],
    owners: Callable[[], Iterable[str]],
) -> WorkerWatch:
    """Return the watch over a step thread. `runner` runs the canaries. `end_work`: as in WorkerHealth.
    `owners`: as in Inspections.
    """
    config = life.config
    health = WorkerHealth(
        server=life.server,
        steps=steps,
        limits=StallLimits(config.step_timeout_s, config.stuck_exit_s),
        clock=clock,
        telemetry=life.telemetry,
        end_work=end_work,
    )
    canaries = Canaries(
        runner,
        interval_s=config.canary_interval_s,
        timeout_s=canary_timeout_s(config),
        retry_s=min(config.canary_interval_s, config.stuck_exit_s / 4),
        progress=lambda: steps.progress,
        health=health,
        clock=clock,
        telemetry=life.telemetry,
    )
    return WorkerWatch(Inspections(steps, owners), health, canaries)


_LOG = logging.getLogger("tandem.heartbeats")


class Heartbeats:
    """Sends heartbeats, on the event loop and not on the step thread, so routers see a stuck step as a constant
    counter.
    """

    def __init__(
        self,
        send: Callable[[worker_pb2.Heartbeat], None],
        *,
        interval_s: float,
        num_steps: Callable[[], int],
        watch: WorkerWatch,
        service_times: Callable[[], ServiceTimes | None],
        publish: Callable[[Inspected], None] = lambda inspected: None,
        links: Callable[[], Sequence[admin_pb2.LinkSpeed]] = tuple,
    ) -> None:
        """`num_steps`: the engine's step counter. `service_times`: how fast this worker computes. `publish` gets the
        inspection of each heartbeat. `links`: the measured speeds of this worker's links."""
        self._send = send
        self._interval_s = interval_s
        self._num_steps = num_steps
        self._watch = watch
        self._service_times = service_times
        self._publish = publish
        self._links = links

    async def run(self) -> None:
        """Send a heartbeat every `interval_s` until cancelled."""
        running = waiting = free_blocks = 0
        while True:
            try:
                inspected = await self._watch.inspections.inspect(timeout_s=self._interval_s)
            except Unavailable:
                _LOG.debug("the step thread is in a long step; the heartbeat repeats the previous figures")
            else:
                running, waiting = int(inspected.figures["running"]), int(inspected.figures["waiting"])
                free_blocks = inspected.blocks["free"] + inspected.blocks["cached"]
                self._publish(inspected)
            times = self._service_times()
            self._send(
                worker_pb2.Heartbeat(
                    step=self._num_steps(),
                    running=running,
                    waiting=waiting,
                    free_blocks=free_blocks,
                    links=self._links(),
                    step_s=self._watch.health.step_s,
                    service_times=None if times is None else service_times_to_wire(times),
                )
            )
            await asyncio.sleep(self._interval_s)


_IDLE_BLOCKS = ("free", "cached")  # states; a figure that begins with blocks_ is the number of blocks in a state
_SEQUENCES = ("running", "waiting", "frozen")
# Figures of the scheduler that only grow, with the counters that they become.
_TOTALS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("tokens_computed", "tandem_computed_tokens_total", {}),
    ("preemptions", "tandem_preemptions_total", {}),
    ("evicted_blocks", "tandem_evicted_blocks_total", {}),
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
    ("host_tier_blocks", "tandem_prefix_tier_used_blocks", {"tier": "host"}),
    ("disk_tier_blocks", "tandem_prefix_tier_used_blocks", {"tier": "disk"}),
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

    def publish_outlook(self, times: ServiceTimes | None, prompts: PromptWork, sequences: SequenceWork) -> None:
        """Publish for how long the worker has work, by which its pool can be scaled. `times`: None if not known yet."""
        if times is None:
            return
        batch = sequences.num_running + sequences.num_joining
        queued = StepWork(num_new=round(prompts.num_new), attended=prompts.attended)
        self._telemetry.gauge("tandem_queued_prompt_seconds", times.seconds(queued))
        self._telemetry.gauge("tandem_predicted_itl_seconds", times.step_s(batch, sequences.context))

    def record_step(self, work: StepWork, time: StepTime) -> None:
        """Record a step that has ended, on the step thread. Its parts are published with the next inspection."""
        kind = "mixed" if work.is_mixed else "prefill" if work.num_new else "decode"
        self._telemetry.observe("tandem_step_seconds", time.seconds, work=kind)
        self._part_s["plan"] += time.plan_s
        self._part_s["run"] += time.run_s
        self._part_s["complete"] += time.complete_s
