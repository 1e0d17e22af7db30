"""`tandem demo`, which `make demo` runs: one prompt through a whole cluster on this machine, with the demo model.

It starts Redis, a router, a prefill worker and a decode worker, sends one prompt over gRPC, prints its tokens as they
arrive and the phases of the request, and stops everything. It exits with 0 only if all of that succeeded.
"""

import argparse
import asyncio
import sys
from collections import deque

from cli.local.local_cluster import LocalCluster, Plan
from cli.table import ledger_text
from cli.verbs.clusters import up
from cli.verbs.clusters.up import check_before_start, plan_from, run_until_stopped, tell
from cluster.errors import TandemError
from cluster.process import ExitStatus
from tandem.client import AsyncClient
from tandem.errors import TandemError as ClientError
from tandem.results import Result

PROMPT = "def read_file(path):\n    "  # the demo model was trained on Python source only
MAX_TOKENS = 52
_KEPT_LINES = 40

HELP = "start a cluster of the demo model, send one prompt, show where its time went, and stop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    up.add_arguments(parser)
    parser.set_defaults(port=0, grpc_port=0, kv_cache_memory="256MiB")


def run(arguments: argparse.Namespace) -> int:
    plan, config = plan_from(arguments)
    check_before_start(plan, config)
    logs: deque[str] = deque(maxlen=_KEPT_LINES)
    told: list[Result] = []

    async def act(cluster: LocalCluster) -> None:
        tell(f"router at {cluster.grpc} (gRPC) and http://{cluster.http}")
        told.append(await _one_prompt(cluster.grpc, plan))

    try:
        asyncio.run(run_until_stopped(plan, act, echo=lambda name, line: logs.append(f"[{name}] {line}")))
    except (TandemError, ClientError) as error:
        sys.stderr.write("".join(f"{line}\n" for line in logs))
        tell(f"{error.reason}: {error}")
        return ExitStatus.CRASHED
    if not told:
        tell("interrupted")
        return ExitStatus.CRASHED
    tell("stopped; nothing is left running")
    return ExitStatus.OK


async def _one_prompt(address: str, plan: Plan) -> Result:
    authorities, name = (plan.tls.ca_file, plan.tls.server_name or None) if plan.tls is not None else (None, None)
    async with AsyncClient(address, plan.admin_key, tls_ca=authorities, tls_server_name=name) as client:
        print(f"\n{PROMPT}", end="", flush=True)
        generation = client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0)
        async for delta in generation:
            print(delta.text, end="", flush=True)
        result = await generation.result()
    print(f"\n\n{ledger_text(result)}\n", flush=True)
    return result
