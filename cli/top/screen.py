"""Draws the data of `tandem top` as lines that fit a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from rich.text import Text

from cli.top.watch import Watch, WatchedRequest, full_name, kv_use, num_live, num_waiting, short
from tandem.enum_words import MEMBER_ROLES, MEMBER_STATES, REQUEST_PHASES
from tandem.v1 import admin_pb2

REQUEST_ORDERS, MEMBER_ORDERS = ("age", "tokens", "phase"), ("name", "load", "KV")
_BARS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = {
    "tokenize": "bright_black",
    "admit": "bright_black",
    "prefill_queue": "yellow",
    "prefill": "bold yellow",
    "transfer": "green",
    "decode_queue": "cyan",
    "decode": "blue",
    "retry": "bold red",
}
_KEYS = "q quit  tab members/requests  ↑↓ choose  s sort  e explain  d drain"
_KV_WIDTH = 12
_MAX_FAULTS = 3


@dataclass(slots=True)
class View:
    """The operator's choices. Only the command changes them."""

    in_members: bool = False  # the arrow keys choose a member, not a request
    request: tuple[str, str] | None = None  # the chosen one: WatchedRequest.key; None: the first
    member: str = ""  # "id@incarnation"; empty: the first one
    request_order: int = 0
    member_order: int = 0
    question: str = ""  # shown in place of the keys
    problem: str = ""  # why the cluster does not answer


def requests_shown(watch: Watch, view: View) -> list[WatchedRequest]:
    """Return live requests in the chosen order, and then the newest ended ones."""
    orders = (
        lambda each: -each.age_s,
        lambda each: -each.timeline.num_tokens,
        lambda each: each.timeline.spans[-1].phase if each.timeline.spans else 0,
    )
    live = sorted(watch.live(), key=orders[view.request_order])
    return [*live, *reversed(watch.ended)]


def members_shown(watch: Watch, view: View) -> list[admin_pb2.MemberStatus]:
    orders = (
        lambda each: (each.role, each.member_id),
        lambda each: -num_live(each),
        lambda each: -kv_use(each).share,
    )
    return sorted(watch.members, key=orders[view.member_order])


def chosen_request(requests: Sequence[WatchedRequest], view: View) -> int:
    """Return the row of the chosen request; 0 if it is not listed any more."""
    return next((row for row, request in enumerate(requests) if request.key == view.request), 0)


def chosen_member(members: Sequence[admin_pb2.MemberStatus], view: View) -> int:
    return next((row for row, member in enumerate(members) if full_name(member) == view.member), 0)


