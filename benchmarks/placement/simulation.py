"""Two or more simulated workers behind one router, in simulated time: the real scheduler and the real placement, while
every step takes the time of the worker's own service times. Predictions can be compared with what then happens, without
any noise of a machine, and the arms of the benchmark with each other.

Prompts share no prefixes, and messages take a constant time.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from cli.load import Arrival, Record
from cluster.messages import (
    DecodeJob,
    LinkSpeed,
    MemberId,
    PrefillJob,
    Role,
    Sampling,
    SequenceStart,
    TokenStops,
)
from cluster.outstanding_work import PromptWork
from cluster.protocol.hashing import nameless_chains
from cluster.request_size import RequestSize, blocks_for, sealed_blocks
from cluster.service_times import ServiceTimes, StepLimit
from engine.scheduling.commands import (
    AdmitExport,
    AdmitImported,
    AdmitLocal,
    Command,
    Event,
    ExportAccepted,
    ExportFinished,
    Release,
    Reserve,
    Reserved,
    Sealed,
    Started,
    StepTokens,
)
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import SequenceScheduler
from engine.scheduling.step import DrawnToken, StepPlan, StepResult
from engine.timing.service_time_fit import step_work
from router.policies.candidates import RequestFacts, WorkerLoad
from router.policies.placement import Policy
from router.policies.prediction.latency import Prediction, predict
from router.policies.prediction.speeds import Speeds
from router.policies.prediction.unmodelled import UnmodelledTimes
from router.policies.prediction.work_ahead import PromptBacklog, SequenceProgress, WorkAhead, batch_of

_ROUTER = MemberId("router", "1")
_BLOCK_SIZE, _NUM_BLOCKS, _MAX_CHUNK, _MAX_RUNNING = 16, 8192, 512, 64
_MAX_MODEL_LEN = 8192
_TIMEOUT_S = 1e6
_SAMPLING = Sampling()


@dataclass(frozen=True, slots=True)
class Setting:
    """One worker. Times in seconds. `reported`: the service times that it reports; None: its true ones."""

    times: ServiceTimes
    kv_bytes_per_token: float
    link_bytes_per_s: float
    message_s: float = 0.0  # between router and worker, each way
    gap_s: float = 0.0  # between two steps of a worker
    step_limit: StepLimit = field(default_factory=StepLimit)
    noise: Callable[[], float] = lambda: 1.0  # a factor of each step's time
    role: Role | None = None
    reported: ServiceTimes | None = None


@dataclass(slots=True)
class Served:
    """One request: what was predicted for it, and what happened."""

    arrival: Arrival
    prediction: Prediction | None = None
    prefill: MemberId | None = None
    decode: MemberId | None = None
    token_times_s: list[float] = field(default_factory=list)

    @property
    def record(self) -> Record:
        times_s = tuple(self.token_times_s)
        return Record(self.arrival.at_s, times_s, times_s[-1], self.arrival.prompt_tokens)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.arrival.at_s

    @property
    def itl_s(self) -> float:
        return (self.token_times_s[-1] - self.token_times_s[0]) / max(1, len(self.token_times_s) - 1)


@dataclass(slots=True)
class _HandOff:
    """The KV of one prompt on its way."""

    number: int
    job: DecodeJob
    importer: "_Worker"
    exporter: "_Worker"
    block_ids: tuple[int, ...] = ()
    moved_s: float = 0.0  # when the blocks so far will have arrived
    is_moved: bool = False

    @property
    def ticket_id(self) -> bytes:
        return b"%d" % self.number


class Simulation:
    """One run of a policy. `prefills` and `decodes` are the numbers of the workers that the policy may choose for each
    part; a worker may be in both."""

    def __init__(
        self, policy: Policy, settings: Sequence[Setting], prefills: Sequence[int], decodes: Sequence[int]
    ) -> None:
        self.policy = policy
        self.now_s = 0.0
        self.workers = [_Worker(self, MemberId(f"w{number}", "1"), each) for number, each in enumerate(settings)]
        self._prefills = [self.workers[number] for number in prefills]
        self._decodes = [self.workers[number] for number in decodes]
        self._speeds = Speeds()
        self._numbers = count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._live: dict[int, Served] = {}
        self.hand_offs: dict[int, _HandOff] = {}

    def run(self, arrivals: Sequence[Arrival]) -> list[Served]:
        served = [Served(arrival) for arrival in arrivals]
        for each in served:
            self.at(each.arrival.at_s, partial(self._arrive, each))
        while self._heap:
            self.now_s, _, act = heapq.heappop(self._heap)
            act()
        return served

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._numbers), act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, act)

    def _arrive(self, served: Served) -> None:
        arrival = served.arrival
        facts = RequestFacts(
            arrival.prompt_tokens, arrival.output_tokens, 1, expected_output=float(arrival.output_tokens)
        )
        reported = {worker.member: worker.reported for worker in self.workers}
        believed = self._speeds.believed(reported, self.now_s)
        loads = {worker.member: worker.load(believed[worker.member]) for worker in self.workers}
        prefills = [loads[worker.member] for worker in self._prefills]
        placement = self.policy.choose(prefills, [loads[worker.member] for worker in self._decodes], facts)
        assert placement is not None
        self.policy.placed(prefills, [loads[worker.member] for worker in self._decodes], facts, self.now_s)
        exporter = loads[placement.prefill] if placement.prefill is not None else None
        known = placement.chosen.prediction if placement.chosen is not None else None
        served.prediction = known or predict(exporter, loads[placement.decode], facts)
        served.prefill, served.decode = placement.prefill, placement.decode
        by_member = {worker.member: worker for worker in self.workers}
        decode = by_member[placement.decode]
        handle = next(self._numbers)
        self._live[handle] = served
        size = RequestSize(arrival.prompt_tokens, arrival.output_tokens, 0, 1)
        decode.sequences[handle] = SequenceProgress(arrival.output_tokens, size, float(arrival.output_tokens))
        job = DecodeJob(
            f"r{handle}",
            0,
            _ROUTER,
            (0,) * arrival.prompt_tokens,
            _SAMPLING,
            TokenStops(arrival.output_tokens),
            (SequenceStart(handle, seed=0),),
            None,
            _TIMEOUT_S,
        )
        work = PromptWork.of(arrival.prompt_tokens, 0)
        computing = by_member[placement.prefill] if placement.prefill is not None else decode
        computing.prompts[handle] = computing.backlog.add_prompt(work, self.now_s)
        if placement.prefill is None:
            decode.send(AdmitLocal(job))
            return
        hand_off = self.hand_offs[handle] = _HandOff(handle, job, decode, computing)
        export = PrefillJob(
            f"r{handle}",
            0,
            job.prompt_token_ids,
            _SAMPLING,
            job.stops,
            (0,),
            0,
            decode.member,
            _TIMEOUT_S,
        )
        computing.send(AdmitExport(hand_off.ticket_id, export))
        decode.send(
            Reserve(handle, blocks_for(arrival.prompt_tokens, _BLOCK_SIZE), (), job, is_announced=True), num_messages=2
        )

    def first_token(self, handle: int, worker: "_Worker") -> None:
        worker.backlog.record_computed(worker.prompts.pop(handle), self.now_s)
        served = self._live[handle]
        served.token_times_s.append(self.now_s)
        self._learn_ttft(served, worker, is_export=True)

    def token(self, handle: int, worker: "_Worker") -> None:
        served = self._live[handle]
        worker.sequences[handle].record_token(self.now_s)
        served.token_times_s.append(self.now_s)
        if handle in worker.prompts:
            worker.backlog.record_computed(worker.prompts.pop(handle), self.now_s)
            self._learn_ttft(served, worker, is_export=False)
        if len(served.token_times_s) == served.arrival.output_tokens:
            del worker.sequences[handle], self._live[handle]
            assert served.prediction is not None
            worker.unmodelled.record_itl(served.prediction.modelled_itl_s, served.itl_s, self.now_s)

    def _learn_ttft(self, served: Served, worker: "_Worker", *, is_export: bool) -> None:
        assert served.prediction is not None
        modelled_s = served.prediction.modelled_ttft_s
        worker.unmodelled.record_ttft(modelled_s, served.ttft_s, self.now_s, is_export=is_export)


class _Worker:
    """One worker with its step loop, and what the router knows of it."""

    def __init__(self, simulation: Simulation, member: MemberId, setting: Setting) -> None:
        self.member = member
        self.backlog = PromptBacklog()
        self.unmodelled = UnmodelledTimes()
        self.prompts: dict[int, int] = {}
        self.sequences: dict[int, SequenceProgress] = {}
        self._simulation = simulation
        self._setting = setting
        limits = SchedulerLimits(
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=_MAX_RUNNING,
            max_prefill_tokens=_MAX_CHUNK,
            max_queue=10_000,
            step_limit=setting.step_limit,
        )
        self._scheduler = SequenceScheduler(limits, new_chain=nameless_chains(), times=lambda: self.reported)
        self._inbox: list[Command] = []
        self._is_busy = False
        self.num_mixed = 0

    @property
    def reported(self) -> ServiceTimes:
        return self._setting.reported or self._setting.times

    def load(self, times: ServiceTimes) -> WorkerLoad:
        """Return what the router knows of the worker. `times`: what it believes of its speed."""
        setting = self._setting
        links = tuple(
            LinkSpeed(other.member, "shm", setting.link_bytes_per_s, 0.0) for other in self._simulation.workers
        )
        work = WorkAhead(
            times=times,
            prompts=self.backlog.queue(self._simulation.now_s),
            batch=batch_of(list(self.sequences.values())),
            max_chunk=_MAX_CHUNK,
            max_running=_MAX_RUNNING,
            step_limit=setting.step_limit,
            recent=self.backlog.recent(times, self._simulation.now_s),
        )
        return WorkerLoad(
            member=self.member,
            kv_format="a",
            assigned=len(self.sequences) + len(self.prompts),
            links=links,
            kv_bytes_per_token=setting.kv_bytes_per_token,
            work=work,
            unmodelled=self.unmodelled.at(self._simulation.now_s),
            role=self._setting.role,
        )

    def send(self, command: Command, num_messages: int = 1) -> None:
        self._simulation.after(num_messages * self._setting.message_s, partial(self._receive, command))

    def _receive(self, command: Command) -> None:
        self._inbox.append(command)
        if not self._is_busy:
            self._is_busy = True
            self._simulation.after(0.0, self._turn)

    def _turn(self) -> None:
        now_s = self._simulation.now_s
        while self._inbox:
            self._emit(self._scheduler.apply(self._inbox.pop(0), now_s))
        events, plan = self._scheduler.plan(now_s)
        self._emit(events)
        if plan is None and self._inbox:  # from its own events
            self._simulation.after(0.0, self._turn)
        elif plan is None:
            self._is_busy = False
        else:
            work = step_work(plan)
            assert work is not None
            seconds = self._setting.times.seconds(work) * self._setting.noise()
            self._simulation.after(seconds, partial(self._complete, plan))

    def _complete(self, plan: StepPlan) -> None:
        tokens = tuple(tuple(DrawnToken(1) for _ in chunk.samples) for chunk in plan.chunks)
        self._emit(self._scheduler.complete(plan, StepResult(tokens), self._simulation.now_s))
        self._simulation.after(self._setting.gap_s, self._turn)

    def _emit(self, events: Sequence[Event]) -> None:
        simulation, setting = self._simulation, self._setting
        for event in events:
            match event:
                case StepTokens(tokens=tokens):
                    for token in tokens:
                        simulation.after(setting.message_s, partial(simulation.token, token.handle, self))
                case Sealed(ticket_id, _, block_ids):
                    self._move(int(ticket_id), len(block_ids))
                case ExportFinished() as finished:
                    handle = int(finished.ticket_id)
                    simulation.after(setting.message_s, partial(simulation.first_token, handle, self))
                    if finished.tail is not None:
                        self._move(handle, 1)
                    hand_off = simulation.hand_offs[handle]
                    fixed_s = setting.times.hand_off.fixed_s if setting.times.hand_off is not None else 0.0
                    arrives_s = max(hand_off.moved_s, simulation.now_s) + fixed_s
                    simulation.at(arrives_s, partial(self._arrive, hand_off))
                case Reserved(handoff_id, block_ids):
                    simulation.hand_offs[handoff_id].block_ids = block_ids
                    self._join(simulation.hand_offs[handoff_id])
                case ExportAccepted() | Started():
                    pass
                case _:
                    raise AssertionError(f"unexpected {event}")

    def _move(self, handle: int, num_blocks: int) -> None:
        hand_off = self._simulation.hand_offs[handle]
        num_bytes = num_blocks * _BLOCK_SIZE * self._setting.kv_bytes_per_token
        begin_s = max(hand_off.moved_s, self._simulation.now_s)
        hand_off.moved_s = begin_s + num_bytes / self._setting.link_bytes_per_s

    def _arrive(self, hand_off: _HandOff) -> None:
        hand_off.is_moved = True
        hand_off.importer._join(hand_off)

    def _join(self, hand_off: _HandOff) -> None:
        if not (hand_off.is_moved and hand_off.block_ids):
            return
        num_sealed = sealed_blocks(len(hand_off.job.prompt_token_ids), _BLOCK_SIZE)
        sealed_ids, tail_ids = hand_off.block_ids[:num_sealed], hand_off.block_ids[num_sealed:]
        del self._simulation.hand_offs[hand_off.number]
        hand_off.exporter._receive(Release(hand_off.ticket_id))
        self._receive(AdmitImported(hand_off.number, hand_off.job, sealed_ids, tail_ids, (1,)))
