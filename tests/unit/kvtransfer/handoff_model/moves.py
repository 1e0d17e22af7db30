"""The effect of each step on a world, by the name of its label."""

from collections.abc import Callable
from dataclasses import replace

from kvtransfer.protocol import export_machine as exporting
from kvtransfer.protocol import import_machine as importing
from kvtransfer.protocol import import_state
from kvtransfer.protocol.handoff import FirstToken, RemoteBlock, Renew, Settle, Tail
from tests.unit.kvtransfer.handoff_model.scenario import (
    CORRUPT,
    DEAD,
    DECODED,
    DESTROYING,
    FREE,
    LANDED,
    LAPSED,
    LOST,
    NOT_BEGUN,
    REPORTED,
    RUNNING,
    STOPPED,
    Violation,
)
from tests.unit.kvtransfer.handoff_model.world import FAIL, Draft, Read, replaced, without


def deliver(draft: Draft, packed: int, copy_stays: bool) -> None:
    machines = draft.machines
    draft.net = without(draft.net, packed)
    if copy_stays:
        draft.net = (*draft.net, packed & ~1)
    number = packed >> 1
    handoff, to_importer, message = machines.messages[number]
    if to_importer:
        recipient = draft.recipient(handoff)
        assert recipient is not None
        event = machines.to_importer(message)
        draft.advance_import(recipient, event)
        after = draft.imports[recipient]
        absorbed = (
            after >= 0
            and recipient == handoff
            and not draft.is_shared()
            and machines.import_step(after, event) == (after, ())
        )
    else:
        ticket = machines.tickets[handoff]
        if isinstance(message, Renew) and not draft.known[handoff] & LAPSED:
            draft.export_time(ticket, 1.0)
        if isinstance(message, Settle):
            draft.check_quiet(handoff)
        heard = machines.to_exporter(handoff, message)
        draft.advance_export(ticket, heard)
        after = draft.exports[ticket]
        absorbed = not isinstance(message, Renew) and machines.export_step(after, heard) == (after, ())
    if copy_stays and absorbed:
        draft.net = without(draft.net, packed & ~1)


def moment(draft: Draft, handoff: int) -> None:
    """Deliver all waiting messages of a hand-off as one group."""
    machines = draft.machines
    together = machines.moment(handoff, draft.net)
    for place, packed in enumerate(together, 1):
        draft.net = without(draft.net, packed)
        if draft.imports[handoff] >= 0:
            _, _, message = machines.messages[packed >> 1]
            draft.advance_import(handoff, machines.to_importer(message, is_followed=place < len(together)))


def lose(draft: Draft, packed: int) -> None:
    draft.net = without(draft.net, packed)


def compute(draft: Draft, ticket: int) -> None:
    """Compute a chunk. The first one reserves the whole prompt; each seals one block, of which the last is the tail."""
    num_blocks = draft.machines.scenario.blocks[ticket]
    stage, block_ids = draft.jobs[ticket]
    if stage == 0:
        block_ids = draft.free_remote()[:num_blocks]
        for block in block_ids:
            draft.remote = replaced(draft.remote, block, 0)
    is_damaged = draft.machines.scenario.wrong == "provenance"  # on its way to the exporter, which did not look
    content = CORRUPT if is_damaged else 16 * (ticket + 1) + stage
    draft.remote = replaced(draft.remote, block_ids[stage], content)
    digest = bytes([CORRUPT if draft.machines.scenario.wrong == "digest" else content])
    sealed = RemoteBlock(block_ids[stage], digest, is_damaged)
    draft.jobs = replaced(draft.jobs, ticket, (stage + 1, block_ids))
    if stage + 1 < num_blocks:
        draft.advance_export(ticket, exporting.SealBlocks(stage, (sealed,)))
        return
    wrong = draft.machines.scenario.wrong
    finish = exporting.Finish(
        (FirstToken(1, draft.machines.scenario.ended),),
        4 * (num_blocks - 1) + 1 + (wrong == "count"),
        bytes([ticket + 7 * (wrong == "prompt")]),
        Tail(sealed, 1),
    )
    draft.advance_export(ticket, finish)


def abort(draft: Draft, ticket: int) -> None:
    stage, block_ids = draft.jobs[ticket]
    if stage < draft.machines.scenario.blocks[ticket]:
        draft.jobs = replaced(draft.jobs, ticket, (-1 - stage, block_ids))
    draft.advance_export(ticket, FAIL)


def reap(draft: Draft, ticket: int) -> None:
    draft.advance_export(ticket, exporting.Tick())


def time(draft: Draft, ticket: int) -> None:
    due_s = draft.machines.exports[draft.exports[ticket]].next_deadline_s
    assert due_s is not None
    draft.export_time(ticket, due_s)


def timeout(draft: Draft, handoff: int) -> None:
    number = draft.imports[handoff]
    due_s = replace(draft.machines.imports[number], renew_at_s=None).next_deadline_s
    assert due_s is not None
    draft.imports = replaced(draft.imports, handoff, draft.machines.import_later(number, due_s))
    draft.advance_import(handoff, import_state.Tick())