def draw(watch: Watch, view: View, width: int, height: int) -> Text:
    """Return the whole screen: `height` lines of at most `width` characters."""
    members, requests = members_shown(watch, view), requests_shown(watch, view)
    lines = [_title(watch, width), *_state(watch, view), *_figures(watch, width), Text()]
    left = height - len(lines) - 4  # two headings, a blank line, and the keys
    num_members = max(1, min(len(members), max(left // 2, left - len(requests))))
    num_requests = max(0, left - num_members)
    at = chosen_member(members, view) if view.in_members else -1
    lines.append(_heading(_member_cells(None, watch), MEMBER_ORDERS[view.member_order]))
    for row in _shown_rows(len(members), at, num_members):
        lines.append(_row(_member_cells(members[row], watch), row == at))
    at = chosen_request(requests, view) if not view.in_members else -1
    lines += [Text(), _heading(_request_cells(None), REQUEST_ORDERS[view.request_order])]
    for row in _shown_rows(len(requests), at, num_requests):
        lines.append(_row(_request_cells(requests[row]), row == at))
    if not requests and num_requests:
        lines.append(Text("no request yet", style="bright_black"))
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(Text(view.question, style="bold") if view.question else Text(_KEYS, style="bright_black"))
    for line in lines:
        line.truncate(width)
    return Text("\n").join(lines)


def _title(watch: Watch, width: int) -> Text:
    models = sorted({member.model for member in watch.members})
    title = Text.assemble(("tandem", "bold"), "  ", ", ".join(models))
    asked = f"{short(watch.routers[0].router)}, {watch.num_live} live" if watch.routers else "connecting"
    title.append(asked.rjust(max(1, width - len(title))), style="bright_black")
    return title


def _state(watch: Watch, view: View) -> list[Text]:
    if view.problem:
        return [Text(view.problem, style="bold red")]
    if faults := list(islice(watch.faults(), _MAX_FAULTS)):
        return [Text(fault, style="bold red") for fault in faults]
    if news := [event.text for event in watch.events()]:
        return [Text(news[-1], style="bright_black")]
    ready = sum(member.state == admin_pb2.MEMBER_STATE_READY for member in watch.members)
    return [Text(f"{ready} of {len(watch.members)} members are ready", style="bright_black")]


def _figures(watch: Watch, width: int) -> list[Text]:
    sparks = max(6, (width - 56) // 2)
    figures = []
    for name, rate, title, latency, field in (
        ("requests", "num_ended", "TTFT", "ttft", "ttft_p50_s"),
        ("tokens", "num_tokens", "ITL", "itl", "itl_p50_s"),
    ):
        known = watch.latency(latency)
        median, tail = known if known is not None else (None, None)
        figures.append(
            Text.assemble(
                (f"{name:<9}", "bright_black"),
                (f"{watch.recent(rate):>7.1f}/s ", "bold"),
                (sparkline(watch.series(rate), sparks), "blue"),
                (f"  {title:<5}", "bright_black"),
                (f"{duration_text(median):>8}", "bold"),
                (f" p99 {duration_text(tail):>8} ", ""),
                (sparkline(watch.series(field), sparks), "blue"),
            )
        )
    return figures


Cells = list[tuple[str, str]]  # text and style


def _member_cells(member: admin_pb2.MemberStatus | None, watch: Watch) -> Cells:
    """Return the cells of a member, or of the heading."""
    if member is None:
        numbers = f"{'live':>5}", f"{'wait':>5}", f"{'tokens/s':>9}"
        names = f"{'member':<14}", f"{'role':<8}", f"{'state':<10}", *numbers, "KV"
        return [(name, "") for name in names]
    use = kv_use(member)
    is_router = member.role == admin_pb2.MEMBER_ROLE_ROUTER
    rate = watch.tokens_per_s.get(full_name(member))
    state = f"silent {member.last_seen_s:.0f} s" if member.last_seen_s else MEMBER_STATES.label(member.state)
    is_fault = bool(member.last_seen_s) or member.state == admin_pb2.MEMBER_STATE_UNHEALTHY
    live = _router_live(member, watch) if is_router else num_live(member)
    return [
        (f"{member.member_id[:14]:<14}", ""),
        (f"{MEMBER_ROLES.label(member.role):<8}", "bright_black"),
        (f"{state[:10]:<10}", "bold red" if is_fault else "bright_black"),
        (f"{live:>5}", ""),
        (f"{num_waiting(member) if not is_router else '':>5}", ""),
        (f"{'' if rate is None else f'{rate:.0f}':>9}", ""),
        (_bar(use.share, _KV_WIDTH) if use.num_blocks else " " * _KV_WIDTH, "blue"),
        (f"{100 * use.share:>4.0f}%" if use.num_blocks else "", ""),
    ]


def _request_cells(request: WatchedRequest | None) -> Cells:
    """Return the cells of a request, or of the heading."""
    if request is None:
        names = (f"{'request':<22}", f"{'phase':<14}", f"{'age':>8}", f"{'tokens':>7}")
        return [(name, "") for name in (*names, f"{'prefill':<11}", f"{'decode':<11}")]
    timeline = request.timeline
    phase = REQUEST_PHASES.label(timeline.spans[-1].phase) if timeline.spans else ""
    is_fault = timeline.outcome not in ("", "ok", "cancelled")
    style = "bold red" if is_fault else "bright_black" if timeline.outcome else _PHASE_STYLES.get(phase, "")
    return [
        (f"{printable(timeline.label or timeline.request_id)[:22]:<22}", "bright_black" if timeline.outcome else ""),
        (f"{(timeline.outcome or phase.replace('_', ' '))[:14]:<14}", style),
        (f"{duration_text(request.age_s):>8}", ""),
        (f"{timeline.num_tokens:>7}", ""),
        (f"{short(timeline.prefill_member)[:11] or '-':<11}", "bright_black"),
        (f"{short(timeline.decode_member)[:11] or '-':<11}", "bright_black"),
    ]


def _heading(cells: Cells, order: str) -> Text:
    text = Text(" ".join(cell for cell, _ in cells), style="underline")
    text.append(f" by {order}", style="not underline bright_black")
    return text


def _row(cells: Cells, is_chosen: bool) -> Text:
    row = Text(" ").join(Text(cell, style=style) for cell, style in cells)
    if is_chosen:
        row.stylize("reverse")
    return row


def _shown_rows(number: int, chosen: int, height: int) -> range:
    """Return the rows that are shown, the chosen one among them; -1: none is chosen."""
    first = max(0, min(chosen - height + 1, number - height))
    return range(first, min(number, first + height))


def _router_live(member: admin_pb2.MemberStatus, watch: Watch) -> int:
    return sum(router.num_live for router in watch.routers if router.router == full_name(member))


def _bar(share: float, width: int) -> str:
    filled = round(share * width)
    return "█" * filled + "░" * (width - filled)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return bars of the last values, the highest one full; blank before the first value."""
    last = list(values)[-width:]
    most = max(last, default=0.0) or 1.0
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in last).rjust(width)


def duration_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.01:
        return f"{1e3 * seconds:.2f} ms"
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def printable(text: str) -> str:
    """Return the text without characters that would move the cursor or change the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
