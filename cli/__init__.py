"""The `tandem` command, and what starts a cluster on one machine."""

import os

# Children are made by fork, so that they end with whoever made them. gRPC's own handlers of a fork, which it sets up
# when it is imported, may abort the child before it has become its program. No child of ours speaks gRPC before that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