def renew(draft: Draft, handoff: int) -> None:
    """Renew a lease, once per hand-off: a second renewal would have no other effect than the first."""
    machines = draft.machines
    due = replace(machines.imports[draft.imports[handoff]], renew_at_s=0.0)
    state, actions = importing.advance(due, import_state.Tick(), 0.0, machines.guards)
    draft.imports = replaced(draft.imports, handoff, machines.number_import(replace(state, renew_at_s=None)))
    draft.perform(handoff, machines.posted(actions))


def reserved(draft: Draft, handoff: int) -> None:
    block_ids = draft.granted[handoff]
    draft.granted = replaced(draft.granted, handoff, ())
    scenario = draft.machines.scenario
    if draft.imports[handoff] >= 0:
        num_verified = len(block_ids) if scenario.verified is None else scenario.verified
        unverified = frozenset(range(num_verified, len(block_ids)))
        draft.advance_import(handoff, import_state.Reserved(block_ids, int(scenario.cached), unverified))


def decoded(draft: Draft, handoff: int) -> None:
    draft.imports = replaced(draft.imports, handoff, DECODED)
    worker = draft.machines.scenario.workers[handoff] - 1
    draft.free(worker, [b for b, owner in enumerate(draft.owners[worker]) if owner == handoff + 10])
    draft.grant(worker)


def destroyed(draft: Draft, handoff: int) -> None:
    draft.known = replaced(draft.known, handoff, draft.known[handoff] & ~DESTROYING)
    draft.reads = tuple(read for read in draft.reads if read.handoff != handoff)
    if draft.imports[handoff] >= 0:
        draft.advance_import(handoff, import_state.ChannelDestroyed())


def land(draft: Draft, read: Read, *, is_corrupt: bool = False) -> None:
    handoff, remote, local, status, values = read
    worker = draft.machines.scenario.workers[handoff]
    draft.reads = without(draft.reads, read)
    if status != LANDED:
        values = tuple(draft.remote[block] for block in remote)
        if is_corrupt:
            values = (CORRUPT, *values[1:])
        for block, value in zip(local, values, strict=True):
            if draft.owners[worker - 1][block] not in (handoff, handoff + 20):
                raise Violation("a read wrote into a block that is not its hand-off's any more")
            draft.write(worker - 1, block, value)
    if status == REPORTED or draft.imports[handoff] < 0:
        return
    if draft.workers[worker] == STOPPED:
        draft.reads = (*draft.reads, read._replace(status=LANDED, values=values))
        return
    draft.advance_import(handoff, import_state.ReadCompleted(0, tuple(bytes([value]) for value in values)))


def corrupt(draft: Draft, read: Read) -> None:
    land(draft, read, is_corrupt=True)


def report(draft: Draft, read: Read) -> None:
    draft.reads = (*without(draft.reads, read), read._replace(status=REPORTED))
    draft.advance_import(read.handoff, import_state.ReadFailed(0))


def unopened(draft: Draft, read: Read) -> None:
    draft.reads = without(draft.reads, read)
    draft.advance_import(read.handoff, import_state.OpenFailed(0))


def reissue(draft: Draft) -> None:
    draft.advance_export(0, exporting.Reissue(2))
    draft.begin(1)


def cancel(draft: Draft, handoff: int) -> None:
    draft.advance_import(handoff, import_state.Cancel())


def stop(draft: Draft, worker: int) -> None:
    draft.workers = replaced(draft.workers, worker, STOPPED)


def wake(draft: Draft, worker: int) -> None:
    draft.workers = replaced(draft.workers, worker, RUNNING)


def die(draft: Draft, worker: int) -> None:
    draft.workers = replaced(draft.workers, worker, DEAD)
    if worker == 0:
        for handoff, number in enumerate(draft.imports):
            if number >= 0:
                draft.end_call(handoff, True)
        return
    for handoff in (0, 1):
        if draft.machines.scenario.workers[handoff] == worker and draft.imports[handoff] != NOT_BEGUN:
            if draft.imports[handoff] >= 0:
                draft.end_call(handoff, False)
            draft.imports = replaced(draft.imports, handoff, LOST)
            draft.granted = replaced(draft.granted, handoff, ())
            draft.reads = tuple(read for read in draft.reads if read.handoff != handoff)
    for block in range(len(draft.owners[worker - 1])):
        draft.own(worker - 1, block, FREE)
    draft.claims = replaced(draft.claims, worker - 1, ())


def sever(draft: Draft, handoff: int) -> None:
    draft.net = tuple(packed for packed in draft.net if draft.machines.messages[packed >> 1][0] != handoff)
    draft.end_call(handoff, False)
    draft.end_call(handoff, True)


MOVES: dict[object, Callable[..., None]] = {
    "abort": abort,
    "cancel": cancel,
    "compute": compute,
    "corrupt": corrupt,
    "decoded": decoded,
    "deliver": deliver,
    "destroyed": destroyed,
    "die": die,
    "land": land,
    "lose": lose,
    "moment": moment,
    "reap": reap,
    "reissue": reissue,
    "renew": renew,
    "report": report,
    "reserved": reserved,
    "sever": sever,
    "stop": stop,
    "time": time,
    "timeout": timeout,
    "unopened": unopened,
    "wake": wake,
}
