"""A prefill worker without a model, with the real scheduler, pool, tiers, threads and disk."""

import asyncio
import itertools
from pathlib import Path

from cluster.messages import LayoutFingerprint, PrefillJob
from cluster.observe.telemetry import Telemetry
from cluster.protocol.hashing import keyed_chains
from cluster.settings.config import WorkerConfig
from engine.kv.layout import LayerShape, lay_out
from engine.kv.pool import KvPool
from engine.scheduling import commands
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import DrawnToken, StepResult
from engine.steps.questions import Questions
from prefill_worker.prefixes.tier_storage import BlockFiles
from prefill_worker.prefixes.tiers import PrefixTiers, TierResources, open_tiers
from tests.prefill_jobs import prefill_job

LAYOUT = LayoutFingerprint(weights="w", model_config="c", dtype="float32", block_table="t")
BLOCK_SIZE, _NUM_BLOCKS = 4, 7  # two prompts of three blocks, and one to compute in
BLOCK_BYTES = lay_out([LayerShape(1, 8, 8)], BLOCK_SIZE, "float32").block_bytes


class TierBench:
    """A prefill worker without a model: a computed block is filled with a number of its prompt's tokens."""

    def __init__(self, disk: Path | None = None, *, slots: int = 16, files: int = 16, kv_verify: str = "off") -> None:
        self.pool = KvPool(lay_out([LayerShape(1, 8, 8)], BLOCK_SIZE, "float32"), _NUM_BLOCKS)
        config = WorkerConfig(
            model="m",
            kv_verify=kv_verify,
            prefix_host_memory=str(slots * BLOCK_BYTES),
            prefix_disk=str(disk) if disk is not None else "",
            prefix_disk_space=str(files * BlockFiles.file_bytes(BLOCK_BYTES)),
        )
        chains = keyed_chains(b"key", BLOCK_SIZE)
        self.scheduler = SequenceScheduler(
            SchedulerLimits(
                num_blocks=_NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                max_model_len=1 << 20,
                max_prefill_tokens=512,
                max_num_seqs=4,
                max_queue=4,
            ),
            new_chain=chains,
        )
        self.index, storage = open_tiers(config, self.pool, LAYOUT)
        self.telemetry = Telemetry()
        self.token_s = 1.0  # slow: any copy is worth it
        self.questions = Questions(self._post)
        resources = TierResources(
            self.index, storage, chains, BLOCK_SIZE, BLOCK_BYTES, self._compute_s, itertools.count(), self.telemetry
        )
        self.tiers = PrefixTiers(resources, self.questions)

    def _compute_s(self, num_tokens: int, num_before: int) -> float:
        return self.token_s * num_tokens

    async def ask(self, *tokens: int) -> int:
        """Prefill a prompt and return the number of found tokens. Check that found blocks equal the computed ones."""
        job = prefill_job(tokens)
        chain = self.tiers.chain(job)
        await self.tiers.fetch(job, chain)
        (finished,) = [event for event in self.compute_prompt(job) if isinstance(event, commands.ExportFinished)]
        self.tiers.store(chain)
        await self.stored()
        self.index.check()
        self.scheduler.check()
        return finished.num_cached

    def outcomes(self, action: str) -> dict[str, float]:
        names = ("ok", "damaged", "unverified", "unreadable", "unwritable", "dropped", "late", "no_room", "failed")
        values = {n: self.telemetry.value("tandem_prefix_tier_blocks_total", action=action, outcome=n) for n in names}
        return {name: value for name, value in values.items() if value}

    def compute_prompt(self, job: PrefillJob) -> list[commands.Event]:
        self._post(commands.AdmitExport(b"ticket", job))
        _, plan = self.scheduler.plan(0.0)
        assert plan is not None
        (chunk,) = plan.chunks
        for number, block_id in enumerate(chunk.block_ids[: len(job.token_ids) // BLOCK_SIZE]):
            value = job.token_ids[number * BLOCK_SIZE] % 251
            if number * BLOCK_SIZE < chunk.start:
                assert self.pool.raw[block_id].tolist() == [value] * BLOCK_BYTES
            else:
                self.pool.raw[block_id] = value
        return list(self.scheduler.complete(plan, StepResult(((DrawnToken(1),),)), 0.0))

    def _post(self, command: commands.Command) -> None:
        for event in self.scheduler.apply(command, 0.0):
            asyncio.get_running_loop().call_soon(self.questions.settle, (event,))

    async def stored(self) -> None:
        while tasks := [task for task in asyncio.all_tasks() if task.get_name() == "store prefix"]:
            await asyncio.wait(tasks, timeout=10)


def prompt(number: int, num_blocks: int = 3) -> tuple[int, ...]:
    return tuple(range(100 * number, 100 * number + num_blocks * BLOCK_SIZE + 1))
