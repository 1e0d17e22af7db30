"""The part of a worker that runs sequences: its service, imports and link checks."""

from collections.abc import Awaitable, Callable, Iterator

from cluster.errors import Unhealthy
from decode_worker.service import DecodeService
from engine.build import Engine
from engine.scheduling import commands
from engine.scheduling.limits import SchedulerLimits
from engine.steps.step_loop import StepLoop
from kvtransfer.importer.link_check import Destination
from worker.life import WorkerLife
from worker.transfer import WorkerTransfer


class DecodePart:
    """`handoff_ids` are shared with prefix pulls. `num_free_blocks` asks the step thread."""

    def __init__(
        self,
        life: WorkerLife,
        engine: Engine,
        steps: StepLoop[commands.Command, commands.Event],
        transfer: WorkerTransfer,
        *,
        limits: SchedulerLimits,
        handoff_ids: Iterator[int],
        num_free_blocks: Callable[[], Awaitable[int]],
        refuse_if_unhealthy: Callable[[], None],
    ) -> None:
        self.service = DecodeService(
            member=life.member,
            steps=steps,
            importer=transfer.importer,
            exporter=transfer.exporter,
            vocab_size=engine.model_info.vocab_size,
            limits=limits,
            handoff_ids=handoff_ids,
            cluster_key=life.key,
            new_chain=life.new_chain,
            wire_dtype=life.config.kv_wire_dtype,
            stream_grace_s=life.config.stream_grace_s,
            refuse_if_unhealthy=refuse_if_unhealthy,
            telemetry=life.telemetry,
        )
        imports = self.service.imports
        self.link_check = transfer.link_check(Destination(imports, imports.new_id, num_free_blocks))

    def release(self, ticket_id: bytes) -> None:
        """Free the blocks of a ticket that has no lease left."""
        self.service.exports.release(ticket_id)

    def num_frozen_tickets(self) -> int:
        return self.service.exports.num_tickets

    def owners(self) -> Iterator[str]:
        yield from self.service.owners()
        yield from self.link_check.owners()

    def figures(self) -> dict[str, float]:
        return self.service.figures() | {
            "local_prefills": float(self.service.num_local_prefills),
            "imports": float(len(self.service.imports)),
        }

    def end_work(self, error: Unhealthy) -> None:
        self.service.end_work(error)
