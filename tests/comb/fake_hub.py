"""A model hub in one process: what `huggingface_hub` asks for when it uploads and downloads a small repository."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """Files per repository, and the uploads that are waiting for a commit."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.private: dict[str, bool] = {}
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def _answer(self, body: Any = None, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self) -> None:
        body, path = self._body(), self.path.split("?")[0]
        if path == "/api/repos/create":
            request = json.loads(body)
            name = "/".join(part for part in (request.get("organization"), request["name"]) if part)
            self.hub.repos.setdefault(name, {})
            self.hub.private[name] = "private" in (
                request.get("visibility"),
                "private" if request.get("private") else "",
            )
            self._answer({"url": f"{self.hub.url}/{name}"})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            mode = lambda name: "lfs" if name.endswith(".safetensors") else "regular"  # noqa: E731
            self._answer({"files": [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False}
                                    for f in files]})  # fmt: skip
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            self._answer({"transfer": "basic", "objects": [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}}
                for o in objects]})  # fmt: skip
        elif "/commit/" in path:
            self._commit("/".join(path.split("/")[3:5]), body)
        else:
            self._answer({}, 404)

    def _commit(self, repo: str, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.hub.repos[repo][value["path"]] = self.hub.objects[value["oid"]]
        url = f"{self.hub.url}/{repo}/commit/{COMMIT}"
        self._answer({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})

    def do_PUT(self) -> None:
        self.hub.objects[self.path.removeprefix("/lfs/")] = self._body()
        self._answer()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if len(parts) >= 5 and parts[2] == "resolve":
            content = self.hub.repos.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
            if content is None:
                self._answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            else:
                etag = f'"{hashlib.sha256(content).hexdigest()}"'
                self._answer(content, ETag=etag, X_Repo_Commit=COMMIT)
        else:
            self._answer({}, 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def fake_hub() -> Iterator[Hub]:
    """A hub on a free port of this machine, for the length of the ``with`` block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
