"""`tandem batch`: answer a file of requests, with the capacity that no other request needs."""

import argparse
import ssl
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from cli import connection
from cli.batch.batch_file import BatchAnswer, BatchRequest, BatchSender, Server, kept_lines, read_requests
from cli.local.last_cluster import find_http_address
from cluster.errors import ConfigError
from cluster.process import ExitStatus

HELP = "answer a file of requests in OpenAI's batch format; a restarted command sends only what is left"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN.jsonl", help="the requests, one JSON object per line")
    parser.add_argument("output", type=Path, metavar="OUT.jsonl", help="the answers, one per line as they come")
    parser.add_argument(
        "--http-address",
        metavar="HOST:PORT",
        help="HTTP address of a router (default: TANDEM_HTTP_ADDRESS or the last local cluster)",
    )
    connection.add_credentials(parser)
    parser.add_argument(
        "--concurrency", type=int, metavar="N", default=32, help="maximum requests at once (default: 32)"
    )
    parser.add_argument(
        "--max-attempts", type=int, metavar="N", default=8, help="maximum attempts of a request (default: 8)"
    )
    parser.add_argument(
        "--timeout-s", type=float, metavar="X", default=600.0, help="timeout of one attempt in seconds (default: 600)"
    )


def run(arguments: argparse.Namespace) -> int:
    for name in ("concurrency", "max_attempts", "timeout_s"):
        if getattr(arguments, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {getattr(arguments, name):g}")
    requests = _requests(arguments.input)
    sender = BatchSender(_server(arguments), concurrency=arguments.concurrency, max_attempts=arguments.max_attempts)
    kept = _kept(arguments.output, requests)
    left = [request for request in requests if request.custom_id not in kept]
    if len(left) < len(requests):
        sys.stderr.write(f"{len(requests) - len(left)} of {len(requests)} requests have an answer from before\n")
    with _appending(arguments.output, kept.values()) as output:
        failed = _ask(sender, left, output)
    print(f"{len(left)} asked: {len(left) - len(failed)} ok, {len(failed)} failed; answers in {arguments.output}")
    for answer in failed[:3]:
        sys.stderr.write(f"tandem: {answer.custom_id}: {answer.problem or f'HTTP status {answer.status_code}'}\n")
    return ExitStatus.CRASHED if failed else ExitStatus.OK


def _ask(sender: BatchSender, requests: Sequence[BatchRequest], output: TextIO) -> list[BatchAnswer]:
    """Write each answer as it comes. Return those that are not ok."""
    failed = []
    for answer in _shown(sender.answers(requests), len(requests)):
        output.write(answer.to_line())
        output.flush()
        if not answer.is_ok:
            failed.append(answer)
    return failed


def _shown(answers: Iterator[BatchAnswer], total: int) -> Iterator[BatchAnswer]:
    """Show the progress of the batch, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from answers
        return
    from rich.console import Console  # imported here: a tenth of a second
    from rich.progress import track

    yield from track(answers, "batch", total=total, console=Console(stderr=True))


def _kept(path: Path, requests: Sequence[BatchRequest]) -> dict[str, str]:
    """Return the lines of an earlier run that stay in the output. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return kept_lines(lines, str(path), {request.custom_id for request in requests})


def _requests(path: Path) -> list[BatchRequest]:
    try:
        with path.open(encoding="utf-8") as lines:
            return read_requests(lines, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _appending(path: Path, kept: Iterable[str]) -> Iterator[TextIO]:
    """Open the output for further answers. It holds the `kept` lines and no other."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text("".join(kept), encoding="utf-8")
        draft.replace(path)
        output = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with output:
        yield output


def _server(arguments: argparse.Namespace) -> Server:
    address = find_http_address(arguments.http_address)
    authorities = connection.tls_ca(arguments, address)
    try:
        tls = ssl.create_default_context(cafile=authorities) if authorities else None
    except OSError as error:
        raise ConfigError(f"--tls-ca {authorities} holds no certificate") from error
    return Server(
        address=address,
        api_key=connection.client_key(arguments, address),
        tls=tls,
        tls_server_name=connection.tls_server_name(arguments) or "",
        timeout_s=arguments.timeout_s,
    )
