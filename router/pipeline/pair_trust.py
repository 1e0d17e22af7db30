"""What this router's hand-offs have shown of each pair of workers: told of attempts, asked by placement.

Owns the breakers, the logs and the figure of them. A failed hand-off counts against its pair once both workers have
been heard since: where one is not, the failure was its own, and the fleet deals with it. Never chooses a pair.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from router.fleet.fleet import Fleet
from router.pipeline.failures import AttemptFailed
from router.policies.breakers import BreakerPolicy, BreakerState, Pair, PairBreakers, Trial

_LOG = logging.getLogger("tandem.router.pairs")


@dataclass(frozen=True, slots=True)
class _Suspicion:
    trial: Trial
    failed_s: float
    reason: str


class PairTrust:
    def __init__(self, *, policy: BreakerPolicy, fleet: Fleet, telemetry: Telemetry) -> None:
        self._breakers = PairBreakers(policy)
        self._fleet = fleet
        self._telemetry = telemetry
        self._suspicions: list[_Suspicion] = []  # at most one per attempt in the time that a check takes

    def passed_over(self) -> frozenset[Pair]:
        """Pairs that no request should be given now."""
        self._judge()
        return self._breakers.passed_over(_now_s())

    @contextmanager
    def trying(self, exporter: MemberId, importer: MemberId) -> Iterator[Callable[[], None]]:
        """One attempt between the two. What it gives is called when the KV has arrived; AttemptFailed is heard too."""
        trial = self._breakers.begin((exporter, importer), _now_s())
        is_over = False

        def arrived() -> None:
            nonlocal is_over
            if not is_over and self._breakers.succeeded(trial, _now_s()):
                _LOG.info("hand-offs between two workers work again", extra=_names(trial))
            is_over = True
            self._publish()

        self._publish()
        try:
            yield arrived
        except AttemptFailed as failure:
            if failure.is_of_pair and not is_over:
                is_over = True
                self._suspicions.append(_Suspicion(trial, _now_s(), failure.reason))
            raise
        finally:
            if not is_over:
                self._breakers.dropped(trial)
                self._publish()

    def _judge(self) -> None:
        suspicions, self._suspicions = self._suspicions, []
        for suspicion in suspicions:
            peers = [self._fleet.peer(member) for member in suspicion.trial.pair]
            there = [peer for peer in peers if peer is not None]
            if len(there) < len(peers):
                self._breakers.dropped(suspicion.trial)
            elif all(peer.heard_s > suspicion.failed_s for peer in there):
                self._count(suspicion)
            else:
                self._suspicions.append(suspicion)
        self._breakers.keep(self._fleet.connected())
        self._publish()

    def _count(self, suspicion: _Suspicion) -> None:
        pause_s = self._breakers.failed(suspicion.trial, _now_s(), random.random())
        if pause_s is not None:
            fields = _names(suspicion.trial) | {"reason": suspicion.reason, "pause_s": round(pause_s, 1)}
            _LOG.warning("hand-offs between two workers fail: they are not paired for a while", extra=fields)
            self._telemetry.count("tandem_pair_breaker_openings_total", reason=suspicion.reason)

    def _publish(self) -> None:
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            self._telemetry.gauge("tandem_pair_breaker_state", self._breakers.count(state), state=state)


def _names(trial: Trial) -> dict[str, object]:
    exporter, importer = trial.pair
    return {"exporter": str(exporter), "importer": str(importer)}


def _now_s() -> float:
    """The clock by which peers are heard."""
    return asyncio.get_running_loop().time()
