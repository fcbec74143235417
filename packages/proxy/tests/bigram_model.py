"""A random Qwen3 that uses a tool: run by vLLM's Python on a folder with the `words` tokenizer.

In: FOLDER with tokenizer.json. Out: config.json, tokenizer_config.json and model.safetensors there.
Its layers are small random numbers; its head answers the last token's embedding with a likely next
token, so that replies are tool calls or words, never twice quite the same.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, CONTEXT = 512, 2, 4, 2, 32, 256, 4096
CALL_OPEN = '<tool_call>\n{"name": "bash", "arguments": {"command": "'
LIKELY = {  # token → what tends to follow it, with the strength of the tendency
    "<|im_start|>assistant\n": [(CALL_OPEN, 9.0), ("return", 8.0)],
    CALL_OPEN: [("cat ", 10.0), ("submit", 9.0)],
    "cat ": [("stock", 10.0), ("left", 9.5)],
    "stock": [('"}}\n</tool_call>', 10.0)],
    "left": [('"}}\n</tool_call>', 9.0), ("Ġ", 8.0)],
    "submit": [('"}}\n</tool_call>', 10.0)],
    '"}}\n</tool_call>': [("<|im_end|>", 11.0)],
    "return": [("Ġ", 9.0), ("<|im_end|>", 8.5)],
    "Ġ": [("left", 8.0), ("right", 8.0), ("sum", 8.0)],
    "right": [("<|im_end|>", 9.0)],
    "sum": [("<|im_end|>", 9.0)],
}


def weights(tokenizer: Tokenizer, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(*shape, generator=generator)

    embed = torch.nn.functional.normalize(torch.randn(size, HIDDEN, generator=generator), dim=-1)
    head = noise(size, HIDDEN)
    for token, followers in LIKELY.items():
        for follower, strength in followers:
            at, to = tokenizer.token_to_id(token), tokenizer.token_to_id(follower)
            head[to] += strength * embed[at] / HIDDEN**0.5  # the final norm scales to sqrt(HIDDEN)
    # long next to what the random layers add, so that the last token stays the loudest
    state = {"model.embed_tokens.weight": 8 * embed, "lm_head.weight": head,
             "model.norm.weight": torch.ones(HIDDEN)}  # fmt: skip
    for i in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for name, shape in shapes.items():
            state[f"model.layers.{i}.{name}.weight"] = noise(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{i}.{name}.weight"] = torch.ones(HIDDEN)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            state[f"model.layers.{i}.{name}.weight"] = torch.ones(HEAD_DIM)
    return state


def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = -(-tokenizer.get_vocab_size(with_added_tokens=True) // 64) * 64
    end = tokenizer.token_to_id("<|im_end|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32",
        "vocab_size": size, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": INNER, "max_position_embeddings": CONTEXT, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "attention_bias": False, "eos_token_id": end, "bos_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    save_file(weights(tokenizer, size), str(folder / "model.safetensors"), {"format": "pt"})


if __name__ == "__main__":
    main()
