"""`tandem batch`: its files, and requests over real sockets to a scripted server."""

import json
import os
import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from cli.__main__ import main
from cli.verbs.generation.batch import (
    BatchAnswer,
    BatchRequest,
    BatchSender,
    Server,
    _appending,
    _kept,
    _requests,
    kept_lines,
    read_requests,
)
from cluster.errors import ConfigError
from cluster.process import full_disk
from tests.certificates import SERVER_NAME, make_certificates


def line(custom_id: str = "1", **fields: object) -> str:
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}, **fields}
    return json.dumps(request)


def test_requests_are_read_and_use_only_spare_capacity_by_default() -> None:
    urgent = line("2", url="/v1/chat/completions", body={"messages": [], "service_tier": "auto"})
    assert read_requests([line("1"), "\n", urgent], "in") == [
        BatchRequest("1", "/v1/completions", {"service_tier": "flex", "prompt": "a"}),
        BatchRequest("2", "/v1/chat/completions", {"messages": [], "service_tier": "auto"}),
    ]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "in, line 1: not JSON"),
        (["[]"], "line 1: a request must be an object"),
        ([line(), line()], "line 2: custom_id '1' is used twice"),
        ([line(custom_id="")], "custom_id must be"),
        ([line(custom_id="\ud800")], "custom_id .* is not text"),
        ([line(url="/v1/embeddings")], "url one of /v1/chat/completions"),
        ([line(method="GET")], "method must be POST"),
        ([line(body=[])], "body must be an object"),
        ([line(body={"stream": True})], "body.stream must be false"),
    ],
)
def test_a_wrong_line_is_reported_with_its_number(lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_requests(lines, "in")


def test_answers_of_an_earlier_run_are_kept_unless_another_attempt_may_differ() -> None:
    answers = [BatchAnswer(str(status), status, "r", {}) for status in (200, 400, 401, 403, 429, 503)]
    written = [answer.to_line() for answer in (*answers, BatchAnswer("lost", 0, problem="refused"))]
    for torn in ('{"id', written[0].rstrip()):
        kept = kept_lines([*written, torn], "out", {"200", "401", "403", "429", "503", "lost"})
        assert kept == {"200": written[0], "400": written[1]}
    assert set(kept_lines(written, "out", {"200"})) == {"200", "400", "401", "403", "429", "503", "lost"}


def test_an_answer_with_unusual_line_separators_is_found_by_the_next_run(tmp_path: Path) -> None:
    request = BatchRequest("a\u2028", "/v1/completions", {})
    answer = BatchAnswer(request.custom_id, 200, "r", {"text": "b\u2029c\x85d"}).to_line()
    (tmp_path / "out").write_text(answer, encoding="utf-8")
    assert _kept(tmp_path / "out", [request]) == {request.custom_id: answer}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"error": {"message": "no model"}}, "HTTP status 404: no model"),
        ({"error": "x"}, "HTTP status 404"),
        ([], "HTTP status 404"),
    ],
)
def test_a_failed_request_is_reported_with_the_message_of_the_router(body: object, why: str) -> None:
    assert BatchAnswer("1", 404, "r", body).why == why


def test_a_file_of_requests_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line(), encoding="utf-8-sig")
    assert [request.custom_id for request in _requests(tmp_path / "in")] == ["1"]


@pytest.mark.parametrize("foreign", ["notes\n", "notes", "{}\n", line() + "\n"])
def test_a_file_that_holds_anything_else_is_not_written_over(foreign: str) -> None:
    with pytest.raises(ConfigError, match="out, line 2 is not an answer of a batch"):
        kept_lines([BatchAnswer("1", 200, "r", {}).to_line(), foreign], "out", {"1"})


class _Handler(BaseHTTPRequestHandler):
    """Answers with the next of the statuses in the request's `statuses`; 0 ends the connection without an answer."""

    protocol_version = "HTTP/1.1"
    asked: dict[str, int]
    held: Event

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = self.asked[body["name"]] = self.asked.get(body["name"], 0) + 1
        status = body["statuses"][min(number, len(body["statuses"])) - 1]
        if body.get("is_held"):
            self.held.wait()
        if not status:
            self.close_connection = True
            return
        text = json.dumps({"key": self.headers.get("authorization")}).encode()
        self.send_response(status)
        self.send_header("x-request-id", f"id-{body['name']}")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def handler() -> type[_Handler]:
    return type("Handler", (_Handler,), {"asked": {}, "held": Event()})


