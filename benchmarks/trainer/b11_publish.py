"""B11: handing 100 MB of new weights to an engine, by each way that there is, as a share of what
the raw path does in the same second: in one process the engine reads the trainer's own tensors; to
a copy they go as a file, on a disk or in shared memory; two ranks gather them over gloo first.

    python benchmarks/trainer/b11_publish.py --out benchmarks/trainer/b11.json
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from result import tell

from nanoswe_trainer.cluster import free_address
from nanoswe_trainer.engine.copied import Host, HostedEngine
from nanoswe_trainer.engine.local import LocalEngine
from nanoswe_trainer.model import Decoder, ModelConfig, initialise
from nanoswe_trainer.worker import Worker

CONFIG = ModelConfig(
    vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=7,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64,
)  # fmt: skip
REPEATS = 5


def took(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def in_process(decoder: Decoder, compute: ThreadPoolExecutor) -> float:
    engine = LocalEngine(decoder, slots=1, max_context=64, compute=compute)
    return took(lambda: asyncio.run(engine.update(lambda: None)))


def copied(
    decoder: Decoder, folder: Path, compute: ThreadPoolExecutor
) -> tuple[list[float], list[float]]:
    """Seconds of publish and take; of the same bytes written, synced, read and copied."""
    engine = HostedEngine(
        worker=Worker(decoder), folder=folder, max_context=64, version=0, half=False,
        compute=compute, tolerance=1.0,
    )  # fmt: skip
    path = asyncio.run(engine.publish(0))
    host = Host(engine.folder, 0, {"slots": 1, "max_context": 64})
    ours, raw = [], []
    for version in range(1, REPEATS + 1):

        async def hand_over(version: int = version) -> None:
            await host.take(await engine.publish(version), version)

        ours.append(took(lambda: asyncio.run(hand_over())))
        path = engine.folder / f"{version:06}" / "model.safetensors"
        data = path.read_bytes()

        def bare(data: bytes = data) -> None:
            (folder / "raw").write_bytes(data)
            bytearray((folder / "raw").read_bytes())

        raw.append(took(bare))
    return ours, raw


def rank(number: int, address: str, out: Path) -> None:
    """Two of these: seconds to gather the model on the first; of as many raw bytes by gloo."""
    torch.set_num_threads(1)
    where = {"init_method": f"tcp://{address}", "rank": number, "world_size": 2}
    dist.init_process_group("gloo", **where)
    worker = Worker(initialise(CONFIG, 0))
    share = torch.zeros(sum(p.numel() for p in worker.decoder.parameters()) // 2)
    whole = [torch.empty_like(share) for _ in range(2)]
    ours, raw = [], []
    for _ in range(REPEATS):
        dist.barrier()
        ours.append(took(lambda: worker._gathered(worker.decoder.state_dict())))
        dist.barrier()
        raw.append(took(lambda: dist.all_gather(whole, share)))
    if number == 0:
        out.write_text(json.dumps([ours, raw]))
    dist.barrier()  # nobody leaves while the other still reads
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    decoder, found = initialise(CONFIG, 0), {}
    parameters = [p.detach() for p in decoder.parameters()]
    other = [torch.empty_like(p) for p in parameters]
    with ThreadPoolExecutor(1) as compute, tempfile.TemporaryDirectory(dir=Path.cwd()) as disk:
        copies = [took(lambda: [a.copy_(b) for a, b in zip(other, parameters, strict=True)])
                  for _ in range(REPEATS)]  # fmt: skip
        found["in process"] = [in_process(decoder, compute) for _ in range(REPEATS)], copies
        found["file, disk"] = copied(decoder, Path(disk) / "w", compute)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            found["file, shared memory"] = copied(decoder, Path(memory) / "w", compute)
        told = Path(disk) / "gloo.json"
        mp.spawn(rank, (free_address(), told), nprocs=2)
        found["gloo, two ranks"] = json.loads(told.read_text())
    rows = {}
    for way, (ours, raw) in found.items():
        middle = statistics.median(ours), statistics.median(raw)
        share = statistics.median(b / a for a, b in zip(ours, raw, strict=True))
        rows[way] = {"sec": round(middle[0], 4), "raw_sec": round(middle[1], 4),
                     "share_of_raw": round(share, 2)}  # fmt: skip
    size = sum(p.numel() for p in parameters) * 4
    tell({"bytes": size, "ways": rows, "torch": torch.__version__, "all": found}, options.out)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
