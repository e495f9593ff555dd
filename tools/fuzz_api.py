"""Send a server requests made from its own description, valid and not: whatever comes, it answers and goes on.

usage: python tools/fuzz_api.py URL [--cases 5000] [--seed 0] [--timeout 60]
       python tools/fuzz_api.py --serve MODEL [...]      starts `pagoda serve MODEL` with a short context for it

Counts answers by path and status. A failure is a status of 5xx, no answer in time, or an error in no known shape; after
the first of each kind, and at the end, the server must answer a plain request, and hold no request and no KV block.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

logger = logging.getLogger(__name__)

ABSENT: Final = "absent"
"""The tag of routes that answer 501."""

WITHOUT_BODY: Final = 20
"""Cases for an operation that takes no body."""

_MESSAGES: Final = [{"role": "user", "content": "a"}]
PLAIN: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 3},
    "/v1/chat/completions/render": {"messages": _MESSAGES},
    "/v1/chat/completions/batch": {"messages": [_MESSAGES], "max_tokens": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": _MESSAGES},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5]},
    "/invocations": {"prompt": "a", "max_tokens": 3},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/embeddings": {"input": "a"},
    "/v2/embed": {"texts": ["a"]},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
}
"""Path -> a body that is answered by a server of the right kind."""

HEALTH: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(slots=True)
class Findings:
    """What came back. `failures`: kind -> the first request that had it."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """Requests that were sent."""
        return sum(self.answers.values())

    def table(self) -> str:
        """Answers by path and status."""
        paths = sorted({path for path, _ in self.answers})
        statuses = sorted({status for _, status in self.answers})
        rows = [f"{'':44}" + "".join(f"{status:>7}" for status in statuses)]
        rows += [f"{path:44}" + "".join(f"{self.answers[path, each]:7}" for each in statuses) for path in paths]
        return "\n".join(rows)


class Fuzz:
    """A run against one server. `canary`: a path and a body that it answers with 200."""

    def __init__(self, url: str, canary: tuple[str, dict[str, Any]], *, timeout: float = 60.0) -> None:
        self.findings = Findings()
        self._url = url
        self._canary = canary
        self._timeout = timeout
        self._session = requests.Session()
        self._session.headers["connection"] = "close"  # one request's failure is not the next one's
        self._choose = random.Random(0)

    def run(self, cases: int, seed: int = 0) -> Findings:
        """Send so many cases, shared evenly by the operations, two of three valid by the description."""
        begin = time.monotonic()
        self._check_canary("before the first case")
        operations = self._operations()
        with_body = [each for each in operations if each.body]
        left = cases
        for operation in operations:
            if not operation.body:
                left -= self._run_operation(operation, GenerationMode.POSITIVE, WITHOUT_BODY, seed)
        for number, operation in enumerate(with_body):
            share = left * (number + 1) // len(with_body) - left * number // len(with_body)
            self._run_operation(operation, GenerationMode.POSITIVE, share - share // 3, seed)
            self._run_operation(operation, GenerationMode.NEGATIVE, share // 3, seed)
        self._check_canary("after the last case")
        self._check_idle()
        self.findings.seconds = time.monotonic() - begin
        return self.findings

    def _operations(self) -> list[Any]:
        described = self._session.get(f"{self._url}/openapi.json", timeout=self._timeout).json()
        schema = schemathesis.openapi.from_dict(described)
        return [
            operation
            for result in schema.get_all_operations()
            if ABSENT not in (operation := result.ok()).definition.raw.get("tags", ())
        ]

    def _run_operation(self, operation: Any, mode: GenerationMode, count: int, seed: int) -> int:
        """Send up to `count` cases; how many there were. Three of four valid ones are cut down to a few odd fields."""
        sent = 0

        @seeded(seed)
        @settings(
            max_examples=max(1, count),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            nonlocal sent
            if sent < count:
                sent += 1
                plain = PLAIN.get(operation.path)
                if plain is not None and mode is GenerationMode.POSITIVE and sent % 4 and isinstance(case.body, dict):
                    case.body = plain | self._some(case.body)
                self._send(case)

        with suppress(Unsatisfiable):  # nothing about a request without parameters can be wrong
            send()
        logger.info(
            "%s, %s: %d cases; %d failures so far", operation.label, mode.value, sent, len(self.findings.failures)
        )
        return sent

    def _some(self, body: dict[str, Any]) -> dict[str, Any]:
        names = self._choose.sample(sorted(body), min(len(body), self._choose.randint(0, 3)))
        return {name: body[name] for name in {*names, "model"} & body.keys()}

    def _send(self, case: Any) -> None:
        try:
            answer = case.call(base_url=self._url, session=self._session, timeout=self._timeout)
        except requests.RequestException as error:
            self._failed(f"{case.operation.label}: {type(error).__name__}", _shown(case))
            return
        self.findings.answers[case.operation.path, answer.status_code] += 1
        if answer.status_code >= 500:
            self._failed(f"{case.operation.label}: {answer.status_code} {answer.text[:200]}", _shown(case))
        elif answer.status_code >= 400 and not _is_error(answer):
            self._failed(f"{case.operation.label}: {answer.status_code} in no known shape", _shown(case))

    def _failed(self, kind: str, example: str) -> None:
        if kind not in self.findings.failures:
            self.findings.failures[kind] = example
            self._check_canary(f"after {kind}")

    def _check_canary(self, when: str) -> None:
        path, body = self._canary
        try:
            answer = self._session.post(self._url + path, json=body, timeout=self._timeout)
            told = f"{answer.status_code} {answer.text[:200]}" if answer.status_code != 200 else ""
        except requests.RequestException as error:
            told = type(error).__name__
        if told:
            self.findings.failures.setdefault(f"no answer to a plain request {when}", told)

    def _check_idle(self) -> None:
        """Requests whose clients are gone end within a moment."""
        deadline = time.monotonic() + self._timeout
        while True:
            text = self._session.get(f"{self._url}/metrics", timeout=self._timeout).text
            found = {name: _total(text, name) for name in HEALTH}
            if not any(found.values()):
                return
            if time.monotonic() > deadline:
                self.findings.failures["not idle at the end"] = json.dumps(found)
                return
            time.sleep(0.1)


def _total(metrics: str, name: str) -> float:
    return sum(map(float, re.findall(rf"^{name}\{{.*?\}} (\S+)$", metrics, re.MULTILINE)))


def _is_error(answer: requests.Response) -> bool:
    """Whether a 4xx is one of ours: OpenAI's shape or Anthropic's. HEAD has no body."""
    if answer.request.method == "HEAD":
        return True
    try:
        told = answer.json()
    except ValueError:
        return False
    return isinstance(told, dict) and isinstance(told.get("error"), Mapping) and bool(told["error"].get("message"))


def _shown(case: Any) -> str:
    return f"{case.method} {case.formatted_path} query {case.query!r} body {case.body!r}"[:2000]


@contextmanager
def served(model: str, *flags: str) -> Iterator[str]:
    """`pagoda serve MODEL` on a free port, warm; its address."""
    words = [sys.executable, "-m", "pagoda.server.cli.main", "serve", model, "--port", "0", *flags]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            url = found.group(1) if (found := re.search(r"listening on (http://[\d.:]+)", line)) else url
            if "ready after" in line:
                break
        else:
            raise SystemExit(f"the server ended with status {process.wait()} before it was ready")
        _drain(process)
        yield url
    finally:
        process.terminate()
        process.wait()


def canary_of(url: str) -> tuple[str, dict[str, Any]]:
    """A plain request that this server's kind of model answers."""
    for path in ("/v1/completions", "/pooling"):
        if requests.post(url + path, json=PLAIN[path], timeout=60).ok:
            return path, PLAIN[path]
    raise SystemExit(f"{url} answers no plain request: neither a completion nor a vector")


