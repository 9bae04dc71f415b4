"""A PTX interpreter: runs an artifact's PTX on a machine without a GPU.

    result = run(ptx, [x, y, np.int32(n)], grid=(8, 1, 1), block=(128, 1, 1), arch="sm_90a")

`x` and `y` are numpy arrays and are changed in place, as device buffers would be. What is exact, what is only
within a documented bound, and what is not emulated is listed in docs/emulator.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..ptx.ir import Function, Module
from ..ptx.parser import parse
from .approx import BOUNDS, Bound
from .errors import Deadlock, EmulationError, Unsupported, Where
from .machine import SCHEDULES, Machine, Prepared
from .memory import Memory
from .program import Program
from .values import Array, bf16, from_bf16

__all__ = [
    "BOUNDS",
    "SCHEDULES",
    "Bound",
    "Deadlock",
    "EmulationError",
    "Launch",
    "Memory",
    "Result",
    "Tensor",
    "Unsupported",
    "Where",
    "bf16",
    "from_bf16",
    "load",
    "run",
    "run_stream",
]

Dim = tuple[int, int, int]
_TEXTS: dict[str, Module] = {}


@dataclass(frozen=True)
class Tensor:
    """A CuTe DSL tensor argument with dynamic layout: {pointer; int32 shape[]; int64 stride[]} by value.

    `strides` are in elements; the innermost one is static in the kernel and not passed. The defaults are
    those of the array, which must be C-contiguous.
    """

    array: Array
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def pack(self, address: int) -> bytes:
        shape = self.shape or self.array.shape
        strides = self.strides or tuple(s // self.array.itemsize for s in self.array.strides)
        head = struct.pack(f"<Q{len(shape)}i", address, *shape)
        head += b"\0" * (-len(head) % 8)
        return head + struct.pack(f"<{len(shape) - 1}q", *strides[:-1])


@dataclass(frozen=True)
class Launch:
    """One launch. `args` follow the `.entry`: numpy arrays (a pointer to them), :class:`Tensor`, scalars,
    bytes.

    `grid` counts CTAs. `entry` names the kernel where a module holds several. `overlap` is programmatic
    stream serialization (PDL): the launch may start before the previous one of the stream has completed.
    """

    ptx: str | Module
    args: Sequence[Any]
    grid: Dim
    block: Dim
    cluster: Dim = (1, 1, 1)
    dynamic_smem: int = 0
    entry: str = ""
    overlap: bool = False


@dataclass(frozen=True)
class Result:
    """What a run did.

    `steps` counts instructions executed by a group of threads together. `executed[i]` holds the PTX lines
    that launch i executed, `missed[i]` those of its kernel that no thread reached. `overlapped[i]` says
    whether launch i started before its predecessor had completed. `stale_reads` counts load instructions
    that weak mode answered with older bytes for some thread. `diagnostics` are faults tolerated under
    uninitialized="record".
    """

    memory: Memory
    steps: int
    executed: list[set[int]]
    missed: list[set[int]]
    overlapped: list[bool]
    stale_reads: int = 0
    diagnostics: list[EmulationError] = field(default_factory=list)


def load(ptx: str | Module, entry: str = "", *, arch: str = "") -> Program:
    """Parse and decode a kernel; kept, so that running it again costs nothing.

    `arch` defaults to the module's `.target`. Raises Unsupported for an instruction that is not emulated,
    ValueError when the entry is not there or not unique.
    """
    if isinstance(ptx, str):
        module = _TEXTS.get(ptx)
        if module is None:
            if len(_TEXTS) > 64:
                _TEXTS.clear()
            module = _TEXTS[ptx] = parse(ptx)
    else:
        module = ptx
    entries = [f for f in module.entries if not entry or f.name == entry]
    if len(entries) != 1:
        names = ", ".join(f.name for f in module.entries) or "none"
        raise ValueError(f"choose one entry of the module: {names}")
    arch = arch or module.target
    programs = _programs(module)
    key = (entries[0].name, arch)
    if key not in programs:
        programs[key] = Program(module, entries[0], arch)
    return programs[key]


def _programs(module: Module) -> dict[tuple[str, str], Program]:
    found = module.__dict__.get("_emulator_programs")
    if found is None:
        found = module.__dict__["_emulator_programs"] = {}
    return found


def run(
    ptx: str | Module | Function,
    args: Sequence[Any],
    grid: Dim,
    block: Dim,
    cluster: Dim = (1, 1, 1),
    *,
    arch: str = "",
    schedule: str | None = None,
    seed: int = 0,
    max_steps: int = 20_000_000,
    dynamic_smem: int = 0,
    memory: Memory | None = None,
    entry: str = "",
    weak: bool = False,
    uninitialized: str = "raise",
    approx_seed: int | None = None,
) -> Result:
    """Run one kernel to its end.

    `schedule` is "lockstep" (default), "eager" or "random" with `seed`; see machine.py. `weak` lets writes
    become visible to other CTAs late wherever the PTX memory model allows it; see history.py.
    `uninitialized` is what a read of shared or poisoned memory that nobody wrote does: "raise", "record" or
    "ignore". `approx_seed` moves the results of approximate instructions inside their documented bounds. A
    `Function` runs without its module's variables.

    Raises EmulationError for anything that PTX leaves undefined, Deadlock when nothing can go on,
    Unsupported for an instruction that is not emulated, ValueError for arguments that do not fit.
    """
    if isinstance(ptx, Function):
        ptx = _wrap(ptx, arch)
    launch = Launch(ptx, args, grid, block, cluster, dynamic_smem, entry)
    return run_stream(
        [launch],
        arch=arch,
        schedule=schedule or "lockstep",
        seed=seed,
        max_steps=max_steps,
        memory=memory,
        weak=weak,
        uninitialized=uninitialized,
        approx_seed=approx_seed,
    )


def run_stream(
    launches: Sequence[Launch],
    *,
    arch: str = "",
    pdl: bool | None = None,
    schedule: str = "lockstep",
    seed: int = 0,
    max_steps: int = 20_000_000,
    memory: Memory | None = None,
    weak: bool = False,
    uninitialized: str = "raise",
    approx_seed: int | None = None,
) -> Result:
    """Run launches in stream order on one memory. Parameters and errors as in :func:`run`.

    `pdl` overrides `Launch.overlap` for all launches after the first. An overlapping launch may start once
    every CTA of its predecessor has issued `griddepcontrol.launch_dependents` or ended; its
    `griddepcontrol.wait` returns when the predecessor has completed. With schedule="eager" it then runs
    ahead as far as it may.
    """
    memory = memory if memory is not None else Memory()
    prepared = []
    for k, launch in enumerate(launches):
        overlap = k > 0 and (launch.overlap if pdl is None else pdl)
        prepared.append(_prepare(launch, memory, arch, overlap))
    machine = Machine(
        memory,
        prepared,
        schedule=schedule,
        seed=seed,
        weak=weak,
        max_steps=max_steps,
        uninitialized=uninitialized,
        approx_seed=approx_seed,
    )
    trace = machine.run()
    executed, missed = [], []
    for ready, pcs in zip(prepared, trace.executed, strict=True):
        lines = {ready.program.instructions[pc].line for pc in pcs}
        everything = {i.line for f in ready.program.functions for i in f.body}
        executed.append(lines)
        missed.append(everything - lines)
    stale = machine.history.stale_reads if machine.history is not None else 0
    return Result(memory, machine.time, executed, missed, trace.overlapped, stale, trace.diagnostics)


def _wrap(function: Function, arch: str) -> Module:
    return Module((8, 8), arch, {function.name: function})


def _prepare(launch: Launch, memory: Memory, arch: str, overlap: bool) -> Prepared:
    program = load(launch.ptx, launch.entry, arch=arch)
    for name, dim in (("grid", launch.grid), ("block", launch.block), ("cluster", launch.cluster)):
        if len(dim) != 3 or min(dim) < 1:
            raise ValueError(f"{name} {dim}: three positive numbers")
    if any(n % c for n, c in zip(launch.grid, launch.cluster, strict=True)):
        raise ValueError(f"grid {launch.grid} is no multiple of the cluster {launch.cluster}")
    _check_directives(program, launch)
    params = bytearray(program.param_size)
    variables = program.entry.params
    if len(launch.args) != len(variables):
        raise ValueError(f"{program.name}: {len(variables)} parameters, {len(launch.args)} arguments")
    for k, (v, arg) in enumerate(zip(variables, launch.args, strict=True)):
        raw = _pack(arg, v.type, v.size or 0, memory, k)
        at = program.params[v.name]
        params[at : at + len(raw)] = raw
    return Prepared(
        program, bytes(params), launch.grid, launch.block, launch.cluster, launch.dynamic_smem, overlap
    )


def _check_directives(program: Program, launch: Launch) -> None:
    """The launch must be one that the entry was compiled for."""
    directives = program.entry.directives
    shape = directives.get("reqntid")
    if shape:
        need = tuple(int(x) for x in shape) + (1,) * (3 - len(shape))
        if need != launch.block:
            raise ValueError(
                f"{program.name} requires blocks of {need} threads (.reqntid), not {launch.block}"
            )
    cluster = directives.get("reqnctapercluster")
    if cluster:
        wanted = tuple(int(x) for x in cluster) + (1,) * (3 - len(cluster))
        if wanted != launch.cluster:
            raise ValueError(
                f"{program.name} requires clusters of {wanted} (.reqnctapercluster), not {launch.cluster}"
            )
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    limit = directives.get("maxntid")
    if limit:
        most = int(np.prod([int(x) for x in limit]))
        if threads > most:
            raise ValueError(f"{program.name} allows {most} threads in a block (.maxntid), not {threads}")
    if threads > 1024:
        raise ValueError(f"a block of {threads} threads: at most 1024 exist")


def _pack(arg: Any, type_: str, size: int, memory: Memory, index: int) -> bytes:
    """One argument as the bytes of its parameter."""
    if isinstance(arg, Tensor):
        raw = arg.pack(memory.address(arg.array))
    elif isinstance(arg, np.ndarray):
        raw = struct.pack("<Q", memory.address(arg))
    elif isinstance(arg, bytes | bytearray):
        raw = bytes(arg)
    elif isinstance(arg, np.generic):
        raw = arg.tobytes()
    elif isinstance(arg, bool | int | float):
        if isinstance(arg, float) or type_ in ("f32", "f64"):
            raw = struct.pack("<f" if size == 4 else "<d", arg)
        else:
            raw = (int(arg) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    else:
        raise ValueError(f"argument {index}: cannot pass a {type(arg).__name__}")
    if len(raw) != size:
        hint = ""
        if isinstance(arg, np.ndarray) and size > 8:
            hint = "; a tensor with dynamic layout is passed as Tensor(array)"
        raise ValueError(f"argument {index}: {len(raw)} bytes for a parameter of {size}{hint}")
    return raw
