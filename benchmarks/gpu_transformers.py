"""The same load as gpu_engine.py's throughput, through transformers' continuous batching, for comparison.

usage: python gpu_transformers.py [--requests N --input N --output N] [--tiny]

Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import gpu_model
import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.requests, args.input, args.output = 4, 32, 8
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = gpu_model.write(Path(tempfile.mkdtemp()) / "model", args.tiny)
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, config.vocab_size, (args.requests, args.input), generator=generator).tolist()
    rules = transformers.GenerationConfig(
        max_new_tokens=args.output, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    model.generate_batch(prompts[:2], generation_config=rules)
    begin = time.perf_counter()
    done = model.generate_batch(prompts, generation_config=rules)
    seconds = time.perf_counter() - begin
    tokens = sum(len(one.generated_tokens) for one in done.values())
    print(
        json.dumps(
            {
                "requests": args.requests,
                "input": args.input,
                "output": args.output,
                "seconds": seconds,
                "tokens": tokens,
                "output_tokens_per_s": tokens / seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
