"""Publishes what disaggregation changes, as gauges."""

from cluster.observe.telemetry import Telemetry
from router.policies.effect import NO_EFFECT, Comparison


def publish_effect(comparison: Comparison, telemetry: Telemetry) -> None:
    """Publish how much earlier or later first tokens are at pairs, as far as that is known."""
    for effect in {comparison.ttft, comparison.predicted_ttft} - {NO_EFFECT}:
        for bound, value in (("mean", effect.mean_s), ("low", effect.low_s), ("high", effect.high_s)):
            telemetry.gauge("tandem_disaggregation_ttft_effect_seconds", value, basis=effect.basis, bound=bound)
        telemetry.gauge("tandem_disaggregation_trials", effect.num_requests, basis=effect.basis)
