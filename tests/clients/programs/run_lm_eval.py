"""lm-eval on three questions: log-probabilities of prompts with `echo`, perplexity, and texts with five stops.

Log-probabilities of token ids need a tokenizer; the default, `tokenizer_backend=auto`, asks the server for it.
"""

from __future__ import annotations

import json

from checks import MODEL, V1, main
from commands import BIN, HOME, works

QUESTIONS = (
    {"q": "The capital of France is", "choices": ["Paris", "Rome"], "a": 0, "t": "Paris"},
    {"q": "Water is made of hydrogen and", "choices": ["gold", "oxygen"], "a": 1, "t": "oxygen"},
    {"q": "Two plus two is", "choices": ["four", "nine"], "a": 0, "t": "four"},
)
KINDS: dict[str, dict] = {
    "texts": {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{t}}",
        "generation_kwargs": {"until": ["\n", "Q:", "</s>", "<|im_end|>", "Question:"], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    },
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
(HOME / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
for kind, task in KINDS.items():  # JSON is YAML
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(HOME / "data.jsonl")}}}
    (HOME / f"{kind}.yaml").write_text(json.dumps({"task": f"pagoda_{kind}", "test_split": "test", **source, **task}))


def lm_eval(name: str, model: str, path: str, tasks: str, *more: str, settings: str = "") -> None:
    where = f"model={MODEL},base_url={V1}{path},num_concurrent=2,max_retries=1{settings}"
    command = (str(BIN / "lm_eval"), "run", "--model", model, "--model_args", where)
    works(name, *command, "--include_path", str(HOME), *more, "--tasks", tasks, expect="pagoda_texts")


ALL = "pagoda_choices,pagoda_perplexity,pagoda_texts"
lm_eval("completions", "local-completions", "/completions", ALL)
lm_eval("completions_as_text", "local-completions", "/completions", ALL, settings=",tokenized_requests=False")
lm_eval("chat", "local-chat-completions", "/chat/completions", "pagoda_texts", "--apply_chat_template")
main()
