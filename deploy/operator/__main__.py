"""`python -m deploy.operator`: on Kubernetes, sets what it costs to end each worker's pod.

With `--follow on` it also scales the Deployments of both pools to the target of `tandem scale`.
"""

import argparse
import asyncio
import os
import socket
from contextlib import suppress

from cluster.accounts.key_store import configured_key
from cluster.observe.logs import configure_logs
from cluster.process import announce_ready, exit_process, run_process, stop_requested
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import WorkerLoads
from cluster.serving.tls import ClusterTls, load_tls
from cluster.settings.config import RouterConfig
from cluster.settings.config_sources import LineParser, load_config, refuse_unknown
from deploy.operator.api_server import Access, ApiServer
from deploy.operator.pools import DeploymentFollower, Pools, keep_costs


def parser() -> argparse.ArgumentParser:
    made = LineParser(prog="python -m deploy.operator", description=__doc__, allow_abbrev=False)
    made.add_argument("--follow", choices=("on", "off"), default="off", help="scale the pools to the scale target")
    made.add_argument("--router", default="tandem-router:50051", help="gRPC address of the routers' Service")
    made.add_argument("--namespace", default="", help="namespace of the Deployments (default: that of this pod)")
    made.add_argument(
        "--api-server",
        default="",
        metavar="URL",
        help="URL of Kubernetes' API server (default: that of this pod's service account)",
    )
    made.add_argument(
        "--admin-key-file", default=os.environ.get("TANDEM_ADMIN_KEY_FILE", ""), help="file with the routers' admin key"
    )
    return made


async def _main() -> None:
    arguments, unknown = parser().parse_known_args()
    refuse_unknown(parser(), unknown)
    config = load_config(RouterConfig, {"model": "-", "host": "127.0.0.1"})  # it serves nothing
    configure_logs(config.log_level, config.log_format)
    stop = stop_requested()
    tls = load_tls(config, config.advertise_host or config.host)
    working = asyncio.create_task(_work(arguments, config, tls), name="operator")
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working


async def _work(arguments: argparse.Namespace, config: RouterConfig, tls: ClusterTls | None) -> None:
    access = Access(arguments.api_server) if arguments.api_server else Access.in_cluster(os.environ)
    api, namespace = ApiServer(access), arguments.namespace or Access.namespace()
    key = configured_key("", arguments.admin_key_file, "--admin-key")
    pools = Pools(api, namespace, WorkerLoads([arguments.router], key, tls).ask)
    if arguments.follow == "off":
        announce_ready(follows="nothing")
        await keep_costs(pools)
    registry = Registry(url=config.redis, cluster_name=config.cluster_name, ttl_s=config.registration_ttl_s)
    follower = DeploymentFollower(
        api=api,
        pools=pools,
        registry=registry,
        namespace=namespace,
        name=f"the operator in {namespace}, pod {socket.gethostname()}",
        announce=lambda: announce_ready(follows="scale target"),
    )
    costs = asyncio.create_task(keep_costs(pools), name="pod deletion costs")
    try:
        await follower.run()
    finally:
        costs.cancel()
        await registry.close()


if __name__ == "__main__":
    exit_process(run_process("operator", _main))
