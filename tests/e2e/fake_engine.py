"""Run an engine process whose loop is scripted: it repeats the prompt, one token a step. This is a test double."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.config import Config
from dovetail.config.checkpoint import locate
from dovetail.messages import (
    AbortAllMsg,
    AbortMsg,
    Answer,
    CommandReply,
    ContinueMsg,
    EngineStats,
    ExpertLoadMsg,
    FlushCacheMsg,
    GenerateMsg,
    PauseMsg,
    RequestFailed,
    StartProfileMsg,
    StatsRequestMsg,
    StopProfileMsg,
    ToEngine,
    TokenOutput,
)
from dovetail.server.engine_process import Endpoints, serve_loop
from dovetail.tokenizer import IncrementalDetokenizer, Tokenizer
from dovetail.types import FinishKind, FinishReason, TokenLogprob


@dataclass
class Running:
    msg: GenerateMsg
    detokenizer: IncrementalDetokenizer
    done: int = 0


class FakeLoop:
    """Follow the script in ``namespace`` (without a tenant's part before it): "slow" sleeps 20 ms a step, "status:N"
    refuses, "exit" ends the process, "raise" raises, "hang:N" stands still for N seconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._running: dict[str, Running] = {}
        self._paused = False
        self._answers: list[Answer] = []
        chosen = {"cache": {"name": "fake"}, "attention.decode": {"name": "fake"}, "speculative": None}
        model = {"vocab_size": tokenizer.vocab_size}
        embedding = {"size": 4, "pooling": "last"}
        resolved = {"model": model, "chosen": chosen, "lists": {}}
        self.info = {"context_len": 2048, "embedding": embedding, "max_running": 256, "resolved": resolved}

    def idle(self) -> bool:
        return False

    @property
    def has_work(self) -> bool:
        return bool(self._running) and not self._paused

    def handle(self, msg: ToEngine) -> None:
        match msg:
            case GenerateMsg():
                self._add(msg)
            case AbortMsg():
                self._abort(msg.rid, msg.message)
            case AbortAllMsg():
                for rid in list(self._running):
                    self._abort(rid, msg.message)
            case FlushCacheMsg():
                ok = not self._running
                self._answers.append(CommandReply(msg.call_id, ok, "" if ok else "requests are running"))
            case PauseMsg() | ContinueMsg():
                self._paused = isinstance(msg, PauseMsg)
                self._answers.append(CommandReply(msg.call_id, True))
            case StartProfileMsg() | StopProfileMsg():
                self._answers.append(CommandReply(msg.call_id, True, files=("fake.json.gz",)))
            case ExpertLoadMsg():
                self._answers.append(CommandReply(msg.call_id, True, expert_tokens={0: [3, 1], 2: [0, 0]}))
            case StatsRequestMsg():
                n = len(self._running)
                self._answers.append(
                    EngineStats(
                        msg.call_id,
                        int(self._paused),
                        running=n,
                        pages_total=64,
                        pages_used=n,
                        graphs_captured=3,
                        graphs_missing=4,
                    )
                )

    def step(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        if any(script_of(running.msg) == "slow" for running in self._running.values()):
            time.sleep(0.02)
        for running in [] if self._paused else list(self._running.values()):
            answers.append(self._advance(running))
        return answers

    def _add(self, msg: GenerateMsg) -> None:
        script = script_of(msg)
        if script.startswith("status:"):
            self._answers.append(RequestFailed(msg.rid, int(script[7:]), "scripted refusal", param="prompt"))
        elif script.startswith("hang:"):
            time.sleep(float(script[5:]))
            self._answers.append(TokenOutput(msg.rid, msg.input_ids[:1], FinishReason(FinishKind.LENGTH)))
        elif script == "exit":
            os._exit(9)
        elif script == "raise":
            raise RuntimeError("scripted failure")
        else:
            params = msg.params
            self._running[msg.rid] = Running(msg, IncrementalDetokenizer(self._tokenizer, params.stop))

    def _abort(self, rid: str, message: str) -> None:
        if self._running.pop(rid, None):
            self._answers.append(TokenOutput(rid, [], FinishReason(FinishKind.ABORT, message=message)))

    def _advance(self, running: Running) -> TokenOutput:
        msg, params, index = running.msg, running.msg.params, running.done
        if params.max_new_tokens == 0:
            return self._prefilled(msg)
        token = msg.input_ids[index % len(msg.input_ids)]
        running.done += 1
        running.detokenizer.push([token])
        finish = None
        if running.detokenizer.matched:
            finish = FinishReason(FinishKind.STOP, running.detokenizer.matched)
        elif token in params.stop_token_ids:
            finish = FinishReason(FinishKind.STOP, token)
        elif running.done >= min(params.max_new_tokens or len(msg.input_ids), self.info["context_len"]):
            finish = FinishReason(FinishKind.LENGTH)
        if finish:
            del self._running[msg.rid]
        prompt = prompt_logprobs(msg) if index == 0 else None
        logprobs = None if params.logprobs is None else [logprob(token, 1, params.logprobs)]
        return TokenOutput(
            msg.rid,
            [token],
            finish,
            len(msg.input_ids),
            running.done,
            0,
            logprobs,
            prompt,
            queue_seconds=None if index else 0.001,
        )

    def _prefilled(self, msg: GenerateMsg) -> TokenOutput:
        del self._running[msg.rid]
        finish = FinishReason(FinishKind.LENGTH)
        length = len(msg.input_ids)
        return TokenOutput(msg.rid, [], finish, length, prompt_logprobs=prompt_logprobs(msg), pooled=pooled(msg))


def pooled(msg: GenerateMsg) -> bytes | None:
    """Return label log-probabilities of -0.5 each, or the hidden state [first token, 1, 0, tokens]."""
    pooling = msg.params.pooling
    if pooling is None:
        return None
    state = [msg.input_ids[0], 1, 0, len(msg.input_ids)]
    return np.array([-0.5] * len(pooling.token_ids) or state, "<f4").tobytes()


def prompt_logprobs(msg: GenerateMsg) -> list[TokenLogprob] | None:
    top = msg.params.prompt_logprobs
    start = msg.params.prompt_logprobs_start
    return None if top is None else [logprob(t, i, top) for i, t in enumerate(msg.input_ids)][start:]


def script_of(msg: GenerateMsg) -> str:
    return msg.namespace.rpartition("/")[2]


def logprob(token: int, index: int, top: int) -> TokenLogprob:
    best = tuple((token + j, -0.5 - j) for j in range(top))
    return TokenLogprob(token, -0.5 if index else None, best if index else ())


@contextmanager
def open_fake_loop() -> Iterator[FakeLoop]:
    yield FakeLoop(Tokenizer.from_dir(locate("tiny")))


def run_fake_engine(config: Config, endpoints: Endpoints) -> None:
    """Run the process."""
    serve_loop(open_fake_loop, endpoints, config.server.log_level)


def run_fragile_engine(config: Config, endpoints: Endpoints) -> None:
    """Run a process whose second start fails. It counts its starts in the file ``tuning.path``."""
    starts = Path(config.tuning.path or "")
    starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
    serve_loop(open_broken_loop if starts.read_text() == "xx" else open_fake_loop, endpoints, config.server.log_level)


@contextmanager
def open_endless_loop() -> Iterator[FakeLoop]:
    time.sleep(600)
    yield FakeLoop(Tokenizer.from_dir(locate("tiny")))


def run_endless_start(config: Config, endpoints: Endpoints) -> None:
    """Run a process that is never ready."""
    serve_loop(open_endless_loop, endpoints, config.server.log_level)


@contextmanager
def open_broken_loop() -> Iterator[FakeLoop]:
    raise RuntimeError("no such device")
    yield


def run_broken_engine(config: Config, endpoints: Endpoints) -> None:
    """Run a process that cannot start."""
    serve_loop(open_broken_loop, endpoints, config.server.log_level)


@contextmanager
def open_stuck_loop() -> Iterator[FakeLoop]:
    try:
        yield FakeLoop(Tokenizer.from_dir(locate("tiny")))
    finally:
        time.sleep(600)


def run_stuck_engine(config: Config, endpoints: Endpoints) -> None:
    """Run a process whose loop cannot be closed, as with a lost device."""
    serve_loop(open_stuck_loop, endpoints, config.server.log_level)
