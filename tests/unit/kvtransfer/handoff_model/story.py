"""Steps and worlds in words."""

from kvtransfer.protocol.handoff import Settle, Settled
from tests.unit.kvtransfer.handoff_model.machines import Machines
from tests.unit.kvtransfer.handoff_model.scenario import Label, World
from tests.unit.kvtransfer.handoff_model.world import Draft, Read


def describe(machines: Machines, world: World) -> str:
    draft = Draft(machines, world)
    importers = [machines.imports[number].phase if number >= 0 else number for number in draft.imports]
    exporters = [machines.exports[number].phase for number in draft.exports]
    return f"importers {importers}, exporters {exporters}, local blocks {draft.owners}, waiting {draft.claims}"


def tell(machines: Machines, label: Label) -> str:
    """Return a step as one line of text."""
    kind, *rest = label
    names = {0: "A", 1: "B"}
    if kind in ("deliver", "lose"):
        assert isinstance(rest[0], int)
        handoff, to_importer, message = machines.messages[rest[0] >> 1]
        what = type(message).__name__ if message is not None else "end of call"
        if isinstance(message, Settled):
            what += "{valid}" if message.valid else "{invalid}"
        if isinstance(message, Settle):
            what += f"{{{message.outcome}}}"
        way = "reaches the importer" if to_importer else "reaches the exporter"
        again = ", a copy stays" if kind == "deliver" and rest[1] else ""
        return f"{names[handoff]}: {what} {'is lost' if kind == 'lose' else way}{again}"
    read = rest[0] if rest else None
    if isinstance(read, Read):
        end = {
            "land": "lands",
            "report": "is reported as failed",
            "corrupt": "lands corrupted",
            "unopened": "finds no way",
        }[str(kind)]
        return f"{names[read.handoff]}: read of remote {list(read.remote)} into local {list(read.local)} {end}"
    texts = {
        "compute": "prefill {} computes a block",
        "reap": "the exporter looks at its clock (ticket {})",
        "time": "the lease of ticket {} runs out by the exporter's clock",
        "timeout": "the importer of {} reaches its deadline",
        "renew": "the importer of {} renews",
        "reserved": "the reservation of {} reaches its importer",
        "moment": "all that is on its way to the importer of {} reaches it as one",
        "decoded": "{} is decoded to its end",
        "destroyed": "the channel of {} is destroyed",
        "cancel": "the request of {} is cancelled at the importer",
        "abort": "prefill {} is aborted",
        "sever": "the call of {} breaks",
    }
    if kind in ("wake", "stop", "die"):
        who = "the prefill worker" if rest[0] == 0 else f"decode worker {rest[0]}"
        return who + {"wake": " wakes up", "stop": " is stopped", "die": " dies"}[str(kind)]
    if kind == "reissue":
        return "the ticket is reissued: attempt 2 is B"
    return texts[str(kind)].format(names[rest[0]])  # type: ignore[index]
