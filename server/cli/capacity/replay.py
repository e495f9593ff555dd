"""`pagoda replay`: step the real scheduler through an incident snapshot, and say where it differs from the record."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pagoda.common.config.commands import COMMAND_SETTINGS, ReplayConfig
from pagoda.common.config.settings import build
from pagoda.common.engine.incident.files import read_snapshot
from pagoda.common.engine.incident.replay import Replay, ReplayedCall
from pagoda.common.engine.incident.snapshot import Snapshot
from pagoda.common.engine.scheduling.scheduler import Scheduler
from pagoda.server.settings.flags import resolve_settings

SETTINGS: Final = COMMAND_SETTINGS["replay"]

SHOWN_CALLS: Final = 12
"""Last calls that are printed without --verbose."""

SHOWN_REQUESTS: Final = 32


def run(args: argparse.Namespace) -> int:
    """Print the replay. Returns 1 if the scheduler did something else than at the incident. Raises RequestError."""
    config = build(ReplayConfig, resolve_settings(args, SETTINGS).values)
    snapshot = read_snapshot(Path(args.file))
    print(_head(snapshot))
    replay = Replay(snapshot)
    last = _print_calls(replay.recorded(), every=config.verbose)
    same = last is None or not last.difference
    if same and (last is None or not last.error):
        print(f"replayed {len(snapshot.events)} calls as recorded; now:")
        print(_state(replay.scheduler))
        if config.steps:
            _print_calls(replay.further(config.steps), every=config.verbose)
            print(_state(replay.scheduler))
    return 0 if same else 1


def _head(snapshot: Snapshot) -> str:
    lines = [f"pagoda {snapshot.version}, {snapshot.created}: {snapshot.cause}"]
    lines += [line.rstrip() for line in snapshot.traceback]
    lines += [f"{name}: {value}" for name, value in snapshot.engine.items() if value]
    lines.append(f"limits: {snapshot.limits}")
    if snapshot.stats is not None:
        stats = snapshot.stats
        lines.append(
            f"running {stats.running}, waiting {stats.waiting}, KV blocks {stats.kv_blocks_used} of "
            f"{stats.kv_blocks_total}, steps {stats.steps}, preemptions {stats.preemptions}"
        )
    lines += [
        f"step {plan.step}: {plan.shape[0]} sequences, {plan.shape[1]} tokens, {plan.shape[2]} pages"
        for plan in snapshot.plans
    ]
    return "\n".join(lines)


def _print_calls(calls: Iterable[ReplayedCall], *, every: bool) -> ReplayedCall | None:
    """Print all calls, or the last ones. Returns the last one; None without any."""
    last: ReplayedCall | None = None
    kept: deque[ReplayedCall] = deque(maxlen=SHOWN_CALLS)
    for last in calls:
        if every:
            print(_line(last))
        else:
            kept.append(last)
    for call in kept:
        print(_line(call))
    return last


def _line(call: ReplayedCall) -> str:
    line = f"  {call.text}"
    if call.difference:
        line += f"\n    DIFFERENT: {call.difference}"
    return f"{line}\n{call.error.rstrip()}" if call.error else line


def _state(scheduler: Scheduler) -> str:
    """Return one line per request, running ones first."""
    running = [
        f"  row {request.row}: {request.request_id}, {len(request.prompt)} prompt + {len(request.outputs)} generated "
        f"of at most {request.limit}, blocks {' + '.join(str(len(group.table)) for group in request.groups)}"
        for request in scheduler.running
    ]
    waiting = [
        f"  waits: {request.request_id}, {request.num_known} tokens, {request.num_preemptions} preemptions"
        for request in scheduler.requests.values()
        if not request.groups
    ]
    lines = running + waiting
    more = [f"  and {len(lines) - SHOWN_REQUESTS} more"] if len(lines) > SHOWN_REQUESTS else []
    pools = ", ".join(f"{pool.num_free} of {pool.num_blocks - 1}" for pool in scheduler.kv.pools)
    return "\n".join([*lines[:SHOWN_REQUESTS], *more, f"  free blocks: {pools}"])