@pytest.fixture
def server(handler: type[_Handler]) -> Iterator[Server]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads, http.block_on_close = True, False
    Thread(target=http.serve_forever, daemon=True).start()
    yield Server(address=f"127.0.0.1:{http.server_address[1]}", api_key="secret")
    handler.held.set()
    http.shutdown()
    http.server_close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.verbs.generation.batch._FIRST_PAUSE_S", 0.0)


def request(name: str, *statuses: int, **fields: object) -> BatchRequest:
    return BatchRequest(name, "/v1/completions", {"name": name, "statuses": statuses, **fields})


def test_requests_are_sent_with_the_key_and_retried_only_where_that_may_help(
    server: Server, handler: type[_Handler]
) -> None:
    requests = [request("ok", 200), request("wrong", 400), request("busy", 429, 503, 200), request("cut", 0, 200)]
    requests.append(request("down", 503))
    sender = BatchSender(server, concurrency=3, max_attempts=4)
    answers = {answer.custom_id: answer for answer in sender.answers(requests)}
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "ok": 200,
        "wrong": 400,
        "busy": 200,
        "cut": 200,
        "down": 503,
    }
    assert handler.asked == {"ok": 1, "wrong": 1, "busy": 3, "cut": 2, "down": 4}
    assert (answers["ok"].body, answers["ok"].request_id) == ({"key": "Bearer secret"}, "id-ok")


def test_an_unreachable_router_is_an_answer_with_the_reason() -> None:
    sender = BatchSender(Server(address="127.0.0.1:1"), concurrency=1, max_attempts=2)
    (answer,) = sender.answers([request("a", 200)])
    assert not answer.status_code and "127.0.0.1:1" in answer.problem
    assert json.loads(answer.to_line())["error"]["code"] == "unavailable"


def test_a_reader_that_leaves_ends_the_requests_that_are_on_their_way(server: Server) -> None:
    sender = BatchSender(server, concurrency=2, max_attempts=9)
    answers = sender.answers([request("first", 200), request("held", 200, is_held=True)])
    assert next(answers).custom_id == "first"
    answers.close()
    sender.join()  # ends, although the server has not answered


def test_a_router_whose_certificate_has_a_name_of_its_own_is_asked_under_that_name(
    tmp_path: Path, handler: type[_Handler], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag, and the files of a member: in its container `tandem batch` needs no flag."""
    certificates = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.shared.cert, certificates.shared.key)
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.socket = context.wrap_socket(http.socket, server_side=True)
    http.daemon_threads, http.block_on_close = True, False
    Thread(target=http.serve_forever, daemon=True).start()
    address, ca = f"127.0.0.1:{http.server_address[1]}", f"{certificates.authority.cert}"
    (tmp_path / "in").write_text(line(body={"name": "a", "statuses": [200]}))
    (tmp_path / "member.yaml").write_text(f"tls_ca: {ca}\ntls_server_name: {SERVER_NAME}\n")
    command = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--http-address", address, "--max-attempts", "1"]
    try:
        assert main([*command, "--tls-ca", ca]) == 1
        assert "IP address mismatch" in capsys.readouterr().err
        assert main([*command, "--tls-ca", ca, "--tls-server-name", SERVER_NAME]) == 0
        (tmp_path / "out").unlink()
        monkeypatch.setenv("TANDEM_CONFIG", str(tmp_path / "member.yaml"))
        assert main(command) == 0
        assert "1 ok" in capsys.readouterr().out
    finally:
        http.shutdown()
        http.server_close()


def test_the_address_of_the_page_has_the_name_that_the_browser_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = str(make_certificates(tmp_path).authority.cert)
    command = ["ui", "--http-address", "10.0.0.7:8000", "--api-key", "k", "--tls-ca", ca]
    assert main(command) == 0
    assert capsys.readouterr() == ("https://10.0.0.7:8000/ui#key=k\n", "")
    assert main([*command, "--tls-server-name", SERVER_NAME]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"https://{SERVER_NAME}:8000/ui#key=k\n"
    assert printed.err == f"the browser's machine must resolve {SERVER_NAME} to 10.0.0.7\n"


def test_a_full_disk_is_reported_with_its_file_and_an_interrupted_batch_with_how_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"

    def write() -> None:
        with Path("/dev/full").open("w") as disk, _appending(path, []) as output:
            os.dup2(disk.fileno(), output.fileno())
            output.write("an answer")

    with pytest.raises(OSError) as full:
        write()
    assert full_disk(full.value) == f"No space left on device: {path}; free some space there, or give it more"
    with pytest.raises(KeyboardInterrupt), _appending(path, []):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == f"tandem: interrupted; the same command asks for what {path} does not have yet\n"
