"""What the programs share: each runs one client unchanged and prints one line per feature.

PASS: it works. TASK: the requests succeed, but the small model's answer is unusable. FAIL: anything else.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable

from pydantic import BaseModel

URL = os.environ.get("PAGODA_URL", "http://127.0.0.1:8000")
V1 = f"{URL}/v1"
MODEL = os.environ.get("PAGODA_MODEL", "small")
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS},
}
CHECKS: dict[str, Callable] = {}


class City(BaseModel):
    """A city."""

    city: str


class TaskFailed(Exception):
    """The model failed, not the request."""


def check(function: Callable, name: str | None = None) -> Callable:
    CHECKS[name or function.__name__] = function
    return function


def main() -> None:
    """Run the checks, or those that the command line names."""
    for name in sys.argv[1:] or CHECKS:
        try:
            result = CHECKS[name]()
            if inspect.isawaitable(result):
                result = asyncio.run(result)
            print("PASS", name, repr(result)[:100], flush=True)
        except TaskFailed as error:
            print("TASK", name, " ".join(str(error).split())[:300], flush=True)
        except Exception as error:
            print("FAIL", name, type(error).__name__, " ".join(str(error).split())[:900], flush=True)
