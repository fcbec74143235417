"""Runs inside vLLM's workers (`--worker-extension-cls vllm_worker.Weights`), in vLLM's own Python.

In: a model folder, by RPC. Out: its weights in place of those served. Imports nothing of ours: it
is found by its folder on PYTHONPATH.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file


class Weights:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def load_folder(self, folder: str) -> None:
        """`model.load_weights` alone would fail on a CPU, where vLLM repacks what it loads."""
        tensors = load_file(Path(folder) / "model.safetensors")
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        # A tied head is a packed copy of the embeddings there, which nothing else renews.
        for module in self.model_runner.model.modules():
            if type(module).__name__ in ("VocabParallelEmbedding", "ParallelLMHead"):
                module.quant_method.process_weights_after_loading(module)
