"""Programmatic dependent launch: overlap with the previous grid, and the one edge that ends the overlap.

Soundness note
    trigger()  `griddepcontrol.launch_dependents` lets the next grid start. It publishes nothing: the next grid may
               only touch what this grid (and any grid still running) never writes, until its own wait returns.
    wait()     `griddepcontrol.wait` returns when all prerequisite grids have completed and their memory operations
               are visible (PTX ISA, "griddepcontrol"). It is per thread: every thread that reads upstream data runs it.
    Chains     A grid that triggers *early* (before its wait) does not tell its dependents that its own predecessors
               have completed. A grid that triggers *late* (after its wait) does. So what is read before the wait must
               have been written before the last late trigger: this is what `Launch.stable_distance` promises, and
               what the launch plan checks.
"""

from __future__ import annotations

from cutlass import Float32

from .ptx import ordering


def trigger() -> None:
    """Allow the next grid to start its independent part."""
    ordering("griddepcontrol.launch_dependents;")


def wait(after: Float32) -> None:
    """Return when every previous grid has completed and its writes are visible to this thread.

    `after` is a value >= 0 (or NaN) that depends on all arithmetic meant to overlap with the previous grid. The
    assembler may hoist the wait above arithmetic, since no memory is involved, and then the overlap is lost; a
    branch that is never taken, on a value which it cannot predict, holds that arithmetic above the wait.
    """
    ordering(
        "{\n.reg .pred never;\nsetp.lt.f32 never, $0, 0f00000000;\n@never trap;\ngriddepcontrol.wait;\n}",
        "f",
        (after,),
    )
