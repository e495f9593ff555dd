"""Tokens per second of one stream with speculative decoding, over those without: texts that copy, and free text.

    python benchmarks/cpu/speculation.py --model MODEL.gguf [--drafter FOLDER] [--output FILE.json]

One engine per method in one process. A round runs a prompt on every engine in turn, in an order that rotates, so that
load on the machine meets all of them; reported are medians of the ratios of a round, of wall time and of processor
time. Greedy, no end of text, so that all generate as many tokens: `--tokens`, but of a copy only as many as the text
has, since what follows it is free text. `suffix` remembers past answers, so that it knows them after the first round.

`--drafter`: a checkpoint that train_drafter.py has made, as method eagle, also with the questions that it did not see.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from pagoda import LLM, SamplingParams

TEXT = (
    "The harbour of Lindau opens on the lake between a lighthouse and a stone lion. Ferries leave every hour for "
    "Bregenz, and in summer a paddle steamer follows them. The lighthouse keeper, Mr. Albrecht, counts the boats each "
    "evening and writes the number in a green book with the date, the wind and the height of the water. On market days "
    "the farmers bring apples, cheese and honey across the lake, and the square smells of coffee until noon."
)
RECIPE = (
    "Wash two pounds of apples, peel them and cut them into thin slices. Mix the slices with sugar, cinnamon and the "
    "juice of one lemon. Rub cold butter into the flour until it looks like sand, add a spoon of water and press the "
    "dough into a round dish. Fill it with the apples, cover it with the rest and bake it for forty minutes."
)
NEWS = (
    "The city council of Graz decided on Tuesday to close the old bridge over the Mur for repairs. Work will begin in "
    "April and end in November. Cyclists can use the new path along the river, while buses stop at the main square. "
    "The mayor said that the bridge, built in 1890, will look exactly as it did before."
)
PROMPTS = {
    "copy": [
        f"Repeat the following text exactly, word for word:\n\n{TEXT}",
        f"Repeat the following text exactly, word for word:\n\n{RECIPE}",
        f"Repeat the following text exactly, word for word:\n\n{NEWS}",
    ],
    "free": [
        "Write a short story about a dragon who learns to bake bread.",
        "Explain how a bicycle stays upright while it moves.",
        "Describe your favourite season of the year and what people do in it.",
    ],
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 3, "prompt_lookup_max": 6}
METHODS: dict[str, dict[str, Any] | None] = {"none": None, "ngram": NGRAM, "suffix": {"method": "suffix"}}
HELD_OUT = 12
"""Questions of those that a drafter did not see."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3], help="most drafts of the drafter")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    methods = {name: METHODS[name] for name in ["none", *(name for name in args.methods if name != "none")]}
    kinds = dict(PROMPTS)
    if args.drafter is not None:
        given = {"method": "eagle", "model": str(args.drafter)}
        methods |= {f"eagle, {drafts} drafts": {**given, "num_speculative_tokens": drafts} for drafts in args.drafts}
        unseen = json.loads((args.drafter / "held_out.json").read_text())
        kinds["unseen questions"] = unseen[:: len(unseen) // HELD_OUT]
    engines = {
        name: LLM(args.model, max_model_len=2048, max_num_seqs=4, speculative_config=method)
        for name, method in methods.items()
    }
    result = {
        "tokens": args.tokens,
        "rounds": args.rounds,
        "load": os.getloadavg()[0],
        "kinds": {kind: measure(engines, prompts, args) for kind, prompts in kinds.items()},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


def measure(engines: dict[str, LLM], prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return, per method, tokens/s and the ratios to the engine without drafts; medians over rounds and prompts."""
    before = {name: llm.llm_engine.stats.drafts for name, llm in engines.items()}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    cpu_ratios: dict[str, list[float]] = {name: [] for name in engines}
    for round_number in range(args.rounds + 1):
        for prompt in prompts:
            tokens = args.tokens
            if prompt in PROMPTS["copy"]:
                tokens = min(tokens, len(engines["none"].get_tokenizer().encode(prompt.partition("\n\n")[2])))
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            seconds, cpu_seconds, answers = {}, {}, {}
            order = list(engines)
            for name in order[round_number % len(order) :] + order[: round_number % len(order)]:
                begin, cpu_begin = time.perf_counter(), time.process_time()
                output = engines[name].chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
                seconds[name] = time.perf_counter() - begin
                cpu_seconds[name] = time.process_time() - cpu_begin
                answers[name] = list(output[0].outputs[0].token_ids)
                assert len(answers[name]) == tokens
            for name in engines if round_number else ():  # the first round warms up
                rates[name].append(tokens / seconds[name])
                ratios[name].append(seconds["none"] / seconds[name])
                cpu_ratios[name].append(cpu_seconds["none"] / cpu_seconds[name])
                print(name, prompt[:20], round(ratios[name][-1], 2), round(cpu_ratios[name][-1], 2), file=sys.stderr)
    summary: dict[str, Any] = {}
    for name, llm in engines.items():
        summary[name] = {"tokens_per_s": round(median(rates[name]), 1), "ratio": round(median(ratios[name]), 2)}
        summary[name]["cpu_ratio"] = round(median(cpu_ratios[name]), 2)
        summary[name]["ratios"] = [round(ratio, 2) for ratio in sorted(ratios[name])]
        summary[name]["equal_tokens"] = answers[name] == answers["none"]
        if (now := llm.llm_engine.stats.drafts) is not None and (then := before[name]) is not None:
            drafts = now.since(then)
            summary[name] |= {
                "drafted": drafts.tokens,
                "accepted": drafts.num_accepted,
                "acceptance_length": round(drafts.mean_length, 2),
                "steps": dict(zip(("drafted", "no_match", "acceptance", "batch_size"), drafts.steps)),
            }
    return summary


if __name__ == "__main__":
    main()
