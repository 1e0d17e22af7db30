"""Tandem's tests, and what they start."""

import os
import sys

# Members are made by fork, so that they end with their test. gRPC's own handlers of a fork, which it would set up when
# it is imported, may abort the child before it has become its program. No child of ours speaks gRPC before that.
assert "grpc" not in sys.modules, "it would not hear"
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
