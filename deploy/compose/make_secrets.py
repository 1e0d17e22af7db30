"""Creates the secrets of a compose cluster in two folders; keeps those that exist. `make_secrets.py MEMBERS REDIS`.

MEMBERS: `cluster.key`, `api.key`, `admin.key`, `metrics.key`, and `tandem.yaml` with the address of Redis. REDIS:
`users.acl` and `password`, the password of Grafana's user admin, and the key with which Prometheus reads metrics. Only
the containers' user can read the files.
"""

import os
import secrets
import sys
from pathlib import Path

from cluster.registry.redis_server import USER, users_file
from cluster.settings.config import RouterConfig


def make(members: Path, redis: Path) -> None:
    password = _kept(redis / "password", secrets.token_urlsafe(32))
    # What follows from the password is written each time, because an upgrade may change the rights of members.
    _write(redis / "users.acl", users_file(RouterConfig.cluster_name, password))
    _write(members / "tandem.yaml", f"redis: redis://{USER}:{password}@redis:6379/0\n")
    _kept(redis / "grafana", secrets.token_urlsafe(16))
    _kept(members / "metrics.key", _kept(redis / "metrics", secrets.token_urlsafe(32)))
    _kept(members / "cluster.key", secrets.token_hex(32))
    for name in ("api.key", "admin.key"):
        _kept(members / name, secrets.token_urlsafe(32))


def _kept(path: Path, text: str) -> str:
    """Write the text unless there is such a file. Return what the file holds."""
    if not path.exists():
        _write(path, text)
    return path.read_text()


def _write(path: Path, text: str) -> None:
    """Replace the file, which is never half written."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.rename(path)


if __name__ == "__main__":
    os.umask(0o077)
    try:
        make(Path(sys.argv[1]), Path(sys.argv[2]))
    except OSError as error:
        sys.exit(
            f"secrets: cannot write {error.filename}: {error.strerror}; the volumes must belong to user {os.getuid()}"
        )
