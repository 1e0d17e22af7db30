"""The events of a run, line by line: which member did what, and when by the simulated clock."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cluster.observe.logs import TextFormatter
from tests.chaos.simulated.machine.loop import current
from tests.chaos.simulated.machine.machine import world
from tests.chaos.simulated.schedules.mishaps import Kind, Mishap
from tests.chaos.simulated.schedules.mix import DirectAsk
from tests.chaos.simulated.schedules.schedule import Ask, Schedule
from tests.chaos.simulated.world import Result


def describe(schedule: Schedule) -> str:
    """Return the schedule in lines."""
    lines = [
        f"seed {schedule.seed}: {schedule.num_routers} routers, {schedule.num_prefills} prefill workers with"
        f" {_numbers(schedule.prefill_blocks)} blocks and {schedule.num_decodes} decode workers with"
        f" {_numbers(schedule.decode_blocks)}; a block holds {schedule.block_size} tokens",
        f"  each has {schedule.drain_grace_s:g} s to leave, a request {schedule.max_attempts} attempts; a step takes"
        f" {schedule.max_prefill_tokens} tokens of {schedule.max_num_seqs} sequences",
    ]
    extras = {
        f"{schedule.swap_blocks} blocks of swap space per decode worker": schedule.swap_blocks,
        "devices compute on their own": schedule.launches,
        f"placement {schedule.mix.placement}, targets {schedule.mix.slo_ttft_ms:g} ms to the first token and"
        f" {schedule.mix.slo_tpot_ms:g} ms per token; clients begin after {schedule.mix.warm_up_s:g} s": schedule.mix,
        "sequences draft token ahead": schedule.speculates,
        "there is no prefill pool": schedule.mix.is_colocated,
        "reads go wrong": schedule.read_faults,
        "KV has keyed digests": schedule.mix.is_keyed,
        f"members' calls are frames: {schedule.mix.wires}": schedule.mix.wires,
        f"the cluster's secret is rotated: {schedule.mix.rotation}": schedule.mix.rotation,
        f"proofs of members' calls: {schedule.mix.proofs}": schedule.mix.proofs,
        f"tenants of weight {_numbers(schedule.tenants)}": schedule.tenants,
        f"{schedule.host_blocks} blocks of host memory for prefixes, {schedule.disk_blocks} of disk": (
            schedule.host_blocks
        ),
    }
    lines += [f"  {text}" for text, holds in extras.items() if holds]
    for number, ask in enumerate(schedule.asks):
        cancels = "" if ask.cancel_after is None else f", cancels after {ask.cancel_after}"
        if ask.reconnect_after is not None:
            cancels += f", loses its connection after {ask.reconnect_after}"
        prompt = f"{ask.num_tokens} tokens, {ask.max_tokens} more, n={ask.n}{_account(ask)}"
        lines.append(f"  request {number}: to router {ask.router} at {ask.at_s:.3f} s, {prompt}{cancels}")
    for number, direct in enumerate(schedule.mix.direct_asks):
        cancels = "" if direct.cancel_after is None else f", cancels after {direct.cancel_after}"
        prompt = f"{direct.num_tokens} tokens, {direct.max_tokens} more, n={direct.n}{_account(direct)}"
        way = f"to {direct.prefill} and {direct.decode}" if direct.prefill else f"to {direct.decode} alone"
        lines.append(f"  direct request {number}: {way} at {direct.at_s:.3f} s, {prompt}{cancels}")
    if schedule.mix.of_both:
        lines.append(f"  workers of both roles: {', '.join(schedule.mix.of_both)}")
    for flip in schedule.mix.flips:
        lines.append(f"  {flip.place} is given the role {flip.role} at {flip.at_s:.3f} s, for {flip.for_s:g} s")
    lines += map(_mishap, schedule.mishaps)
    lines += [f"  {each.message}, time {each.occurrence + 1}, is malformed" for each in schedule.mutations]
    return "\n".join(lines)


def tell(result: Result) -> str:
    """Return the events of the run and its failures in lines."""
    lines = [f"{at_s:10.4f} s  {who:<11} {what}" for at_s, who, what in result.happened]
    return "\n".join([*lines, "", *(f"WRONG: {violation}" for violation in result.violations)])


@contextmanager
def overheard() -> Iterator[None]:
    """Record the members' log messages as events."""
    root, handler = logging.getLogger(), _Overhears()
    handler.setFormatter(_Words())
    disabled, level, handlers = root.manager.disable, root.level, root.handlers
    logging.disable(logging.NOTSET)
    root.setLevel(logging.INFO)
    root.handlers = [handler]
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)
        logging.disable(disabled)


class _Overhears(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(("tandem", "kvtransfer")):
            world().say(current(), self.format(record))


class _Words(TextFormatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).partition(" ")[2]  # without the real time


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _account(ask: Ask | DirectAsk) -> str:
    tenant = f", of tenant {ask.tenant}" if ask.tenant else ""
    return tenant if ask.prompt_logprobs is None else f"{tenant}, prompt_logprobs={ask.prompt_logprobs}"


def _mishap(mishap: Mishap) -> str:
    when = f"at {mishap.at_s:.4f} s"
    if mishap.phase is not None:
        when = f"{mishap.at_s:.4f} s after {mishap.phase}, time {mishap.occurrence + 1}"
    jump = f" ({mishap.after_bytes} bytes later)" if mishap.kind is Kind.TORN else ""
    jump += f" by {mishap.jump_s:+g} s" if mishap.jump_s else ""
    return f"  {mishap.role} {mishap.number} {mishap.kind}{jump} {when}, for {mishap.for_s:g} s"
