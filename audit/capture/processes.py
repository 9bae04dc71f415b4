"""Call a function in a fresh process, with a time limit: what crashes or hangs there cannot harm the caller."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any


class Fresh:
    """Processes forked from a server that has imported `preload` once, which is most of a start's time."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> tuple[Any, str]:
        """(result, "") or (None, one line that says why there is none). `timeout` is in seconds.

        `function` and its arguments must be picklable. What it prints is dropped. May be called from threads.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        child = self._context.Process(target=_answer, args=(function, args, theirs), daemon=True)
        child.start()
        theirs.close()
        try:
            if not ours.poll(timeout):
                return None, f"not done within {timeout:g} s"
            return ours.recv()
        except EOFError:
            child.join()
            return None, f"the process ended without an answer ({_ending(child.exitcode)})"
        finally:
            child.kill()
            child.join()
            ours.close()


def _answer(function: Callable[..., Any], args: tuple[Any, ...], pipe: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        answer = (function(*args), "")
    except BaseException as e:  # also SystemExit: a compiler's driver may call sys.exit
        answer = (None, one_line(e))
    pipe.send(answer)


def _ending(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# `ptxas application ptx input, line 2048; error   : Feature 'fma.f32x2' requires .target` / `sm_100 or higher`
# `Error: unsupported operation` from the LLVM back end, below a general "compilation failed"
_BACKEND = re.compile(r"extra log: (?:\S+ )?Error: (.+)")
_PTXAS = re.compile(r"line \d+; (?:error|fatal)\s*: (.+(?:\n\s+sm_\w+ or higher)?)")


def one_line(error: BaseException) -> str:
    """What went wrong: what the assembler said first, else what the compiler said first."""
    text = _ANSI.sub("", str(error))
    if found := _PTXAS.search(text):
        return "ptxas: " + " ".join(found[1].split())
    if found := _BACKEND.search(text):
        return "the compiler's back end: " + found[1].strip()
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
    return f"{type(error).__name__}: {first}"[:300]
