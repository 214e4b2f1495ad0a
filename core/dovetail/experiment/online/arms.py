"""Present the arms of an experiment as one engine: each request goes to the arm that its key selects."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from dovetail.config import Config
from dovetail.errors import ConfigError, DovetailError, EngineDeadError, EngineError, RequestError
from dovetail.experiment.online.log import ArmGauges, ArmLog, StreamLog
from dovetail.experiment.online.routing import pick, request_key
from dovetail.experiment.online.shadow import FinishedRequest, ShadowTraffic
from dovetail.messages import (
    Command,
    CommandReply,
    EngineStats,
    FlushCacheMsg,
    GenerateMsg,
    HeldAdapterMsg,
    LoadAdapterMsg,
    TokenOutput,
    UnloadAdapterMsg,
)
from dovetail.server.engine_process import EngineTarget
from dovetail.server.streams import OutputStream
from dovetail.server.supervisor import SupervisedEngine

logger = logging.getLogger("dovetail.server")

_POLL_SECONDS = 0.05
_GAUGES = (
    "paused",
    "running",
    "waiting",
    "pages_total",
    "pages_used",
    "pages_cached",
    "pages_pinned",
    "grammar_cached_bytes",
)


class OnlineArm:
    """Hold one arm of a running experiment: its config, its engine process, and its weight, which an operator can change."""

    def __init__(self, name: str, config: Config, client: SupervisedEngine, weight: float) -> None:
        self.name = name
        self.config = config
        self.client = client
        self.weight = weight
        self.stopping = False
        self.stats = EngineStats()

    @property
    def running(self) -> bool:
        """Return True while the arm accepts requests."""
        return self.client.alive and not (self.stopping or self.client.stalled)

    @property
    def state(self) -> str:
        """Return the state of the arm: running, stalled, stopping, stopped, restarting or dead."""
        if self.client.failure is not None:
            return "restarting" if self.client.restarting and not self.stopping else "dead"
        if self.stopping:
            return "stopping" if self.client.alive else "stopped"
        if self.client.stalled:
            return "stalled"
        return "running" if self.client.alive else "stopped"


class ArmsClient:
    """Drive several engine processes through the interface of one (``engines.EngineHandle``), and carry out the operator's
    commands on arms.

    An arm that was stopped gets no more requests, and an arm that has died or stands still gets none until it runs again
    (``SupervisedEngine``). Its share goes to the other arms in proportion to their weights, or in equal parts if all of these are 0. The engines start one after the other, because each measures how much memory is
    left.
    """

    def __init__(
        self,
        config: Config,
        arms: Mapping[str, Config],
        target: EngineTarget,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """``arms`` are complete configs (see ``arm_configs``); ``decode`` turns token ids into text."""
        section = config.experiment
        self.arms = {
            name: OnlineArm(name, own, SupervisedEngine(own, target), section.weights[name])
            for name, own in arms.items()
        }
        self.log = ArmLog(tuple(arms))
        self.shadow = ShadowTraffic(section.shadow, self.log, decode) if section.shadow else None
        self._source = section.key
        self._groups: dict[str, ArmStream] = {}
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._num_loads = 0  # loads of adapters that have not ended in all arms
        self.info: dict[str, Any] = {}

    # start and stop

    async def start(self) -> dict[str, Any]:
        """Start every arm. Return the info of the first arm with the limits that hold for all arms. Raises ``EngineError`` that
        names the arm."""
        try:
            for arm in self.arms.values():
                await self._start(arm)
        except BaseException:
            await self.stop()
            raise
        self.info = _common_info({name: arm.client.info for name, arm in self.arms.items()})
        return self.info

    async def _start(self, arm: OnlineArm) -> None:
        try:
            await arm.client.start()
        except (ConfigError, EngineError) as error:
            raise type(error)(f"arm {arm.name}: {error}") from None
        logger.info("arm %s is ready, engine process %s", arm.name, arm.client.pid)

    async def stop(self) -> None:
        """Stop every engine process at once."""
        tasks = [*self._stopping.values(), *(self.shadow.workers if self.shadow else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(arm.client.stop() for arm in self.arms.values()))

    @property
    def alive(self) -> bool:
        """Return True while at least one arm accepts requests."""
        return any(arm.client.alive and not arm.stopping for arm in self.arms.values())

    @property
    def stalled(self) -> bool:
        """Return True if every arm that could accept requests stands still."""
        return self.alive and not any(arm.running for arm in self.arms.values())

    @property
    def restarting(self) -> bool:
        """Return True if no arm accepts requests, and one is about to be ready."""
        return not self.alive and any(arm.client.restarting for arm in self.arms.values())

    async def ended(self) -> None:
        """Return once no arm runs any more and none is started again."""
        waiting = {asyncio.ensure_future(arm.client.ended()) for arm in self.arms.values()}
        try:
            while waiting and any(arm.client.alive or arm.client.restarting for arm in self.arms.values()):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def end_if_hung(self, seconds: float) -> None:
        """Kill every arm that does not respond within ``seconds``."""
        await asyncio.gather(*(arm.client.end_if_hung(seconds) for arm in self.arms.values()))

    @property
    def failure(self) -> str | None:
        """Return the arms whose process has ended by itself, each with the reason; None if there are none."""
        return "; ".join(f"arm {a.name}: {a.client.failure}" for a in self.arms.values() if a.client.failure) or None

    @property
    def pid(self) -> int | None:
        """Return the process id of the first arm that accepts requests."""
        return next((arm.client.pid for arm in self.arms.values() if arm.running), None)

    # requests

    def check(self, tenant: str, count: int) -> None:
        """Check nothing: the arm is not selected yet."""

    def open(self, group: str, msgs: Sequence[GenerateMsg]) -> ArmStream:
        """Send requests to the arm that the request's key selects. See ``EngineClient.open``."""
        if group in self._groups:
            raise RequestError(f"rid {group!r} is in use by a running request; choose another", param="rid")
        key = request_key(self._source)
        arm = self._select(key)
        shadow = self.shadow if self.shadow and self.shadow.arm != arm.name and self.shadow.selects(group) else None
        stream = arm.client.open(group, msgs)
        log = StreamLog(self.log, arm.name, key, msgs, "served", keep=shadow is not None)
        changes = None if shadow is None or self._num_loads else shadow.adapter_changes
        self._groups[group] = ArmStream(stream, log, lambda: self._closed(group, arm, msgs, log, shadow, changes))
        return self._groups[group]

    def abort(self, group: str) -> bool:
        """See ``EngineClient.abort``."""
        return any(arm.client.abort(group) for arm in self.arms.values() if arm.client.alive)

    def abort_all(self, message: str = "aborted by the operator") -> None:
        """Abort every request of every arm."""
        for arm in self.arms.values():
            if arm.client.alive:
                arm.client.abort_all(message)

    @property
    def num_open(self) -> int:
        """Return the number of open groups of requests that clients wait for; shadow requests do not count."""
        return len(self._groups)

    def _select(self, key: str) -> OnlineArm:
        shares = self.shares()
        if not any(shares.values()):
            raise EngineDeadError(f"no arm accepts requests: {self.failure or 'all were stopped'}")
        return self.arms[pick(key, shares)]

    def _closed(
        self,
        group: str,
        arm: OnlineArm,
        msgs: Sequence[GenerateMsg],
        log: StreamLog,
        shadow: ShadowTraffic | None,
        adapter_changes: int | None,
    ) -> None:
        del self._groups[group]
        self.log.latencies[arm.name].extend(log.latencies)
        if shadow is not None and log.complete:
            other = self.arms[shadow.arm]
            finished = FinishedRequest(group, tuple(msgs), log, adapter_changes)
            shadow.offer(finished, other.client.open if other.running else None)

    # commands

    async def stats(self) -> EngineStats:
        """Return the sums over all arms. Totals include arms that have ended; gauges do not. Raises ``EngineDeadError`` if no arm
        is running."""
        running = [arm for arm in self.arms.values() if arm.client.alive]
        if not running:
            raise EngineDeadError("no arm is running")
        await asyncio.gather(*(_refresh(arm) for arm in running))
        return _summed(self.arms.values())

    async def command(self, msg: Command) -> CommandReply:
        """Send a command to every running arm. The reply is a refusal if at least one arm refuses. Tokens of experts are
        added up over the arms; arms whose layers differ refuse."""
        if isinstance(msg, LoadAdapterMsg | UnloadAdapterMsg) and self.shadow is not None:
            self.shadow.adapter_changes += 1
        replies = await (self._load_adapter(msg) if isinstance(msg, LoadAdapterMsg) else self._send_all(msg))
        refused = [f"arm {name}: {reply.message}" for name, reply in replies.items() if not reply.ok]
        if not replies:
            raise EngineDeadError(f"no arm is running: {self.failure or 'all were stopped'}")
        if len({_layers_of(reply) for reply in replies.values()}) > 1:
            refused.append("the arms have different layers of experts")
        files = tuple(file for reply in replies.values() for file in reply.files)
        return CommandReply("", not refused, "; ".join(refused), files, {} if refused else _added(replies.values()))

    async def _send_all(self, msg: Command) -> dict[str, CommandReply]:
        names = [name for name, arm in self.arms.items() if arm.client.alive]
        replies = await asyncio.gather(*(self.arms[name].client.command(msg) for name in names))
        return dict(zip(names, replies, strict=True))

    async def _load_adapter(self, msg: LoadAdapterMsg) -> dict[str, CommandReply]:
        """Load an adapter in all arms that are not being stopped. It becomes known in each once all have read it, and in none if one
        refuses it or ends."""
        self._num_loads += 1
        try:
            return await self._load_in_all(msg)
        finally:
            self._num_loads -= 1

    async def _load_in_all(self, msg: LoadAdapterMsg) -> dict[str, CommandReply]:
        names = [name for name, arm in self.arms.items() if arm.client.alive and not arm.stopping]
        hold, keep = msgspec.structs.replace(msg, hold=True), HeldAdapterMsg("", msg.name, keep=True)
        replies: dict[str, CommandReply] = {}
        for step, undo in ((hold, msgspec.structs.replace(keep, keep=False)), (keep, UnloadAdapterMsg("", msg.name))):
            replies, errors = await self._try(names, step)
            if errors or not all(reply.ok for reply in replies.values()):
                await self._try(names, undo)
                if errors:
                    raise errors[0]
                break
        return replies

    async def _try(self, names: Sequence[str], msg: Command) -> tuple[dict[str, CommandReply], list[BaseException]]:
        """Send a command to arms. Return the replies and errors of those that are not being stopped."""
        sent = (self.arms[name].client.command(msg) for name in names)
        results = dict(zip(names, await asyncio.gather(*sent, return_exceptions=True), strict=True))
        counted = {name: result for name, result in results.items() if not self.arms[name].stopping}
        replies = {name: result for name, result in counted.items() if isinstance(result, CommandReply)}
        return replies, [result for result in counted.values() if isinstance(result, BaseException)]

    async def flush_cache(self) -> CommandReply:
        """Flush the cache of every running arm. The reply is a refusal if at least one arm refuses."""
        return await self.command(FlushCacheMsg(""))

    # the experiment

    def shares(self) -> dict[str, float]:
        """Return the current share of each arm. Shares add up to 1, or are all 0 if no arm accepts requests."""
        weights = {name: arm.weight if arm.running else 0.0 for name, arm in self.arms.items()}
        if not any(weights.values()):
            weights = {name: float(arm.running) for name, arm in self.arms.items()}
        total = sum(weights.values()) or 1.0
        return {name: weight / total for name, weight in weights.items()}

    def gauges(self) -> Iterator[ArmGauges]:
        """Yield the gauge values of every arm."""
        shares = self.shares()
        for name, arm in self.arms.items():
            yield ArmGauges(name, arm.running, shares[name], arm.client.num_open)

    def stop_arm(self, name: str) -> None:
        """Send no more requests to an arm, and end its process once its running requests have finished. Raises
        ``RequestError`` for an unknown arm, one that is not running, and the last running arm."""
        arm = self._known(name)
        if not any(other.running for other in self.arms.values() if other is not arm):
            raise RequestError(
                f"arm {name!r} is the last running arm; to stop it, stop the server", param="arm", code="last_arm"
            )
        arm.stopping = True
        logger.info("arm %s is stopped; its share goes to the others", name)
        self._stopping[name] = asyncio.ensure_future(self._end(arm))

    def promote(self, name: str) -> None:
        """Route all requests to one arm. The other arms keep running without requests until they are stopped. Raises
        ``RequestError`` for an unknown arm and one that is not running."""
        self._known(name)
        for arm in self.arms.values():
            arm.weight = float(arm.name == name)
        logger.info("arm %s is promoted; it answers all requests", name)

    def _known(self, name: str) -> OnlineArm:
        if name not in self.arms:
            raise RequestError(f"arm is {name!r:.80}; allowed: {', '.join(self.arms)}", param="arm", code="unknown_arm")
        if not self.arms[name].running:
            raise RequestError(f"arm {name!r} is {self.arms[name].state}", param="arm", code="arm_not_running")
        return self.arms[name]

    async def _end(self, arm: OnlineArm) -> None:
        while arm.client.alive and arm.client.num_open:
            await asyncio.sleep(_POLL_SECONDS)
        await _refresh(arm)
        await arm.client.stop()
        logger.info("arm %s: its process has ended", arm.name)


