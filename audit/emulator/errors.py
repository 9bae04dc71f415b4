"""What can go wrong in a run. Messages name the PTX line, the thread and the memory nearest to the access."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Where:
    """One thread at one instruction. `grid` is the launch's position in the stream."""

    kernel: str
    grid: int
    ctaid: tuple[int, int, int]
    tid: tuple[int, int, int]
    line: int
    text: str
    source: str = ""

    def __str__(self) -> str:
        at = f" ({self.source})" if self.source else ""
        return (
            f"PTX line {self.line}{at} `{self.text}`, CTA {self.ctaid} thread {self.tid}, launch {self.grid}"
        )


class EmulationError(Exception):
    """The program did something that PTX leaves undefined, or never ended.

    `kind` is one of "out-of-bounds", "misaligned", "uninitialized", "mbarrier", "barrier", "exited",
    "undefined", "trap", "deadlock", "limit". `where` is the first offending thread, None when no single
    thread is to blame.
    """

    def __init__(self, kind: str, message: str, where: Where | None = None) -> None:
        super().__init__(f"{kind}: {message}" + (f"; {where}" if where else ""))
        self.kind = kind
        self.message = message
        self.where = where


class Deadlock(EmulationError):
    """Nothing can run any more. `waits` says, one line each, what is waited for, where, and by whom."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__("deadlock", "no thread can make progress: " + " | ".join(waits))
        self.waits = waits


class Unsupported(Exception):
    """An instruction that the emulator does not execute. Raised while decoding, before anything runs."""

    def __init__(self, opcode: str, line: int, reason: str = "") -> None:
        super().__init__(f"PTX line {line}: `{opcode}` is not emulated" + (f": {reason}" if reason else ""))
        self.opcode = opcode
        self.line = line


class Fault(Exception):
    """Raised inside an instruction, which knows the thread by its `position` in the executing selection; whoever
    has narrowed that selection down fills in the `lane`."""

    def __init__(self, kind: str, message: str, position: int = 0, lane: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.position = position
        self.lane = lane

    def settle(self, lanes: Any) -> None:
        """The position counted in these lanes."""
        if self.lane is None:
            self.lane = int(lanes[min(self.position, len(lanes) - 1)])
