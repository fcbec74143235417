"""What a recipe wants of a machine: a recipe in; what would be where, about how much memory that
needs, and what is missing, a line each, out. Nothing is run.

Weights are not read: config.json alone decides the sizes. The estimate counts what lasts (master
weights, gradients, AdamW's two averages, frozen copies) and the largest of what passes
(activations, logits); allocators take some tens of percent more.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from nanoswe_harbor.task import TaskError, load_tasks
from nanoswe_trainer.logprob import CHUNK_LOGITS
from nanoswe_trainer.lora import add_lora
from nanoswe_trainer.model import Decoder, read_config
from nanoswe_trainer.recipe import TrainRecipe

GIB = 2**30


def memory(recipe: TrainRecipe, decoder: Decoder) -> tuple[float, float]:
    """(what lasts, what passes): bytes on a rank, for a decoder that may be on the meta device."""
    config, cluster = decoder.config, recipe.cluster
    parameters = sum(p.numel() for p in decoder.parameters())
    learned = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    frozen = parameters if recipe.train.kl else 0
    if recipe.train.teacher:
        with torch.device("meta"):
            frozen = sum(p.numel() for p in Decoder(read_config(recipe.train.teacher)).parameters())
    lasting = 4 * (parameters + frozen) + 12 * learned
    width = 2 if cluster.bf16 else 4
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    # what the backward needs of a block: inputs of the norms, of the matrices, of the products
    inside = 5 * config.hidden_size + 2 * heads * config.head_dim + 4 * config.intermediate_size
    layers = config.num_hidden_layers
    kept = config.hidden_size * layers + inside if cluster.recompute else inside * layers
    root = 2 * config.vocab_size * config.hidden_size  # embeddings and head are whole in a step
    gathered = width * (parameters / layers + root) * (cluster.ranks > 1)
    passing = kept * cluster.max_tokens * width + 3 * 4 * CHUNK_LOGITS + gathered
    return lasting / cluster.ranks, passing


def check(recipe: TrainRecipe) -> tuple[list[str], list[str]]:
    """(what is where, what is missing)"""
    facts: list[str] = []
    missing = list(_files(recipe, facts))
    cluster, gpus = recipe.cluster, torch.cuda.device_count()
    facts.append(f"{cluster.ranks} ranks, " + ("a GPU each, from the first" if gpus else "on CPUs"))
    by_vllm = " ".join((f"vLLM by {cluster.vllm},", *cluster.vllm_options))
    place = "an actor on Ray" if cluster.backend == "ray" else "in this process"
    served = by_vllm if cluster.engine == "vllm" else place
    facts.append(f"engine: {served}; up to {recipe.eval.concurrency} trials at once")
    if recipe.init and recipe.cluster.bf16 and gpus < cluster.ranks:
        missing.append(f"{cluster.ranks} GPUs for the ranks: {gpus} found; without, it is too slow")
    served_here = cluster.engine == "vllm" and "://" not in cluster.vllm
    if served_here and 1 < gpus <= cluster.ranks:
        missing.append(f"a GPU for vLLM: the ranks take all {gpus}; fewer cluster.ranks")
    configs = [f / "config.json" for f in (recipe.init, recipe.train.teacher) if f]
    if recipe.init and all(file.exists() for file in configs):
        config = read_config(recipe.init)
        with torch.device("meta"):
            decoder = Decoder(config)
        if cluster.lora:
            add_lora(decoder, cluster.lora, 0)
        lasting, passing = memory(recipe, decoder)
        billions = sum(p.numel() for p in decoder.parameters()) / 1e9
        text = f"{lasting / GIB:.1f} GiB that last, up to {passing / GIB:.1f} in a step"
        facts.append(f"{billions:.2f} B parameters; a rank needs {text}")
        room = torch.cuda.mem_get_info()[1] if gpus else 0.0
        if served_here and gpus == 1:  # they share it
            flag, options = "--gpu-memory-utilization", cluster.vllm_options
            room *= 1 - (float(options[options.index(flag) + 1]) if flag in options[:-1] else 0.9)
        if room and lasting + passing > room:
            advice = "cluster.recompute, a smaller cluster.max_tokens, more ranks, or cluster.lora"
            missing.append(f"memory: a GPU has {room / GIB:.0f} GiB; {advice}")
    return facts, missing


def _files(recipe: TrainRecipe, facts: list[str]) -> Iterator[str]:
    """What is not there; what is, goes to `facts`."""
    if recipe.has_trials:
        heldout = recipe.tasks.path.parent / recipe.train.heldout
        for kind, path in (("training", recipe.tasks.path), ("held-out", heldout)):
            try:
                facts.append(f"{len(recipe.tasks.chosen(load_tasks(path)))} {kind} tasks in {path}")
            except TaskError as error:
                yield f"{kind} tasks: {error}"
    wanted: list[tuple[Path | None, str]] = [
        *((path, "sft.data") for path in recipe.sft.data),
        (recipe.init and recipe.init / "config.json", "init: a Hugging Face folder"),
        (recipe.init and recipe.init / "tokenizer.json", "init: its tokenizer"),
        (recipe.train.teacher and recipe.train.teacher / "config.json", "train.teacher"),
    ]
    if recipe.cluster.engine == "vllm" and "://" not in recipe.cluster.vllm:
        wanted.append((Path(recipe.cluster.vllm), "cluster.vllm: ./just setup vllm"))
    if recipe.agent.kind in ("openhands", "mini") and recipe.has_trials:
        python = recipe.agent.python or Path(f".{recipe.agent.kind}/bin/python")
        wanted.append((python, f"agent.python: ./just setup {recipe.agent.kind}"))
    yield from (f"{file} ({what})" for file, what in wanted if file and not file.exists())
    if recipe.init and not any(recipe.init.glob("*.safetensors")):
        yield f"{recipe.init}/*.safetensors (init: the weights)"
