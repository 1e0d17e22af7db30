"""The cluster key file: created once, refused if others can read it, rotated while members use it."""

import os
import stat
import threading
from pathlib import Path

import pytest

from cluster.auth.key_file import load_keys, read_key_file, rotate, rotate_caches
from cluster.auth.keys import SECRET_BYTES, ClusterKeys, Purpose
from cluster.errors import ConfigError


def _accepts(keys: ClusterKeys, signer: ClusterKeys) -> bool:
    return keys.verify(Purpose.TICKETS, b"message", signer.sign(Purpose.TICKETS, b"message"))


def _is_seen_by(keys: ClusterKeys) -> None:
    """Let the keys read their file now, as they do within a second by themselves."""
    keys.secret_of(b"none")


def test_a_missing_key_file_is_created_once_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cluster.key"
    keys = load_keys(path)
    assert len(read_key_file(path).secrets.current) == SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _accepts(load_keys(path), keys)
    assert os.listdir(path.parent) == ["cluster.key"]


def test_members_that_start_together_use_the_same_secret(tmp_path: Path) -> None:
    together, keys = threading.Barrier(8), []

    def start() -> None:
        together.wait()
        keys.append(load_keys(tmp_path / "cluster.key"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(keys) == 8
    assert len({each.sign(Purpose.TICKETS, b"") for each in keys}) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"zz" * 32,
        b"00" * 31,
        b"\xff\xfe" * 32,
        b"next " + b"00" * 32,
        b"current " + b"00" * 32 + b"\nnext",
        b"current " + b"00" * 32 + b"\nnext " + b"11" * 32 + b"\nprevious " + b"22" * 32,
        b"current " + b"00" * 32 + b"\ncaches 1",
        b"current " + b"00" * 32 + b"\ncurrent " + b"11" * 32,
    ],
)
def test_a_file_without_a_key_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"cluster\.key must hold 64 hex digits"):
        load_keys(path)


def test_a_key_file_that_others_may_read_is_refused_with_the_command_to_run(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    load_keys(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(path)


def test_a_key_file_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot read or create"):
        load_keys(tmp_path / "file" / "cluster.key")


def test_at_each_step_of_a_rotation_members_before_and_after_it_accept_each_other(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    first = load_keys(path)
    for word in ("next", "previous", ""):
        before = ClusterKeys(read_key_file(path).secrets)
        assert rotate(path).other_word == word
        after = load_keys(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert _accepts(before, after)
        assert _accepts(after, before)
        assert after.hash_key == first.hash_key
    assert not _accepts(ClusterKeys(read_key_file(path).secrets), ClusterKeys(b"k" * 32))
    assert first.hash_key != ClusterKeys(read_key_file(path).secrets.current).hash_key


def test_a_running_member_follows_its_file_and_keeps_the_key_of_its_caches(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    running, hash_key = load_keys(path), load_keys(path).hash_key
    old = ClusterKeys(read_key_file(path).secrets)
    for _ in range(3):
        rotate(path)
    assert rotate_caches(path).secrets.generation == 2
    new = load_keys(path)
    assert new.hash_key != hash_key
    while not _accepts(running, new):  # it looks at its file again 0.05 s after the last time
        assert not _accepts(running, ClusterKeys(b"x" * 32))
    assert not _accepts(running, old)
    assert running.hash_key == hash_key


def test_a_damaged_file_leaves_a_running_member_its_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cluster.key"
    running = load_keys(path)
    before = running.sign(Purpose.TICKETS, b"message")
    path.write_text("a secret with an error")
    while not caplog.records:
        _is_seen_by(running)
    assert running.sign(Purpose.TICKETS, b"message") == before
    assert "a secret with" not in caplog.text
