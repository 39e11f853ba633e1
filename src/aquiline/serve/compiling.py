"""Compiling grammars beside everything else.

Some short expressions take hours, or gigabytes, and nothing tells them from others before they are compiled. So they
are compiled in processes of their own, each of which ends itself when a grammar takes too long; the next grammar then
starts another one. Few run at once. Each imports xgrammar, in 4 s and 270 MB that the HTTP process does not need then.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from aquiline.config import SamplingParams, Structured
from aquiline.engine.grammar import Grammars
from aquiline.serve.api_errors import bad_request

MAX_COMPILES = 2
"""Grammars that are compiled at once."""


class Compiling:
    """Compiles grammars for the target. limit_s: seconds that a request waits for its grammar, and for its turn; those
    in which a process starts are not counted."""

    def __init__(self, grammars: Grammars, eos_token_ids: tuple[int, ...], limit_s: float) -> None:
        self.grammars, self.eos_token_ids, self.limit_s = grammars, eos_token_ids, limit_s
        self._room = asyncio.Semaphore(MAX_COMPILES)
        self._idle: list[_Compiler] = []

    async def compiled(self, sampling: SamplingParams, field: str) -> str:
        """The compiled grammar of what `field` of a request's body asks for. Raises ApiError."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.limit_s):
                await self._room.acquire()
            return await self._begun(sampling, max(0.001, began + self.limit_s - time.monotonic()))
        except TimeoutError:
            raise bad_request(
                f"{field}: compiling its grammar takes longer than {self.limit_s:g} s; make it smaller: fewer and "
                "shorter repetitions, less nesting", field,
            ) from None  # fmt: skip
        except ValueError as error:
            raise bad_request(
                f"{field}: {str(error).removeprefix('structured.').removeprefix('structured: ')}", field
            ) from None

    def _begun(self, sampling: SamplingParams, limit_s: float) -> asyncio.Future[str]:
        """Compile, with a thread that waits. The result is dropped if nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        structured = sampling.structured
        assert structured is not None
        ends = sampling.ends(self.eos_token_ids)

        def tell(compiled: str | None, error: Exception | None) -> None:
            self._room.release()
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif compiled is not None:
                future.set_result(compiled)

        def work() -> None:
            compiled, problem = None, None
            try:
                compiled = self._compiled(structured, ends, limit_s)
            except Exception as error:  # whoever waits is told of it
                problem = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, compiled, problem)

        try:
            threading.Thread(target=work, name="aquiline-grammar", daemon=True).start()
        except RuntimeError:
            self._room.release()
            raise
        return future

    def _compiled(self, structured: Structured, ends: frozenset[int], limit_s: float) -> str:
        """Compile in a process. Raises TimeoutError, and ValueError for what cannot be compiled."""
        compiler = self._taken()
        try:
            compiler.connection.send((structured, ends, limit_s))
            answer: str | ValueError = compiler.connection.recv()
        except (EOFError, OSError):
            compiler.connection.close()
            compiler.process.join()
            if compiler.process.exitcode == -signal.SIGALRM:
                raise TimeoutError from None
            told = f"its grammar could not be compiled (exit code {compiler.process.exitcode}); make it smaller"
            raise ValueError(told) from None
        self._idle.append(compiler)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def close(self) -> None:
        """End the processes that have nothing to do."""
        while self._idle:
            self._idle.pop().connection.close()

    def _taken(self) -> _Compiler:
        """An idle process that is alive, or a new one."""
        with contextlib.suppress(IndexError):
            while True:
                if (compiler := self._idle.pop()).process.is_alive():
                    return compiler
        return _Compiler.begun(self.grammars)


class _Compiler(NamedTuple):
    """A process that compiles grammars, one after another, and our end of its pipe."""

    process: Any
    connection: Connection

    @classmethod
    def begun(cls, grammars: Grammars) -> _Compiler:
        """Start a process."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        given = (theirs, grammars.tokenizer, grammars.vocab_size)
        process = context.Process(target=_compile, args=given, name="aquiline-grammar", daemon=True)
        try:
            process.start()
        finally:
            theirs.close()
        return cls(process, ours)


def _compile(connection: Connection, tokenizer: Tokenizer, vocab_size: int) -> None:
    """The body of a process that compiles. The alarm ends it, whatever it is doing, and whether or not the process that
    asked is still there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process drains first
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    grammars = Grammars(tokenizer, vocab_size)
    with contextlib.suppress(EOFError, OSError):
        while True:
            structured, ends, limit_s = connection.recv()
            answer: str | ValueError
            try:
                grammars.prepare()
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                answer = grammars.compile(structured, ends)
            except ValueError as error:
                answer = error
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(answer)
