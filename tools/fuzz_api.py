"""Fuzz a server with valid and invalid requests generated from its OpenAPI schema.

usage: python tools/fuzz_api.py URL [--cases 5000] [--seed 0] [--timeout 60]
       python tools/fuzz_api.py --serve MODEL [...]      starts `pagoda serve MODEL` with a short context

Counts responses by path and status. A failure is a 5xx status, a timeout, or an error body of unknown format. After the
first failure of each kind and at the end, the server must answer a plain request; at the end it must have no
requests in flight and no KV blocks in use.
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

UNSUPPORTED_TAG: Final = "absent"  # of routes that answer 501
CASES_WITHOUT_BODY: Final = 20  # per operation without a request body, which together get at most a third of all

_MESSAGES: Final = [{"role": "user", "content": "a"}]
PLAIN: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/completions/render": {"prompt": "a"},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 3},
    "/v1/chat/completions/render": {"messages": _MESSAGES},
    "/v1/chat/completions/batch": {"messages": [_MESSAGES], "max_tokens": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/responses/render": {"input": "a"},
    "/v1/conversations": {},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 3}},
    "/v2/chat": {"model": "fake", "messages": _MESSAGES, "max_tokens": 3},
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
"""Path -> a valid body, for a model of the right kind."""

IDLE_METRICS: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(slots=True)
class Findings:
    """Results of a run."""

    responses: Counter[tuple[str, int]] = field(default_factory=Counter)  # (path, status) -> count
    failures: dict[str, str] = field(default_factory=dict)  # kind -> first request that caused it
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """Number of requests sent."""
        return sum(self.responses.values())

    def table(self) -> str:
        """Return the response counts by path and status as a text table."""
        paths = sorted({path for path, _ in self.responses})
        statuses = sorted({status for _, status in self.responses})
        rows = [f"{'':44}" + "".join(f"{status:>7}" for status in statuses)]
        rows += [f"{path:44}" + "".join(f"{self.responses[path, each]:7}" for each in statuses) for path in paths]
        return "\n".join(rows)


class Fuzz:
    """A run against one server. `canary`: path and body of a request that it answers with 200."""

    def __init__(self, url: str, canary: tuple[str, dict[str, Any]], *, timeout: float = 60.0) -> None:
        self.findings = Findings()
        self._url = url
        self._canary = canary
        self._timeout = timeout
        self._session = requests.Session()
        self._session.headers["connection"] = "close"  # a failure must not affect the next request
        self._random = random.Random(0)

    def run(self, cases: int, seed: int = 0) -> Findings:
        """Send `cases` requests, spread evenly over the operations; two of three are valid by the schema."""
        begin = time.monotonic()
        self._check_canary("before the first case")
        operations = self._operations()
        with_body = [each for each in operations if each.body]
        remaining = cases
        count = max(1, min(CASES_WITHOUT_BODY, cases // 3 // max(1, len(operations) - len(with_body))))
        for operation in operations:
            if not operation.body:
                remaining -= self._run_operation(operation, GenerationMode.POSITIVE, count, seed)
        for number, operation in enumerate(with_body):
            share = remaining * (number + 1) // len(with_body) - remaining * number // len(with_body)
            self._run_operation(operation, GenerationMode.POSITIVE, share - share // 3, seed)
            self._run_operation(operation, GenerationMode.NEGATIVE, share // 3, seed)
        self._check_canary("after the last case")
        self._check_idle()
        self.findings.seconds = time.monotonic() - begin
        return self.findings

    def _operations(self) -> list[Any]:
        description = self._session.get(f"{self._url}/openapi.json", timeout=self._timeout).json()
        schema = schemathesis.openapi.from_dict(description)
        return [
            operation
            for result in schema.get_all_operations()
            if UNSUPPORTED_TAG not in (operation := result.ok()).definition.raw.get("tags", ())
        ]

    def _run_operation(self, operation: Any, mode: GenerationMode, count: int, seed: int) -> int:
        """Send up to `count` cases and return their number. Three of four valid ones are reduced to a few fields."""
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
                    case.body = plain | self._sample_fields(case.body)
                self._send(case)

        with suppress(Unsatisfiable):  # a request without parameters has no invalid form
            send()
        logger.info(
            "%s, %s: %d cases; %d failures so far", operation.label, mode.value, sent, len(self.findings.failures)
        )
        return sent

    def _sample_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        names = self._random.sample(sorted(body), min(len(body), self._random.randint(0, 3)))
        return {name: body[name] for name in {*names, "model"} & body.keys()}

    def _send(self, case: Any) -> None:
        try:
            response = case.call(base_url=self._url, session=self._session, timeout=self._timeout)
        except requests.RequestException as error:
            self._record_failure(f"{case.operation.label}: {type(error).__name__}", _describe(case))
            return
        self.findings.responses[case.operation.path, response.status_code] += 1
        if response.status_code >= 500:
            self._record_failure(
                f"{case.operation.label}: {response.status_code} {response.text[:200]}", _describe(case)
            )
        elif response.status_code >= 400 and not _is_error(response):
            self._record_failure(f"{case.operation.label}: {response.status_code} in unknown format", _describe(case))

    def _record_failure(self, kind: str, example: str) -> None:
        if kind not in self.findings.failures:
            self.findings.failures[kind] = example
            self._check_canary(f"after {kind}")

    def _check_canary(self, when: str) -> None:
        path, body = self._canary
        try:
            response = self._session.post(self._url + path, json=body, timeout=self._timeout)
            fault = f"{response.status_code} {response.text[:200]}" if response.status_code != 200 else ""
        except requests.RequestException as error:
            fault = type(error).__name__
        if fault:
            self.findings.failures.setdefault(f"no answer to a plain request {when}", fault)

    def _check_idle(self) -> None:
        """Wait until no requests are in flight: those of disconnected clients must end soon."""
        deadline = time.monotonic() + self._timeout
        while True:
            text = self._session.get(f"{self._url}/metrics", timeout=self._timeout).text
            values = {name: _total(text, name) for name in IDLE_METRICS}
            if not any(values.values()):
                return
            if time.monotonic() > deadline:
                self.findings.failures["not idle at the end"] = json.dumps(values)
                return
            time.sleep(0.1)


def _total(metrics: str, name: str) -> float:
    return sum(map(float, re.findall(rf"^{name}\{{.*?\}} (\S+)$", metrics, re.MULTILINE)))


def _is_error(response: requests.Response) -> bool:
    """Return whether a 4xx response has an error body in the format of OpenAI or Anthropic. HEAD has no body."""
    if response.request.method == "HEAD":
        return True
    try:
        body = response.json()
    except ValueError:
        return False
    return isinstance(body, dict) and isinstance(body.get("error"), Mapping) and bool(body["error"].get("message"))


def _describe(case: Any) -> str:
    return f"{case.method} {case.formatted_path} query {case.query!r} body {case.body!r}"[:2000]


@contextmanager
def served(model: str, *flags: str) -> Iterator[str]:
    """Run `pagoda serve MODEL` on a free port; yield its URL once it is ready."""
    words = [sys.executable, "-m", "pagoda.server.cli.main", "serve", model, "--port", "0", *flags]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            url = match.group(1) if (match := re.search(r"listening on (http://[\d.:]+)", line)) else url
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
    """Return path and body of a plain request that the server's model can answer."""
    for path in ("/v1/completions", "/pooling"):
        if requests.post(url + path, json=PLAIN[path], timeout=60).ok:
            return path, PLAIN[path]
    raise SystemExit(f"{url} answers no plain request: neither a completion nor a vector")


def _drain(process: subprocess.Popen[str]) -> None:
    """Keep reading the log, so that the server never blocks on a full pipe."""
    assert process.stderr is not None
    threading.Thread(target=lambda stream=process.stderr: [None for _ in stream], daemon=True).start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", nargs="?", help="URL of the server")
    parser.add_argument("--serve", metavar="MODEL", help="start a server for this model instead")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--timeout", type=float, default=60.0, help="maximum seconds per response")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    if bool(args.url) == bool(args.serve):
        parser.error("give either a URL or --serve MODEL")
    if args.url:
        return _report(args.url.rstrip("/"), args)
    flags = (
        *("--max-model-len", "64", "--max-num-seqs", "16", "--enable-tokenizer-info-endpoint"),
        *("--override-generation-config", '{"max_new_tokens": 2}'),  # longer outputs reveal nothing more
        *("--max-num-queued-reqs", "256"),  # else one request may queue 16,384 sequences
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
