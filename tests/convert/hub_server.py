"""A small Hugging Face Hub over HTTP: the endpoints that huggingface_hub calls to deliver a model, and their checks.

It keeps commits, branches, tags and LFS objects as the Hub does, so that the real client can be driven against it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN, READER = "hf_WriterTokenThatMustNotShow", "hf_ReaderTokenThatMustNotShow"


class Hub:
    """All repositories.

    Attributes:
        commits: {oid: {path: bytes}}.
        refused: {(method, part of the path): status}, for faults.
        calls: every request so far, as "METHOD path".
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.repositories: dict[str, dict] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.refused: dict[tuple[str, str], int] = {}
        self.calls: list[str] = []
        self.url = ""

    def add(self, name: str) -> dict:
        oid = self.commit({".gitattributes": b"*.safetensors filter=lfs\n"}, name)
        self.repositories[name] = {"branches": {"main": oid}, "tags": {}, "private": None}
        return self.repositories[name]

    def commit(self, files: dict[str, bytes], message: str) -> str:
        text = f"{len(self.commits)} {message}"
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = files
        return oid

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.resolve(self.repositories[name], revision)]

    def resolve(self, repository: dict, revision: str) -> str | None:
        return (
            repository["branches"].get(revision)
            or repository["tags"].get(revision)
            or (revision if revision in self.commits else None)
        )


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def entry_of(path: str, data: bytes) -> dict:
    entry = {
        "type": "file",
        "path": path,
        "size": len(data),
        "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    }
    if is_large(path):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_arguments):
        pass

    def answer(self, status=200, body=None, headers=None, error=None, code=None):
        data = body if isinstance(body, bytes) else json.dumps({"error": error} if error else body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, str(value))
        if error:
            self.send_header("X-Error-Message", error)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_any(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        body = self.read_chunks() if chunked else self.rfile.read(length)
        with hub.lock:
            hub.calls.append(f"{self.command} {path}")
            for (method, part), status in hub.refused.items():
                if method == self.command and part in path:
                    return self.answer(status, error="refused by the test")
            if path.startswith("/upload/"):
                return self.upload(path, body)
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if token not in (TOKEN, READER):
                return self.answer(401, error="Invalid username or password.")
            writes = self.command != "GET" and any(part in path for part in ("/commit/", "/tag/", "/preupload/", "/create", "/branch/", "lfs"))  # fmt: skip
            if token == READER and writes:
                return self.answer(403, error="You don't have the rights to do this")
            return self.route(path, body)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = handle_any  # noqa: N815

    def read_chunks(self):
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def upload(self, path, body):
        oid = path.removeprefix("/upload/")
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(400, error="the content is not what its oid says")
        self.hub.large[oid] = body
        return self.answer(200, {})

    def route(self, path, body):
        hub = self.hub
        if path == "/api/whoami-v2":
            return self.answer(200, {"name": "someone", "type": "user", "orgs": [], "auth": {}})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            if name in hub.repositories:
                return self.answer(409, error="You already created this model repo")
            hub.add(name)["private"] = wanted.get("visibility") == "private" or wanted.get("private")
            return self.answer(200, {"url": f"{hub.url}/{name}"})
        match = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+?)(?:\.git)?(/.*)?", path)
        if match is None or match[1] not in hub.repositories:
            return self.answer(404, error="Repository not found", code="RepoNotFound")
        repository, rest = hub.repositories[match[1]], match[2] or ""
        if not rest:
            return self.info(match[1], repository, "main")
        if rest == "/refs":
            refs = {
                kind: [
                    {"name": name, "ref": f"refs/{prefix}/{name}", "targetCommit": oid}
                    for name, oid in repository[kind].items()
                ]
                for kind, prefix in (("branches", "heads"), ("tags", "tags"))
            }
            return self.answer(200, {**refs, "converts": []})
        if rest == "/info/lfs/objects/batch":
            objects = [self.batch(item) for item in json.loads(body)["objects"]]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        kind, _, argument = rest[1:].partition("/")
        return getattr(self, f"on_{kind}")(match[1], repository, argument, body)

    def batch(self, item):
        if item["oid"] in self.hub.large:
            return item
        return {**item, "actions": {"upload": {"href": f"{self.hub.url}/upload/{item['oid']}"}}}

    def info(self, name, repository, revision):
        oid = self.hub.resolve(repository, revision)
        if oid is None:
            return self.answer(404, error="Revision not found", code="RevisionNotFound")
        return self.answer(200, {"id": name, "sha": oid, "siblings": [], "private": True, "tags": [], "downloads": 0})

    def on_revision(self, name, repository, revision, _body):
        return self.info(name, repository, revision)

    def on_tree(self, _name, repository, revision, _body):
        oid = self.hub.resolve(repository, revision)
        if oid is None:
            return self.answer(404, error="Revision not found", code="RevisionNotFound")
        return self.answer(200, [entry_of(path, data) for path, data in self.hub.commits[oid].items()])

    def on_branch(self, _name, repository, branch, _body):
        if branch in repository["branches"]:
            return self.answer(409, error="Reference already exists")
        repository["branches"][branch] = repository["branches"]["main"]
        return self.answer(201, {})

    def on_tag(self, _name, repository, argument, body):
        if self.command == "DELETE":
            del repository["tags"][argument]
            return self.answer(200, {})
        tag = json.loads(body)["tag"]
        if tag in repository["tags"]:
            return self.answer(409, error="Tag reference exists already")
        repository["tags"][tag] = self.hub.resolve(repository, argument)
        return self.answer(200, {})

    def on_preupload(self, _name, repository, revision, body):
        held = self.hub.commits[self.hub.resolve(repository, revision)]
        files = []
        for item in json.loads(body)["files"]:
            path = item["path"]
            known = entry_of(path, held[path]) if path in held else None
            oid = None if known is None else known["lfs"]["oid"] if is_large(path) else known["oid"]
            files.append(
                {"path": path, "uploadMode": "lfs" if is_large(path) else "regular", "shouldIgnore": False, "oid": oid}
            )
        return self.answer(200, {"files": files})

    def on_commit(self, name, repository, branch, body):
        lines = [json.loads(line) for line in body.decode().splitlines()]
        header = lines[0]["value"]
        parent = repository["branches"].get(branch)
        if "parentCommit" in header and header["parentCommit"] != parent:
            return self.answer(412, error="A commit has happened since. Please refresh and try again.")
        files = dict(self.hub.commits[parent])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.large:
                    return self.answer(400, error="the LFS object was never uploaded")
                files[value["path"]] = self.hub.large[value["oid"]]
            else:
                if value["path"] not in files:
                    return self.answer(404, error="A file with this name doesn't exist", code="EntryNotFound")
                del files[value["path"]]
        oid = repository["branches"][branch] = self.hub.commit(files, header["summary"])
        return self.answer(200, {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})

    def on_resolve(self, _name, repository, argument, _body):
        revision, _, path = argument.partition("/")
        oid = self.hub.resolve(repository, revision)
        if oid is None or path not in self.hub.commits[oid]:
            return self.answer(404, error="Entry not found", code="EntryNotFound")
        data = self.hub.commits[oid][path]
        return self.answer(200, data, {"ETag": f'"{entry_of(path, data)["oid"]}"', "X-Repo-Commit": oid})


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
