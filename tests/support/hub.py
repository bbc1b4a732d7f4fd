"""A local server with the subset of the Hugging Face hub's API that the client library needs for uploads and
downloads.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

TOKEN = "hf_0123456789secret"
COMMIT = "5" * 40


class Hub:
    """Accepts uploads, as the hub does.

    `files` maps repository and name to each uploaded file; `asked` lists all requests. A request whose path contains
    `fails_at` gets a response with status 507 and a body that contains the token.
    """

    def __init__(self) -> None:
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.fails_at = ""
        self.stored: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environment(self, home: str) -> dict[str, str]:
        """Return the environment variables that make the client use this server and log in to it."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": home,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.files[repo][value["path"]]
            elif line["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.stored[value["oid"]]


class _Handler(BaseHTTPRequestHandler):
    of: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        repo = self.path.partition("?")[0].removeprefix("/api/models/").removesuffix("/revision/main")
        if self._is_refused():
            return
        if "/tree/" in self.path:
            self._list()
            return
        if "/resolve/" in self.path:
            self._give(*self.path.strip("/").split("/resolve/main/"))
            return
        if self.path == "/api/whoami-v2":
            self._answer({"name": "ada", "type": "user", "orgs": []})
        elif repo in self.of.private:
            siblings = [{"rfilename": name} for name in self.of.files[repo]]
            facts = {"private": self.of.private[repo], "sha": COMMIT}
            self._answer({"id": repo, **facts, "siblings": siblings})
        else:
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._is_refused():
            return
        repo = "/".join(self.path.strip("/").removeprefix("api/models/").removesuffix(".git").split("/")[:2])
        if "/paths-info/" in self.path:
            asked = parse_qs(body.decode()).get("paths", [])
            files = self.of.files.get(repo, {})
            known = [
                {"type": "file", "path": one, "size": len(files[one]), "oid": COMMIT} for one in asked if one in files
            ]
            self._answer(known)
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization'] or 'ada'}/{asked['name']}"
            self.of.private[repo], self.of.files[repo] = asked["visibility"] == "private", {}
            self._answer({"url": f"{self.of.url}/{repo}"})
        elif "/preupload/" in self.path:
            sent = json.loads(body)["files"]
            modes = [(one["path"], "lfs" if one["path"].endswith(".safetensors") else "regular") for one in sent]
            self._answer({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.of.url}/put/{one['oid']}?signature=secret", "header": {}}}
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self.of.commit(repo, [json.loads(line) for line in body.splitlines()])
            self._answer({"commitUrl": f"{self.of.url}/{repo}/commit/1", "commitOid": "1" * 40})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._fails():
            self.of.stored[hashlib.sha256(content).hexdigest()] = content
            self._answer({})

    def _is_refused(self) -> bool:
        """Reject requests without the token and requests that should fail; return whether the request was rejected."""
        self.of.asked.append(f"{self.command} {self.path}")
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid credentials"}, 401)
            return True
        return self._fails()

    def _fails(self) -> bool:
        fails = bool(self.of.fails_at) and self.of.fails_at in self.path
        if fails:
            self._answer({"error": f"no room for {self.headers['Authorization']}"}, 507)
        return fails

    def _list(self) -> None:
        """Respond with the files below a folder of a repository."""
        repo, place = self.path.partition("?")[0].removeprefix("/api/models/").split("/tree/main", 1)
        below, files = place.strip("/"), self.of.files.get(repo, {})
        found = {name: content for name, content in files.items() if not below or name.startswith(f"{below}/")}
        if not found:
            self._answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self._answer([{"type": "file", "path": name, "size": len(one), "oid": COMMIT} for name, one in found.items()])

    def _give(self, repo: str, name: str) -> None:
        """Respond with a file, or only with its headers."""
        if (content := self.of.files.get(repo, {}).get(name)) is None:
            self._answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(content).hexdigest()
        self._answer(content, headers={"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _answer(
        self, content: dict[str, Any] | list[Any] | bytes, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(body))} | (headers or {})
        ).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write nothing to standard error."""
