"""A small Hub on loopback, for tests: repositories in memory, with the routes that huggingface_hub asks for.

`with HubServer() as hub:` serves; `hub.environment(folder)` is what a process needs to use it and nothing else. Uploads
arrive as one commit. A private repository answers only to `hub.token`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_" + "t" * 34
_REVISION = r"(?P<revision>[^/]+)"
_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Repository:
    """Its commits, by id: files by name. Branches and tags name commits."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add("main", {})

    def add(self, branch: str, files: dict[str, bytes]) -> str:
        """A new commit at the end of a branch."""
        body = json.dumps(
            [len(self.commits), sorted((name, hashlib.sha256(x).hexdigest()) for name, x in files.items())]
        )
        commit = hashlib.sha1(body.encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def at(self, revision: str) -> str | None:
        """The commit a branch, tag or commit id means."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class HubServer:
    """A Hub. `repositories` may be looked at and changed by tests; `served` counts the bytes of every file."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.token = TOKEN
        self.served: dict[str, int] = {}
        self.requests: list[str] = []
        self.cut_uploads = 0  # so many commits to come break off before they are made
        self.cut_downloads = 0  # so many files to come break off in the middle
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Variables of a process that uses this Hub, with caches of its own."""
        known = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        return known | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": token or ""}

    def add(self, name: str, folder: Path, private: bool = False, branch: str = "main") -> Repository:
        """Puts a folder's files into a repository."""
        repository = self.repositories.setdefault(name, Repository(private))
        files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        repository.add(branch, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
        return repository


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._read(with_body=False)

    def do_GET(self) -> None:
        self._read(with_body=True)

    def do_POST(self) -> None:
        self._write()

    def do_DELETE(self) -> None:
        self._write()

    def log_message(self, *_: Any) -> None:
        pass

    # --- answers ---

    def _json(self, value: Any, status: int = 200, error: str = "", with_body: bool = True) -> None:
        self._send(json.dumps(value).encode(), status, {"X-Error-Code": error} if error else {}, with_body)

    def _send(self, body: bytes, status: int, headers: dict[str, str], with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        is_known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        return None if found is None or (found.private and not is_known) else found

    # --- reading ---

    def _read(self, with_body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append(f"{self.command} {path}")
        if path == "/api/whoami-v2":
            self._json({"name": "tester", "type": "user", "orgs": [{"name": "org"}]}, with_body=with_body)
        elif (match := re.fullmatch(rf"/{_REPO}/resolve/{_REVISION}/(?P<file>.+)", path)) is not None:
            self._file(match, with_body)
        elif (match := re.fullmatch(rf"/api/models/{_REPO}/tree/{_REVISION}(/.*)?", path)) is not None:
            self._listing(match, with_body, is_tree=True)
        elif (match := re.fullmatch(rf"/api/models/{_REPO}(/revision/{_REVISION})?", path)) is not None:
            self._listing(match, with_body, is_tree=False)
        else:
            self._json({}, 200 if path == "/api/agent-harnesses" else 404, with_body=with_body)

    def _commit_of(self, match: re.Match[str], with_body: bool) -> tuple[Repository, str] | None:
        repository = self._repository(match["repo"])
        if repository is None:
            self._json({"error": "Repository not found"}, 404, "RepoNotFound", with_body)
            return None
        commit = repository.at(match["revision"] or "main")
        if commit is None:
            self._json({"error": "Invalid rev id"}, 404, "RevisionNotFound", with_body)
            return None
        return repository, commit

    def _file(self, match: re.Match[str], with_body: bool) -> None:
        found = self._commit_of(match, with_body)
        if found is None:
            return
        repository, commit = found
        body = repository.commits[commit].get(match["file"])
        if body is None:
            # With the commit, so that clients remember that it has no such file.
            body, known = b'{"error": "Entry not found"}', {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            self._send(body, 404, known, with_body)
            return
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status = 200
        if (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")) is not None:
            first, last = int(asked[1]), int(asked[2] or len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            body, status = body[first : last + 1], 206
        if with_body and self.hub.cut_downloads and match["file"].endswith((".safetensors", ".bin")):
            self.hub.cut_downloads -= 1
            self._cut(body, status, headers)
            return
        if with_body:
            self.hub.served[match["file"]] = self.hub.served.get(match["file"], 0) + len(body)
        self._send(body, status, headers, with_body)

    def _cut(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        """Promises everything and hangs up in the middle."""
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.close_connection = True

    def _listing(self, match: re.Match[str], with_body: bool, is_tree: bool) -> None:
        found = self._commit_of(match, with_body)
        if found is None:
            return
        repository, commit = found
        files = repository.commits[commit]
        if is_tree:
            sizes = [(name, len(body), hashlib.sha1(body).hexdigest()) for name, body in files.items()]
            self._json([{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in sizes])
            return
        siblings = [{"rfilename": name} for name in files]
        facts = {"id": match["repo"], "modelId": match["repo"], "sha": commit, "private": repository.private}
        self._json(facts | {"siblings": siblings, "tags": []}, with_body=with_body)

    # --- writing ---

    def _write(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append(f"{self.command} {path}")
        body = self._body()
        if path != "/api/validate-yaml" and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._json({"error": "Invalid credentials"}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif (match := re.fullmatch(rf"/api/models/{_REPO}/branch/(?P<branch>.+)", path)) is not None:
            self._branch(match)
        elif (match := re.fullmatch(rf"/api/models/{_REPO}/preupload/{_REVISION}", path)) is not None:
            names = [file["path"] for file in json.loads(body)["files"]]
            self._json({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif (match := re.fullmatch(rf"/api/models/{_REPO}/commit/{_REVISION}", path)) is not None:
            self._commit(match, body)
        else:
            self._json({"error": "unknown route"}, 404)

    def _body(self) -> bytes:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().strip(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        is_private = bool(asked.get("private")) or asked.get("visibility") == "private"
        is_there = name in self.hub.repositories
        self.hub.repositories.setdefault(name, Repository(is_private))
        answer = {"url": f"{self.hub.url}/{name}", "id": name, "name": name}
        self._json(answer, 409 if is_there else 200)

    def _branch(self, match: re.Match[str]) -> None:
        repository = self._repository(match["repo"])
        if repository is None:
            self._json({"error": "Repository not found"}, 404, "RepoNotFound")
            return
        is_there = match["branch"] in repository.branches
        repository.branches.setdefault(match["branch"], repository.branches["main"])
        self._json({}, 409 if is_there else 200)

    def _commit(self, match: re.Match[str], body: bytes) -> None:
        found = self._commit_of(match, with_body=True)
        if found is None:
            return
        if self.hub.cut_uploads:
            self.hub.cut_uploads -= 1
            self.close_connection = True
            self.connection.close()
            return
        repository, commit = found
        files = dict(repository.commits[commit])
        for line in filter(None, body.split(b"\n")):
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "deletedFile":
                files.pop(entry["value"]["path"], None)
        made = repository.add(match["revision"], files)
        address = f"{self.hub.url}/{match['repo']}/commit/{made}"
        self._json({"success": True, "commitOid": made, "commitUrl": address, "hookOutput": ""})
