"""The ranks of a run: a recipe and a model folder in; one object that has a Worker's methods, out.

One rank is a Worker in this process. Several meet over gloo, on GPUs over NCCL; a method called
here is called on each of them, and the first one's answer is the answer. They are processes of this
machine, or actors of a Ray cluster (the extra `ray`), on as few nodes as hold them; there the
engine is one too, and is started again when it dies. Refuses (RankError, by the rank's number) what
dies, raises, or does not answer in time.
"""

import asyncio
import ctypes
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nanoswe_proxy.errors import EngineError
from nanoswe_trainer.recipe import TrainRecipe
from nanoswe_trainer.worker import Worker, open_worker

MAX_RESTARTS = 3  # of an engine
CALL_SEC = 1800.0  # of one method on all ranks; a full step of an 8B model takes minutes
Submit = Callable[[str, tuple, dict], Future]  # a method of one rank


class RankError(RuntimeError):
    """A rank failed; the run resumes from its last checkpoint."""


class Ranks:
    """Calls a method on all ranks at once."""

    def __init__(self, ranks: list[Submit]):
        self._submits, self.ranks = ranks, len(ranks)

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked = [submit(method, args, kwargs) for submit in self._submits]
            done, _ = wait_for(asked, CALL_SEC, FIRST_EXCEPTION)
            if len(done) == len(asked) and not any(f.exception() for f in asked):
                return asked[0].result()
            wait_for(asked, 5)  # who else has something to say
            said = [f"rank {i}: {_why(f)}" for i, f in enumerate(asked)]
            raise RankError(f"`{method}` failed on {'; '.join(filter(None, said))}")

        return call


def _why(future: Future) -> str:
    if not future.done():
        return "no answer"
    error = future.exception()
    error = getattr(error, "cause", error)  # Ray's, of what was raised there
    return f"{type(error).__name__}: {error}" if error else "fine"


@contextmanager
def open_ranks(recipe: TrainRecipe, folder: Path) -> Iterator[Worker]:
    """`cluster.ranks` of them over the model of `folder`, for the time of the block."""
    if recipe.cluster.ranks == 1:
        yield open_worker(recipe, folder)
        return
    with ExitStack() as stack:
        place = {"local": _processes, "ray": _actors}[recipe.cluster.backend]
        address, *submits = place(recipe.cluster.ranks, stack)
        ranks = Ranks(submits)
        ranks.join(address, recipe, folder.absolute())
        yield cast(Worker, ranks)


class Rank:
    """What lives in a rank's process."""

    worker: Worker

    def call(self, method: str, args: tuple, kwargs: dict, rank: int) -> Any:
        if method == "join":
            return self._join(rank, *args)
        return getattr(self.worker, method)(*args, **kwargs)

    def address(self) -> str:
        """A free one that other nodes reach."""
        return free_address(socket.gethostbyname(socket.gethostname()))

    def _join(self, rank: int, address: str, recipe: TrainRecipe, folder: Path) -> None:
        torch.set_num_threads(recipe.cluster.train_threads)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            backend, init_method=f"tcp://{address}", rank=rank, world_size=recipe.cluster.ranks,
            timeout=timedelta(seconds=CALL_SEC),
        )  # fmt: skip
        self.worker = open_worker(recipe, folder)


HERE = Rank()


def _here(*call: Any) -> Any:
    return HERE.call(*call)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def free_address(host: str = "127.0.0.1") -> str:
    with socket.create_server((host, 0)) as listener:
        return f"{host}:{listener.getsockname()[1]}"


def _follow() -> None:
    """A rank ignores Ctrl-C, the controller decides; it dies with the controller."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _processes(count: int, stack: ExitStack) -> Iterator[Any]:
    yield free_address()
    pools = [ProcessPoolExecutor(1, mp.get_context("spawn"), _follow) for _ in range(count)]
    started = [pool.submit(os.getpid) for pool in pools]
    for rank, pool in enumerate(pools):
        stack.callback(pool.shutdown)
        stack.callback(_kill, started[rank].result())  # it may hang in a collective
        yield lambda *call, pool=pool, rank=rank: pool.submit(_here, *call, rank)


def _actors(count: int, stack: ExitStack) -> Iterator[Any]:
    ray = _ray()
    stack.callback(ray.shutdown)
    for rank, where in enumerate(_places(ray, count, "the ranks")):
        actor = ray.remote(Rank).options(**where, max_restarts=0).remote()
        if rank == 0:  # where the first one is they meet
            yield ray.get(actor.address.remote())
        yield lambda *call, actor=actor, rank=rank: actor.call.remote(*call, rank).future()


def actor(kind: type, *args: Any) -> Callable[..., Awaitable[Any]]:
    """ask(method, …) of one of `kind` that Ray starts again when it dies, and then asks again."""
    ray = _ray()
    (where,) = _places(ray, 1, "the engine")
    often = {"max_restarts": MAX_RESTARTS, "max_task_retries": MAX_RESTARTS}
    made = ray.remote(kind).options(**where, **often).remote(*args)

    async def ask(method: str, *args: Any) -> Any:
        answer = getattr(made, method).remote(*args)
        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"the engine's actor does not come back: {error}") from error

    return ask


def _places(ray: Any, count: int, what: str) -> list[dict[str, Any]]:
    """Options of `count` actors: a CPU for each, and a GPU where there are any."""
    bundle = {"CPU": 1, "GPU": min(1, ray.cluster_resources().get("GPU", 0))}
    group = ray.util.placement_group([bundle] * count, strategy="PACK")
    if not group.wait(60):
        raise RankError(f"ray: no room for {what}: {count} times {bundle}")
    slot = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    size = {"num_cpus": 1, "num_gpus": bundle["GPU"]}
    return [{**size, "scheduling_strategy": slot(group, i)} for i in range(count)]


def _ray() -> Any:
    """Ray, connected to its cluster."""
    try:
        import ray

        ray.init("auto", log_to_driver=False, ignore_reinit_error=True)
    except ImportError as error:
        raise RankError("ray is not installed: nanoswe-trainer[ray]") from error
    except ConnectionError as error:
        text = "no Ray cluster answers; `ray start --head` here, or set RAY_ADDRESS"
        raise RankError(text) from error
    return ray
