"""Rows of load: idle sockets, overload, soak."""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from faults.report import Options, Report
from faults.server import CACHE, MemoryProbe, Server, Usage, serving
from faults.streams import Answer, ask, neighbours, stream_body

SOCKETS: Final = 5_000
CLOSE_SECONDS: Final = 60.0  # within which the server must have closed them: over three times its longest default
MAX_GROWTH: Final = 300.0  # MB

OVERLOAD: Final = 10.0  # times the requests that the server completes
CALIBRATION_SECONDS: Final = 60.0
CALIBRATION_CLIENTS: Final = 128  # as many sequences as run at a time by default
DRAIN_SECONDS: Final = 90.0  # after which a request that was sent during the overload counts as lost
MAX_OPEN: Final = 4_000  # connections that the overload keeps open; more than a server admits by default


def sockets(options: Options) -> list[Report]:
    """5,000 connections, idle or with half a header or half a body, beside ten streams and new clients."""
    report = Report("5,000 idle and half-open sockets")
    with serving(options.model, *CACHE, log=Path(options.log_folder) / "sockets.log") as server:
        idle = server.usage().descriptors
        log_before = server.log_size()
        with neighbours(server.port) as streams, MemoryProbe(server, 0.5) as memory:
            streams.gaps()
            opened = _open_sockets(server.port)
            waits = []
            for _ in range(20):
                begin = time.monotonic()
                status, _ = server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}, timeout=30)
                waits.append(time.monotonic() - begin if status == 200 else float("inf"))
            gaps = streams.gaps()
            begin = time.monotonic()
            left = len(opened)
            while left and time.monotonic() < begin + CLOSE_SECONDS:
                time.sleep(0.5)
                opened = [each for each in opened if not _is_closed(each)]
                left = len(opened)
            seconds = time.monotonic() - begin
        for each in opened:
            each.close()
        report.at_most("new clients are served", max(waits), 5.0)
        report.at_most("memory growth", memory.growth, MAX_GROWTH, "MB")
        report.require("closed by timeouts", left == 0, f"{left} open after {seconds:.0f} s")
        report.at_most("worst token gap", gaps.worst, 0.5)
        report.at_most("log", (server.log_size() - log_before) / 1e6, 5.0, "MB")
        time.sleep(1.0)
        after = server.usage().descriptors
        report.require("descriptors return", after <= idle + 20, f"{idle} before, {after} after")
    return [report]


