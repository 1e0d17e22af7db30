"""Two workers that hand prompts to each other in both directions under every kind of fault: a plan, and its run.

A plan contains only values, so that a failing one can be reduced and printed.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from cluster.errors import HandOffFailed, HandOffReason
from cluster.messages import MemberId
from cluster.protocol import tickets
from cluster.settings.worker_settings import TransferSettings
from kvtransfer.exporter.exporter import FirstToken, TailBlock
from kvtransfer.importer.importer import ExpectedPrompt, ImportedBlocks
from tests.chaos.simulated.handoffs.worker import KEY, ROOT, Worker, content_of
from tests.chaos.simulated.machine.loop import SimulatedLoop
from tests.contract.rigs.handoff_calls import Calls
from tests.contract.rigs.kv_pools import BLOCK_SIZE
from tests.loopback import Fault, FaultSchedule, LoopbackNetwork

_LONGER_THAN_ANYTHING_S = 60.0
_RESUME_EVERY_S = 3.0


@dataclass(frozen=True, slots=True)
class HandOff:
    """A prompt that one worker computes and the other one fetches."""

    start_s: float
    exporter: int  # of the two
    num_tokens: int
    num_choices: int = 1
    has_ended: bool = False  # its first choice, with its first token
    num_shared: int = 0  # leading blocks that every such prompt begins with
    chunk_blocks: int = 1
    chunk_s: float = 0.5
    attach_s: float = 0.0  # time from the ticket to the importer's attach
    cancel_s: float | None = None  # time from the attach to the cancellation of the importer's request
    abort_s: float | None = None  # time from the start to the cancellation of prefill
    again_s: float | None = None  # time until the ticket is reissued and fetched a second time
    decode_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Mishap:
    """`jump`: a worker's clock advances by a lease. `sever`: a call breaks. `die`: a worker dies and a new one
    starts.
    """

    at_s: float
    kind: str
    worker: int
    number: int = 0  # of the call; for a jump: odd when the exporter looks at its clock at once


@dataclass(frozen=True, slots=True)
class Plan:
    hand_offs: tuple[HandOff, ...]
    mishaps: tuple[Mishap, ...] = ()
    faults: dict[int, Fault] = field(default_factory=dict)  # of each transport, by step
    verify: str = "all"
    num_blocks: int = 12


class World:
    """The two workers and the plan. It is made and run on a SimulatedLoop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._settings = TransferSettings(
            lease_s=3.0,
            max_lease_s=12.0,
            attach_timeout_s=10.0,
            read_timeout_s=2.0,
            quarantine_s=4.0,  # longer than what is held up waits
            kv_verify=plan.verify,
        )
        self._network = LoopbackNetwork()
        self._schedules = {name: FaultSchedule(plan.faults) for name in ("shm", "tcp")}
        self._book: dict[str, Calls] = {}
        self._num_begun = [0, 0]
        self._workers = [self._new_worker(place) for place in (0, 1)]
        self._num_handoffs = 0
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> "Counter[str]":
        """Run the plan and return the number of hand-offs by outcome. Raises AssertionError for the first promise that
        is broken.
        """
        resuming = asyncio.create_task(self._resume())
        async with asyncio.TaskGroup() as group:
            for number, hand_off in enumerate(self._plan.hand_offs):
                group.create_task(self._hand_off(number, hand_off))
            for mishap in self._plan.mishaps:
                group.create_task(self._happen(mishap))
        await asyncio.sleep(_LONGER_THAN_ANYTHING_S)
        for worker in self._workers:
            worker.check_idle()
        resuming.cancel()
        for worker in self._workers:
            await worker.importer.close()
            await worker.exporter.close()
        return self.outcomes

    def _new_worker(self, place: int) -> Worker:
        self._num_begun[place] += 1
        worker = Worker(
            member=MemberId(f"w{place}", str(self._num_begun[place])),
            num_blocks=self._plan.num_blocks,
            settings=self._settings,
            network=self._network,
            schedules=self._schedules,
            connect=lambda address: self._book[address],
        )
        self._book[worker.address] = worker.calls
        return worker

    async def _hand_off(self, number: int, plan: HandOff) -> None:
        await asyncio.sleep(plan.start_s)
        exporter, importer = self._workers[plan.exporter], self._workers[1 - plan.exporter]
        prompt = _Prompt(number, plan)
        ticket_id = number.to_bytes(16, "big")
        reserved = exporter.begin(ticket_id, prompt.hashes, len(prompt.contents))
        if reserved is None:
            self.outcomes["no room to compute"] += 1
            return
        issued = exporter.exporter.issue(
            request_id=str(number),
            attempt=1,
            importer=importer.member,
            num_tokens=plan.num_tokens,
            prompt_hash=prompt.hash,
            num_choices=plan.num_choices,
            ticket_id=ticket_id,
        )
        attempts = [self._attempt(importer, issued.signed, prompt, plan.attach_s, plan.cancel_s)]
        if plan.again_s is not None:
            signed = tickets.reissue(issued.signed, KEY, attempt=2, importer=importer.member)
            attempts.append(self._attempt(importer, signed, prompt, plan.attach_s + plan.again_s, None))
        await asyncio.gather(
            self._compute(exporter, ticket_id, prompt, reserved.block_ids, reserved.num_cached), *attempts
        )

    async def _compute(
        self, worker: Worker, ticket_id: bytes, prompt: "_Prompt", block_ids: Sequence[int], num_found: int
    ) -> None:
        """Act as the step thread: compute chunk after chunk unless the prefill is cancelled."""
        plan, loop = prompt.plan, asyncio.get_running_loop()
        abort_s = loop.time() + plan.abort_s if plan.abort_s is not None else float("inf")
        if num_found:
            worker.exporter.seal(ticket_id, first_index=0, block_ids=block_ids[:num_found])
        num_sealed = num_found
        while num_sealed < prompt.num_full:
            await asyncio.sleep(plan.chunk_s)
            if worker.is_dead:
                return
            if loop.time() >= abort_s:
                worker.exporter.fail(ticket_id, reason=HandOffReason.PREFILL_FAILED, detail="given up")
                worker.let_go(block_ids)
                return
            end = min(num_sealed + plan.chunk_blocks, prompt.num_full)
            chunk, contents = block_ids[num_sealed:end], prompt.contents[num_sealed:end]
            worker.write(chunk, contents)
            worker.pool.keep(chunk, contents, prompt.hashes[num_sealed - 1] if num_sealed else ROOT)
            worker.exporter.seal(ticket_id, first_index=num_sealed, block_ids=chunk)
            num_sealed = end
        tail = None
        if prompt.num_valid:
            worker.write(block_ids[-1:], prompt.contents[-1:])
            tail = TailBlock(block_ids[-1], prompt.num_valid)
        worker.exporter.finish(ticket_id, first_tokens=prompt.first_tokens, tail=tail)
        worker.let_go(block_ids)

    async def _attempt(
        self, worker: Worker, signed: bytes, prompt: "_Prompt", attach_s: float, cancel_s: float | None
    ) -> None:
        """Act as a decode worker: fetch, decode, end, and check the accounts afterwards."""
        await asyncio.sleep(attach_s)
        if worker.is_dead:
            return
        handoff_id, self._num_handoffs = self._num_handoffs, self._num_handoffs + 1
        worker.expect(handoff_id, prompt.hashes)
        fetching = asyncio.create_task(
            worker.importer.import_blocks(
                handoff_id=handoff_id,
                signed_ticket=signed,
                expected=ExpectedPrompt(prompt.plan.num_tokens, prompt.hash, prompt.plan.num_choices),
                blocks=worker,
            )
        )
        if cancel_s is not None:
            asyncio.get_running_loop().call_later(cancel_s, fetching.cancel)
        try:
            imported = await fetching
        except HandOffFailed as error:
            self._ended(worker, str(error.handoff_reason))
        except asyncio.CancelledError:
            self._ended(worker, "cancelled")
        else:
            if not worker.is_dead:
                await self._decode(worker, handoff_id, prompt, imported)
        finally:
            worker.forget(handoff_id)

    async def _decode(self, worker: Worker, handoff_id: int, prompt: "_Prompt", imported: ImportedBlocks) -> None:
        block_ids = worker.take(handoff_id)
        for block_id, content in zip(imported.sealed_block_ids, prompt.contents[: prompt.num_full], strict=True):
            assert worker.holds(block_id, content), f"prompt {prompt.number} is decoded with another prompt's KV"
        for block_id, first in zip(imported.tail_block_ids, prompt.first_tokens, strict=prompt.num_valid > 0):
            assert first.ended or worker.holds(block_id, prompt.contents[-1]), f"a wrong tail of prompt {prompt.number}"
        worker.pool.keep(imported.sealed_block_ids, prompt.hashes, ROOT)
        self._ended(worker, "ok")
        await asyncio.sleep(prompt.plan.decode_s)
        if not worker.is_dead:
            worker.let_go(block_ids)
            worker.check()

    def _ended(self, worker: Worker, outcome: str) -> None:
        self.outcomes[outcome] += 1
        for each in self._workers:
            each.check()

    async def _happen(self, mishap: Mishap) -> None:
        await asyncio.sleep(mishap.at_s)
        worker = self._workers[mishap.worker]
        match mishap.kind:
            case "jump":
                worker.clock.ahead_s += self._settings.lease_s
                if mishap.number % 2:
                    worker.exporter.reap()
            case "sever":
                worker.calls.sever(mishap.number)
            case "die":
                self._workers[mishap.worker] = self._new_worker(mishap.worker)
                await worker.die()
        for each in self._workers:
            each.check()

    async def _resume(self) -> None:
        """Resume delayed or stopped work at intervals."""
        while True:
            await asyncio.sleep(_RESUME_EVERY_S)
            for schedule in self._schedules.values():
                schedule.resume()


