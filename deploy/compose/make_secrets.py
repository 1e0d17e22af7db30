"""Creates the secrets of a compose cluster in a folder; keeps those that exist.

    make_secrets.py FOLDER PROFILES     creates them
    make_secrets.py FOLDER              fails where members do not use TLS

The folder has the members' files: `cluster.key`, `api.key`, `admin.key`, `metrics.key`, and `tandem.yaml` with the
address of Redis; with `mtls` in PROFILES also `tls/`, which `tandem.yaml` names. Each other service has a folder in it,
where its own volume is mounted: `redis/` has `users.acl` and `password`, `prometheus/` the key with which Prometheus
reads metrics, `grafana/` the password of Grafana's user admin. Only the containers' user can read the files.
"""

import os
import secrets
import shutil
import sys
from pathlib import Path

from cli.verbs.access.certs import make_authority, make_certificate
from cluster.registry.redis_server import USER, users_file
from cluster.settings.config import RouterConfig

# No certificate can name a container's address. Clients dial the others.
_SERVER_NAME = "members.tandem"
_HOSTS = (_SERVER_NAME, "router", "localhost", "127.0.0.1")
_DAYS = 3650


def make(folder: Path, profiles: str) -> None:
    redis, prometheus, grafana = (folder / name for name in ("redis", "prometheus", "grafana"))
    for other in (redis, prometheus, grafana):
        other.mkdir(exist_ok=True)
    password = _kept(redis / "password", secrets.token_urlsafe(32))
    tls = _made_certificates(folder / "tls") if "mtls" in profiles.split(",") else ""
    # What follows from the password is written each time, because an upgrade may change the rights of members.
    _write(redis / "users.acl", users_file(RouterConfig.cluster_name, password))
    _write(folder / "tandem.yaml", f"redis: redis://{USER}:{password}@redis:6379/0\n{tls}")
    _kept(grafana / "password", secrets.token_urlsafe(16))
    _kept(prometheus / "metrics.key", _kept(folder / "metrics.key", secrets.token_urlsafe(32)))
    _kept(folder / "cluster.key", secrets.token_hex(32))
    for name in ("api.key", "admin.key"):
        _kept(folder / name, secrets.token_urlsafe(32))


def check_tls(folder: Path) -> None:
    """Exit with one line where members do not use TLS."""
    if "tls_cert:" not in (folder / "tandem.yaml").read_text():
        sys.exit(
            "mtls: members do not use TLS yet: the profile must be in COMPOSE_PROFILES, which the container of the"
            " secrets reads; run: COMPOSE_PROFILES=cpu,mtls docker compose up -d --force-recreate"
        )


def _made_certificates(folder: Path) -> str:
    """Create a certificate that all members share, and the authority that clients verify, unless they exist. Return the
    settings of members that use them. The authority's key is deleted: it signs nothing else."""
    if not folder.exists():
        draft = folder.with_suffix(".new")
        shutil.rmtree(draft, ignore_errors=True)
        authority = make_authority(draft, days=_DAYS)
        make_certificate(draft, authority, "member", _HOSTS, days=_DAYS)
        authority.key.unlink()
        draft.rename(folder)
    files = {"cert": "member.crt", "key": "member.key", "ca": "ca.crt"}
    named = "".join(f"tls_{setting}: {folder / name}\n" for setting, name in files.items())
    return f"{named}tls_server_name: {_SERVER_NAME}\n"


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
        make(Path(sys.argv[1]), sys.argv[2]) if sys.argv[2:] else check_tls(Path(sys.argv[1]))
    except OSError as error:
        sys.exit(
            f"secrets: cannot write {error.filename}: {error.strerror}; the volumes must belong to user {os.getuid()}"
        )
