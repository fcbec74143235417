"""Our losses and gradients against TRL's, on the same weights, tokens, advantages and behaviour."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from nanoswe_trainer.algo import policy_loss, token_weights
from nanoswe_trainer.logprob import token_logprobs
from nanoswe_trainer.model import Decoder, save_decoder
from nanoswe_trainer.pack import Row, pack
from nanoswe_trainer.recipe import TrainSection

pytestmark = pytest.mark.interop
LENGTH = 9  # of the longest completion
CASES = {
    "dapo": ({"epsilon_high": 0.28}, {"preset": "dapo"}),
    "dr_grpo": ({"max_completion_length": LENGTH}, {"preset": "dr_grpo"}),
    "grpo": ({}, {"preset": "grpo"}),
    "cispo": ({"epsilon_high": 5.0}, {"preset": "cispo"}),
    "grpo by sequence": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4,
         "epsilon_high": 4e-4}, {"preset": "gspo"}),
    "grpo with KL": (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        {"preset": "grpo", "kl": 0.04}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trls(
    case: str, small: Decoder, model_dir: Path, tmp_path: Path
) -> None:
    settings, ours = CASES[case]
    train = TrainSection(**ours)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in (4, 4, 6, 6)]
    replies = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in (5, LENGTH, 3, 7)]
    advantages = [0.9, -0.9, 0.4, -0.4]
    counts = [len(reply) for reply in replies]
    weights = token_weights(
        counts, train.normaliser, trials=range(4), groups=[0, 0, 1, 1], length=LENGTH
    )
    plain = [
        Row((*p, *r), (*[0.0] * len(p), *[w] * len(r)))
        for p, r, w in zip(prompts, replies, weights, strict=True)
    ]
    with torch.no_grad():
        now, _ = token_logprobs(small, pack(plain))
    behaviour = (now + 0.3 * torch.randn(len(now), generator=generator)).split(counts)
    reference = now - 0.2
    rows = [
        Row(row.tokens, row.weights, (a,) * len(row.tokens), (*[0.0] * len(p), *b.tolist()))
        for row, a, p, b in zip(plain, advantages, prompts, behaviour, strict=True)
    ]
    batch = pack(rows)
    if train.kl:
        batch = type(batch)(**{**vars(batch), "reference_N": reference})
    loss, _ = policy_loss(token_logprobs(small, batch)[0], batch, train)
    loss.backward()

    save_decoder(small, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model_dir / "tokenizer.json"),
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )
    config = {"loss_type": case, "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2, "use_cpu": True,
              "report_to": "none", "bf16": False, "per_device_train_batch_size": 4,
              "num_generations": 2, "output_dir": str(tmp_path / "trl")}  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    trainer = GRPOTrainer(
        model=theirs, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**config | settings), processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
    )  # fmt: skip
    theirs.eval()

    def padded(values: list, left: bool, fill: float = 0) -> torch.Tensor:
        width = max(map(len, values))
        gap = [[fill] * (width - len(v)) for v in values]
        return torch.tensor(
            [g + list(v) if left else list(v) + g for v, g in zip(values, gap, strict=True)]
        )

    mask = padded([[1] * n for n in counts], False)
    inputs = {
        "prompt_ids": padded(prompts, True),
        "prompt_mask": padded([[1] * len(p) for p in prompts], True),
        "completion_ids": padded(replies, False), "completion_mask": mask,
        "advantages": torch.tensor(advantages), "num_items_in_batch": mask.sum(),
        "old_per_token_logps": padded([b.tolist() for b in behaviour], False),
        "ref_per_token_logps": padded([r.tolist() for r in reference.split(counts)], False),
    }  # fmt: skip
    other = trainer._compute_loss(theirs, inputs)
    other.backward()
    # terms of size one that nearly cancel, in fp32
    assert loss.item() == pytest.approx(other.item(), rel=1e-5, abs=1e-6)
    gradients = dict(theirs.named_parameters())
    for name, parameter in small.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-6), name