class _Prompt:
    """A prompt and the contents of its blocks; the content of a full block is its hash too."""

    def __init__(self, number: int, plan: HandOff) -> None:
        self.number, self.plan = number, plan
        self.num_full, self.num_valid = divmod(plan.num_tokens, BLOCK_SIZE)
        self.contents = [
            content_of("shared", place) if place < plan.num_shared else content_of(number, place)
            for place in range(self.num_full + (self.num_valid > 0))
        ]
        if self.num_valid:
            self.contents[-1] = content_of(number, "tail")
        self.hashes = self.contents[: self.num_full]
        self.hash = content_of(number, plan.num_tokens)
        self.first_tokens = [
            FirstToken(7 + choice, plan.has_ended and choice == 0) for choice in range(plan.num_choices)
        ]


def run_plan(plan: Plan) -> "Counter[str]":
    """Run the plan in simulated time and return the number of hand-offs by outcome. Raises AssertionError for the first
    promise that is broken.
    """

    async def run() -> "Counter[str]":
        return await World(plan).run()

    loop = SimulatedLoop(Random(0))
    asyncio.set_event_loop(loop)
    try:
        return loop.world.context.copy().run(loop.run_until_complete, run())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        asyncio.tasks._all_tasks.clear()  # type: ignore[attr-defined]  # the hashes of tasks restart with every loop