class ArmStream:
    """Pass on the outputs of one arm's stream and record them. Implements ``engines.Stream``."""

    def __init__(self, stream: OutputStream, log: StreamLog, on_close: Callable[[], None]) -> None:
        self._stream = stream
        self._log = log
        self._on_close: Callable[[], None] | None = on_close

    @property
    def open(self) -> set[str]:
        """Return the ids of the requests that have not finished."""
        return self._stream.open

    @property
    def unread(self) -> int:
        """Return the number of tokens that have arrived since the last read."""
        return self._stream.unread

    async def __anext__(self) -> list[TokenOutput]:
        """Return the next batch. Raises the error that ended a request."""
        try:
            batch = await self._stream.__anext__()
        except DovetailError as error:
            self._log.error(error)
            raise
        self._log.observe(batch)
        return batch

    def end(self, rid: str) -> None:
        """Abort one request because its text contains a stop string."""
        self._stream.end(rid)
        self._log.record_cut(rid)

    def close(self) -> None:
        """Abort the requests that are still open."""
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            self._stream.close()
            self._log.close()
            on_close()


async def _refresh(arm: OnlineArm) -> None:
    with suppress(EngineDeadError):  # its latest stats still count towards the totals
        arm.stats = await arm.client.stats()


def _layers_of(reply: CommandReply) -> tuple[tuple[int, int], ...]:
    """Return the index of each layer with experts, and its number of experts."""
    return tuple((layer, len(tokens)) for layer, tokens in reply.expert_tokens.items())


