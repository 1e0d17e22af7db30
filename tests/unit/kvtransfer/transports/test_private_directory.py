"""Directories of sockets: a directory is kept as long as its process lives, and removed by the next process after a
kill.
"""

import signal
import subprocess
import sys
from pathlib import Path

from kvtransfer.transports.shm.pool_file import PrivateDirectory

_HOLDER = """
import sys
from pathlib import Path
from kvtransfer.transports.shm.pool_file import PrivateDirectory
directory = PrivateDirectory(Path(sys.argv[1]))
print(directory.path, flush=True)
sys.stdin.read()
"""


def test_the_directory_of_a_killed_process_is_removed_at_the_next_start_and_that_of_a_live_one_stays(
    tmp_path: Path,
) -> None:
    killed, living = _holder(tmp_path), _holder(tmp_path)
    try:
        left = _path_of(killed)
        kept = _path_of(living)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.is_dir(), "it could not clean up"
        mine = PrivateDirectory(tmp_path)
        assert not left.exists()
        assert kept.is_dir()
        mine.remove()
        assert not mine.path.exists()
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()


def test_directory_without_a_lock_is_not_removed(tmp_path: Path) -> None:
    somebody_elses = tmp_path / "tandem-kv-of-theirs"
    somebody_elses.mkdir()
    PrivateDirectory(tmp_path).remove()
    assert somebody_elses.is_dir()


def test_other_users_cannot_read_the_directory(tmp_path: Path) -> None:
    directory = PrivateDirectory(tmp_path)
    assert directory.path.stat().st_mode & 0o077 == 0
    directory.remove()


def test_a_directory_with_too_long_a_path_is_created_in_tmp(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    directory = PrivateDirectory(deep)
    assert directory.path.parent == Path("/tmp")
    directory.remove()


def _holder(parent: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _HOLDER, str(parent)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _path_of(holder: subprocess.Popen[str]) -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())
