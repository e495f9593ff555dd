"""Coding agents, run once each with a question, their own prompts and all of their tools."""

from __future__ import annotations

import json
import os
from pathlib import Path

from checks import MODEL, URL, V1, main
from commands import HOME, works

NODE = Path(os.environ["PAGODA_NODE"]) / "node_modules" / ".bin"
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
ASK = "Say hello."
works("codex", str(NODE / "codex"), "exec", "--skip-git-repo-check", ASK, task="Incomplete response returned")
works("opencode", str(NODE / "opencode"), "run", ASK)
works("qwen-code", str(NODE / "qwen"), "--auth-type", "openai", "-p", ASK, OPENAI_BASE_URL=V1, OPENAI_MODEL=MODEL)
works(
    "claude-code",
    str(NODE / "claude"),
    "-p",
    ASK,
    task="output token maximum",
    ANTHROPIC_BASE_URL=URL,
    ANTHROPIC_API_KEY="none",
    ANTHROPIC_MODEL=MODEL,
)
main()
