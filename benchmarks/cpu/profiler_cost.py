"""What --profiler-config costs on a CPU: steps without a profile, steps that are traced, and writing the trace.

usage: python profiler_cost.py MODEL [--rounds N] [--steps N] [--output JSON]

Three engines (without the flag, with it, with it and Python calls) generate in turn. The second and third generate
twice in each round: without a profile, and traced. Times are processor seconds; "wall" is by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from pagoda import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The capital of", "def main():", "In the beginning"]


def step_seconds(llm: LLM, steps: int) -> float:
    """Return the processor seconds of a step of four sequences."""
    began = time.process_time()
    llm.generate(PROMPTS, SamplingParams(max_tokens=steps, ignore_eos=True), use_tqdm=False)
    seconds = time.process_time() - began
    llm.reset_prefix_cache()
    return seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    engines = {"no flag": {}}
    for name, stack in (("operators", False), ("with Python calls", True)):
        config = {"profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": stack}
        engines[name] = {"profiler_config": config}
    llms = {
        name: LLM(args.model, backend="reference", max_model_len=512, max_num_seqs=8, **settings)
        for name, settings in engines.items()
    }
    rounds: list[dict[str, float]] = []
    for number in range(args.rounds + 1):
        figures = {}
        for name, llm in llms.items():
            figures[f"{name}: idle"] = step_seconds(llm, args.steps)
            if name == "no flag":
                continue
            llm.start_profile()
            figures[f"{name}: traced"] = step_seconds(llm, args.steps)
            wall, own = time.perf_counter(), time.process_time()
            path = llm.stop_profile()
            figures[f"{name}: stop, processor"] = time.process_time() - own
            figures[f"{name}: stop, wall"] = time.perf_counter() - wall
            figures[f"{name}: bytes"] = os.path.getsize(path)
            os.unlink(path)
        if number:  # the first warms up
            rounds.append(figures)
            print(json.dumps(figures), flush=True)
    columns = {name: [figures[name] for figures in rounds] for name in rounds[0]}
    medians = {name: statistics.median(values) for name, values in columns.items()}
    least = {name: min(values) for name, values in columns.items()}
    print(json.dumps({"medians": medians, "least": least}, indent=1))
    if args.output is not None:
        load = os.getloadavg()
        args.output.write_text(
            json.dumps({"load": load, "medians": medians, "least": least, "rounds": rounds}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
