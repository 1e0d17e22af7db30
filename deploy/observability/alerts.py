"""The alerts: what is wrong, when it counts as wrong, and an example that raises it.

One list; `rules.yaml`, `rules_test.yaml` and the tests are made from it. docs/runbooks.md has a section for each name.
"""

from dataclasses import dataclass

_MISSES = (
    'sum by (phase) (rate(tandem_slo_misses_total{latency="%s"}[5m])) / scalar(sum(rate(tandem_requests_total[5m])))'
)
_D, _R = (
    (f'tandem_build_info{{instance="{instance}",member="{member}"}}', "1x30")
    for instance, member in (("d", "decode-0"), ("r", "router-0"))
)


def _named(expr: str) -> str:
    """Return an expression with the label `member` beside `instance`, which is an address. It multiplies by 1."""
    return f"({expr}) * on (instance) group_left (member) max by (instance, member) (tandem_build_info)"


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expr: str
    for_minutes: int
    severity: str  # page: a human now; ticket: a human today
    summary: str  # may name labels of the alert
    series: tuple[tuple[str, str], ...]  # of the example: series and values, one a minute, as promtool reads them
    labels: tuple[tuple[str, str], ...] = ()  # that the example's alert has, beside the severity


ALERTS = (
    Alert(
        "TandemTtftOverTarget",
        f"{_MISSES % 'ttft'} > 0.05",
        5,
        "page",
        "first tokens miss their target; most of the time passes in phase {{ $labels.phase }}",
        (
            ('tandem_slo_misses_total{latency="ttft",phase="prefill_queue"}', "0+30x30"),
            ('tandem_requests_total{outcome="ok"}', "0+60x30"),
        ),
        (("phase", "prefill_queue"),),
    ),
    Alert(
        "TandemItlOverTarget",
        f"{_MISSES % 'itl'} > 0.05",
        5,
        "page",
        "the time between tokens misses its target; most of it passes in phase {{ $labels.phase }}",
        (
            ('tandem_slo_misses_total{latency="itl",phase="transfer"}', "0+30x30"),
            ('tandem_requests_total{outcome="ok"}', "0+60x30"),
        ),
        (("phase", "transfer"),),
    ),
    Alert(
        "TandemRequestsFail",
        'sum by (outcome) (rate(tandem_requests_total{outcome!~"ok|cancelled"}[5m]))'
        " / scalar(sum(rate(tandem_requests_total[5m]))) > 0.01",
        5,
        "page",
        "more than 1 % of the requests end with {{ $labels.outcome }}",
        (
            ('tandem_requests_total{outcome="ok"}', "0+60x30"),
            ('tandem_requests_total{outcome="overloaded"}', "0+6x30"),
        ),
        (("outcome", "overloaded"),),
    ),
    Alert(
        "TandemHandOffsFail",
        'sum by (transport, reason) (rate(tandem_handoffs_total{side="importer",outcome="failed"}[5m]))'
        ' / scalar(sum(rate(tandem_handoffs_total{side="importer"}[5m]))) > 0.01',
        5,
        "page",
        "more than 1 % of the hand-offs by {{ $labels.transport }} fail: {{ $labels.reason }}",
        (
            (
                'tandem_handoffs_total{side="importer",transport="tcp",outcome="failed",reason="lease_expired"}',
                "0+6x30",
            ),
            ('tandem_handoffs_total{side="importer",transport="tcp",outcome="ok",reason=""}', "0+60x30"),
        ),
        (("transport", "tcp"), ("reason", "lease_expired")),
    ),
    Alert(
        "TandemSlowerTransport",
        _named("sum by (instance, broken, taken, reason) (increase(tandem_transport_fallbacks_total[10m])) > 0"),
        5,
        "ticket",
        "{{ $labels.member }} uses {{ $labels.taken }} after {{ $labels.broken }} failed: {{ $labels.reason }}",
        (
            (
                'tandem_transport_fallbacks_total{instance="d",broken="shm",taken="tcp",reason="read_failed"}',
                "0+3x30",
            ),
            _D,
        ),
        (("member", "decode-0"), ("broken", "shm"), ("taken", "tcp"), ("reason", "read_failed")),
    ),
    Alert(
        "TandemSlowLink",
        # Links and workers: what the page names, by the same factors (router/overview/slowness.py). The mean is taken
        # because one ratio near the factor may fall below it.
        "max by (importer, exporter, transport) (avg_over_time(tandem_link_slowdown_ratio[5m])) > 3",
        2,
        "ticket",
        "{{ $labels.importer }} reads KV from {{ $labels.exporter }} by {{ $labels.transport }} {{ $value }} times"
        " slower than usual",
        (
            *(
                (f'tandem_link_slowdown_ratio{{instance="r",importer="{name}",exporter="p",transport="tcp"}}', "1x30")
                for name in "ab"
            ),
            *(
                (f'tandem_link_slowdown_ratio{{instance="{r}",importer="c",exporter="p",transport="tcp"}}', "9x30")
                for r in "rs"
            ),
        ),
        (("importer", "c"), ("exporter", "p"), ("transport", "tcp")),
    ),
    Alert(
        "TandemSlowWorker",
        "max by (worker, leg) (avg_over_time(tandem_worker_slowdown_ratio[5m])) > 1.7",
        2,
        "ticket",
        "{{ $labels.worker }} needs {{ $value }} times as long as other workers for its {{ $labels.leg }} steps",
        (
            *((f'tandem_worker_slowdown_ratio{{instance="r",worker="{name}",leg="decode"}}', "1x30") for name in "ab"),
            *((f'tandem_worker_slowdown_ratio{{instance="{r}",worker="c",leg="decode"}}', "2x30") for r in "rs"),
        ),
        (("worker", "c"), ("leg", "decode")),
    ),
    Alert(
        "TandemPrefillOnDecode",
        'sum by (reason) (rate(tandem_local_prefills_total{reason!~"colocated|predicted"}[5m]))'
        " / scalar(sum(rate(tandem_placement_decisions_total[5m]))) > 0.5",
        5,
        "page",
        "most prompts are prefilled by decode workers: {{ $labels.reason }}",
        (
            ('tandem_local_prefills_total{reason="no_prefill_worker"}', "0+60x30"),
            ('tandem_placement_decisions_total{reason="load"}', "0+60x30"),
        ),
        (("reason", "no_prefill_worker"),),
    ),
    Alert(
        "TandemKvPressure",
        # Preemption and the watermark of hand-offs keep blocks free, so that the share in use may stay below any bound.
        _named(
            "sum by (instance) (rate(tandem_preemptions_total[5m])) > 3 / 60"
            " or sum by (instance) (avg_over_time(tandem_handoffs_waiting[5m])) > 0.5"
        ),
        2,
        "page",
        "the KV pool of {{ $labels.member }} is full: sequences are preempted, or hand-offs wait for room",
        (('tandem_preemptions_total{instance="d"}', "0+6x30"), ('tandem_handoffs_waiting{instance="d"}', "0x30"), _D),
        (("member", "decode-0"),),
    ),
    Alert(
        "TandemPairBreakerOpen",
        "max by (exporter, importer) (tandem_pair_breaker_state) > 0",
        1,
        "page",
        "hand-offs from {{ $labels.exporter }} to {{ $labels.importer }} fail, so that routers use other pairs",
        (('tandem_pair_breaker_state{instance="r",exporter="p",importer="d",state="open"}', "1x30"),),
        (("exporter", "p"), ("importer", "d")),
    ),
    Alert(
        "TandemMemberFlapping",
        _named("sum by (instance, role) (increase(tandem_member_changes_total[15m])) > 6"),
        5,
        "page",
        "{{ $labels.role }} workers join and leave again and again, as {{ $labels.member }} sees it",
        (('tandem_member_changes_total{instance="r",role="decode",change="restarted"}', "0+2x60"), _R),
        (("member", "router-0"), ("role", "decode")),
    ),
    Alert(
        "TandemRedisAway",
        _named("tandem_registry_age_seconds > 15"),
        1,
        "page",
        "{{ $labels.member }} has read no membership from Redis for {{ $value }} s",
        (('tandem_registry_age_seconds{instance="r"}', "60x30"), _R),
        (("member", "router-0"),),
    ),
    Alert(
        "TandemUnverifiedKv",
        _named("sum by (instance) (increase(tandem_kv_blocks_unverified_total[10m])) > 0"),
        5,
        "ticket",
        "{{ $labels.member }} decodes KV that was not compared with its digests",
        (('tandem_kv_blocks_unverified_total{instance="d"}', "0+10x30"), _D),
        (("member", "decode-0"),),
    ),
    Alert(
        "TandemClockSkew",
        _named("abs(tandem_clock_skew_seconds) > 1"),
        5,
        "ticket",
        "the clock of {{ $labels.member }} is {{ $value }} s from that of Redis",
        (('tandem_clock_skew_seconds{instance="d"}', "-3x30"), _D),
        (("member", "decode-0"),),
    ),
)
