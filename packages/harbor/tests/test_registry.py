"""registry: a real server (Debian's docker-registry), alone and behind a front that has faults."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from test_unpack import FIRST, MERGED, SECOND, sha, tree

from nanoswe_harbor.promises import format_faults
from nanoswe_harbor.registry import RegistryError, digests, parse
from nanoswe_harbor.task import load_tasks
from nanoswe_harbor.unpack import name_path, unpack

EXCERPT = Path(__file__).parent / "data" / "verified_excerpt.jsonl"
forward = httpx.Client(trust_env=False)
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@pytest.mark.parametrize(
    ("image", "url", "reference"),
    [
        ("debian", "https://registry-1.docker.io/v2/library/debian", "latest"),
        ("a/b:1.0", "https://registry-1.docker.io/v2/a/b", "1.0"),
        ("docker.io/a/b", "https://registry-1.docker.io/v2/a/b", "latest"),
        ("localhost:5000/a/b", "http://localhost:5000/v2/a/b", "latest"),
        ("ghcr.io/a/b/c:t", "https://ghcr.io/v2/a/b/c", "t"),
        ("swebench/sweb.eval.x86_64.psf_1776_requests-1142:latest@sha256:" + "0" * 64,
         "https://registry-1.docker.io/v2/swebench/sweb.eval.x86_64.psf_1776_requests-1142",
         "sha256:" + "0" * 64),
    ],
)  # fmt: skip
def test_names(image: str, url: str, reference: str) -> None:
    assert parse(image) == (url, reference)


@pytest.mark.parametrize("image", ["", "A/b", "a//b", "a/../b", "a b", "a:b:c", "a@sha256:1", "/a"])
def test_what_is_no_name(image: str) -> None:
    with pytest.raises(RegistryError, match="not the name"):
        parse(image)


def push(url: str, repository: str, tag: str, layers: list[bytes]) -> str:
    """Upload an image of one platform behind an index; the index's digest."""
    diffs = [f"sha256:{sha(content)}" for content in layers]
    config = json.dumps({"config": {"Env": []}, "rootfs": {"diff_ids": diffs}}).encode()
    parts = []
    for content in (config, *layers):
        begun = httpx.post(f"{url}/v2/{repository}/blobs/uploads/")
        where = httpx.URL(begun.headers["location"]).copy_merge_params(
            {"digest": f"sha256:{sha(content)}"}
        )
        httpx.put(where, content=content).raise_for_status()
        parts.append({"digest": f"sha256:{sha(content)}", "size": len(content)})
        parts[-1]["mediaType"] = "application/vnd.oci.image.layer.v1.tar"
    parts[0]["mediaType"] = "application/vnd.oci.image.config.v1+json"
    head = {"schemaVersion": 2}
    manifest = json.dumps({**head, "mediaType": MANIFEST, "config": parts[0], "layers": parts[1:]})
    entry = {"digest": f"sha256:{sha(manifest.encode())}", "size": len(manifest)}
    entries = [
        {**entry, "mediaType": MANIFEST, "platform": {"os": "linux", "architecture": name}}
        for name in ("amd64", "arm64")
    ]
    index = json.dumps({**head, "mediaType": INDEX, "manifests": entries})
    for name, content, kind in ((entry["digest"], manifest, MANIFEST), (tag, index, INDEX)):
        target = f"{url}/v2/{repository}/manifests/{name}"
        httpx.put(target, content=content, headers={"content-type": kind}).raise_for_status()
    return f"sha256:{sha(index.encode())}"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a registry of our own."""
    folder = tmp_path_factory.mktemp("registry")
    program = shutil.which("docker-registry")
    assert program, "install Debian's docker-registry"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "config.yml").write_text(
        "version: 0.1\nlog: {level: error}\nstorage: {filesystem: {rootdirectory: "
        f"{folder}/data}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
    )
    argv = [program, "serve", str(folder / "config.yml")]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            try:
                if httpx.get(f"{url}/v2/").status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                time.sleep(0.05)
        yield url
        process.terminate()


class Front(ThreadingHTTPServer):
    """Forwards to `upstream`, with the faults that a test sets."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self.url = upstream, f"http://127.0.0.1:{self.server_port}"
        self.faults: set[str] = set()
        self.seen: Counter[str] = Counter()
        self.live = self.most_live = self.tokens = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Front

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        front = self.server
        with front.lock:
            front.seen[self.path] += 1
            front.live += 1
            front.most_live = max(front.most_live, front.live)
        late = "uneven" in front.faults and self.path[-1] in "02468"
        if late or "slow" in front.faults:
            time.sleep(0.2)
        with front.lock:
            front.live -= 1
        self.answer(front, front.seen[self.path])

    do_HEAD = do_GET

    def answer(self, front: Front, turn: int) -> None:
        path = self.path.removeprefix("http://registry.example")
        if path.startswith("/token"):
            front.tokens += 1
            return self.say(200, json.dumps({"access_token": "let-me-in"}).encode())
        if "token" in front.faults and self.headers["authorization"] != "Bearer let-me-in":
            scope = f"repository:{path.split('/manifests/')[0][4:]}:pull"
            asks = f'Bearer realm="{front.url}/token",service="registry",scope="{scope}"'
            return self.say(401, b"{}", {"WWW-Authenticate": asks})
        if "patience" in front.faults and turn <= 2:
            return self.say((429, 503)[turn - 1], b"", {"Retry-After": "0"})
        if "down" in front.faults or ("drop" in front.faults and turn == 1):
            self.close_connection = True
            return self.connection.close()
        reply = forward.request(
            self.command,
            front.upstream + path,
            headers={"accept": self.headers.get("accept", "*/*")},
        )
        body = reply.content
        if "corrupt" in front.faults and "/blobs/" in path:
            body = bytes([body[0] ^ 1]) + body[1:]
        kept = ("content-type", "docker-content-digest", "content-length")
        headers = {name: reply.headers[name] for name in kept if name in reply.headers}
        if "cut" in front.faults and "/blobs/" in path and turn == 1:
            self.close_connection, body = True, body[: len(body) // 2]
        return self.say(reply.status_code, body, headers)

    def say(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def front(server: str) -> Iterator[Front]:
    front = Front(server)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    yield front
    front.shutdown()
    front.server_close()


def ask(images: list[str], registry: str, jobs: int = 8) -> dict[str, str]:
    return asyncio.run(digests(images, registry, jobs))


@pytest.mark.interop
@pytest.mark.parametrize(
    "faults", [set(), {"token"}, {"patience"}, {"drop"}, {"token", "patience", "drop"}]
)
def test_digests_whatever_the_front_does(front: Front, server: str, faults: set[str]) -> None:
    digest = push(server, "some/thing", "1", [FIRST])
    front.faults = faults
    found = ask(["some/thing:1", "some/thing:2", "no/thing", f"some/thing@{digest}"], front.url)
    there = {"some/thing:1": digest, f"some/thing@{digest}": digest}
    assert found == {**there, "some/thing:2": "", "no/thing": ""}
    assert front.tokens <= 4 and bool(front.tokens) == ("token" in faults)


@pytest.mark.interop
def test_requests_that_began_without_a_token_get_another_turn(front: Front, server: str) -> None:
    """Some are denied only after others, of the same repository, have fetched its token."""
    names = [f"many/tags:{number}" for number in range(12)]
    pushed = [push(server, "many/tags", str(number), [FIRST]) for number in range(12)]
    front.faults = {"token", "uneven"}
    assert ask(names, front.url, jobs=12) == dict(zip(names, pushed, strict=True))


class Web(Handler):
    """Any other server: it knows no registry's words."""

    def answer(self, front: Front, turn: int) -> None:
        front.faults or self.say(200, b"<html>")
        if "login" in front.faults:
            asks = {"WWW-Authenticate": f'Bearer realm="{front.url}/login"'}
            code = 200 if self.path.startswith("/login") else 401
            self.say(code, b"[1]", asks)


@pytest.mark.parametrize("faults", [set(), {"login"}])
def test_what_is_no_registry(faults: set[str]) -> None:
    web = Front("")
    web.RequestHandlerClass, web.faults = Web, faults
    threading.Thread(target=web.serve_forever, daemon=True).start()
    argv = [sys.executable, "-m", "nanoswe_harbor", "images", EXCERPT, "--check", "--jobs", "1"]
    argv += ["--registry", web.url]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: http://127.0.0.1:")
    web.shutdown()
    web.server_close()


@pytest.mark.interop
def test_no_more_at_once_than_asked_for(front: Front) -> None:
    front.faults = {"slow"}
    ask([f"no/thing:{number}" for number in range(24)], front.url, jobs=4)
    assert 1 < front.most_live <= 4 and sum(front.seen.values()) == 24


@pytest.mark.interop
def test_a_registry_that_is_down_is_an_error_and_not_a_missing_image(front: Front) -> None:
    front.faults = {"down"}
    with pytest.raises(RegistryError, match="5 times"):
        ask(["some/thing:1"], front.url)


@pytest.mark.interop
def test_a_proxy_from_the_environment(
    front: Front, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = push(server, "some/thing", "1", [FIRST])
    monkeypatch.setenv("HTTP_PROXY", front.url)
    assert ask(["some/thing:1"], "http://registry.example") == {"some/thing:1": digest}
    assert list(front.seen) == ["http://registry.example/v2/some/thing/manifests/1"]


@pytest.mark.interop
def test_an_image_is_pulled_and_unpacked(front: Front, server: str, tmp_path: Path) -> None:
    push(server, "some/thing", "1", [FIRST, SECOND])
    front.faults = {"token", "patience", "cut"}
    folder = unpack("some/thing:1", tmp_path / "store", front.url)
    assert tree(folder / "root") == MERGED
    assert name_path(tmp_path / "store", "some/thing:1").resolve() == folder
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
        folder.name,
        "files",
        "names",
    ]
    with pytest.raises(RegistryError, match="not there"):
        unpack("some/thing:3", tmp_path / "store", front.url)


@pytest.mark.interop
def test_a_blob_that_is_not_its_digest(front: Front, server: str, tmp_path: Path) -> None:
    push(server, "some/thing", "1", [FIRST])
    front.faults = {"corrupt"}
    with pytest.raises(RegistryError, match="another digest"):
        unpack("some/thing:1", tmp_path / "store", front.url)
    assert not list((tmp_path / "store/names").iterdir())


@pytest.mark.interop
def test_check_pins_what_is_published_and_lists_what_is_not(server: str, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    cli = [sys.executable, "-m", "nanoswe_harbor"]
    subprocess.run([*cli, "convert", EXCERPT, "--out", tasks], check=True, capture_output=True)
    first, *others = load_tasks(tasks)
    repository, _, tag = first.docker_image.partition(":")
    digest = push(server, repository, tag, [FIRST])

    def check(source: Path, *options: str) -> tuple[int, str]:
        argv = [*cli, "images", source, "--check", "--registry", server, *options]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return done.returncode, done.stdout

    missing = [f"{task.task_id}: missing: {task.docker_image}\n" for task in others]
    told = (1, "".join([*missing, f"1 of {1 + len(others)} images are there\n"]))
    code, text = check(EXCERPT)
    assert (code, sorted(text.splitlines())) == (1, sorted(told[1].splitlines()))
    assert check(tasks) == told
    pinned = load_tasks(tasks)[0].docker_image
    assert pinned == f"{first.docker_image}@{digest}"
    assert (first.path / "environment/Dockerfile").read_text().startswith(f"FROM {pinned}\n")
    assert format_faults(tasks) == (1 + len(others), {})
    assert check(tasks) == told
    code, text = check(tasks, "--json")
    assert code == 1 and json.loads(text)[pinned] == digest


@pytest.mark.interop
def test_an_image_is_pinned_where_it_is_named_and_nowhere_else(server: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = json.loads(EXCERPT.read_text().splitlines()[0])
    told = {"image": "some/thing:1", "repo": "some/body", "difficulty": "see some/thing:1"}
    rows.write_text(json.dumps({**row, **told}))
    cli = [sys.executable, "-m", "nanoswe_harbor"]
    subprocess.run([*cli, "convert", rows, "--out", tmp_path / "tasks"], check=True)
    shutil.copytree(tmp_path / "tasks", tmp_path / "all")
    other = tmp_path / "all" / "own"  # a task whose Dockerfile says what it starts from
    (other / "tests").mkdir(parents=True)
    for name in ("instruction.md", "tests/test.sh", "environment/Dockerfile"):
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text("FROM some/thing:1\n")
    (other / "task.toml").write_text('schema_version = "1.4"\n')
    digest = push(server, "some/thing", "1", [FIRST])
    argv = [*cli, "images", tmp_path / "all", "--check", "--registry", server]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 of 1 images are there\n"), done.stderr
    assert (other / "environment/Dockerfile").read_text() == "FROM some/thing:1\n"
    task = load_tasks(tmp_path / "all")[0]
    assert task.docker_image == f"some/thing:1@{digest}"
    assert task.metadata["difficulty"] == told["difficulty"]
