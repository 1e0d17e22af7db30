"""The page at /ui: which callers get it and its data, and what its security policy allows."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser

import httpx
import pytest

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.registry.registry import Registry
from cluster.registry.scale_registry import ScaleTargets
from router.http.openai_api import build_app
from router.http.page_endpoint import FOLDER, add_page
from router.operator_commands import ScaleTargetView
from tests.system.rigs.members.overview_rig import overview_of
from tests.system.rigs.members.router_harness import RouterUnderTest, answer_to, ask, router_under_test

_HOME = ("127.0.0.1", 5000)
_AWAY = ("192.0.2.7", 5000)
_KEY = {"authorization": "Bearer secret"}


@asynccontextmanager
async def page(
    admin_key: str = "", *, client: tuple[str, int] = _HOME, host: str = "localhost:8000"
) -> AsyncIterator[tuple[RouterUnderTest, httpx.AsyncClient]]:
    async with router_under_test() as router:
        registry = Registry(url="redis://127.0.0.1:1/0", cluster_name="nobody", ttl_s=5.0)  # it does not answer
        scaling = ScaleTargetView(ScaleTargets(registry), router.fleet.set_scale_target)
        app = build_app(
            pipeline=router.pipeline,
            live_requests=router.live_requests,
            tokenization=router.tokenization,
            telemetry=router.telemetry,
            ready=lambda: True,
            gate=Gate(admin_key=admin_key),
            audit=Audit(),
            max_message_bytes=100_000,
        )
        add_page(app, overview_of(router, scaling, registry))
        transport = httpx.ASGITransport(app, client=client)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
            yield router, http
        await registry.close()


class _Resources(HTMLParser):
    """The resources that a page loads, and its elements that a strict policy forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.forbidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.loaded += [str(values[name]) for name in ("src", "href") if name in values]
        self.forbidden += [name for name in values if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in values):
            self.forbidden.append(tag)


async def test_the_page_loads_only_files_of_the_router_and_has_no_inline_script_or_style() -> None:
    async with page("secret") as (_, http):  # the page itself needs no key: it asks for it
        answer = await http.get("/ui")
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'") and "unsafe" not in policy
        found = _Resources()
        found.feed(answer.text)
        assert found.forbidden == []
        kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
        modules = [f"ui/{path.name}" for path in FOLDER.glob("*.js")]
        for path in {*found.loaded, *modules}:
            file = await http.get(f"/{path}")
            assert file.status_code == 200, path
            assert file.headers["content-type"].startswith(kinds[path[path.rindex(".") :]])
            assert file.headers["content-security-policy"] == policy
            again = await http.get(f"/{path}", headers={"if-none-match": file.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")


async def test_no_script_of_the_page_parses_text_as_html_or_stores_a_key() -> None:
    scripts = {path.name: path.read_text() for path in FOLDER.glob("*.js")}
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|sessionStorage|cookie|https?://(?!www\.w3\.org/2000/svg)"
    assert {name: re.findall(banned, text) for name, text in scripts.items() if re.search(banned, text)} == {}


@pytest.mark.parametrize("path", ["/admin/overview", "/admin/explain?name=r"])
async def test_the_data_need_the_key(path: str) -> None:
    async with page("secret", client=_AWAY, host="router.example") as (_, http):
        refused = await http.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "unauthenticated")
        assert (await http.get(path, headers=_KEY)).status_code in (200, 404)


@pytest.mark.parametrize(
    ("client", "host", "status"),
    [
        (_HOME, "localhost:8000", 200),
        (_HOME, "[::1]:8000", 200),
        (_HOME, "rebound.example", 401),  # a name of another site that leads to this machine
        (_AWAY, "192.0.2.1:8000", 401),
    ],
)
async def test_without_keys_the_data_are_for_the_routers_own_machine(
    client: tuple[str, int], host: str, status: int
) -> None:
    async with page(client=client, host=host) as (_, http):
        assert (await http.get("/admin/overview")).status_code == status


async def test_the_data_of_the_page_are_those_of_the_overview() -> None:
    async with page() as (router, http):
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        await answer_to(router, ask(request_id="<img src=x>"))
        shown = await http.get("/admin/overview")
        assert shown.headers["cache-control"] == "no-store"
        (own,) = shown.json()["routers"]
        assert [request["request_id"] for request in own["ended"]] == ["<img src=x>"]
        position = own["position"]
        seen = f"{own['router']}:{position['ended']}:{position['events']}:{position['samples']}"
        (own,) = (await http.get("/admin/overview", params={"seen": seen})).json()["routers"]
        assert own["ended"] == []
        explained = (await http.get("/admin/explain", params={"name": "<img src=x>"})).json()["requests"]
        assert [request["outcome"] for request in explained] == ["ok"]
        assert (await http.get("/admin/explain", params={"name": "nobody's"})).status_code == 404
        assert (await http.get("/admin/overview", params={"seen": "r:1:x:2"})).status_code == 400
