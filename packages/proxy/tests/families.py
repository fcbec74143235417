"""Model folders of many families: real chat templates, over a vocabulary that the caller gives."""

import json
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

TEMPLATES = Path(__file__).parent / "data/templates"
THINK, CALLS = ["<think>", "</think>"], ["<tool_call>", "</tool_call>"]
QWEN = (["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        [*CALLS, "<tool_response>", "</tool_response>", *THINK])  # fmt: skip
LLAMA = (["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
          "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"], [])  # fmt: skip
DEEP = "begin▁of▁sentence end▁of▁sentence User Assistant tool▁calls▁begin tool▁calls▁end tool▁sep"
SPECIAL = {
    "qwen": QWEN,
    "nemotron": QWEN,
    "glm": (["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
             "<|observation|>"], [*THINK, *CALLS, "<arg_key>", "</arg_key>", "<arg_value>",
             "</arg_value>"]),
    "llama": LLAMA,
    "gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], []),
    "phi": (["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>"], []),
    "deepseek": ([f"<｜{name}｜>" for name in DEEP.split()], THINK),
    "mistral": (["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
                 "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"], []),
}  # fmt: skip
# what each can write: calls, several at once, a system message
CAN = {
    "qwen2_5": "csp", "qwen3": "csp", "qwen3_5_think": "csp", "qwen3_5_nothink": "csp",
    "qwen3_instruct_2507": "csp", "nemotron_3_nano": "csp", "glm4moe": "csp", "llama3_1": "cs",
    "llama3_2": "cs", "gemma3": "s", "phi3": "s", "deepseekv3": "s", "mistral_tekken": "csp",
}  # fmt: skip


def folder(name: str, vocabulary: Tokenizer, at: Path) -> Path:
    """A model folder; `vocabulary` gets the special tokens of the family."""
    special, tags = next(v for k, v in SPECIAL.items() if name.startswith(k))
    vocabulary.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    vocabulary.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    at.mkdir(parents=True, exist_ok=True)
    vocabulary.save(str(at / "tokenizer.json"))
    (at / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
    bos = next((t for t in special if t in ("<bos>", "<s>", "<|begin_of_text|>")
                or "begin▁of" in t), "")  # fmt: skip
    config = {"bos_token": bos, "eos_token": "</s>" if bos == "<s>" else "",
              "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    (at / "tokenizer_config.json").write_text(json.dumps(config))
    return at


def conversations(name: str, text: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict]]:
    """Conversations that the family's template can write, as OpenAI messages; the last asks."""
    can = CAN[name]
    user = text.map(lambda t: {"role": "user", "content": t})
    spoken = st.tuples(text, user).map(lambda p: [{"role": "assistant", "content": p[0]}, p[1]])
    arguments = st.fixed_dictionaries({}, optional={"path": text, "n": st.integers()})
    called = st.lists(st.tuples(arguments, text), min_size=1, max_size=2 if "p" in can else 1)
    acted = st.tuples(called, text).map(lambda p: [*_calls(p[0]), {"role": "assistant",
                      "content": p[1]}, {"role": "user", "content": "next"}])  # fmt: skip
    turns = st.lists(spoken | acted if "c" in can else spoken, max_size=3)
    end = called.map(_calls) if "c" in can else st.just([])
    system = st.just([]) | text.map(lambda t: [{"role": "system", "content": t}])
    return st.tuples(system if "s" in can else st.just([]), user, turns, end | st.just([])).map(
        lambda p: [*p[0], p[1], *(m for turn in p[2] for m in turn), *p[3]]
    )


def _calls(called: list[tuple[dict, str]]) -> list[dict]:
    ids = [f"call{i}0000" for i in range(len(called))]
    calls = [
        {"id": i, "type": "function", "function": {"name": "edit", "arguments": a}}
        for i, (a, _) in zip(ids, called, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": i, "name": "edit", "content": t}
        for i, (_, t) in zip(ids, called, strict=True)
    ]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


TOOLS = [{"type": "function", "function": {
    "name": "edit", "description": "Edits a file. é", "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["path"]}}}]  # fmt: skip
