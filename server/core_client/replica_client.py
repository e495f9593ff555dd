"""Data-parallel replicas in engines of their own (`--data-parallel-mode engines`): one client over all of them.

A request runs in one engine from its beginning to its end. Each engine plans its own steps and has its own KV cache, so
none waits for another, unlike the shards of common.engine.data_parallel, whose steps are one program.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from pagoda.common.engine.data_parallel import AFFINITY_DIVISOR, key_affinity
from pagoda.common.engine.messages import EngineOutput, EngineRequest, EngineStats, StepOutputs, total_stats
from pagoda.common.errors import EngineUnavailableError
from pagoda.server.core_client.client import Listener, StartingClient
from pagoda.server.core_client.ipc_messages import (
    NO_OTHERS,
    Abort,
    AddRequest,
    Command,
    EngineInfo,
    Failed,
    FromEngine,
    Heartbeat,
    OtherUse,
    ProfileState,
    Ready,
    Refused,
    Reply,
    ResetDone,
    Restarting,
    SnapshotTaken,
    StepReply,
    SuspendDone,
    ToEngine,
)
from pagoda.server.core_client.process_client import ProcessClient

_SHORTEST_PREFIX: Final = 64
"""Tokens. Prefixes of this length and of each of its doubles are recognised."""

_MAX_PREFIXES: Final = 1 << 16

_POLL_MS: Final = 50
"""Time for a look at all engines that start."""


class ReplicaRouter:
    """Chooses the replica of the request's cache key, or else the one that has computed the beginning of the prompt,
    unless it has too many sequences."""

    def __init__(self) -> None:
        self._homes: OrderedDict[int, int] = OrderedDict()  # Hash of a prefix -> replica that computed it last.

    def choose(self, request: EngineRequest, loads: dict[int, int]) -> int:
        """Return a replica. `loads`: unfinished sequences of each replica that may be chosen, at least one."""
        prefixes = _prefixes(request)
        least = min(loads.values())
        most = least + 1 + least // AFFINITY_DIVISOR
        if request.cache_key:
            candidates = [replica for replica, load in loads.items() if load <= most]
            home = max(candidates, key=partial(key_affinity, request.cache_key))
        else:
            home = self._home_of(prefixes, loads, most)
        for prefix in prefixes:
            self._homes[prefix] = home
            self._homes.move_to_end(prefix)
        while len(self._homes) > _MAX_PREFIXES:
            self._homes.popitem(last=False)
        return home

    def _home_of(self, prefixes: Sequence[int], loads: Mapping[int, int], most: int) -> int:
        """Return the replica that computed the longest of the prefixes, if it has at most `most` sequences, else the
        least loaded one."""
        homes = (self._homes.get(prefix) for prefix in reversed(prefixes))
        home = next((replica for replica in homes if replica is not None), None)
        if home is None or loads.get(home, most + 1) > most:
            return min(loads, key=loads.__getitem__)
        return home

    def forget(self, replica: int) -> None:
        """Drop what is known of a replica's cache."""
        for prefix in [prefix for prefix, home in self._homes.items() if home == replica]:
            del self._homes[prefix]


def _prefixes(request: EngineRequest) -> list[int]:
    """Return hashes of the prompt's beginnings, shortest first. Requests whose KV differ have none in common."""
    if request.pooling is not None:
        return []
    tokens = request.prompt_token_ids
    state = hash((request.cache_salt, request.adapter))
    end = 0
    length = _SHORTEST_PREFIX
    prefixes = []
    while length <= len(tokens):
        named = [item.digest for item in request.media if end <= item.spans[0][0] < length]
        state = hash((state, *tokens[end:length], *named))
        prefixes.append(state)
        end = length
        length = 2 * length
    return prefixes


class _Call:
    """A command that was sent to several replicas."""

    def __init__(self, command: Command, waiting: set[int]) -> None:
        self.command = command
        self.waiting = waiting
        self.replies: list[Reply] = []


