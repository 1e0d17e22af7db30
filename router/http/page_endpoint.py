"""The page for operators at /ui, and the data that it reads below /admin/.

The page is static files beside this module's folder, read once at start. It asks for the key itself, keeps it in memory
and sends it with every request for data, so the files need none.
"""

import mimetypes
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from cluster.errors import InvalidRequest, Unauthenticated
from router.http.errors import json_bytes
from router.overview.overview import Metadata, Overview
from tandem.enum_words import plain_object
from tandem.v1 import admin_pb2

FOLDER = Path(__file__).with_name("page")
_KINDS = (".html", ".css", ".js", ".svg")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_Seen = Annotated[tuple[str, ...], Query()]
_MAX_SEEN = 64  # routers in one request


def add_page(app: FastAPI, overview: Overview) -> None:
    """Serve the page. Without keys for operators its data are for this machine alone."""
    overviews = _Rendered()
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _KINDS}

    @app.get("/ui", include_in_schema=False)
    @app.get("/ui/{name}", include_in_schema=False)
    async def page(request: Request, name: str = "index.html") -> Response:
        content = files.get(name)
        if content is None:
            return Response("there is no such file\n", 404, _HEADERS, media_type="text/plain")
        tag = f'"{sha256(content).hexdigest()[:16]}"'
        headers = _HEADERS | {"etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=mimetypes.guess_type(name)[0])

    @app.get("/admin/overview", include_in_schema=False)
    async def cluster_overview(request: Request, seen: _Seen = ()) -> Response:
        _check_machine(request)
        asked = admin_pb2.OverviewRequest(seen=dict(map(_position, seen[:_MAX_SEEN])))
        return _data(overviews.json(await overview.of_cluster(asked, _metadata(request))))

    @app.get("/admin/explain", include_in_schema=False)
    async def explanation(request: Request, name: str) -> Response:
        _check_machine(request)
        return _data(json_bytes(plain_object(await overview.explain_anywhere(name, _metadata(request)))))


class _Rendered:
    """The JSON of the last overview. Pages that are given the same overview share it."""

    def __init__(self) -> None:
        self._message: admin_pb2.OverviewResponse | None = None
        self._json = b""

    def json(self, message: admin_pb2.OverviewResponse) -> bytes:
        if message is not self._message:
            self._message, self._json = message, json_bytes(plain_object(message))
        return self._json


def _data(json: bytes) -> Response:
    headers = _HEADERS | {"cache-control": "no-store"}
    return Response(json, headers=headers, media_type="application/json")


def _position(text: str) -> tuple[str, admin_pb2.OverviewPosition]:
    """Read "router:ended:events:samples". Raises InvalidRequest."""
    router, *numbers = text.rsplit(":", 3)
    try:
        ended, events, samples = map(int, numbers)
        return router, admin_pb2.OverviewPosition(ended=ended, events=events, samples=samples)
    except ValueError as error:
        raise InvalidRequest("seen must be ROUTER:ENDED:EVENTS:SAMPLES with three numbers") from error


def _check_machine(request: Request) -> None:
    """Refuse callers without a key from other machines, and pages of other sites whose name leads to this one. Raises
    Unauthenticated."""
    if request.state.caller.key_id:
        return
    host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    is_here = request.client is not None and _is_loopback(request.client.host)
    if not is_here or not (host == "localhost" or _is_loopback(host)):
        raise Unauthenticated(
            "without an admin key the router serves this page only to its own machine; start it with --admin-key"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _metadata(request: Request) -> Metadata:
    """Return the caller's key as the metadata of a call to another router."""
    key = request.headers.get("authorization")
    if key is None and "x-api-key" in request.headers:
        key = f"Bearer {request.headers['x-api-key']}"
    return [("authorization", key)] if key is not None else []
