"""Rows on the engine's process and on the server's end: kill -9, SIGSTOP, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from faults.report import Options, Report
from faults.server import HealthProbe, Server, accepts_flag, serving
from faults.streams import Answer, ask, stream_body

STREAMS: Final = 200
API_MODULE: Final = "cli.api_process"
HEARTBEAT_MS: Final = 5000  # --rpc-timeout of the SIGSTOP row
DEADLINE: Final = 15.0  # --request-timeout of the SIGSTOP row, in seconds


def _log(options: Options, name: str) -> Path:
    return Path(options.log_folder) / f"{name}.log"


async def _wait_for_tokens(server: Server, tokens: int, seconds: float = 120) -> None:
    """Wait until the server has generated `tokens` tokens."""
    deadline = time.monotonic() + seconds
    while await asyncio.to_thread(server.metric, "vllm:generation_tokens_total") < tokens:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {tokens} tokens within {seconds} s")
        await asyncio.sleep(0.1)


async def _until(server: Server, *, ok: bool, seconds: float, path: str = "/health") -> float:
    """Return the seconds until the probe's status is 200 (`ok`) or is not, or infinity."""
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        if (await asyncio.to_thread(server.health, 1.0, path) == 200) == ok:
            return time.monotonic() - begin
        await asyncio.sleep(0.05)
    return float("inf")


@dataclass(frozen=True)
class _Killed:
    answers: list[Answer]
    unready: float  # seconds from the signal until /ready is not 200
    time: float  # monotonic, when the engine was killed


async def _kill_under_load(server: Server, tokens: int, timeout: float) -> _Killed:
    """Start the streams, kill the engine while they run, and wait for all of them."""
    tasks = [
        asyncio.create_task(ask(server.port, stream_body(f"{i} Once upon a time", tokens), timeout=timeout))
        for i in range(STREAMS)
    ]
    await _wait_for_tokens(server, STREAMS)
    os.kill(server.engine_pid(), signal.SIGKILL)
    begin = time.monotonic()
    unready = await _until(server, ok=False, seconds=10, path="/ready")
    return _Killed(list(await asyncio.gather(*tasks)), unready, begin)


def kill(options: Options) -> list[Report]:
    """kill -9 the engine: by default the server ends; with --restart-engine nothing unsent is lost. kill -9 one of two
    API server processes: its streams end with an event, those of the other go on.
    """
    return [_kill_and_exit(options), _kill_and_restart(options), _kill_api_process(options)]


def _kill_and_exit(options: Options) -> Report:
    report = Report("kill -9 the engine under 200 streams")
    with serving(options.model, log=_log(options, "kill")) as server:
        killed = asyncio.run(_kill_under_load(server, 1000, 120))
        latest = max(each.end - killed.time for each in killed.answers)
        silent = sum(not each.error for each in killed.answers)
        causes = Counter(each.error[:120] for each in killed.answers if each.error)
        report.at_most("the last request fails", latest, 1.0)
        report.require("all fail with an error", silent == 0, f"{silent} of {STREAMS} without an error")
        report.at_most("it is not ready", killed.unready, 2.0)
        status = server.wait_for_exit(30)
        report.require("exit status is not 0", status not in (0, None), f"status {status}")
        report.notes |= {"causes": dict(causes.most_common(3)), "started": sum(bool(e.first) for e in killed.answers)}
    return report


def _kill_and_restart(options: Options) -> Report:
    report = Report("kill -9 the engine, --restart-engine")
    if not accepts_flag("--restart-engine"):
        report.require("there is --restart-engine", False, "the flag is unknown")
        return report
    with serving(options.model, "--restart-engine", "3", log=_log(options, "restart")) as server:
        with HealthProbe(server, 0.1) as probe:
            killed = asyncio.run(_kill_under_load(server, 60, 300))  # short: those that run again finish
        unsent = [each for each in killed.answers if not each.first or each.first > killed.time]
        lost = [each for each in unsent if not (each.done and each.finished == "length" and each.tokens >= 1)]
        sent = [each for each in killed.answers if each.first and each.first <= killed.time]
        silent = sum(not (each.error or each.done) for each in sent)
        report.require("nothing unsent is lost", not lost, f"{len(lost)} of {len(unsent)} lost")
        report.require("requests with tokens fail with an error", silent == 0, f"{silent} of {len(sent)} without one")
        report.at_most("it is not ready", killed.unready, 2.0)
        report.at_most("it is ready again", asyncio.run(_until(server, ok=True, seconds=60, path="/ready")), 60.0)
        report.require("no liveness probe fails meanwhile", not probe.failures, probe.failures[:3])
        report.notes |= {"unsent": len(unsent), "sent": len(sent)}
        report.notes |= {"first errors": [each.error or each.cut for each in lost[:2]]}
    return report


