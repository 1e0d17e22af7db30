"""The cluster key file."""

import os
import stat
import threading
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.identity import KEY_BYTES, load_cluster_key


def test_a_missing_key_file_is_created_once_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cluster.key"
    key = load_cluster_key(path)
    assert len(key) == KEY_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_cluster_key(path) == key
    assert os.listdir(path.parent) == ["cluster.key"]


def test_members_that_start_together_use_the_same_key(tmp_path: Path) -> None:
    together, keys = threading.Barrier(8), []

    def start() -> None:
        together.wait()
        keys.append(load_cluster_key(tmp_path / "cluster.key"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(keys) == 8
    assert len(set(keys)) == 1


@pytest.mark.parametrize("content", [b"", b"abc", b"zz" * 32, b"00" * 31, b"\xff\xfe" * 32])
def test_a_file_without_a_key_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"cluster\.key must hold 64 hex digits"):
        load_cluster_key(path)


def test_a_key_file_that_others_may_read_is_refused_with_the_command_to_run(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    load_cluster_key(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_cluster_key(path)


def test_a_key_file_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot read or create"):
        load_cluster_key(tmp_path / "file" / "cluster.key")
