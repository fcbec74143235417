"""registry: what a registry has, by its HTTP API (OCI distribution; Docker's schema 2).

In: image names (`[host/]name[:tag][@digest]`). Out: the digest of each (HEAD on its manifest), and
manifests and blobs, checked against their digests. Tokens are fetched as the registry asks,
retry-after is obeyed within a bound, proxies come from the environment. Refuses (RegistryError) a
bad name, what a registry denies, an answer that never comes.
"""

import asyncio
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import httpx

from nanoswe_harbor.envspec import image_name, spec_of
from nanoswe_harbor.families import BAD_ROW
from nanoswe_harbor.instance import HarborError
from nanoswe_harbor.sources import read_rows
from nanoswe_harbor.task import load_tasks, package_digest

PUBLIC = "https://registry-1.docker.io"
TRIES, LONGEST_WAIT_SEC = 5, 60.0
DOCKERS, OCIS = ("manifest.list.v2", "manifest.v2"), ("index.v1", "manifest.v1")
MEDIA = [f"application/vnd.docker.distribution.{kind}+json" for kind in DOCKERS]
MEDIA += [f"application/vnd.oci.image.{kind}+json" for kind in OCIS]
MISSING = (401, 403, 404)  # a public registry denies what it does not have
PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
NAME = re.compile(
    r"(?:(?P<host>[a-z0-9-]+(?:\.[a-z0-9-]+)+(?::\d+)?|localhost(?::\d+)?|[a-z0-9-]+:\d+)/)?"
    rf"(?P<path>{PART}(?:/{PART})*)(?::(?P<tag>\w[\w.-]*))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?"
)


class RegistryError(HarborError):
    """A registry cannot be asked, or gives something else than what its digest says."""


def parse(image: str, registry: str = "") -> tuple[str, str]:
    """(the URL of an image's repository, the tag or digest to ask for); `registry` is the URL of
    what stands for the public one."""
    found = NAME.fullmatch(image)
    if found is None:
        raise RegistryError(f"{image}: not the name of an image")
    host, path = found["host"], found["path"]
    url = f"{'http' if re.match('(localhost|127[.])', host or '') else 'https'}://{host}"
    if host in (None, "docker.io"):
        url, path = registry or PUBLIC, path if "/" in path else f"library/{path}"
    return f"{url.rstrip('/')}/v2/{path}", found["digest"] or found["tag"] or "latest"


