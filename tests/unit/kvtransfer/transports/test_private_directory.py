"""Directories of sockets: a directory is kept as long as its process lives, and removed by the next process after a
kill.
"""

import subprocess
import sys
from pathlib import Path

from kvtransfer.transports.shm.pool_file import PrivateDirectory

# Two processes, each of which has a directory; the first one is killed when a line is read. It is a fork of the second
# one, because each import of torch takes seconds.
_HOLDERS = """
import os, signal, sys
from pathlib import Path
from kvtransfer.transports.shm.pool_file import PrivateDirectory
killed = os.fork()
directory = PrivateDirectory(Path(sys.argv[1]))
name = "left" if killed == 0 else "kept"
os.write(1, f"{name} {directory.path}\\n".encode())  # in one piece, which print() may divide
if killed == 0:
    signal.pause()
sys.stdin.readline()
os.kill(killed, signal.SIGKILL)
os.waitpid(killed, 0)
print("killed", flush=True)
sys.stdin.read()
"""


def test_the_directory_of_a_killed_process_is_removed_at_the_next_start_and_that_of_a_live_one_stays(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", _HOLDERS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holders:
        assert holders.stdin is not None and holders.stdout is not None
        lines = [holders.stdout.readline().split() for _ in range(2)]  # in either order
        paths = {name: Path(path) for name, path in lines}
        left, kept = paths["left"], paths["kept"]
        holders.stdin.write("\n")
        holders.stdin.flush()
        assert holders.stdout.readline() == "killed\n"
        assert left.is_dir(), "it could not clean up"
        mine = PrivateDirectory(tmp_path)
        assert not left.exists()
        assert kept.is_dir()
        mine.remove()
        assert not mine.path.exists()


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
