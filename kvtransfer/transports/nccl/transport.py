"""NCCL between GPUs of any hosts, by cupy: a communicator of two ranks per pair of workers, made when it is needed.

    nccl_pair      the life of a pair, pure: states, deadlines, when to try again
    nccl_messages  what the two sides say over the control connection
    nccl_link      one connection and communicator, on the thread that owns them
    nccl_exporter, nccl_importer   the two sides
    nccl_cupy      the library, by cupy

NCCL is two-sided and has no tags: every transfer is announced, with its epoch and a number, on the pair's control
connection, and what fails ends the communicator. Nothing is ever initialised for all members together: a member that
joins or leaves concerns its own pairs.
"""

from kvtransfer.transports.base import TransportMeans
from kvtransfer.transports.nccl.cupy_library import cupy_nccl, why_not_loadable
from kvtransfer.transports.nccl.exporting import NAME as NAME
from kvtransfer.transports.nccl.exporting import NcclExporter
from kvtransfer.transports.nccl.importing import NcclImporter
from kvtransfer.transports.nccl.pair import PairLimits


def unavailable(means: TransportMeans) -> str:
    return why_not_loadable() if means.memory.raw.is_cuda else "the pool is not on a GPU"


def not_worth_it(means: TransportMeans) -> str:
    """Why it is left out unless --kv-transports names it."""
    return "the cluster uses TLS and NCCL does not encrypt" if means.server_tls is not None else ""


def exporter(means: TransportMeans) -> NcclExporter:
    return NcclExporter(
        memory=means.memory,
        library=cupy_nccl(_device_index(means)),
        host=means.host,
        advertise_host=means.advertise_host,
        limits=PairLimits(transfer_s=means.timeout_s),
    )


def importer(means: TransportMeans) -> NcclImporter:
    return NcclImporter(
        memory=means.memory, library=cupy_nccl(_device_index(means)), limits=PairLimits(transfer_s=means.timeout_s)
    )


def _device_index(means: TransportMeans) -> int:
    return means.memory.raw.get_device()