def _open_sockets(port: int) -> list[socket.socket]:
    starts = (b"", b"GET /he", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
    opened = []
    for i in range(SOCKETS):
        each = socket.create_connection(("127.0.0.1", port), timeout=30)
        opened.append(each)
        try:
            each.sendall(starts[i % len(starts)])
        except OSError:
            continue
        each.setblocking(False)
    return opened


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the peer has closed the connection, and close it then."""
    try:
        while connection.recv(4096):
            pass
    except (BlockingIOError, TimeoutError):
        return False
    except OSError:
        pass
    connection.close()
    return True


# Overload.


def overload(options: Options) -> list[Report]:
    """Ten times the requests that the server completes, with its default limits, for --minutes."""
    report = Report(f"{OVERLOAD:g} x overload for {options.minutes:g} min")
    with serving(options.model, *CACHE, log=Path(options.log_folder) / "overload.log") as server:
        rate, alone = asyncio.run(_measure_capacity(server))
        with MemoryProbe(server, 0.5) as memory:
            answers = asyncio.run(_overload(server, rate * OVERLOAD, options.minutes * 60))
        _judge_overload(report, answers, alone)
        report.at_most("memory growth", memory.growth, MAX_GROWTH, "MB")
        report.require("health is true", server.health(5) == 200)
        rejected = server.metric("vllm:admission_rejections_total")
        refused = sum(each.status == 429 for each in answers)
        report.require("429s are counted", rejected == refused, f"{rejected:g} counted, {refused} received")
        report.notes |= {"capacity, requests/s": round(rate, 2), "sent": len(answers)}
    return [report]


def _overload_body(number: int) -> dict[str, Any]:
    prompt = f"Number {number}. " + "It was a dark and stormy night. " * (1 + number % 5)
    return stream_body(prompt, 32) | {"stream_options": {"include_usage": True}, "user": str(number)}


async def _measure_capacity(server: Server) -> tuple[float, list[Answer]]:
    """Return completed requests per second of a saturated server, and its answers."""
    answers: list[Answer] = []
    end = time.monotonic() + CALIBRATION_SECONDS

    async def client(first: int) -> None:
        number = first
        while time.monotonic() < end:
            answers.append(await ask(server.port, _overload_body(number)))
            number += 1

    begin = time.monotonic()
    await asyncio.gather(*(client(i * 1000) for i in range(CALIBRATION_CLIENTS)))
    done = [each for each in answers if each.done]
    return max(1.0, len(done) / (time.monotonic() - begin)), done


async def _overload(server: Server, rate: float, seconds: float) -> list[Answer]:
    """Send `rate` requests a second, whether or not earlier ones have ended."""
    tasks: list[asyncio.Task[Answer]] = []
    pending: set[asyncio.Task[Answer]] = set()
    begin = time.monotonic()
    while (elapsed := time.monotonic() - begin) < seconds:
        due = int(rate * elapsed) - len(tasks)
        for _ in range(min(due, MAX_OPEN - len(pending))):
            left = seconds - elapsed + DRAIN_SECONDS
            task = asyncio.create_task(ask(server.port, _overload_body(10**6 + len(tasks)), timeout=left))
            tasks.append(task)
            pending.add(task)
            task.add_done_callback(pending.discard)
        await asyncio.sleep(0.02)
    return list(await asyncio.gather(*tasks))


def _judge_overload(report: Report, answers: list[Answer], alone: list[Answer]) -> None:
    statuses = Counter(each.status for each in answers)
    admitted = [each for each in answers if each.status == 200]
    refused = [each for each in answers if each.status == 429]
    lost = [each for each in answers if not each.ended]
    twice = [each for each in admitted if each.done and each.usage.get("completion_tokens", 0) != 32]
    report.require("429s with Retry-After", bool(refused) and all(each.retry_after for each in refused), len(refused))
    report.require("nothing is lost", not lost, f"{len(lost)} of {len(answers)}: {lost[0].cut if lost else ''}")
    report.require("nothing is answered twice or in part", not twice, len(twice))
    report.require("no 5xx", not any(status >= 500 for status in statuses), dict(statuses))
    if not admitted or not alone:
        report.require("requests are admitted", False, len(admitted))
        return
    report.at_most("admitted p99 latency", _p99(admitted), 2 * _p99(alone))
    report.notes |= {
        "p99, saturated": round(_p99(alone), 2),
        "p99 of those that came after 10 s": round(_p99(_after(admitted, 10.0) or admitted), 2),
        "median, overloaded": round(statistics.median(each.end - each.begin for each in admitted), 2),
    }


def _after(answers: list[Answer], seconds: float) -> list[Answer]:
    """Return those that were sent later than `seconds` after the first."""
    first = min(each.begin for each in answers)
    return [each for each in answers if each.begin > first + seconds]


def _p99(answers: list[Answer]) -> float:
    seconds = sorted(each.end - each.begin for each in answers)
    return seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))]


# Soak.

SOAK_CLIENTS: Final = 16
SAMPLE_SECONDS: Final = 5.0
CUT_TOKENS: Final = 400  # asked for by requests that the client leaves


@dataclass
class _Counts:
    """What the clients of a soak received."""

    finished: Counter[str] = field(default_factory=Counter)  # by finish_reason
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cut: int = 0  # requests that the client left
    refused: int = 0  # 400
    faults: list[str] = field(default_factory=list)


def soak(options: Options) -> list[Report]:
    """Mixed load for --soak-minutes: no growth of memory, threads or descriptors; counters equal the clients' own."""
    report = Report(f"soak of {options.soak_minutes:g} min, mixed load")
    with serving(options.model, *CACHE, log=Path(options.log_folder) / "soak.log") as server:
        counts, samples = asyncio.run(_soak(server, options))
        time.sleep(2.0)
        counted = server.metric_by("vllm:request_success_total", "finished_reason")
        metrics: dict[str, Any] = {
            "finished": {name: counted.get(name, 0.0) for name in ("stop", "length")},
            "prompt tokens": server.metric("vllm:prompt_tokens_total"),
            "generation tokens": server.metric("vllm:generation_tokens_total"),
        }
        open_now = server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")
        blocks = server.metric("vllm:kv_cache_usage_perc")
    clients = {name: float(counts.finished[name]) for name in ("stop", "length")}
    report.require("no request fails", not counts.faults, f"{len(counts.faults)}: {counts.faults[:2]}")
    report.require("finished requests are equal", metrics["finished"] == clients, f"{metrics['finished']}, {clients}")
    aborted = counted.get("abort", 0.0)
    report.require("aborted requests are equal", aborted == counts.cut, f"{aborted:g} counted, {counts.cut} cut")
    prompt, generated = metrics["prompt tokens"], metrics["generation tokens"]
    report.require("prompt tokens are equal", prompt == counts.prompt_tokens, f"{prompt}, {counts.prompt_tokens}")
    unread = 0 <= generated - counts.generation_tokens <= counts.cut * CUT_TOKENS
    both = f"{generated:g}, {counts.generation_tokens}"
    report.require("generated tokens are equal, but for those of cut requests", unread, both)
    report.require("nothing runs at the end", not open_now and not blocks, f"{open_now:g}, {blocks:g}")
    _judge_growth(report, samples)
    report.notes |= {"requests": sum(counts.finished.values()) + counts.cut + counts.refused, "cut": counts.cut}
    return [report]


def _judge_growth(report: Report, samples: list[Usage]) -> None:
    """Compare the last quarter of the run with the second; the first warms caches up."""
    quarter = len(samples) // 4
    if quarter < 2:
        report.require("there are samples", False, len(samples))
        return
    earlier, later = samples[quarter : 2 * quarter], samples[-quarter:]
    memory = statistics.median(each.memory for each in later) - statistics.median(each.memory for each in earlier)
    threads = max(each.threads for each in later) - max(each.threads for each in earlier)
    descriptors = max(each.descriptors for each in later) - max(each.descriptors for each in earlier)
    report.at_most("memory growth, second to last quarter", memory, max(20.0, 0.02 * earlier[0].memory), "MB")
    report.at_most("thread growth", threads, 2, "threads")
    report.at_most("descriptor growth", descriptors, 10, "descriptors")
    report.notes["memory by tenth, MB"] = [round(each.memory) for each in samples[:: max(1, len(samples) // 10)]]


async def _soak(server: Server, options: Options) -> tuple[_Counts, list[Usage]]:
    counts, samples = _Counts(), []
    seconds = options.soak_minutes * 60
    end = time.monotonic() + seconds
    tasks = [asyncio.create_task(_soak_client(server.port, i, end, options.pause, counts)) for i in range(SOAK_CLIENTS)]
    while time.monotonic() < end:
        samples.append(await asyncio.to_thread(server.usage))
        await asyncio.sleep(min(SAMPLE_SECONDS, seconds / 40))
    await asyncio.gather(*tasks)
    return counts, samples


async def _soak_client(port: int, seed: int, end: float, pause: float, counts: _Counts) -> None:
    chance = random.Random(seed)
    while time.monotonic() < end:
        kind = chance.choice(("completion", "completion", "chat", "whole", "schema", "cut", "invalid"))
        path, body, cut_after = _soak_body(kind, chance)
        answer = await ask(port, body, path=path, cut_after=cut_after)
        if kind == "invalid":
            counts.refused += 1
            if answer.status != 400:
                counts.faults.append(f"invalid: {answer.status} {answer.error or answer.cut}")
        elif (cut_after and answer.tokens == cut_after) or (answer.done and answer.finished):
            counts.cut += not answer.done
            counts.finished[answer.finished] += answer.done
            counts.prompt_tokens += answer.usage.get("prompt_tokens", 0)
            counts.generation_tokens += answer.usage.get("completion_tokens", 0)
        else:
            counts.faults.append(f"{kind}: {answer.status} {answer.error or answer.cut}"[:200])
        if pause:
            await asyncio.sleep(min(chance.expovariate(1 / pause), max(0.0, end - time.monotonic())))


def _soak_body(kind: str, chance: random.Random) -> tuple[str, dict[str, Any], int]:
    """Return path, body, and after how many tokens the client leaves (0: never)."""
    words = " ".join(f"word{chance.randrange(10**6)}" for _ in range(chance.randint(1, 200)))
    fields: dict[str, Any] = {"max_tokens": chance.randint(1, 48), "temperature": chance.choice((0.0, 1.0))}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    messages = [{"role": "user", "content": words}]
    match kind:
        case "chat":
            return "/v1/chat/completions", {"messages": messages, **fields, **usage}, 0
        case "whole":
            return "/v1/completions", {"prompt": words, **fields}, 0
        case "schema":
            schema = {"type": "object", "properties": {f"p{chance.randrange(50)}": {"type": "integer"}}}
            return "/v1/completions", {"prompt": words, **fields, "structured_outputs": {"json": schema}}, 0
        case "cut":
            fields = usage | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            return "/v1/completions", stream_body(words, CUT_TOKENS) | fields, chance.randint(1, 5)
        case "invalid":
            return "/v1/completions", {"prompt": words, "temperature": -chance.randint(1, 5)}, 0
        case _:
            return "/v1/completions", {"prompt": words, **fields, **usage}, 0
