"""Coding agents, run once each with a question, their own prompts and all of their tools."""

from agents import add_checks
from checks import main

add_checks("Say hello.", codex_task="Incomplete response returned", claude_task="output token maximum")
main()
