"""`tandem up`: a cluster on this machine, until Ctrl-C."""

import argparse
import asyncio
import dataclasses
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from cli.connection import LastCluster, forget, remember, running
from cli.local.layout import Pools, Ports, router_ports, threads_per_worker
from cli.local.local_cluster import LocalCluster, Plan, first_of
from cluster.accounts.audit import Audit
from cluster.accounts.key_store import configured_key
from cluster.accounts.keys import new_secret
from cluster.auth.key_file import cluster_keys, key_path
from cluster.errors import ConfigError
from cluster.process import announce_ready, unused_tmpdir
from cluster.registry.registration import advertised_host
from cluster.serving.listening import cannot_listen, is_of_host, reason, refusal
from cluster.serving.tls import load_tls
from cluster.settings.config import RouterConfig
from cluster.settings.config_sources import add_flags, load_config
from cluster.settings.worker_settings import (
    EngineSettings,
    TransferSettings,
    flag_of,
    require_exact_wire,
    require_one_quantisation,
    setting,
)
from deploy.ray.options import RayOptions, add_ray_arguments, ray_options

HELP = "start a cluster on this machine, or its workers on Ray, and keep it until Ctrl-C"
DEMO_MODEL = Path(__file__).parents[3] / "examples" / "demo_model"
_START_TIMEOUT_S = 300.0


class MakeCluster(Protocol):
    async def __call__(
        self, plan: Plan, *, say: Callable[[str], None], echo: Callable[[str, str], None]
    ) -> LocalCluster: ...


@dataclass(frozen=True, kw_only=True)
class UpConfig(EngineSettings, TransferSettings, RouterConfig):
    """Every setting of every process that `tandem up` starts, checked before it starts any."""

    slo_tpot_ms: float = setting(
        0.0,
        "target in milliseconds for the mean time per later token: --placement auto chooses by it, and workers limit"
        " prompts beside running sequences to it; 0: none, and workers limit prompts to 1.5 times a step without them",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model or str(DEMO_MODEL))
        EngineSettings.__post_init__(self)
        TransferSettings.__post_init__(self)
        RouterConfig.__post_init__(self)
        require_one_quantisation(self.kv_cache_dtype, self.kv_wire_dtype)
        require_exact_wire(self.deterministic, self.kv_wire_dtype)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pools = parser.add_argument_group("pools")
    pools.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default: 1; with --colocated: 0)")
    pools.add_argument("--decode", type=int, metavar="N", help="decode workers (default: 1; with --colocated: 0)")
    pools.add_argument(
        "--colocated",
        type=int,
        metavar="N",
        help="workers that prefill and decode (default: 0)",
    )
    pools.add_argument(
        "--routers",
        type=int,
        metavar="N",
        default=1,
        help="routers; each uses the ports after those of the previous one, with --share-port the same --port"
        " (default: 1)",
    )
    pools.add_argument(
        "--start-timeout-s",
        type=float,
        metavar="X",
        default=_START_TIMEOUT_S,
        help=f"seconds within which the cluster must be ready (default: {_START_TIMEOUT_S:g})",
    )
    add_ray_arguments(parser)
    add_flags(parser, UpConfig, without=frozenset({"member_id", "local_rank", "local_world_size"}))


def run(arguments: argparse.Namespace) -> int:
    plan, config = plan_from(arguments)
    check_before_start(plan, config)
    if line := unused_tmpdir():
        tell(line)
    options = ray_options(arguments)
    asyncio.run(_up(plan, local_cluster if options is None else _on_ray(options, config)))
    return 0


def check_before_start(plan: Plan, config: UpConfig) -> None:
    """Refuse now what a member would refuse later, such as a router after the workers have loaded the model. Raises
    ConfigError."""
    _check_ports_are_free(config, plan.routers)
    cluster_keys(config)
    configured_key(config.api_key, config.api_key_file, "--api-key")
    configured_key("", config.metrics_key_file, "--metrics-key")
    Audit(config.audit_file).close()  # it can be opened
    if config.tool_call_parser or config.reasoning_parser:
        from router.tools.formats import AnswerFormat  # only here: its import takes longer than the other checks

        AnswerFormat.named(config.tool_call_parser, config.reasoning_parser)


