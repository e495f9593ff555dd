"""The coding agents: `add_checks` asks each a question, with default settings, its own prompt and all of its tools."""

from __future__ import annotations

import json
import os
from pathlib import Path

from checks import MODEL, URL, V1
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
OPENAI = {"OPENAI_BASE_URL": V1, "OPENAI_MODEL": MODEL}
ANTHROPIC = {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": MODEL}


def add_checks(question: str, *, expect: str = "", codex_task: str = "", claude_task: str = "") -> None:
    """Add a check of each agent, which prints `expect`. The tasks: what it prints where the model failed."""
    (HOME / ".codex").mkdir()
    (HOME / ".codex" / "config.toml").write_text(CODEX)
    (HOME / "opencode.json").write_text(json.dumps(OPENCODE))
    codex = (str(NODE / "codex"), "exec", "--skip-git-repo-check", question)
    works("codex", *codex, expect=expect, task=codex_task)
    works("opencode", str(NODE / "opencode"), "run", question, expect=expect)
    works("qwen-code", str(NODE / "qwen"), "--auth-type", "openai", "-p", question, expect=expect, **OPENAI)
    works("claude-code", str(NODE / "claude"), "-p", question, expect=expect, task=claude_task, **ANTHROPIC)
