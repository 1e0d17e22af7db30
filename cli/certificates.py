"""An authority of one's own and members' certificates, for a first try of TLS. Made by the `openssl` command.

For a cluster that stays, use the authority that the organisation has. Keys are readable by their owner only.
"""

import ipaddress
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError

_HOST = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_TIMEOUT_S = 30.0

_AUTHORITY = """[req]
distinguished_name = subject
x509_extensions = extensions
prompt = no
[subject]
CN = Tandem authority
[extensions]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
_MEMBER = """[req]
distinguished_name = subject
prompt = no
[subject]
CN = {name}
[extensions]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
{alternatives}
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path


def make_authority(folder: Path, *, days: int) -> Pair:
    """ca.crt and ca.key in `folder`; those that are there stay. Raises ConfigError."""
    pair = Pair(folder / "ca.crt", folder / "ca.key")
    if pair.cert.exists() and pair.key.exists():
        return pair
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _private(pair.key)
    config = folder / "ca.cnf"
    config.write_text(_AUTHORITY)
    _openssl("req", "-x509", *_NEW_KEY, "-keyout", pair.key, "-out", pair.cert, "-days", days, "-config", config)
    config.unlink()
    return pair


def make_certificate(folder: Path, authority: Pair, name: str, hosts: Sequence[str], *, days: int) -> Pair:
    """NAME.crt and NAME.key in `folder`, for a member that others reach under `hosts`. Raises ConfigError."""
    if not _HOST.fullmatch(name) or name == "ca":
        raise ConfigError(f"a certificate's name is letters, digits, dots and dashes, and not ca: {name!r}")
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    config, request = folder / f"{name}.cnf", folder / f"{name}.csr"
    alternatives = f"subjectAltName = {', '.join(map(_alternative, hosts))}" if hosts else ""
    config.write_text(_MEMBER.format(name=name, alternatives=alternatives))
    _private(pair.key)
    _openssl("req", "-new", *_NEW_KEY, "-keyout", pair.key, "-out", request, "-config", config)
    signer = ("-CA", authority.cert, "-CAkey", authority.key, "-CAcreateserial")
    form = ("-extfile", config, "-extensions", "extensions")
    _openssl("x509", "-req", "-in", request, "-out", pair.cert, "-days", days, *signer, *form)
    config.unlink()
    request.unlink()
    return pair


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        pass
    if not _HOST.fullmatch(host):
        raise ConfigError(f"not a host name or IP address: {host!r}")
    return f"DNS:{host}"


def _private(path: Path) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)


def _openssl(*arguments: object) -> None:
    program = shutil.which("openssl")
    if program is None:
        raise ConfigError("the openssl command is needed to make certificates, and is not on the PATH")
    ended = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if ended.returncode:
        raise ConfigError(f"openssl {arguments[0]} failed: {ended.stderr.strip().splitlines()[-1:]}")