def plan_from(arguments: argparse.Namespace) -> tuple[Plan, UpConfig]:
    """Return the cluster that the arguments describe. Raises ConfigError."""
    given = {name: value for name, value in vars(arguments).items() if name in _names() | {"config"}}
    config = load_config(UpConfig, given)
    admin_key = configured_key(config.admin_key, config.admin_key_file, "--admin-key") or new_secret()
    pools = pools_from(arguments.prefill, arguments.decode, arguments.colocated)
    if arguments.start_timeout_s <= 0 or not math.isfinite(arguments.start_timeout_s):
        raise ConfigError(f"--start-timeout-s must be a positive number of seconds, not {arguments.start_timeout_s:g}")
    _check_model(config.model, config.revision)
    num_cores = len(os.sched_getaffinity(0))
    plan = Plan(
        pools=pools,
        routers=routers_from(arguments.routers, config),
        flags={**given, "model": config.model} | ({} if config.admin_key_file else {"admin_key": admin_key}),
        redis=config.redis,
        cluster_name=config.cluster_name,
        key_file=os.path.abspath(key_path(config)),
        registration_ttl_s=config.registration_ttl_s,
        admin_key=admin_key,
        num_threads=config.num_threads or threads_per_worker(num_cores, pools.num_workers),
        start_timeout_s=arguments.start_timeout_s,
        drain_grace_s=config.drain_grace_s,
        tls=load_tls(config, advertised_host(config)),
    )
    return plan, config


def pools_from(prefill: int | None, decode: int | None, colocated: int | None) -> Pools:
    """Return the sizes of the pools. Raises ConfigError."""
    given = {"--prefill": prefill, "--decode": decode, "--colocated": colocated}
    for flag, size in given.items():
        if size is not None and size < 0:
            raise ConfigError(f"{flag} must not be negative, not {size}")
    default = 1 if colocated is None else 0
    pools = Pools(default if prefill is None else prefill, default if decode is None else decode, colocated or 0)
    if not pools.num_decode + pools.num_colocated:
        named = [flag for flag in ("--decode", "--colocated") if given[flag] is not None]
        raise ConfigError(f"{' or '.join(named)} must be at least 1: every request ends on a worker that decodes")
    return pools


def routers_from(count: int, config: RouterConfig) -> list[Ports]:
    """Return the ports of each router. Raises ConfigError."""
    if count < 1:
        raise ConfigError(f"a cluster needs at least one router, not --routers {count}")
    first = Ports(config.port, config.grpc_port, config.health_port, config.metrics_port)
    if config.share_port == "off":
        return router_ports(first, count)
    return [replace(each, http=config.port) for each in router_ports(replace(first, http=0), count)]


async def local_cluster(plan: Plan, *, say: Callable[[str], None], echo: Callable[[str, str], None]) -> LocalCluster:
    return LocalCluster(plan, say=say, echo=echo)


def _on_ray(options: RayOptions, config: UpConfig) -> MakeCluster:
    """Return the maker of a cluster on Ray. Raises ConfigError."""
    try:
        from deploy.ray.up import ray_cluster
    except ImportError as error:
        raise ConfigError(f"--ray needs Ray, which is not installed: pip install 'ray>=2.55' ({error})") from error
    key_file = key_path(config).absolute()
    return partial(ray_cluster, options=options, num_threads=config.num_threads, key_file=key_file)


def tell(text: str) -> None:
    """Write a message for the user to stderr; stdout is for the ready line."""
    sys.stderr.write(f"tandem: {text}\n")
    sys.stderr.flush()


def tell_log(name: str, line: str) -> None:
    sys.stderr.write(f"[{name}] {line}\n")
    sys.stderr.flush()