class ReplicaClient:
    """Implements EngineClient over one engine per replica.

    A replica that fails ends all. One that is replaced (RestartingClient) loses its requests only: the listener gets
    Restarting with their ids, and the others serve on. Without ids, no replica is left until Ready.
    """

    def __init__(self, clients: Sequence[StartingClient]) -> None:
        self.clients = tuple(clients)
        self._router = ReplicaRouter()
        self._replica_of: dict[str, int] = {}  # Unfinished sequence -> replica.
        self._loads = [0] * len(clients)  # Number of unfinished sequences of this client on each replica.
        self._stats = [EngineStats()] * len(clients)
        self._down: set[int] = set()  # Replicas that are being replaced.
        self._calls: dict[int, _Call] = {}  # Ticket -> call.
        self._listener: Listener | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where SharedClients find the engines' sockets, in the order of the replicas."""
        return tuple(client.address for client in self.clients if isinstance(client, ProcessClient))

    @property
    def failed(self) -> Failed | None:
        """Why the first engine that died did, as far as it is known."""
        processes = (client for client in self.clients if isinstance(client, ProcessClient))
        return next((process.failed for process in processes if process.failed is not None), None)

    def wait_ready(self) -> EngineInfo:
        """Block until all engines are warm. Raises what kept one from starting, whether or not others still load."""
        infos: dict[int, EngineInfo] = {}
        while len(infos) < len(self.clients):
            waiting = [index for index in range(len(self.clients)) if index not in infos]
            for index in waiting:
                if (info := self.clients[index].poll_ready(max(1, _POLL_MS // len(waiting)))) is not None:
                    infos[index] = info
        return merge_infos([infos[index] for index in range(len(self.clients))])

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self._listener = listener
        for index, client in enumerate(self.clients):
            client.listen(loop, partial(self._receive, index))

    @property
    def others(self) -> OtherUse:
        uses = [client.others for client in self.clients if client.others is not NO_OTHERS]
        if not uses:
            return NO_OTHERS
        owners: dict[str, tuple[int, int]] = {}
        for owner, (sequences, tokens) in itertools.chain(*(use.owners.items() for use in uses)):
            before = owners.get(owner, (0, 0))
            owners[owner] = before[0] + sequences, before[1] + tokens
        sequences, tokens, callers = (
            sum(getattr(use, name) for use in uses) for name in ("sequences", "tokens", "callers")
        )
        return OtherUse(sequences, tokens, callers, owners)

    def send(self, command: ToEngine) -> None:
        match command:
            case AddRequest():
                self._add(command)
            case Abort(request_ids):
                self._abort(request_ids)
            case _ if isinstance(command, Command):
                self._call(command)
            case _:
                for replica in self._up():
                    self.clients[replica].send(command)

    def check(self) -> None:
        for replica, client in enumerate(self.clients):
            try:
                client.check()
            except EngineUnavailableError:
                if replica not in self._down or len(self._down) == len(self.clients):
                    raise

    def kill(self, cause: str) -> None:
        for replica in self._up():
            try:
                self.clients[replica].check()
            except EngineUnavailableError:
                if replica not in self._down:
                    self.clients[replica].kill(cause)

    def close(self, timeout: float = 2.0) -> None:
        for client in self.clients:
            client.close(timeout)

    def _up(self) -> list[int]:
        return [replica for replica in range(len(self.clients)) if replica not in self._down]

    # Requests.

    def _add(self, command: AddRequest) -> None:
        """Send a request to a replica. Raises EngineUnavailableError if all are being replaced, EngineDeadError."""
        loads = {index: self._loads[index] + self.clients[index].others.sequences for index in self._up()}
        while loads:
            replica = self._router.choose(command.request, loads)
            try:
                self.clients[replica].send(command)
            except EngineUnavailableError:  # The replica has just ended.
                del loads[replica]
                continue
            for request_id in (command.request.request_id, *(request_id for request_id, _ in command.others)):
                self._forget(request_id)
                self._replica_of[request_id] = replica
                self._loads[replica] += 1
            return
        raise EngineUnavailableError("all replicas are being restarted")

    def _abort(self, request_ids: list[str]) -> None:
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            replica = self._forget(request_id)
            if replica is not None:
                by_replica.setdefault(replica, []).append(request_id)
        for replica, requests_of_replica in by_replica.items():
            if replica not in self._down:
                self.clients[replica].send(Abort(requests_of_replica))

    def _forget(self, request_id: str) -> int | None:
        replica = self._replica_of.pop(request_id, None)
        if replica is not None:
            self._loads[replica] -= 1
        return replica

    # Commands with a reply: all replicas execute them.

    def _call(self, command: Command) -> None:
        up = self._up()
        self._calls[command.ticket] = _Call(command, set(up))
        for replica in up:
            self.clients[replica].send(command)

    def _reply(self, replica: int, reply: Reply) -> None:
        if (call := self._calls.get(reply.ticket)) is not None:
            call.replies.append(reply)
            self._answered(replica, call)

    def _answered(self, replica: int, call: _Call) -> None:
        """Count a replica that need not answer any more; pass on the reply once there is none left."""
        call.waiting.discard(replica)
        if call.waiting:
            return
        del self._calls[call.command.ticket]
        if call.replies:
            self._tell(merge_replies(call.replies))
        elif self._up():  # All that had the command have ended: those that are left get it.
            self._call(call.command)

    # Messages.

    def _tell(self, message: FromEngine) -> None:
        if self._listener is not None:
            self._listener(message)

    def _receive(self, replica: int, message: FromEngine) -> None:
        match message:
            case StepReply(step):
                self._tell(StepReply(self._in_total(replica, step)))
            case Refused(request_id):
                self._forget(request_id)
                self._tell(message)
            case Restarting(cause):
                self._lose(replica, cause)
            case Ready(info):
                was_alone = len(self._down) == len(self.clients)
                self._down.discard(replica)
                if was_alone:
                    self._tell(Ready(info))
            case Failed():
                self._tell(msgspec.structs.replace(message, message=f"replica {replica}: {message.message}"))
            case Heartbeat():
                pass
            case _:
                self._reply(replica, message)

    def _in_total(self, replica: int, step: StepOutputs) -> StepOutputs:
        """Return a replica's outputs with the statistics of all replicas."""
        outputs = [_of_replica(output, replica) for output in step.outputs]
        for output in outputs:
            if output.finish_reason is not None or output.error is not None:
                self._forget(output.request_id)
        earlier = tuple(self._total_with(replica, stats) for stats in step.earlier)
        stats = self._total_with(replica, step.stats)
        # The statistics are counted once.
        self._stats[replica] = msgspec.structs.replace(step.stats, last_step_tokens=0)
        return StepOutputs(outputs=outputs, stats=stats, earlier=earlier)

    def _total_with(self, replica: int, stats: EngineStats) -> EngineStats:
        return total_stats([*self._stats[:replica], stats, *self._stats[replica + 1 :]])

    def _lose(self, replica: int, cause: str) -> None:
        """Take a replica that ended out of use until it is Ready."""
        self._down.add(replica)
        self._router.forget(replica)
        self._stats[replica] = EngineStats()
        lost = [request_id for request_id, owner in self._replica_of.items() if owner == replica]
        for request_id in lost:
            self._forget(request_id)
        self._tell(Restarting(f"replica {replica}: {cause}", lost if self._up() else None))
        for call in [call for call in self._calls.values() if replica in call.waiting]:
            self._answered(replica, call)


def _of_replica(output: EngineOutput, replica: int) -> EngineOutput:
    return msgspec.structs.replace(output, replica=replica) if output.scheduled else output


def merge_infos(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the description of equal engines as a whole: all KV blocks, and limits that each of them keeps."""
    first = infos[0]
    limits = replace(first.limits, max_model_len=min(info.limits.max_model_len for info in infos))
    return msgspec.structs.replace(
        first,
        limits=limits,
        num_blocks=sum(info.num_blocks for info in infos),
        max_concurrency=min(info.max_concurrency for info in infos),
        memory=f"{len(infos)} x ({first.memory})",
    )


def merge_replies(replies: Sequence[Reply]) -> Reply:
    """Return the replies of all replicas to a command as one: the first with an error, else with all paths."""
    last = replies[-1]
    for reply in replies:
        if not isinstance(reply, ResetDone | SuspendDone) and reply.error:
            return reply
    if isinstance(last, SnapshotTaken | ProfileState):
        paths = (reply.path for reply in replies if isinstance(reply, SnapshotTaken | ProfileState))
        return msgspec.structs.replace(last, path=", ".join(dict.fromkeys(filter(None, paths))))
    return last