def _drain(process: subprocess.Popen[str]) -> None:
    """Read the log on, so that the server never waits for a reader."""
    assert process.stderr is not None
    threading.Thread(target=lambda stream=process.stderr: [None for _ in stream], daemon=True).start()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", nargs="?", help="the server's address")
    parser.add_argument("--serve", metavar="MODEL", help="start a server of this model instead")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that an answer may take")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    if bool(args.url) == bool(args.serve):
        parser.error("give either an address or --serve MODEL")
    if args.url:
        return _report(args.url.rstrip("/"), args)
    flags = (
        *("--max-model-len", "64", "--max-num-seqs", "16", "--enable-tokenizer-info-endpoint"),
        *("--override-generation-config", '{"max_new_tokens": 2}'),  # longer answers find nothing more
        *("--max-num-queued-reqs", "256"),  # else one request may ask for 16,384 answers, and wait for them
    )
    with served(args.serve, *flags) as url:
        return _report(url, args)


def _report(url: str, args: argparse.Namespace) -> int:
    print(f"seed {args.seed}", flush=True)
    findings = Fuzz(url, canary_of(url), timeout=args.timeout).run(args.cases, args.seed)
    print(findings.table())
    print(f"{findings.cases} cases in {findings.seconds:.0f} s, {len(findings.failures)} kinds of failure")
    for kind, example in findings.failures.items():
        print(f"\n{kind}\n  {example}")
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
