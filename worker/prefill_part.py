"""The part of a worker that computes prompts for export: its service, prefixes and cache events."""

import asyncio
from collections.abc import Callable, Iterator

from cluster.clock import Clock
from cluster.errors import DrainIncomplete, Unhealthy
from cluster.outstanding_work import OutstandingWork
from cluster.protocol.hashing import NATIVE
from engine.build import Engine
from engine.grammar.compiled_grammars import CompiledGrammars
from engine.scheduling import commands
from engine.steps.step_loop import StepLoop
from kvtransfer.importer.calls import GrpcChannelPool
from prefill_worker.prefixes.prefix_pulls import PrefixPulls, PullResources
from prefill_worker.prefixes.tiers import PrefixTiers, TierResources, open_tiers
from prefill_worker.service import CacheEventPublisher, PrefillService
from worker.life import WorkerLife
from worker.transfer import WorkerTransfer

ComputeSeconds = Callable[[int, int], float]


class PrefillPart:
    """The part of one worker. `outstanding`: the account of the routers' work. `compute_s` predicts the seconds to
    compute a number of tokens behind others. `handoff_ids` are shared with the imports of hand-offs.
    """

    def __init__(
        self,
        life: WorkerLife,
        engine: Engine,
        steps: StepLoop[commands.Command, commands.Event],
        transfer: WorkerTransfer,
        *,
        outstanding: OutstandingWork,
        compute_s: ComputeSeconds,
        handoff_ids: Iterator[int],
        grammars: CompiledGrammars,
        refuse_if_unhealthy: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._exporter = transfer.exporter
        self.released = asyncio.Event()  # to be set when a ticket has no lease left
        keeps_prefixes = life.config.prefix_caching != "off"
        # Blocks that are pulled in a quantised format would differ from computed ones.
        can_pull = keeps_prefixes and life.config.kv_wire_dtype == NATIVE
        pulls = _pull_resources(life, transfer, compute_s, handoff_ids, clock) if can_pull else None
        self._pulls = None if pulls is None else PrefixPulls(pulls, steps)
        has_tiers = keeps_prefixes and life.config.prefix_host_bytes > 0
        tiers = _tier_resources(life, engine, compute_s, handoff_ids) if has_tiers else None
        self._tiers = None if tiers is None else PrefixTiers(tiers, steps)
        self.cache_events = CacheEventPublisher(life.member, steps)
        self.service = PrefillService(
            steps=steps,
            exporter=transfer.exporter,
            pulls=self._pulls,
            tiers=self._tiers,
            cache_events=self.cache_events,
            outstanding=outstanding,
            vocab_size=engine.model_info.vocab_size,
            max_calls=life.config.max_queue + life.config.max_num_seqs,
            keys=life.keys,
            grammars=grammars,
            refuse_if_unhealthy=refuse_if_unhealthy,
            telemetry=life.telemetry,
        )

    async def drain(self, grace_s: float, *, num_frozen: Callable[[], int]) -> None:
        """Finish the calls that have begun, and wait until every ticket but those of frozen sequences is fetched or has
        lapsed. `num_frozen` returns the number of those. Raises DrainIncomplete."""
        try:
            async with asyncio.timeout(grace_s):
                await self.service.drain()
                while self._exporter.num_live_tickets > num_frozen():
                    self.released.clear()
                    await self.released.wait()
        except TimeoutError:
            raise DrainIncomplete(
                f"{self.service.num_calls} prefill(s) and {self._exporter.num_live_tickets} ticket(s) were left after"
                f" {grace_s:g} s, which their routers start again elsewhere; raise --drain-grace-s"
            ) from None
        finally:
            self.cache_events.close()

    def owners(self) -> Iterator[str]:
        for part in (self.service, self._pulls, self._tiers):
            if part is not None:
                yield from part.owners()

    def figures(self) -> dict[str, float]:
        parts = [part.figures() for part in (self._pulls, self._tiers) if part is not None]
        return {name: figure for figures in parts for name, figure in figures.items()}

    def end_work(self, error: Unhealthy) -> None:
        self.service.end_work(error)

    async def close_caches(self) -> None:
        for part in (self._pulls, self._tiers):
            if part is not None:
                await part.close()


def _pull_resources(
    life: WorkerLife, transfer: WorkerTransfer, compute_s: ComputeSeconds, handoff_ids: Iterator[int], clock: Clock
) -> PullResources:
    return PullResources(
        member=life.member,
        importer=transfer.importer,
        links=transfer.links,
        channels=GrpcChannelPool(life.connect),
        block_size=life.config.block_size,
        block_bytes=transfer.block_bytes,
        new_chain=life.new_chain,
        compute_s=compute_s,
        pull_ids=handoff_ids,
        clock=clock,
        telemetry=life.telemetry,
    )


def _tier_resources(
    life: WorkerLife, engine: Engine, compute_s: ComputeSeconds, handoff_ids: Iterator[int]
) -> TierResources:
    index, storage = open_tiers(life.config, engine.pool, engine.fingerprint)
    return TierResources(
        index=index,
        storage=storage,
        new_chain=life.new_chain,
        block_size=life.config.block_size,
        block_bytes=engine.pool.block_bytes,
        compute_s=compute_s,
        pull_ids=handoff_ids,
        telemetry=life.telemetry,
    )
