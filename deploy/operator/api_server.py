"""Kubernetes' API server: objects read and written as JSON over HTTP, and lists that are watched.

Owns connections, credentials and retries. It behaves as the API's conventions say
(https://kubernetes.io/docs/reference/using-api/api-concepts/): a write carries the resourceVersion that was read and
may conflict (409), a watch ends at any time and goes on from its last resourceVersion, and where that is too old (410)
the list is read again. Calls block, each on a thread.
"""

import asyncio
import http.client
import json
import logging
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from cluster.errors import ConfigError, Unavailable

_LOG = logging.getLogger("tandem.operator")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 10.0
_WATCH_S = 240
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 15.0
_NUM_TRIES = 6
_RETRIED = frozenset({429, 500, 502, 503, 504})
MERGE_PATCH = "application/merge-patch+json"

Object = dict[str, Any]


class ApiError(Unavailable):
    """An answer of the API server with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"Kubernetes answers {status}: {message}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Access:
    """The address of the API server and the credentials of this process. The token's file changes; it is read at each
    call."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @staticmethod
    def in_cluster(environment: Mapping[str, str]) -> "Access":
        """Return the access of a pod's service account. Raises ConfigError outside a pod."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "this process does not run in a pod of Kubernetes: give --api-server, for example that of "
                "`kubectl proxy`"
            )
        name = f"[{host}]" if ":" in host else host
        return Access(f"https://{name}:{port}", _ACCOUNT / "token", _ACCOUNT / "ca.crt")

    @staticmethod
    def namespace() -> str:
        """Return the namespace of this pod. Raises ConfigError outside a pod."""
        try:
            return (_ACCOUNT / "namespace").read_text().strip()
        except OSError as error:
            raise ConfigError("this process does not run in a pod of Kubernetes: give --namespace") from error


class ApiServer:
    def __init__(self, access: Access, *, first_backoff_s: float = _FIRST_BACKOFF_S) -> None:
        """`first_backoff_s`: between a call that failed and its retry; it doubles with each further one."""
        self._access, self._first_backoff_s = access, first_backoff_s

    async def get(self, path: str) -> Object:
        """Raises ApiError, and Unavailable if the server does not answer after several tries."""
        return await self._retried("GET", path)

    async def replace(self, path: str, body: Object) -> Object:
        """Replace the object, whose metadata.resourceVersion must be the one that was read. Raises as `get`; ApiError
        with status 409 if it has changed."""
        return await self._retried("PUT", path, body)

    async def patch(self, path: str, body: Object) -> Object:
        """Merge `body` into the object. Raises as `get`."""
        return await self._retried("PATCH", path, body, MERGE_PATCH)

    async def watch(self, path: str) -> AsyncGenerator[dict[str, Object], None]:
        """Yield the objects of a list by name: at once, and after each change. Follows them until it is closed, also
        while the server does not answer."""
        backoff_s, objects, version = self._first_backoff_s, dict[str, Object](), ""
        while True:
            try:
                if not version:
                    listed = await self.get(path)
                    objects = {item["metadata"]["name"]: item for item in listed["items"]}
                    version = listed["metadata"]["resourceVersion"]
                    yield dict(objects)
                async for event in self._events(path, version):
                    backoff_s = self._first_backoff_s
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        _apply(event, objects)
                        yield dict(objects)
            except ApiError as error:
                if error.status == 410:
                    version = ""
                    continue
                _LOG.warning("a watch failed: %s", error.message, extra={"path": path})
            except (Unavailable, OSError, http.client.HTTPException, ValueError) as error:
                _LOG.warning("a watch was interrupted: %s", error, extra={"path": path})
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _events(self, path: str, version: str) -> AsyncGenerator[Object, None]:
        """Raises ApiError, OSError, HTTPException, ValueError. Ends when the server ends the watch."""
        query = {"watch": 1, "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": _WATCH_S}
        connection, is_over = self._connect(_WATCH_S + _TIMEOUT_S), threading.Event()

        def ask() -> http.client.HTTPResponse:
            connection.connect()
            if is_over.is_set():  # before there was a socket to shut down
                raise ConnectionAbortedError("the watch has ended")
            return self._ask(connection, "GET", f"{path}?{urlencode(query)}", None, "")

        try:
            response = await asyncio.to_thread(ask)
            while line := await asyncio.to_thread(response.readline):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(int(event["object"].get("code", 500)), str(event["object"].get("message", "")))
                yield event
        finally:
            is_over.set()
            _abandon(connection)

    async def _retried(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json"
    ) -> Object:
        backoff_s = self._first_backoff_s
        for number in range(_NUM_TRIES):
            try:
                return await asyncio.to_thread(self._call, method, path, body, kind)
            except ApiError as error:
                if error.status not in _RETRIED or number == _NUM_TRIES - 1:
                    raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                if number == _NUM_TRIES - 1:
                    raise Unavailable(f"Kubernetes' API server does not answer: {error}") from error
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        raise AssertionError("unreachable")

    def _call(self, method: str, path: str, body: Object | None, kind: str) -> Object:
        connection = self._connect(_TIMEOUT_S)
        try:
            answer: Object = json.loads(self._ask(connection, method, path, body, kind).read())
            return answer
        finally:
            connection.close()

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Object | None, kind: str
    ) -> http.client.HTTPResponse:
        headers = {"accept": "application/json"}
        if self._access.token_file is not None:
            headers["authorization"] = f"Bearer {self._access.token_file.read_text().strip()}"
        if body is not None:
            headers["content-type"] = kind
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        if response.status >= 400:
            text = response.read(4096).decode(errors="replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["message"]
            raise ApiError(response.status, text or response.reason)
        return response

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self._access.url)
        assert parts.hostname is not None
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        context = ssl.create_default_context(cafile=str(self._access.ca_file) if self._access.ca_file else None)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)


def _apply(event: Object, objects: dict[str, Object]) -> None:
    name = event["object"]["metadata"]["name"]
    if event["type"] == "DELETED":
        objects.pop(name, None)
    else:
        objects[name] = event["object"]


def _abandon(connection: http.client.HTTPConnection) -> None:
    """End a read that may be blocked on another thread."""
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
