"""`tandem certs`: create a certificate authority and a member's certificate with `openssl`, for a first try of TLS.

Use your organisation's authority for a permanent cluster. Private keys are readable by their owner only.
"""

import argparse
import ipaddress
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.argument_types import whole_number
from cluster.errors import ConfigError

HELP = "create a certificate authority and a member's certificate, for a first try of TLS"
_DAYS, _MAX_DAYS = 365, 36_500
_HERE = ("localhost", "127.0.0.1")
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder for the files; an authority that is already there is reused"
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name or IP address of the member; may be repeated (localhost is always included)",
    )
    parser.add_argument("--name", default="member", help="name of the member's files (default: member)")
    parser.add_argument(
        "--days",
        type=whole_number(1, _MAX_DAYS),
        default=_DAYS,
        metavar="N",
        help=f"days for which the certificates are valid (default: {_DAYS})",
    )


def run(arguments: argparse.Namespace) -> int:
    hosts = list(dict.fromkeys([*arguments.host, *_HERE]))
    try:
        authority = make_authority(arguments.folder, days=arguments.days)
        pair = make_certificate(arguments.folder, authority, arguments.name, hosts, days=arguments.days)
    except OSError as error:
        raise ConfigError(f"cannot write to {arguments.folder}: {error.strerror}; choose another folder") from error
    print(f"{pair.cert} names {', '.join(hosts)}; start each member with")
    print(f"  --tls-cert {pair.cert} --tls-key {pair.key} --tls-ca {authority.cert}")
    print(f"and give clients --tls-ca {authority.cert}. Keep {authority.key} secret: its owner can add members.")
    return 0


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path


def make_authority(folder: Path, *, days: int) -> Pair:
    """Create ca.crt and ca.key in `folder`, unless they exist. Raises ConfigError."""
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
    """Create NAME.crt and NAME.key in `folder` for a member with these host names. Raises ConfigError."""
    if not _HOST.fullmatch(name) or name == "ca":
        raise ConfigError(f"--name must consist of letters, digits, dots and dashes and must not be ca: {name!r}")
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
        raise ConfigError("`tandem certs` needs the openssl command, which is not on the PATH; install openssl")
    ended = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if ended.returncode:
        reason = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        raise ConfigError(f"openssl {arguments[0]} failed: {reason}")