def _kill_api_process(options: Options) -> Report:
    report = Report("kill -9 one of two API server processes under 60 streams")
    with serving(options.model, "--api-server-count", "2", log=_log(options, "api-process")) as server:
        answers = asyncio.run(_kill_api_process_under_load(server))
        whole = [each for each in answers if each.done and not each.error]
        ended = [each for each in answers if each.error]
        cut = len(answers) - len(whole) - len(ended)
        report.require("some streams go on", bool(whole), len(whole))
        report.require("the others end with an event", bool(ended) and not cut, f"{len(ended)} do, {cut} are cut")
        later = [server.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] for _ in range(20)]
        report.require("requests are answered", later == [200] * 20, dict(Counter(later)))
        report.require("the server lives", server.process.poll() is None)
    return report


async def _kill_api_process_under_load(server: Server) -> list[Answer]:
    tasks = [asyncio.create_task(ask(server.port, stream_body(f"{i} Once", 200))) for i in range(60)]
    await _wait_for_tokens(server, len(tasks) * 20)  # all run at the same time, so that each has begun
    os.kill(server.pids_of(API_MODULE)[-1], signal.SIGKILL)
    return list(await asyncio.gather(*tasks))


def stop(options: Options) -> list[Report]:
    """SIGSTOP the engine: /health is false after the heartbeat time, requests fail, true again after SIGCONT."""
    report = Report("SIGSTOP the engine")
    deadline_flags = ("--request-timeout", str(DEADLINE)) if accepts_flag("--request-timeout") else ()
    flags = ("--rpc-timeout", str(HEARTBEAT_MS), *deadline_flags)
    report.require("requests have deadlines", bool(deadline_flags), " ".join(deadline_flags) or "no --request-timeout")
    with serving(options.model, *flags, log=_log(options, "stop")) as server:
        asyncio.run(_stop_and_continue(server, report))
    return [report]


async def _stop_and_continue(server: Server, report: Report) -> None:
    before = [asyncio.create_task(ask(server.port, stream_body(f"{i} Once", 3000))) for i in range(10)]
    await _wait_for_tokens(server, 20)
    pid = server.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    during = [asyncio.create_task(ask(server.port, stream_body(f"{i} Then", 20))) for i in range(5)]
    unhealthy = await _until(server, ok=False, seconds=HEARTBEAT_MS / 1000 + 20)
    report.at_most("health is false", unhealthy, HEARTBEAT_MS / 1000 + 2)
    after = [asyncio.create_task(ask(server.port, stream_body(f"{i} Later", 20))) for i in range(5)]
    _, waiting = await asyncio.wait([*before, *during, *after], timeout=begin + DEADLINE + 5 - time.monotonic())
    report.require("requests fail by the deadline", not waiting, f"{len(waiting)} of 20 still wait")
    os.kill(pid, signal.SIGCONT)
    report.at_most("health is true again", await _until(server, ok=True, seconds=30), 10.0)
    answer = await ask(server.port, stream_body("After", 5), timeout=30)
    report.require("it answers again", answer.done, answer.error or answer.cut or "answered")
    for task in waiting:
        task.cancel()


def terminate(options: Options) -> list[Report]:
    """SIGTERM under load: with enough time every admitted request finishes and the status is 0; else it is not 0."""
    return [
        _terminate(options, "SIGTERM under load, time enough", tokens=40, grace=120),
        _terminate(options, "SIGTERM under load, cut", tokens=4000, grace=5),
    ]


def _terminate(options: Options, row: str, tokens: int, grace: int) -> Report:
    report = Report(row)
    name = f"sigterm-{grace}"
    with serving(options.model, "--shutdown-timeout", str(grace), log=_log(options, name)) as server:
        answers, seconds = asyncio.run(_terminate_under_load(server, tokens, grace))
        status = server.wait_for_exit(grace + 30)
    admitted = [each for each in answers if each.status == 200]
    complete = [each for each in admitted if each.done and each.finished == "length" and not each.error]
    lost = [each for each in answers if not each.ended]
    report.require("every request finishes or gets an error", not lost, f"{len(lost)} of {len(answers)} lost")
    report.at_most("the last one ends", seconds, grace + 2.0)
    cut = len(admitted) - len(complete)
    report.require("status is 0 only if none was cut", (status == 0) == (cut == 0), f"status {status}, {cut} cut")
    if grace >= 60:
        report.require("none is cut", cut == 0, f"{cut} of {len(admitted)}")
    report.notes |= {"complete": len(complete), "how others ended": [e.error or e.cut for e in lost[:2]]}
    return report


async def _terminate_under_load(server: Server, tokens: int, grace: int) -> tuple[list[Answer], float]:
    tasks = [
        asyncio.create_task(ask(server.port, stream_body(f"{i} Once", tokens), timeout=grace + 60)) for i in range(30)
    ]
    await _wait_for_tokens(server, 30)
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    answers = list(await asyncio.gather(*tasks))
    return answers, max(each.end for each in answers) - begin
