"""guidellm, one request after the other, on a file of prompts."""

from __future__ import annotations

import json

from checks import URL, main
from commands import BIN, HOME, works

(HOME / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(4)))
works(
    "synchronous",
    str(BIN / "guidellm"),
    *("run", "--backend", f"kind=openai_http,target={URL}", "--profile", "kind=synchronous"),
    *("--constraint", "kind=max_requests,count=4", "--disable-progress"),
    *("--data", f"kind=json_file,path={HOME / 'prompts.jsonl'}"),
    expect="Benchmarking complete",
)
main()
