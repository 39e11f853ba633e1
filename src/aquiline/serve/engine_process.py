"""The engine in a process of its own: commands in, one message per step out.

No text, no JSON and no sockets are here, so that they never take the engine's time. The process ends when the HTTP
process closes its end of the pipe, or is gone.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import tempfile
import threading
from multiprocessing.connection import Connection

from aquiline.engine.learning.learning_loop import learning
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import Sequence, TokenDelta
from aquiline.errors import AquilineError
from aquiline.serve.wire import (
    Abort,
    Begin,
    Command,
    Delta,
    EngineInfo,
    Opening,
    Prepare,
    Quit,
    Refused,
    Stats,
    StepMessage,
    Submit,
    TellPages,
)


def run_engine(connection: Connection, opening: Opening) -> None:
    """The body of the engine process. The first message is an EngineInfo, or a text that says why there is none."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the HTTP process drains first, then closes the pipe
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        tempfile.gettempdir()  # found now: what is imported later may ask for it, and the disk may be full then
    with contextlib.ExitStack() as opened:
        try:
            llm = opened.enter_context(LLM.open(opening.pair, opening.engine, opening.drafting))
            learner = opened.enter_context(learning(llm, opening.pair, opening.learning))
        except (ValueError, AquilineError, OSError) as error:
            connection.send(f"{error}")
            return
        if opening.drafting.is_adaptive:
            llm.engine.prepare_choosing()  # now, and not while the first request waits
        gc.freeze()  # what was loaded stays; collections need not walk over it
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            connection.send(_info(llm, None if learner is None else learner.notice))
            _Host(connection, llm).run()


class _Host:
    """Carries out commands between steps. `sequences` are those that run, by id."""

    def __init__(self, connection: Connection, llm: LLM) -> None:
        self.connection, self.engine = connection, llm.engine
        self.sequences: dict[int, Sequence] = {}
        self.added: list[int] = []
        self.refused: list[Refused] = []
        self.pages: list[int] | None = None  # asked for since the last message

    def run(self) -> None:
        """Step while there is work, wait for commands while there is none, until Quit comes. Raises EOFError if the
        HTTP process is gone."""
        while self._obey():
            deltas, num_steps = list[Delta](), 0
            while self.engine.is_ahead or (self.engine.is_busy and not num_steps):
                deltas += [self._told(delta) for delta in self.engine.step()]
                num_steps += 1
            added, self.added = self.added, []
            refused, self.refused = self.refused, []
            pages, self.pages = self.pages, None
            self.connection.send(StepMessage(added, refused, deltas, self._stats(), num_steps, pages))

    def _obey(self) -> bool:
        """Carry out the commands that have come; wait for some while the engine has nothing to do. False for Quit."""
        while self.connection.poll(0 if self.engine.is_busy else None):
            commands: tuple[Command, ...] = self.connection.recv()
            for command in commands:
                if isinstance(command, Quit):
                    return False
                if isinstance(command, Submit):
                    self._add(command)
                elif isinstance(command, TellPages):
                    self.pages = [] if self.engine.prefix is None else self.engine.prefix.digests(command.most)
                elif isinstance(command, Prepare):
                    threading.Thread(target=self._prepare, name="aquiline-grammar", daemon=True).start()
                else:
                    self._abort(command)
            if not self.engine.is_busy:
                break  # whoever sent them is told, an abort too: pages are free
        return True

    def _prepare(self) -> None:
        with contextlib.suppress(ValueError, OSError):  # of which the requests are told that need grammars
            self.engine.models.grammars.prepare()

    def _add(self, command: Submit) -> None:
        name = int(command.request.id)
        try:
            self.sequences[name] = self.engine.add(command.request)
        except (ValueError, AquilineError, OSError) as error:
            self.refused.append(Refused(name, str(error)))
        else:
            self.added.append(name)

    def _abort(self, command: Abort) -> None:
        if self.sequences.pop(command.request_id, None) is not None:
            self.engine.abort(command.request_id)

    def _told(self, delta: TokenDelta) -> Delta:
        name, begin = int(delta.request_id), None
        sequence = self.sequences[name] if delta.finish_reason is None else self.sequences.pop(name)
        if delta.token_ids and len(sequence.tokens) == sequence.num_prompt + len(delta.token_ids):
            wants = sequence.request.sampling.prompt_logprobs is not None
            begin = Begin(sequence.counters.num_prefix_hits, sequence.prompt_logprobs if wants else None)
        return Delta(
            name, delta.token_ids, delta.num_accepted, delta.drafter, delta.num_drafted, delta.num_confirmed,
            delta.finish_reason, delta.logprobs, delta.error, begin,
        )  # fmt: skip

    def _stats(self) -> Stats:
        engine = self.engine
        counters, pool, last = engine.meter.counters, engine.pool, engine.pipeline.last
        num_active = 0 if last is None or not engine.sequences else len(last.plan.decoding)
        return Stats(
            len(engine.sequences) - engine.scheduler.num_waiting, engine.scheduler.num_waiting, num_active,
            pool.num_pages - pool.num_available, counters.num_prompt_tokens, counters.num_prefix_hits,
            engine.meter.num_prefill_tokens, engine.meter.num_preemptions,
        )  # fmt: skip


def _info(llm: LLM, learning_notice: str | None) -> EngineInfo:
    engine, models = llm.engine, llm.models
    return EngineInfo(
        engine.max_length, models.vocab_size, engine.config.max_batch, engine.pool.num_pages,
        models.draft_config is not None, str(engine.memory), models.system(), learning_notice,
    )  # fmt: skip
