"""vLLM as the trainer's engine: a server of its own, whose weights are replaced between two steps.

In: a Worker, a folder to hand weights over in, the Python that has vLLM. Out: an engine with a copy
of the weights (see copied.py). Turns under way go on from the tokens they have, under the next
version. A server that dies is started again with the weights it had. Refuses (EngineError): a
Python without vLLM, a server that does not come up, weights that the server does not speak with.
"""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch

from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_proxy.engine.remote import RemoteEngine
from nanoswe_proxy.errors import EngineError
from nanoswe_trainer.cluster import MAX_RESTARTS, free_address
from nanoswe_trainer.engine.copied import CopiedEngine
from nanoswe_trainer.worker import Worker

START_SEC = 900.0
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.2}  # greatest |logprob difference| of the probe
ENV = {
    "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


class VllmEngine(CopiedEngine):
    """Made by `serve_vllm`."""

    def __init__(self, command: list[str], **copied: Any):
        super().__init__(**copied)
        self.command, self.failed = command, ""
        self._remote: RemoteEngine | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._up = asyncio.Event()

    async def generate(
        self, session: str, ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Sampled]:
        await self._up.wait()
        async for sampled in self._server().generate(session, ids, sampling):
            self.generated += 1
            yield sampled

    async def release(self, session: str) -> None:
        if self._remote:
            await self._remote.release(session)

    async def attach(self, url: str) -> None:
        """Use a server that somebody else keeps up, and that sees our folder at the same path."""
        await self._connect(url, self.folder)
        await self.hand_over(self.version)

    async def take(self, path: Path, version: int) -> None:
        await self._up.wait()
        remote = self._server()
        try:
            await remote.pause()
            await self._load(path)
            self.version = version
            await remote.resume(version)
        except httpx.HTTPError as error:
            text = f"vLLM went away while it took version {version}: {error!r}"
            raise EngineError(f"{text}; run again: it resumes") from error

    async def start(self) -> None:
        """Start the server on the newest weights. Its output goes to `folder`/vllm.log."""
        path = self.folder / f"{self.version:06}"
        if not path.exists():
            path = await self.publish(self.version)
        address, log = free_address(), self.folder / "vllm.log"
        url, port = f"http://{address}", address.rpartition(":")[2]
        # a copy, in a folder of nothing else: beside this file `vllm` would be this module
        shutil.copy(Path(__file__).with_name("vllm_worker.py"), self.folder)
        env = os.environ | ENV | {"PYTHONPATH": str(self.folder)}
        counted = ",".join(map(str, range(torch.cuda.device_count())))
        # the GPUs after the ranks'; where there are none the server shares with them
        left = env.get("CUDA_VISIBLE_DEVICES", counted).split(",")[self.worker.ranks :]
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(left)} if left else {}
        with log.open("ab") as file:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, "--model", str(path), "--port", port, env=env,
                stdout=file, stderr=file, start_new_session=True
            )  # fmt: skip
        deadline = time.monotonic() + START_SEC
        async with httpx.AsyncClient(base_url=url, timeout=5) as client:
            while True:
                with suppress(httpx.HTTPError):
                    if (await client.get("/health")).is_success:
                        break
                if self._process.returncode is not None or time.monotonic() > deadline:
                    last = log.read_text(errors="replace")[-600:]
                    raise EngineError(f"vLLM did not start; {log} ends: {last}")
                await asyncio.sleep(0.3)
        await self._connect(url, path)

    async def _connect(self, url: str, model: Path) -> None:
        self._remote = await asyncio.to_thread(RemoteEngine.from_spec, url, model)
        self._remote.version = self.version
        self._up.set()

    async def keep_up(self) -> None:
        """Start the server again when it dies; what was under way fails and is tried again."""
        for _ in range(MAX_RESTARTS):
            assert self._process is not None
            await self._process.wait()
            self._up.clear()
            await self._server().upstream.close()
            try:
                await self.start()
            except (EngineError, OSError) as error:
                self.failed = str(error) or type(error).__name__
                break
        else:
            self.failed = f"vLLM died more than {MAX_RESTARTS} times"
        self._up.set()  # nobody waits for what will not come: `_server` says why

    async def stop(self) -> None:
        if self._remote:
            await self._remote.upstream.close()
        if self._process and self._process.returncode is None:
            self._process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 20)
            with suppress(ProcessLookupError):  # its workers too
                os.killpg(self._process.pid, 9)
            await self._process.wait()

    def _server(self) -> RemoteEngine:
        if self.failed or self._remote is None:
            raise EngineError(self.failed or "vLLM has not started")
        return self._remote

    async def _load(self, path: Path) -> None:
        body = {"method": "load_folder", "args": [str(path)]}
        async with httpx.AsyncClient(base_url=self._server().upstream.url, timeout=600) as client:
            answer = await client.post("/collective_rpc", json=body)
        if answer.is_error:
            raise EngineError(f"vLLM did not take {path}: {answer.status_code} {answer.text[:300]}")


@asynccontextmanager
async def serve_vllm(
    worker: Worker, folder: Path, vllm: str, options: Sequence[str], *, max_context: int,
    slots: int, bf16: bool, version: int, compute: ThreadPoolExecutor,
) -> AsyncIterator[VllmEngine]:  # fmt: skip
    """`vllm`: the URL of a server, or a Python to start one with for the time of the block;
    `options` go to it as they are.
    """
    attached = vllm.startswith(("http://", "https://"))
    if not attached and not Path(vllm).is_file():
        raise EngineError(f"{vllm}: no such Python; ./just setup vllm, or set cluster.vllm")
    dtype = "bfloat16" if bf16 else "float32"
    fixed = {
        "--served-model-name": "policy", "--dtype": dtype, "--host": "127.0.0.1",
        "--max-model-len": max_context, "--max-num-seqs": slots,
        "--worker-extension-cls": "vllm_worker.Weights", "--logprobs-mode": "processed_logprobs",
    }  # fmt: skip
    command = ["setpriv", "--pdeathsig=KILL"]  # a trainer that is killed leaves no server behind
    command += [str(Path(vllm).absolute()), "-m", "vllm.entrypoints.openai.api_server"]
    command += [str(x) for pair in fixed.items() for x in pair]
    command += ["--enable-scale-out", "--skip-tokenizer-init", *options]
    engine = VllmEngine(
        command, worker=worker, folder=folder, max_context=max_context, version=version,
        half=bf16, compute=compute, tolerance=TOLERANCE[dtype],
    )  # fmt: skip
    keeper: asyncio.Task[None] | None = None
    try:
        if attached:
            await engine.attach(vllm)
        else:
            await engine.start()
            await engine.probe()  # not in `start`: a restart may fall into a change of the weights
            keeper = asyncio.create_task(engine.keep_up())
        yield engine
    finally:
        if keeper:
            keeper.cancel()
        await engine.stop()
