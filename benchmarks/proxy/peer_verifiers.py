"""verifiers' interception server as a process: run by the Python that has verifiers.

In: the engine's URL, the model folder, a port. Out: `POST /open` registers a rollout and gives its
URL; `GET /export/NAME` gives the rows that its trainer would cut: one per branch, each sampled node
trained in its first. Everything between is verifiers' own.

    python peer_verifiers.py ENGINE FOLDER PORT
"""

import asyncio
import sys

from aiohttp import web
from renderers.configs import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


async def main(engine: str, folder: str, port: int) -> None:
    client = TrainClientConfig(
        base_url=f"{engine}/v1", api_key_var="NO_KEY", renderer_model_name=folder,
        renderer=Qwen3RendererConfig(),
    )  # fmt: skip
    server = InterceptionServer()
    traces: dict[str, Trace] = {}

    async def open_rollout(request: web.Request) -> web.Response:
        name = (await request.json())["name"]
        task = TraceTask(type="Task", data=TaskData(name=name))
        traces[name] = trace = Trace(task=task, agent=AgentInfo(config=AgentConfig()))
        session = RolloutSession(ctx=ModelContext(model="tiny", client=client), trace=trace)
        secret, _ = server.register(session)
        url = server.base_url.replace("//", f"//{secret}@")
        return web.json_response({"url": f"{url}/v1"})

    async def export(request: web.Request) -> web.Response:
        trace = traces[request.match_info["name"]]
        rows, owned = [], set()
        for branch in trace.branches:
            mask: list[bool] = []
            for node in branch.nodes:
                mask += [m and id(node) not in owned for m in node.mask]
                owned.add(id(node))
            if branch.trainable and any(mask):
                rows.append({"tokens": branch.token_ids, "mask": mask, "logprobs": branch.logprobs})
        accounted = sum(sum(node.mask) for node in trace.nodes)
        return web.json_response({"rows": rows, "accounted": accounted})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({})

    async with server:
        app = web.Application()
        app.add_routes([web.post("/open", open_rollout), web.get("/export/{name}", export),
                        web.get("/health", health)])  # fmt: skip
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        sys.stdout.write(f"up: {server.base_url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