def _added(replies: Iterable[CommandReply]) -> dict[int, list[int]]:
    """Return the sums of the replies' ``expert_tokens``."""
    sums: dict[int, list[int]] = {}
    for layer, tokens in (item for reply in replies for item in reply.expert_tokens.items()):
        sums[layer] = [a + b for a, b in zip(sums.get(layer, [0] * len(tokens)), tokens, strict=True)]
    return sums


def _summed(arms: Iterable[OnlineArm]) -> EngineStats:
    sums: dict[str, Any] = {}
    for arm in arms:
        for name, value in msgspec.structs.asdict(arm.stats).items():
            if isinstance(value, dict):
                sums[name] = {
                    key: sums.get(name, {}).get(key, 0) + value.get(key, 0) for key in {**sums.get(name, {}), **value}
                }
            elif isinstance(value, list):
                sums[name] = [a + b for a, b in itertools.zip_longest(sums.get(name, []), value, fillvalue=0)]
            elif not isinstance(value, str) and (arm.client.alive or name not in _GAUGES):
                sums[name] = sums.get(name, 0) + value
    return EngineStats(**sums)


def _common_info(infos: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the first arm's info with the limits that hold for all arms. ``arms`` holds the info of each arm."""
    first = next(iter(infos.values()))
    model = first["resolved"]["model"]
    vocabulary = min(info["resolved"]["model"]["vocab_size"] for info in infos.values())
    return {
        **first,
        "context_len": min(info["context_len"] for info in infos.values()),
        "resolved": {**first["resolved"], "model": {**model, "vocab_size": vocabulary}},
        "arms": dict(infos),
    }
