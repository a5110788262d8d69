"""A server on the loopback interface that speaks the API of the Hugging Face Hub: repositories, commits, LFS."""

import base64
import hashlib
import http.server
import json
import re
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

TOKEN = "hf_secret"


@dataclass
class Repo:
    """A repository. Its commits are {file: content}, the last one is the main branch."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files, branch="main"):
        content = json.dumps([len(self.commits), sorted(files)]).encode()
        commit = hashlib.sha1(content + b"".join(files[name] for name in sorted(files))).hexdigest()
        self.commits[commit], self.refs[branch] = dict(files), commit
        return commit

    def at(self, revision):
        commit = self.refs.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else (None, None)


class FakeHub:
    """Repositories by ORG/NAME, and how the server behaves.

    Attributes:
        lfs: {digest: content} of uploaded large files.
        statuses: {part of a path: status} of requests that are refused.
        cut: Names of files whose body ends halfway, once each.
        asked: Counts of "METHOD path", and of "range" for resumed downloads.
    """

    LARGE = (".onnx", ".npz", ".gz", ".safetensors", ".data")

    def __init__(self):
        self.repos, self.lfs, self.statuses, self.cut, self.asked = {}, {}, {}, set(), Counter()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def add(self, name, folder=None, **kinds):
        repo = self.repos[name] = Repo(**kinds)
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in (folder.rglob("*") if folder else ())
            if path.is_file()
        }
        repo.commit({".gitattributes": b"", **files})
        return repo


@contextmanager
def fake_hub(monkeypatch, cache):
    """Context with a hub that huggingface_hub of this process talks to, with its cache in a folder."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    hub = FakeHub()
    for name, value in {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": 256,  # what arrived of smaller files is not kept
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(cache / "token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)  # between attempts
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()


def _handler(hub):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            self.answer(self.get)

        do_HEAD = do_GET

        def do_POST(self):
            self.answer(self.post)

        def do_PUT(self):
            self.answer(self.put)

        def answer(self, work):
            self.path = self.path.partition("?")[0]
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.asked[f"{self.command} {self.path}"] += 1
            status = next((status for part, status in hub.statuses.items() if part in self.path), None)
            if status is not None:
                return self.send(status, {"error": "refused"})
            return work()

        def send(self, status, value=None, content=None, **headers):
            content = json.dumps(value).encode() if content is None else content
            self.send_response(status)
            for name, text in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def fail(self, status, code):
            self.send(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

        def opened(self, name):
            """The repository, if this client may read it; else the answer is sent."""
            repo, authorized = hub.repos.get(name), self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if repo is None or (repo.private and not authorized):
                return self.fail(404 if authorized else 401, "RepoNotFound")
            if repo.gated:
                return self.fail(403, "GatedRepo")
            return repo

        def get(self):
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(tree|revision)/([^/]+))?", self.path):
                name, what, revision = match.groups()
                if repo := self.opened(name):
                    commit, files = repo.at(revision or "main")
                    if commit is None:
                        return self.fail(404, "RevisionNotFound")
                    listed = [self.entry(path, content) for path, content in sorted(files.items())]
                    siblings = [{"rfilename": file["path"]} for file in listed]
                    about = {"id": name, "sha": commit, "siblings": siblings, "tags": [], "downloads": 0}
                    self.send(200, listed if what == "tree" else about, Content_Type="application/json")
                return None
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path):
                name, revision, path = match.groups()
                if repo := self.opened(name):
                    commit, files = repo.at(revision)
                    if commit is None or path not in files:
                        return self.fail(404, "RevisionNotFound" if commit is None else "EntryNotFound")
                    self.file(path, files[path], commit)
                return None
            return self.fail(404, "EntryNotFound")

        def entry(self, path, content):
            digest = hashlib.sha256(content).hexdigest()
            large = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 134}}
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            return {"type": "file", "path": path, "size": len(content), "oid": blob} | (
                large if path.endswith(hub.LARGE) else {}
            )

        def file(self, path, content, commit):
            about = self.entry(path, content)
            etag = about.get("lfs", about)["oid"]
            headers = {"ETag": f'"{etag}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
            start = re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range") or "")
            if start and int(start[1]):
                hub.asked["range"] += 1
                part = content[int(start[1]) :]
                span = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
                return self.send(206, content=part, Content_Range=span, **headers)
            if path in hub.cut and self.command == "GET":
                hub.cut.discard(path)
                self.send_response(200)
                for name, text in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name.replace("_", "-"), text)
                self.end_headers()
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
                return None
            return self.send(200, content=content, **headers)

        def post(self):
            if self.path == "/api/validate-yaml":
                return self.send(200, {"errors": [], "warnings": []})
            if self.path == "/api/repos/create":
                asked = json.loads(self.body)
                name = f"{asked['organization']}/{asked['name']}"
                if name in hub.repos:
                    return self.send(409, {"error": "exists", "url": f"{hub.url}/{name}"})
                hub.add(name, private=asked.get("visibility") == "private" or bool(asked.get("private")))
                return self.send(200, {"url": f"{hub.url}/{name}", "name": name, "id": name})
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/([^/]+)", self.path):
                name, what, branch = match.groups()
                if repo := self.opened(name):
                    return self.preupload() if what == "preupload" else self.commit(name, repo, branch)
                return None
            if self.path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {
                        **entry,
                        "authenticated": True,
                        "actions": {"upload": {"href": f"{hub.url}/lfs/{entry['oid']}", "header": {}}},
                    }
                    for entry in json.loads(self.body)["objects"]
                ]
                return self.send(200, {"transfer": "basic", "objects": objects})
            return self.fail(404, "EntryNotFound")

        def preupload(self):
            files = json.loads(self.body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(hub.LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            return self.send(200, {"files": modes})

        def commit(self, name, repo, branch):
            files = dict(repo.at(branch)[1] or {})
            for line in self.body.splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    files[value["path"]] = hub.lfs[value["oid"]]
                elif operation["key"] == "deletedFile":
                    del files[value["path"]]
            commit = repo.commit(files, branch)
            about = {"commitUrl": f"{hub.url}/{name}/commit/{commit}", "commitOid": commit, "pullRequestUrl": None}
            return self.send(200, about)

        def put(self):
            digest = hashlib.sha256(self.body).hexdigest()
            if self.path != f"/lfs/{digest}":
                return self.fail(400, "BadDigest")
            hub.lfs[digest] = self.body
            return self.send(200, {})

    return Handler
