"""A model hub in one process: what `huggingface_hub` asks for when it uploads and downloads a small repository."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Repo:
    """Files of the newest commit, and the ids of all commits, newest first."""

    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    private: bool = False

    @property
    def head(self) -> str:
        return self.commits[0]

    def commit(self, files: Mapping[str, bytes | None]) -> str:
        """All files at once, None deletes one; the id of the new commit."""
        self.files = {name: content for name, content in {**self.files, **files}.items() if content is not None}
        content = repr((sorted(self.files.items()), len(self.commits)))
        self.commits.insert(0, hashlib.sha1(content.encode()).hexdigest())
        return self.head


@dataclass
class Failure:
    """Requests whose method and path hold `what` are answered with the status `how`, `times` times."""

    what: str
    how: int
    times: int = 1


class Hub:
    """Repositories, uploads that wait for a commit, the requests that came, and failures to come."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.failures: list[Failure] = []
        self.requests: list[str] = []
        self.token: str | None = None
        self.url = ""

    @property
    def repos(self) -> dict[str, dict[str, bytes]]:
        """Files per repository."""
        return {name: repo.files for name, repo in self.repositories.items()}

    def add(self, name: str, files: dict[str, bytes] | None = None, *, private: bool = False) -> Repo:
        """A repository with its first commit."""
        repo = self.repositories.setdefault(name, Repo(private=private))
        repo.commit(files or {})
        return repo


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def _answer(self, body: Any = None, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fails(self) -> bool:
        """Carries out a failure that is due; whether the request is over with it."""
        request = f"{self.command} {self.path}"
        self.hub.requests.append(request)
        for failure in self.hub.failures:
            if failure.what in request and failure.times:
                failure.times -= 1
                self._body()
                self._answer({"error": "as the test wants"}, failure.how)
                return True
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            if "/lfs/" in self.path:  # signed addresses carry their own permission
                return False
            self._body()
            self._answer({"error": "Invalid credentials in Authorization header"}, 401)
            return True
        return False

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
        if self._fails():
            return
        body, path = self._body(), self.path.split("?")[0]
        if path == "/api/repos/create":
            request = json.loads(body)
            name = "/".join(part for part in (request.get("organization"), request["name"]) if part)
            if name in self.hub.repositories:
                self._answer({"url": f"{self.hub.url}/{name}", "error": "You already created this model repo"}, 409)
                return
            private = bool(request.get("private")) or request.get("visibility") == "private"
            self.hub.add(name, private=private)
            self._answer({"url": f"{self.hub.url}/{name}"})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if path.endswith(".safetensors") else "regular" for path in paths]
            self._answer({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False}
                                    for path, mode in zip(paths, modes, strict=True)]})  # fmt: skip
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            there = self.hub.objects
            upload = lambda oid: {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{oid}"}}}  # noqa: E731
            self._answer({"transfer": "basic", "objects": [
                {"oid": o["oid"], "size": o["size"], **({} if o["oid"] in there else upload(o["oid"]))}
                for o in objects]})  # fmt: skip
        elif "/commit/" in path:
            self._commit("/".join(path.split("/")[3:5]), body)
        else:
            self._answer({}, 404)

    def _commit(self, name: str, body: bytes) -> None:
        repo = self.hub.repositories[name]
        files: dict[str, bytes | None] = {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                if value.get("parentCommit", repo.head) != repo.head:
                    self._answer({"error": "A commit has happened since. Please refresh and try again."}, 412)
                    return
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                files[value["path"]] = None
        commit = repo.commit(files)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self._answer({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def do_PUT(self) -> None:
        if self._fails():
            return
        content, oid = self._body(), self.path.removeprefix("/lfs/")
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.objects[oid] = content
        self._answer()

    def do_GET(self) -> None:
        if self._fails():
            return
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._info("/".join(parts[2:4]))
        elif len(parts) >= 5 and parts[2] == "resolve":
            repo = self.hub.repositories.get("/".join(parts[:2]))
            if repo is None:
                self._answer({}, 404, X_Error_Code="RepoNotFound")
                return
            content = repo.files.get("/".join(parts[4:]))
            if content is None:
                self._answer({}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=repo.head)
            else:
                etag = f'"{hashlib.sha256(content).hexdigest()}"'
                self._answer(content, ETag=etag, X_Repo_Commit=repo.head)
        else:
            self._answer({}, 404, X_Error_Code="EntryNotFound")

    def _info(self, name: str) -> None:
        repo = self.hub.repositories.get(name)
        if repo is None:
            self._answer({}, 404, X_Error_Code="RepoNotFound")
        else:
            files = [{"rfilename": path} for path in repo.files]
            self._answer({"id": name, "modelId": name, "sha": repo.head, "private": repo.private, "siblings": files})

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