async def run_until_stopped(
    plan: Plan,
    act: Callable[[LocalCluster], Coroutine[object, object, None]],
    *,
    make: MakeCluster | None = None,
    say: Callable[[str], None] = tell,
    echo: Callable[[str, str], None] = tell_log,
) -> None:
    """Start a cluster, await `act`, then stop the cluster. The first Ctrl-C or SIGTERM ends `act`, the second one ends
    the wait for running requests. Raises the exception of `act`, or the error that ended the cluster."""
    cluster = await (make or local_cluster)(plan, say=say, echo=echo)
    stop, hurry = _signals()  # Ray has set handlers of its own
    try:
        await first_of(cluster.start(), stop.wait())
        if not stop.is_set():
            await first_of(act(cluster), cluster.failed(), stop.wait())
            say("stopping: waiting for running requests" + (" (Ctrl-C again to stop at once)" if stop.is_set() else ""))
            await first_of(cluster.drain(), hurry.wait())
    finally:
        await cluster.close()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return two events, set by the first and by the second SIGINT or SIGTERM."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    return stop, hurry


async def _up(plan: Plan, make: MakeCluster) -> None:
    try:
        await run_until_stopped(plan, lambda cluster: _announce_and_stay(cluster, plan), make=make)
    finally:
        forget(os.getpid())
    tell("stopped")


async def _announce_and_stay(cluster: LocalCluster, plan: Plan) -> None:
    started = _started(cluster, plan)
    if why_not := remember(started):
        tell(f"{why_not}; other commands need --address {started.address}")
    announce_ready(http=f"{'https' if started.tls_ca else 'http'}://{cluster.http}", grpc=cluster.grpc)
    tell('try `tandem generate "def read_file(path):"` in another terminal; Ctrl-C here stops the cluster')
    await cluster.follow_target()


def _started(cluster: LocalCluster, plan: Plan) -> LastCluster:
    tls_ca = os.path.abspath(plan.tls.ca_file) if plan.tls is not None else ""
    return LastCluster(
        grpc=cluster.grpc,
        http=cluster.http,
        pid=os.getpid(),
        tls_ca=tls_ca,
        more_grpc=cluster.more_grpc,
        more_http=cluster.more_http,
        admin_key=plan.admin_key,
        key_file=plan.key_file,
    )


def _names() -> frozenset[str]:
    return frozenset(item.name for item in dataclasses.fields(UpConfig))


def _check_model(model: str, revision: str) -> None:
    """Refuse a missing model now, not after the workers have loaded torch. Raises ConfigError."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        from cluster.grammar.tokenizer_files import locate  # only here: it loads the library of tokenizers

        folder = locate(model, revision)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {model}: the folder holds no config.json; name one that holds a model")


def _check_ports_are_free(config: UpConfig, routers: Sequence[Ports]) -> None:
    """Refuse a host and ports that cannot be bound. Raises ConfigError with all of them."""
    if (error := refusal(config.host, 0)) and is_of_host(error):
        raise cannot_listen(error, config.host, 0, "--port")
    hosts = {"metrics_port": config.metrics_host}
    shared = {"port"} if config.share_port == "on" else set()
    refused = {
        (flag_of(name), hosts.get(name, config.host), port): reason(error)
        for ports in routers
        for name, port in ports.by_setting().items()
        if port and (error := refusal(hosts.get(name, config.host), port, is_shared=name in shared))
    }
    if not refused:
        return
    taken = ", ".join(f"{host}:{port} ({why})" for (_, host, port), why in refused.items())
    flags = " and ".join(dict.fromkeys(flag for flag, _, _ in refused))
    ours = next(
        (one for one in running(os.environ) if one.http.endswith(tuple(f":{port}" for _, _, port in refused))), None
    )
    hint = f"; the cluster of process {ours.pid} uses this port" if ours is not None else ""
    raise ConfigError(f"cannot listen on {taken}{hint}; choose another {flags}, or 0 for a free port")
