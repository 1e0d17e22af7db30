"""Render the results so far of clusters on one GPU as Markdown. Pure."""

import math
from collections.abc import Mapping
from typing import Any


def table(figures: Mapping[str, Any]) -> str:
    lines = [*_about(figures), ""]
    lines += [
        "| | requests/s | TTFT p50 / p99 ms | ITL p50 / p99 ms | goodput | ITL p99 of streams alone / in a storm, ms |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(mode, found) for mode, found in figures["modes"].items() if "conversations" in found]
    lines += ["", *(_kill(kill) for kill in figures["kills"])]
    lines += [f"{mode}: {line}." for mode, found in figures["modes"].items() for line in _pairs(found)]
    if said := figures["problem"].splitlines():  # of a process that ended the last line is its error
        lines.append(f"**It ended early: {said[0]}{' ' + said[-1].strip() if len(said) > 1 else ''}**")
    return "\n".join(lines)


def _about(figures: Mapping[str, Any]) -> list[str]:
    lines = [f"{name}: {value}." for name, value in figures["setting"].items() if value]
    if load := figures["load"]:
        lines.append(
            f"{load['requests']} conversations by `tandem bench`, {load['rate_rps']:.1f} a second; lengths "
            f"{load['lengths']}: {load['mean_prompt_tokens']:,.0f} tokens of prompt and "
            f"{load['mean_output_tokens']:,.0f} of answer in the mean."
        )
    return lines


def _row(mode: str, found: Mapping[str, Any]) -> str:
    talk = found["conversations"]
    ttft, itl = (
        " / ".join(f"{1e3 * talk[name].get(share, 0.0):.1f}" for share in ("p50", "p99"))
        for name in ("ttft_s", "itl_s")
    )
    storm = " / ".join(f"{1e3 * found.get(name, {}).get('p99', math.nan):.1f}" for name in ("alone", "in_storm"))
    ok, sent = talk["requests"]["ok"], talk["requests"]["sent"]
    rate = f"{talk['throughput']['requests_per_s']:.1f} ({ok} of {sent})"
    return f"| {mode} | {rate} | {ttft} | {itl} | {talk['goodput']['share']:.1%} | {storm} |"


def _kill(kill: Mapping[str, Any]) -> str:
    requests = kill["requests"]
    errors = f" ({requests['errors']})" if requests["errors"] else ""
    lost = f"{kill['lost']} of {requests['sent']} requests lost{errors}"
    gaps = " and ".join(f"{kill[name].get('max', 0.0):.1f} s" for name in ("ttft_s", "itl_s"))
    return f"kill -9 of the {kill['role']} worker: {lost}, longest wait for a first and for a next token {gaps}"


def _pairs(found: Mapping[str, Any]) -> list[str]:
    """Return the transports of KV as the cluster reports them."""
    return [
        f"{member['member']} read from {pair['exporter']} by {pair['transport']}, {pair['bytes_per_s'] / 1e9:.2f} GB/s"
        for member in found.get("status", {}).get("members", [])
        for pair in member["links"]
    ]
