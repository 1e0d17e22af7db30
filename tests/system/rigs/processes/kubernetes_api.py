"""A Kubernetes API server for tests: real HTTP, with the answers that the API's documentation names.

Lists have a resourceVersion, a watch sends each later change as a line of JSON and ends with an ERROR of code 410 if it
begins before what is kept, a write of an older resourceVersion gets 409, and `fail_next` answers with any other status.
Source: https://kubernetes.io/docs/reference/using-api/api-concepts/ and the OpenAPI document of autoscaling/v1.
"""

import json
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
NAMESPACE = "tandem"
_DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
AUTOSCALERS = f"/apis/autoscaling/v2/namespaces/{NAMESPACE}/horizontalpodautoscalers"
SCALED_OBJECTS = f"/apis/keda.sh/v1alpha1/namespaces/{NAMESPACE}/scaledobjects"


class FakeApiServer:
    """An API server in this process. Use it as a context manager. Its Deployments have all their replicas ready at
    once, and end the pods with the lowest deletion cost first. Any thread may call its methods.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = 100
        self._lists: dict[str, dict[str, Object]] = {_DEPLOYMENTS: {}, _PODS: {}, AUTOSCALERS: {}}
        self._events: list[tuple[int, str, Object]] = []  # of Deployments: version, type, object
        self._failures: deque[int] = deque()
        self._watchers: set[Any] = set()
        self.before_write: Callable[[], None] | None = None  # called once, between a client's read and its write
        self.requests: list[tuple[str, str]] = []  # method and path
        self.removed: list[str] = []  # pods, in the order in which they were ended
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        for pool in ("tandem-prefill", "tandem-decode"):
            self.set_deployment(pool, 2)

    def __enter__(self) -> "FakeApiServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self.cut_watches()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def replicas(self, name: str) -> int:
        with self._changed:
            return int(self._lists[_DEPLOYMENTS][name]["spec"]["replicas"])

    def pods(self, pool: str = "") -> dict[str, Object]:
        with self._changed:
            return {name: pod for name, pod in self._lists[_PODS].items() if name.startswith(pool)}

    def set_deployment(self, name: str, replicas: int) -> None:
        """Change a Deployment as its controller and an operator would."""
        with self._changed:
            known = self._lists[_DEPLOYMENTS].get(name)
            pods = self._lists[_PODS]
            own = sorted((pod for pod in pods if pod.startswith(name)), key=lambda pod: _cost(pods[pod]))
            for pod in own[: max(0, len(own) - replicas)]:
                del pods[pod]
                self.removed.append(pod)
            for number in range(replicas):
                if sum(pod.startswith(name) for pod in pods) < replicas:
                    pods.setdefault(f"{name}-{number}", _pod(f"{name}-{number}", name))
            status = {"replicas": replicas, "readyReplicas": replicas}
            item = {"metadata": {"name": name}, "spec": {"replicas": replicas}, "status": status}
            self._lists[_DEPLOYMENTS][name] = item
            self._record("MODIFIED" if known else "ADDED", item)

    def add(self, path: str, name: str, spec: Object) -> None:
        """Create an autoscaler. The list of ScaledObjects exists from the first one on, as with KEDA."""
        with self._changed:
            self._lists.setdefault(path, {})[name] = {"metadata": {"name": name}, "spec": spec}

    def fail_next(self, *statuses: int) -> None:
        with self._changed:
            self._failures.extend(statuses)

    def forget_events(self) -> None:
        """Compact: a watch that begins before now is too old."""
        with self._changed:
            self._events.clear()
            self._version += 1
            self._record("BOOKMARK", {"metadata": {}})

    def cut_watches(self) -> None:
        with self._changed:
            for connection in self._watchers:
                with suppress(OSError):
                    connection.shutdown(2)
            self._changed.notify_all()

    def _record(self, kind: str, item: Object) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, kind, json.loads(json.dumps(item))))
        self._changed.notify_all()

    def answer(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        """Return the status and the object for one request that is no watch."""
        with self._changed:
            self.requests.append((method, path))
            if self._failures:
                status = self._failures.popleft()
                return status, _status(status, "as the test wishes")
            if method == "GET" and path in self._lists:
                items = list(self._lists[path].values())
                return 200, {"metadata": {"resourceVersion": str(self._version)}, "items": items}
            folder, _, name = path.removesuffix("/scale").rpartition("/")
            if name not in self._lists.get(folder, {}):
                return 404, _status(404, f"{path} not found")
            item = self._lists[folder][name]
            if method == "PATCH":
                item["metadata"].setdefault("annotations", {}).update(body["metadata"]["annotations"])
                return 200, item
            return self._scaled(item, method, body)

    def _scaled(self, item: Object, method: str, body: Object) -> tuple[int, Object]:
        name = item["metadata"]["name"]
        if method == "PUT":
            if self.before_write is not None:
                interfere, self.before_write = self.before_write, None
                interfere()
                item = self._lists[_DEPLOYMENTS][name]
            if body["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                return 409, _status(409, f"deployments {name}: the object has been modified")
            self.set_deployment(name, int(body["spec"]["replicas"]))
            item = self._lists[_DEPLOYMENTS][name]
        metadata = {"name": name, "resourceVersion": item["metadata"]["resourceVersion"]}
        return 200, {"kind": "Scale", "metadata": metadata, "spec": {"replicas": item["spec"]["replicas"]}}

    def events_after(self, version: int) -> list[tuple[int, str, Object]] | None:
        """Return the events after a version, once there are any; None if it is too old."""
        with self._changed:
            if self._events and version < self._events[0][0] - 1:
                return None
            self._changed.wait_for(lambda: bool(self._events) and self._events[-1][0] > version, timeout=0.5)
            return [event for event in self._events if event[0] > version]

    def _handler(fake: "FakeApiServer") -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _answer(self) -> None:
                parts = urlsplit(self.path)
                query = parse_qs(parts.query)
                if "watch" in query:
                    self._watch(parts.path, int(query["resourceVersion"][0]))
                    return
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                status, item = fake.answer(self.command, parts.path, body)
                content = json.dumps(item).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_PATCH = _answer

            def _watch(self, path: str, version: int) -> None:
                with fake._changed:
                    fake.requests.append(("WATCH", path))
                    fake._watchers.add(self.connection)
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.close_connection = True
                with suppress(OSError):
                    while (events := fake.events_after(version)) is not None:
                        for _, kind, item in events:
                            self._send({"type": kind, "object": item})
                        version = events[-1][0] if events else version
                        self._send({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}})
                    self._send({"type": "ERROR", "object": _status(410, "too old resource version")})
                with fake._changed:
                    fake._watchers.discard(self.connection)

            def _send(self, event: Object) -> None:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))

        return Handler


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "status": "Failure", "code": code, "message": message}


def _pod(name: str, pool: str) -> Object:
    return {"metadata": {"name": name, "labels": {"app.kubernetes.io/name": pool}}}


def _cost(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost", 0))
