"""aiperf, streamed chats from a file of prompts, two at a time."""

from __future__ import annotations

import json

from checks import MODEL, URL, check, main
from commands import BIN, HOME, works
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

TOKENIZER = HOME / "tokenizer"
"""It counts the prompts' tokens; the answers' are counted by the server."""

TOKENIZER.mkdir()
Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(TOKENIZER / "tokenizer.json"))
(TOKENIZER / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
(HOME / "prompts.jsonl").write_text("".join(json.dumps({"text": f"Count to {n}."}) + "\n" for n in range(4)))
works(
    "chat",
    str(BIN / "aiperf"),
    *("profile", "--url", URL, "-m", MODEL, "--endpoint-type", "chat", "--streaming", "--ui", "none"),
    *("--input-file", str(HOME / "prompts.jsonl"), "--custom-dataset-type", "single_turn"),
    *("--request-count", "4", "--concurrency", "2", "--extra-inputs", "max_tokens:16"),
    *("--tokenizer", str(TOKENIZER), "--use-server-token-count"),
    expect="Benchmark Duration",
    HF_HUB_OFFLINE="",  # Offline it looks for every tokenizer in the hub's cache.
)


def counted() -> str:
    (report,) = HOME.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    if found["request_count"]["avg"] != 4 or found["error_summary"]:
        raise RuntimeError(f"not all requests were answered: {found['error_summary']}")
    return "4 requests"


check(counted)
main()
