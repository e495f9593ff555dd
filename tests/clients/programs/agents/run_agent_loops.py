"""Coding agents that read a file by one of their own tools and say what it holds, over a model that plays a script.

The model calls the tool only if its prompt shows the tool as the chat template writes it, and answers only if it shows
the file's content as a result of a tool (see `agent_script` of tests/clients). Settings are the defaults.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from checks import MODEL, URL, V1, main
from commands import HOME, works

NODE = Path(os.environ["PAGODA_NODE"]) / "node_modules" / ".bin"
ASK = "Which stone does fact.txt name?"
ANSWER = "The file names quartz-42."
CODEX = f"""\
model = "{MODEL}"
model_provider = "pagoda"
[model_providers.pagoda]
name = "pagoda"
base_url = "{V1}"
wire_api = "responses"
"""
PROVIDER = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": V1, "apiKey": "none"}}
OPENCODE = {"model": f"pagoda/{MODEL}", "provider": {"pagoda": {**PROVIDER, "models": {MODEL: {"name": MODEL}}}}}
(HOME / ".codex").mkdir()
(HOME / ".codex" / "config.toml").write_text(CODEX)
(HOME / "opencode.json").write_text(json.dumps(OPENCODE))
works("codex", str(NODE / "codex"), "exec", "--skip-git-repo-check", ASK, expect=ANSWER)
works("opencode", str(NODE / "opencode"), "run", ASK, expect=ANSWER)
works(
    *("qwen-code", str(NODE / "qwen"), "--auth-type", "openai", "-p", ASK),
    expect=ANSWER,
    OPENAI_BASE_URL=V1,
    OPENAI_MODEL=MODEL,
)
works(
    *("claude-code", str(NODE / "claude"), "-p", ASK),
    expect=ANSWER,
    ANTHROPIC_BASE_URL=URL,
    ANTHROPIC_API_KEY="none",
    ANTHROPIC_MODEL=MODEL,
)
main()
