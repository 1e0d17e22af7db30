"""The page at /ui in Chromium, over a real cluster with two routers."""

import os
import re
import signal
import socket
from collections.abc import Iterator

import httpx
import pytest

from cli.__main__ import main
from tests.system.rigs.processes.chromium import Browser, needs_chromium
from tests.system.rigs.processes.up_command import Up

pytestmark = [pytest.mark.slow, needs_chromium]

HOSTILE = "<img src=x onerror=window.owned=1>"
KEY = "the-operators-key"
_READY = "document.querySelector('#summary').textContent.includes('members are ready')"
_MOST_BYTES = 150_000


def _free_port() -> int:
    """Return a port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    key_file = tmp_path_factory.mktemp("key") / "admin"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    ports = ("--port", str(_free_port()), "--grpc-port", str(_free_port()))
    started = Up(tmp_path_factory.mktemp("up"), "--routers", "2", "--admin-key-file", str(key_file), *ports)
    started.until("ready http=")
    yield started
    assert started.end() == 0


@pytest.fixture
def url(up: Up) -> str:
    return up.until("ready http=").split("http=")[1].split()[0]


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def generate(url: str, label: str) -> None:
    body = {"model": "demo_model", "prompt": "import os\n", "max_tokens": 24, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": label}, timeout=60)
    assert answer.status_code == 200, answer.text


def bar_of(url: str, label: str) -> str:
    """Return an expression of the bar of a request in the timeline."""
    request = httpx.get(f"{url}/admin/explain", params={"name": label}, headers={"authorization": f"Bearer {KEY}"})
    return f"document.querySelector('[data-request=\"{request.json()['requests'][0]['request_id']}\"]')"


def test_the_page_asks_for_the_key_keeps_it_nowhere_and_loads_little(browser: Browser, url: str) -> None:
    browser.open(f"{url}/ui")
    browser.until("!document.querySelector('#key').hidden")
    enter = "document.querySelector('#key input').value = {!r}; document.querySelector('#key').requestSubmit(); true"
    browser.value(enter.format("wrong"))
    browser.until("document.querySelector('#key-problem').textContent.includes('admin')")
    browser.value(enter.format(KEY))
    browser.until(_READY)
    assert browser.value("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    loaded = "performance.getEntriesByType('resource').filter((each) => !each.name.includes('/admin/'))"
    assert browser.value(f"{loaded}.every((each) => each.name.startsWith({url!r}))")
    assert 0 < browser.value(f"{loaded}.reduce((sum, each) => sum + each.decodedBodySize, 0)") < _MOST_BYTES
    refusals = [problem for problem in browser.problems if "401" not in problem]
    assert refusals == []


def test_tandem_ui_prints_an_address_that_opens_the_page(
    browser: Browser, up: Up, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", up.environment["XDG_RUNTIME_DIR"])
    assert main(["ui"]) == 0
    browser.open(capsys.readouterr().out.strip())
    browser.until(_READY)
    assert KEY not in browser.value("location.href")
    assert browser.problems == []


def test_a_request_appears_and_its_ledger_path_and_decision_open(browser: Browser, url: str) -> None:
    browser.open(f"{url}/ui#key={KEY}")
    browser.until(_READY)
    generate(url, "watched")
    bar = bar_of(url, "watched")
    browser.until(f"{bar} !== null")
    browser.value(f"{bar}.dispatchEvent(new MouseEvent('click')), true")
    detail = browser.until("document.querySelector('#detail h3') && document.querySelector('#detail').innerText")
    assert "watched" in detail and "wall time" in detail and "router-0" in detail
    browser.until("document.querySelector('#detail').innerText.includes('Why these workers')")
    browser.value("document.querySelector('#timeline').focus(), true")
    browser.key("Escape")
    browser.until("document.querySelector('#detail').hidden")
    browser.key("ArrowRight")
    browser.until("!document.querySelector('#detail').hidden")
    browser.until("document.querySelectorAll('#pools .kv-cell').length === 2")
    browser.until("document.querySelector('#latency').innerText.includes('ms')")
    assert browser.problems == []


def test_hostile_request_ids_and_hostile_output_stay_text(browser: Browser, url: str) -> None:
    browser.open(f"{url}/ui#key={KEY}")
    browser.until(_READY)
    generate(url, HOSTILE)
    bar = bar_of(url, HOSTILE)
    browser.until(f"{bar} !== null")
    browser.value(f"{bar}.dispatchEvent(new MouseEvent('click')), true")
    browser.until(f"document.querySelector('#detail .id').textContent === {HOSTILE!r}")
    # A grammar makes the model write the hostile text.
    browser.value(
        "{const real = window.fetch; window.fetch = (path, options) => real(path, options?.body ? {...options, body:"
        f" JSON.stringify({{...JSON.parse(options.body), guided_choice: [{HOSTILE!r}]}})}} : options); true}}"
    )
    browser.value(
        "{const form = document.querySelector('#prompt form');"
        " form.elements.text.value = 'x'; form.requestSubmit(); true}"
    )
    browser.until(f"document.querySelector('#answer').textContent === {HOSTILE!r}")
    browser.until("document.querySelector('#prompt button').textContent === 'Send'")
    assert browser.value("document.querySelectorAll('main img, main script').length") == 0
    assert browser.value("window.owned === undefined")
    assert browser.value("[...document.querySelectorAll('#answer span')].every((each) => each.className)")
    assert browser.problems == []


def test_the_page_fits_a_phone(browser: Browser, url: str) -> None:
    browser.resize(390, 844)
    browser.open(f"{url}/ui#key={KEY}")
    browser.until(_READY)
    assert browser.value("document.documentElement.scrollWidth") == 390


def test_the_page_survives_the_death_of_its_router(browser: Browser, up: Up, url: str) -> None:
    browser.open(f"{url}/ui#key={KEY}")
    browser.until(_READY)
    first = up.members()["router-0"]
    os.kill(first, signal.SIGSTOP)  # a stopped router is not replaced at once, so that the page shows its silence
    other = browser.until("document.querySelector('#summary a') && document.querySelector('#summary a').href")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/ui", other) and not other.startswith(url)
    os.kill(first, signal.SIGKILL)
    browser.until(_READY)
    generate(url, "after the death")
    browser.until(f"{bar_of(url, 'after the death')} !== null")
