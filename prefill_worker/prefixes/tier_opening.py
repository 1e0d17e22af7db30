"""The tiers under the pool, as the settings want them: how many blocks fit, and what an earlier run left on disk."""

import logging
from pathlib import Path

from cluster.messages import LayoutFingerprint
from cluster.settings.config import WorkerConfig
from cluster.settings.engine_settings import parse_bytes
from kvtransfer.memory import PoolMemory
from prefill_worker.prefixes.block_files import BlockFiles
from prefill_worker.prefixes.tier_copies import TierCopies
from prefill_worker.prefixes.tier_index import TierIndex

_LOG = logging.getLogger("tandem.prefill.tiers")


def open_tiers(config: WorkerConfig, pool: PoolMemory, fingerprint: LayoutFingerprint) -> tuple[TierIndex, TierCopies]:
    """A disk that cannot be used is a warning, and a tier less."""
    files, found = _open_files(config, pool, fingerprint)
    num_slots = config.prefix_host_bytes // pool.block_bytes
    file_bytes = BlockFiles.file_bytes(pool.block_bytes)
    max_files = parse_bytes(config.prefix_disk_space) // file_bytes if files is not None else 0
    index, copies = TierIndex(num_slots, max_files), TierCopies(pool, num_slots, files)
    copies.remove(index.found(found))
    _LOG.info(
        "prefixes under the pool: %d blocks in host memory, %d on disk, of which %d are there",
        num_slots,
        max_files,
        index.num_on_disk,
    )
    return index, copies


def _open_files(
    config: WorkerConfig, pool: PoolMemory, fingerprint: LayoutFingerprint
) -> tuple[BlockFiles | None, list[bytes]]:
    if not config.prefix_disk:
        return None, []
    try:
        files = BlockFiles(Path(config.prefix_disk), fingerprint, pool.block_bytes)
        return files, files.hashes()
    except OSError as error:
        _LOG.warning("no prefixes on disk: %s", error)
        return None, []
