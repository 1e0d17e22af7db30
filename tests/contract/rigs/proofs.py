"""The proofs with which both sides of the contract tests' connections begin."""

from cluster.auth.keys import ClusterKeys
from cluster.messages import MemberId
from cluster.observe.telemetry import Telemetry
from kvtransfer.transports.proven_connections import ConnectionProofs

KEY = ClusterKeys(b"k" * 32)
TELEMETRY = Telemetry.of_worker()
PROOFS = ConnectionProofs(KEY, MemberId("p0", "a1"), TELEMETRY)  # of both sides, unless a test is about their names
