"""Greedy tokens of torch_cuda and of reference, float32, prompt by prompt; and the answer to a seeded random request.

usage: python gpu_parity.py [--model MODEL.gguf]

Without a model file: the shapes of the small model with random weights. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import pagoda

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
PROMPTS = 10
TOKENS = 64


def answers(model: str, backend: str, dummy: bool) -> list[list[int]]:
    """Token ids of each prompt, greedy, then seeded at temperature 0.8 with filters and penalties."""
    extra = {"load_format": "dummy", "skip_tokenizer_init": True} if dummy else {}
    llm = pagoda.LLM(model, backend=backend, dtype="float32", max_model_len=512, max_num_seqs=16, **extra)
    vocab = llm.llm_engine.info.vocab_size
    lengths = [5 + 9 * number for number in range(PROMPTS)]
    prompts = [
        {"prompt_token_ids": [(7 * at + 31 * number) % (vocab - 10) + 5 for at in range(length)]}
        for number, length in enumerate(lengths)
    ]
    common = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    greedy = pagoda.SamplingParams(temperature=0.0, **common)
    drawn = [
        pagoda.SamplingParams(
            temperature=0.8, top_p=0.9, top_k=50, repetition_penalty=1.1, frequency_penalty=0.1, seed=number, **common
        )
        for number in range(PROMPTS)
    ]
    found = [
        list(one.outputs[0].token_ids)
        for rules in (greedy, drawn)
        for one in llm.generate(prompts, rules, use_tqdm=False)
    ]
    llm.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    args = parser.parse_args()
    model = args.model
    if model is None:
        model = str(Path(tempfile.mkdtemp()) / "model")
        Path(model).mkdir()
        (Path(model) / "config.json").write_text(json.dumps(SMALL))
    ours, theirs = (answers(model, backend, args.model is None) for backend in ("torch_cuda", "reference"))
    equal = [one == other for one, other in zip(ours, theirs)]
    found = {"model": "file" if args.model else "random", "greedy_equal": sum(equal[:PROMPTS])}
    print(json.dumps(found | {"drawn_equal": sum(equal[PROMPTS:]), "of": PROMPTS, "tokens": TOKENS}))


if __name__ == "__main__":
    main()
