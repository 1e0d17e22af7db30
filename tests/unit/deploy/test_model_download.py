"""The Job that fills the volume of a model: its command runs here, against a server that answers as the hub does."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from cluster.grammar.tokenizer_files import locate

_COMPONENT = Path(__file__).parents[3] / "deploy" / "kubernetes" / "components" / "model"
_COMMIT = "a" * 40
_FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"a pickle"}


@contextmanager
def _hub(asked: list[str]) -> Iterator[str]:
    """Serve the revision `v1` of acme/tiny, and yield the server's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, *, has_body: bool) -> None:
            asked.append(self.path)
            path, name = self.path.partition("?")[0], self.path.rpartition("/")[2]
            if path == "/api/models/acme/tiny/revision/v1":
                siblings = [{"rfilename": each} for each in _FILES]
                body = json.dumps({"id": "acme/tiny", "sha": _COMMIT, "siblings": siblings}).encode()
            elif path == f"/api/models/acme/tiny/tree/{_COMMIT}":
                sizes = {each: len(content) for each, content in _FILES.items()}
                tree = [{"type": "file", "path": each, "size": size, "oid": "0"} for each, size in sizes.items()]
                body = json.dumps(tree).encode()
            elif path == f"/acme/tiny/resolve/{_COMMIT}/{name}":
                body = _FILES[name]
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{name}-1"')
            self.send_header("X-Repo-Commit", _COMMIT)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _job() -> dict[str, Any]:
    (job,) = [item for item in yaml.safe_load_all((_COMPONENT / "download.yaml").read_text()) if item["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return dict(container)


def _download(models: Path, url: str, revision: str) -> "subprocess.CompletedProcess[str]":
    container = _job()
    own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    own |= {"MODEL": "acme/tiny", "REVISION": revision, "FOLDER": str(models / "tiny")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | own | {"PATH": path, "HF_ENDPOINT": url, "HF_HOME": str(models.parent / "hub")}
    command = [*container["command"], *container["args"]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_job_fills_the_volume_once_with_the_revision_and_members_need_no_hub_then(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    asked: list[str] = []
    with _hub(asked) as url:
        failed = _download(models, url, "missing")
        assert failed.returncode != 0 and not (models / "tiny").exists(), "members would read a part of a model"
        done = _download(models, url, "v1")
        assert done.returncode == 0, done.stderr
    read = {path.name: path.read_bytes() for path in (models / "tiny").iterdir() if path.is_file()}
    assert read == {name: content for name, content in _FILES.items() if not name.endswith(".bin")}
    assert not any("pytorch_model" in path for path in asked)
    again = _download(models, "http://127.0.0.1:1", "v1")
    assert again.returncode == 0 and "is there already" in again.stdout, "a restarted Job must not need the hub"
    assert locate(str(models / "tiny")) == models / "tiny"
