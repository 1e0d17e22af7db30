"""The flags of `tandem up` for Ray. Imports no Ray, so that `tandem up --help` needs none."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.errors import ConfigError
from cluster.registry.scale_target import POOLS


@dataclass(frozen=True, slots=True)
class RayOptions:
    """`resources` and `labels` of a worker's node by pool: amounts and values by name."""

    address: str
    resources: Mapping[str, Mapping[str, float]]
    labels: Mapping[str, Mapping[str, str]]
    keep_at_stop: bool


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    ray = parser.add_argument_group("workers on Ray")
    ray.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run the workers as actors of this Ray cluster, whose node this machine is (auto, HOST:PORT, or local)",
    )
    ray.add_argument(
        "--ray-resources",
        nargs="*",
        default=[],
        metavar="POOL=NAME:AMOUNT,...",
        help="Ray resources of each worker of a pool, such as decode=CPU:4,GPU:1 (default: CPU:1)",
    )
    ray.add_argument(
        "--ray-labels",
        nargs="*",
        default=[],
        metavar="POOL=NAME:VALUE,...",
        help="labels of the Ray nodes that a pool's workers run on",
    )
    ray.add_argument(
        "--ray-keep",
        action="store_true",
        help="leave the workers running when this process ends; the next `tandem up --ray` finds them",
    )


def ray_options(arguments: argparse.Namespace) -> RayOptions | None:
    """Return the options, or None without --ray. Raises ConfigError."""
    if not arguments.ray:
        if arguments.ray_resources or arguments.ray_labels or arguments.ray_keep:
            raise ConfigError("--ray-resources, --ray-labels and --ray-keep need --ray ADDRESS")
        return None
    resources = {
        pool: {name: _amount(name, value) for name, value in pairs.items()}
        for pool, pairs in _by_pool("--ray-resources", arguments.ray_resources).items()
    }
    labels = _by_pool("--ray-labels", arguments.ray_labels)
    return RayOptions(arguments.ray, resources, labels, arguments.ray_keep)


def _by_pool(flag: str, items: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for item in items:
        pool, equals, text = item.partition("=")
        pairs = [pair.partition(":") for pair in text.split(",")]
        if pool not in POOLS or not equals or not all(name and colon and value for name, colon, value in pairs):
            raise ConfigError(f"write {flag} POOL=NAME:VALUE,... with a pool of {', '.join(POOLS)}, not {item!r}")
        found.setdefault(pool, {}).update({name: value for name, _, value in pairs})
    return found


def _amount(name: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if amount <= 0:
        raise ConfigError(f"--ray-resources {name} must be a positive number, not {text!r}")
    return amount
