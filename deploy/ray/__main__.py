"""Command line of Tandem's pools on a Ray cluster: `python -m deploy.ray up|scale|follow|status|down`.

python -m deploy.ray up --address auto --redis redis://10.0.0.5:6379/0 --prefill 2 --decode 2 --set model=/models/x
python -m deploy.ray scale --address auto prefill=4 python -m deploy.ray follow --address auto --redis
redis://10.0.0.5:6379/0 --set model=/models/x
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence

import ray

from cluster.errors import ConfigError, TandemError
from cluster.identity import advertised_host
from cluster.messages import Role
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import WorkerLoads
from cluster.registry.scale_target import POOLS
from cluster.serving.tls import load_tls
from cluster.settings.config import RouterConfig
from cluster.settings.config_sources import load_config
from deploy.ray.follower import RayFollower
from deploy.ray.pools import RayPools, Resources, actor_name


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        ray.init(address=options.address, namespace=options.namespace, log_to_driver=False)
        pools = RayPools(
            namespace=options.namespace,
            settings=_settings(options),
            resources={role: Resources(options.cpus, options.gpus) for role in POOLS.values()},
        )
        _perform(pools, options)
    except (TandemError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _perform(pools: RayPools, options: argparse.Namespace) -> None:
    match options.verb:
        case "up":
            pools.scale(Role.PREFILL, options.prefill)
            pools.scale(Role.DECODE, options.decode)
            pools.scale(Role.BOTH, options.colocated)
            for line in pools.scale(Role.ROUTER, 1):
                print(line)
        case "scale":
            for name, size in _pairs(options.pool).items():
                if name not in POOLS or not size.isdigit():
                    raise ConfigError(f"write prefill=N, decode=N or colocated=N, not {name}={size}")
                pools.scale(POOLS[name], int(size))
        case "follow":
            asyncio.run(_follow(pools, _settings(options)))
        case "status":
            for role in Role:
                print(f"{actor_name(role)}: {', '.join(pools.members(role)) or '-'}")
        case "down":
            pools.stop()


async def _follow(pools: RayPools, settings: Mapping[str, str]) -> None:
    """Follow the scale target until the process is stopped. Raises ConfigError."""
    config = load_config(RouterConfig, {}, {f"TANDEM_{name.upper()}": value for name, value in settings.items()})
    registry = Registry(url=config.redis, cluster_name=config.cluster_name, ttl_s=config.registration_ttl_s)
    tls = load_tls(config, advertised_host(config))

    async def loads() -> Mapping[str, float]:
        routers = [member.address for member in await registry.members() if member.role is Role.ROUTER]
        return await WorkerLoads(routers, config.admin_key or config.api_key, tls).ask()

    try:
        await RayFollower(pools=pools, registry=registry, loads=loads, say=print).run()
    finally:
        await registry.close()


def _settings(options: argparse.Namespace) -> dict[str, str]:
    return _pairs(options.set) | ({"redis": options.redis} if options.redis else {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray", description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("up", "scale", "follow", "status", "down"))
    parser.add_argument("pool", nargs="*", help="scale: prefill=N decode=M colocated=K")
    parser.add_argument(
        "--address", default="auto", help="address of the Ray cluster; 'local' starts one on this machine"
    )
    parser.add_argument("--namespace", default="tandem", help="Ray namespace of the members")
    parser.add_argument("--redis", default="", help="URL of the registry, reachable from every node")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--colocated", type=int, default=0, help="workers that prefill and decode")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs per worker")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs per worker")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="any setting of cluster/settings/config.py"
    )
    return parser


def _pairs(items: Sequence[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    wrong = [item for item, (_, separator, _) in zip(items, pairs, strict=True) if not separator]
    if wrong:
        raise ConfigError(f"write name=value, not {wrong[0]!r}")
    return {name: value for name, _, value in pairs}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