class Registry(httpx.AsyncClient):
    """A client for as long as one job lasts; tokens are kept by repository."""

    def __init__(self, jobs: int = 8) -> None:
        super().__init__(follow_redirects=True, timeout=60)
        self.slots = asyncio.Semaphore(jobs)
        self.tokens: dict[str, str] = {}

    async def digest(self, repository: str, reference: str) -> str:
        """The digest of what a tag stands for, or "" where there is nothing."""
        answer = await self._ask("HEAD", f"{repository}/manifests/{reference}")
        found: str = answer.headers.get("docker-content-digest", "")
        if not found and answer.status_code not in MISSING:
            raise RegistryError(f"{repository}: {answer.status_code}, no digest; is it a registry?")
        return found

    async def manifest(self, repository: str, reference: str) -> bytes:
        url = f"{repository}/manifests/{reference}"
        answer = await self._ask("GET", url)
        if answer.status_code in MISSING:
            raise RegistryError(f"{url}: not there, or denied; is the name right?")
        _check(reference, hashlib.sha256(answer.content).hexdigest(), url)
        return answer.content

    async def blob(self, repository: str, digest: str, to: Path) -> None:
        """Fetch a blob into a file, unless it is there: whole, and as its digest says."""
        if to.exists():
            return
        part, url = to.with_name(f"{to.name}.part"), f"{repository}/blobs/{digest}"
        answer = await self._ask("GET", url, part)
        if answer.status_code != httpx.codes.OK:
            raise RegistryError(f"{url}: answered {answer.status_code}")
        with part.open("rb") as file:
            _check(digest, hashlib.file_digest(file, "sha256").hexdigest(), url)
        part.rename(to)

    async def _ask(self, method: str, url: str, to: Path | None = None) -> httpx.Response:
        """The answer, once the registry asks for no token and no patience; its body in a file."""
        repository, reason, wait = url.rsplit("/", 2)[0], "", 0.0
        for turn in range(TRIES):
            await asyncio.sleep(wait)
            wait = 2.0**turn / 4
            headers = {"Accept": ", ".join(MEDIA), "Accept-Encoding": "identity"}
            if token := self.tokens.get(repository):
                headers["Authorization"] = token
            try:
                async with self.slots, self.stream(method, url, headers=headers) as answer:
                    code, reason = answer.status_code, f"answered {answer.status_code}"
                    if code == httpx.codes.UNAUTHORIZED and await self._log_in(repository, answer):
                        wait = 0.0
                    elif code == httpx.codes.TOO_MANY_REQUESTS or code >= 500:
                        asked = answer.headers.get("retry-after", "")
                        wait = min(float(asked), LONGEST_WAIT_SEC) if asked.isdigit() else wait
                    elif to is None or code != httpx.codes.OK:
                        await answer.aread()
                        return answer
                    else:
                        with to.open("wb") as file:
                            async for chunk in answer.aiter_raw():
                                file.write(chunk)
                        return answer
            except (httpx.HTTPError, httpx.InvalidURL, *BAD_ROW) as error:
                reason = str(error) or type(error).__name__
        raise RegistryError(f"{url}: {reason}, {TRIES} times; can the registry be reached?")

    async def _log_in(self, repository: str, answer: httpx.Response) -> bool:
        """Get the token that the challenge asks for. Is it worth another try?"""
        sent = answer.request.headers.get("authorization", "")
        if self.tokens.get(repository, "") != sent:
            return True  # another request has got one meanwhile
        asked = dict(re.findall(r'(\w+)="([^"]*)"', answer.headers.get("www-authenticate", "")))
        if sent or "realm" not in asked:
            return False
        reply = await self.get(asked.pop("realm"), params=asked)
        if reply.status_code == httpx.codes.OK:
            fields = {"token": "", **reply.json()}
            self.tokens[repository] = f"Bearer {fields['token'] or fields['access_token']}"
        return reply.status_code == httpx.codes.OK


async def digests(images: Iterable[str], registry: str = "", jobs: int = 8) -> dict[str, str]:
    """Image → the digest of its manifest, "" where it is missing."""
    names = list(dict.fromkeys(images))
    async with Registry(jobs) as client:
        found = await asyncio.gather(*(client.digest(*parse(name, registry)) for name in names))
    return dict(zip(names, found, strict=True))


def published(source: str) -> dict[str, str]:
    """Task or row → the image that it names; not of tasks whose Dockerfile alone says so."""
    if Path(source).is_dir():
        tasks = [task for task in load_tasks(source) if not task.docker_image.startswith("/")]
        return {task.task_id: task.docker_image for task in tasks}
    return {row.instance_id: image_name(row, *spec_of(row)) for row in read_rows(source)}


def pin(dataset: Path, digests: dict[str, str]) -> None:
    """Write the digests of images into the tasks that name them, and the tasks' own anew."""
    listing = dataset / "dataset.toml"
    text = listing.read_text(encoding="utf-8")
    for task in load_tasks(dataset):
        name, old = task.docker_image, package_digest(task.path)
        pinned = f"{name.partition('@')[0]}@{digests.get(name)}"
        places = {"task.toml": '"{}"\n', "environment/Dockerfile": "FROM {}\n"}
        for file, place in places.items() if digests.get(name) else ():
            path = task.path / file
            content = path.read_text(encoding="utf-8")
            path.write_text(content.replace(place.format(name), place.format(pinned)), "utf-8")
        text = text.replace(old, package_digest(task.path))
    listing.write_text(text, encoding="utf-8")


def _check(wanted: str, found: str, url: str) -> None:
    if wanted.startswith("sha256:") and wanted != f"sha256:{found}":
        raise RegistryError(f"{url}: its content has another digest; try again")
