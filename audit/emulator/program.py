"""PTX functions -> a list of closures, one per instruction, decoded once and run many times.

A step is called as `step(g, sel)`: execute the instruction for lanes `sel` of grid `g`. It returns None when
these lanes simply go on to the next instruction, and STOP when it has told the machine itself where they go.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ptx.ir import Addr, Function, Imm, Instruction, Module, Not, Operand, Reg, Symbol, Variable, Vec
from . import memory as mem
from .errors import Fault, Unsupported
from .memory import Buffer, Memory
from .modifiers import unknown
from .values import SINT, UINT, Array

if TYPE_CHECKING:
    from .grid import Grid, Selection

STOP = True
Step = Callable[["Grid", "Selection"], Any]
Reader = Callable[["Grid", "Selection"], Array]
Writer = Callable[["Grid", "Selection", Array], None]

OPS: dict[str, Callable[[Decoder], Step]] = {}

WIDTH = {f"{k}{8 * w}": w for k in "bsu" for w in (1, 2, 4, 8)} | {
    **{"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "tf32": 4, "f32": 4, "f64": 8, "f32x2": 8},
    **{"u16x2": 4, "s16x2": 4, "e4m3x2": 2, "e5m2x2": 2, "ue8m0x2": 2, "e2m1x2": 1},
}
SCOPES = ("cta", "cluster", "gpu", "sys")
SPACES = (
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "param",
    "param::entry",
    "param::func",
    "const",
)


def op(*names: str) -> Callable[[Callable[[Decoder], Step]], Callable[[Decoder], Step]]:
    """Register the decoder of one or more opcodes."""

    def register(decode: Callable[[Decoder], Step]) -> Callable[[Decoder], Step]:
        for name in names:
            OPS[name] = decode
        return decode

    return register


def dtype(type_: str) -> np.dtype[Any]:
    """numpy type in which values of a PTX type are computed; 16-bit floats and packed types are bits."""
    w = WIDTH[type_]
    if type_ in ("f32", "f64"):
        return np.dtype(np.float32 if w == 4 else np.float64)
    return SINT[w] if type_[0] == "s" and "x2" not in type_ else UINT[w]


def _dimension(d: int) -> dict[str, Reader]:
    """The special registers that have an x, a y and a z; `d` says which."""
    return {
        "%tid": lambda g, s: g.tid[d][s],
        "%ntid": lambda g, s: np.full(1, g.block[d], np.uint32),
        "%ctaid": lambda g, s: g.ctaid[d][s],
        "%nctaid": lambda g, s: np.full(1, g.dims[d], np.uint32),
        "%clusterid": lambda g, s: g.clusterid[d][s],
        "%nclusterid": lambda g, s: np.full(1, g.dims[d] // g.cluster[d], np.uint32),
        "%cluster_ctaid": lambda g, s: g.ctaid[d][s] % np.uint32(g.cluster[d]),
        "%cluster_nctaid": lambda g, s: np.full(1, g.cluster[d], np.uint32),
    }


def _special() -> dict[str, Reader]:
    """Special registers: what each thread reads, or [1] for what all threads share."""
    regs = {f"{name}.{axis}": f for d, axis in enumerate("xyz") for name, f in _dimension(d).items()}
    one = np.uint32(1)
    full = np.uint32(0xFFFFFFFF)
    regs |= {
        "%laneid": lambda g, s: g.laneid[s],
        "%warpid": lambda g, s: g.linear[s] // np.uint32(32),
        "%nwarpid": lambda g, s: np.full(1, g.padded // 32, np.uint32),
        "%cluster_ctarank": lambda g, s: g.rank[s],
        "%cluster_nctarank": lambda g, s: np.full(1, g.cluster_size, np.uint32),
        "%is_explicit_cluster": lambda g, s: np.full(1, g.cluster_size > 1, bool),
        "%smid": lambda g, s: g.slot[s].astype(np.uint32),
        "%nsmid": lambda g, s: np.full(1, g.slots, np.uint32),
        "%gridid": lambda g, s: np.full(1, g.index, np.uint32),
        "%lanemask_eq": lambda g, s: one << g.laneid[s],
        "%lanemask_lt": lambda g, s: (one << g.laneid[s]) - one,
        "%lanemask_le": lambda g, s: ((one << g.laneid[s]) << one) - one,
        "%lanemask_gt": lambda g, s: ~(((one << g.laneid[s]) << one) - one) & full,
        "%lanemask_ge": lambda g, s: ~((one << g.laneid[s]) - one) & full,
        "%dynamic_smem_size": lambda g, s: np.full(1, g.dynamic_smem, np.uint32),
        "%total_smem_size": lambda g, s: np.full(1, g.shared_size, np.uint32),
        "%aggr_smem_size": lambda g, s: np.full(1, g.shared_size + mem.RESERVED_SHARED, np.uint32),
        "%clock": lambda g, s: np.full(1, g.machine.time & 0xFFFFFFFF, np.uint32),
        "%clock_hi": lambda g, s: np.full(1, g.machine.time >> 32, np.uint32),
        "%clock64": lambda g, s: np.full(1, g.machine.time, np.uint64),
        "%globaltimer": lambda g, s: np.full(1, g.machine.time, np.uint64),
        "%globaltimer_lo": lambda g, s: np.full(1, g.machine.time & 0xFFFFFFFF, np.uint32),
        "%globaltimer_hi": lambda g, s: np.full(1, g.machine.time >> 32, np.uint32),
    }
    return regs


SPECIAL = _special()


def immediate(imm: Imm, type_: str) -> Array:
    """A literal as an array of one element."""
    dt = dtype(type_)
    width = WIDTH[type_]
    text = imm.bits.lower()
    if text.startswith("0f") or text.startswith("0d"):
        raw = int(text[2:], 16)
        bits = raw if len(text) == (10 if width == 4 else 18) else None
        if bits is None:
            value = float(imm.value)
            bits = int.from_bytes(struct.pack("<f" if width == 4 else "<d", value), "little")
    elif isinstance(imm.value, float) or type_ in ("f32", "f64"):
        bits = int.from_bytes(struct.pack("<d" if width == 8 else "<f", float(imm.value)), "little")
    else:
        bits = int(imm.value)
    return np.array([bits & ((1 << (8 * width)) - 1)], UINT[width]).view(dt)


class Decoder:
    """One instruction's operands, while it is decoded and (closures keep it) while it runs."""

    def __init__(self, program: Program, function: int, ins: Instruction, pc: int) -> None:
        self.ins, self.pc = ins, pc
        self.program = program
        self.function_index = function
        self.function = program.functions[function]
        self.arch = program.arch
        self.registers = program.register_index[function]

    def fail(self, reason: str = "") -> Unsupported:
        return Unsupported(self.ins.text, self.ins.line, reason)

    @property
    def mods(self) -> tuple[str, ...]:
        return self.ins.mods

    @property
    def type(self) -> str:
        """The last modifier that is a type: that of most instructions."""
        found = next((m for m in reversed(self.mods) if m in WIDTH), "")
        if not found:
            raise self.fail("unknown type")
        return found

    def operand(self, k: int) -> Operand:
        try:
            return self.ins.operands[k]
        except IndexError:
            raise self.fail("too few operands") from None

    def scope(self, default: str) -> str:
        return next((m for m in self.mods if m in SCOPES), default)

    def space(self) -> str:
        """State space of the access; "" is generic. `.shared` alone means the CTA's own."""
        found = next((m for m in self.mods if m in SPACES), "")
        return {"shared": "shared::cta", "param::entry": "param", "param::func": "param"}.get(found, found)

    def rounding(self, default: str = "rn") -> str:
        return next((m for m in self.mods if m in ("rn", "rz", "rm", "rp")), default)

    # -- reading ----------------------------------------------------------------------------------------

    def src(self, k: int | Operand, type_: str) -> Reader:
        """Reader of operand `k` as `type_`: arrays of shape [lanes], or [1] for what all lanes share."""
        o = self.operand(k) if isinstance(k, int) else k
        if isinstance(o, Imm):
            value = immediate(o, type_)
            return lambda g, sel: value
        if isinstance(o, Symbol):
            return self._symbol(o, type_)
        if not isinstance(o, Reg):
            raise self.fail(f"operand {o}")
        dt, width = dtype(type_), WIDTH[type_]
        if o.name in SPECIAL:
            special = SPECIAL[o.name]
            return lambda g, sel: special(g, sel).astype(UINT[width]).view(dt)
        i = self._register(o.name)
        size = self.program.register_sizes[i]
        if size == width:
            if dt == UINT[width]:
                return lambda g, sel: g.r[i][sel]
            return lambda g, sel: g.r[i][sel].view(dt)
        if size > width:
            return lambda g, sel: g.r[i][sel].astype(UINT[width]).view(dt)
        raise self.fail(f"register {o.name} is narrower than .{type_}")

    def _register(self, name: str) -> int:
        if name not in self.registers:
            raise self.fail(f"register {name} is not declared")
        return self.registers[name]

    def _symbol(self, o: Symbol, type_: str) -> Reader:
        """Address of a variable in its own state space."""
        dt, width = dtype(type_), WIDTH[type_]
        program, name = self.program, o.name
        if name in program.shared:
            at = mem.RESERVED_SHARED + program.shared[name][0] + o.offset
            return lambda g, sel: ((g.rank[sel] << np.uint32(mem.RANK_SHIFT)) + np.uint32(at)).astype(dt)
        local = program.local[self.function_index].get(name)
        if local is not None:
            value = np.array([local + o.offset], UINT[8]).astype(dt)
            return lambda g, sel: value
        if self.function.is_entry and name in program.params:
            value = np.array([program.params[name] + o.offset], UINT[8]).astype(dt)
            return lambda g, sel: value
        if name in program.globals and width == 8:
            return lambda g, sel: np.array([g.constants[name].address + o.offset], np.uint64).view(dt)
        raise self.fail(f"symbol {name}")

    def pred(self, k: int | Operand) -> Reader:
        """Reader of a predicate operand, possibly negated."""
        o = self.operand(k) if isinstance(k, int) else k
        if isinstance(o, Not):
            inner = self.pred(o.item)
            return lambda g, sel: ~inner(g, sel)
        if isinstance(o, Imm):
            value = np.array([bool(o.value)])
            return lambda g, sel: value
        if not isinstance(o, Reg):
            raise self.fail(f"predicate {o}")
        if o.name in SPECIAL:
            return SPECIAL[o.name]
        i = self._register(o.name)
        if self.program.register_sizes[i] != 0:
            raise self.fail(f"{o.name} is no predicate")
        return lambda g, sel: g.r[i][sel]

    def address(self, k: int | Operand) -> Reader:
        """Reader of `[base+offset]`: unsigned addresses, one per lane."""
        o = self.operand(k) if isinstance(k, int) else k
        if not isinstance(o, Addr):
            raise self.fail(f"address {o}")
        offset = o.offset
        if o.base is None:
            constant = np.array([offset], np.uint64)
            return lambda g, sel: np.repeat(constant, g.lanes(sel).size)
        if isinstance(o.base, Reg):
            i = self._register(o.base.name)
            size = self.program.register_sizes[i]
            if size not in (4, 8):
                raise self.fail(f"{o.base.name} is no address")
            step = UINT[size].type(offset & ((1 << (8 * size)) - 1))
            if not offset:
                return lambda g, sel: g.r[i][sel]
            return lambda g, sel: g.r[i][sel] + step
        inner = self._symbol(Symbol(o.base.name, o.base.offset + offset), "u64")

        def read(g: Grid, sel: Selection) -> Array:
            value = inner(g, sel)
            return np.repeat(value, g.lanes(sel).size) if value.size == 1 else value

        return read

    def param_space(self, k: int) -> str:
        """`.param` accesses: the kernel's own parameters, or variables of a call (kept with local memory)."""
        o = self.operand(k)
        base = o.base if isinstance(o, Addr) else None
        if isinstance(base, Symbol) and base.name in self.program.local[self.function_index]:
            return "local"
        if self.function.is_entry and not (isinstance(base, Symbol) and base.name not in self.program.params):
            return "param"
        raise self.fail("which parameter is meant is not known")

    # -- writing ----------------------------------------------------------------------------------------

    def dst(self, k: int | Operand, type_: str) -> Writer:
        """Writer of values of `type_`; wider registers are sign- or zero-extended, `_` drops them."""
        o = self.operand(k) if isinstance(k, int) else k
        if not isinstance(o, Reg):
            raise self.fail(f"destination {o}")
        if o.name == "_":
            return lambda g, sel, values: None
        i = self._register(o.name)
        size = self.program.register_sizes[i]
        width = WIDTH[type_]
        if size < width:
            raise self.fail(f"register {o.name} is narrower than .{type_}")
        unsigned = UINT[width]
        if size == width:

            def same(g: Grid, sel: Selection, values: Array) -> None:
                g.r[i][sel] = values.view(unsigned)

            return same
        wide = UINT[size]
        if type_[0] == "s":
            narrow, signed = SINT[width], SINT[size]

            def extend(g: Grid, sel: Selection, values: Array) -> None:
                g.r[i][sel] = values.view(narrow).astype(signed).view(wide)

            return extend

        def zero(g: Grid, sel: Selection, values: Array) -> None:
            g.r[i][sel] = values.view(unsigned).astype(wide)

        return zero

    def dst_pred(self, k: int | Operand) -> Writer:
        """Writer of a predicate."""
        o = self.operand(k) if isinstance(k, int) else k
        if not isinstance(o, Reg):
            raise self.fail(f"destination {o}")
        if o.name == "_":
            return lambda g, sel, values: None
        i = self._register(o.name)
        if self.program.register_sizes[i] != 0:
            raise self.fail(f"{o.name} is no predicate")

        def write(g: Grid, sel: Selection, values: Array) -> None:
            g.r[i][sel] = values

        return write

    def items(self, k: int, n: int) -> tuple[Operand, ...]:
        """The elements of a vector operand; a scalar is its own only element."""
        o = self.operand(k)
        found = o.items if isinstance(o, Vec) else (o,)
        if len(found) != n:
            raise self.fail(f"{n} elements expected")
        return found


class Program:
    """An `.entry` with the functions it calls, ready to run. Raises Unsupported while decoding.

    `arch` is the architecture it runs as ("sm_90a"); it decides which instructions exist.
    """

    def __init__(self, module: Module, entry: Function, arch: str) -> None:
        if module.unknown:
            line, text = module.unknown[0]
            raise Unsupported(text, line, "the parser does not know it")
        self.module = module
        self.name = entry.name
        self.entry = entry
        self.arch = arch
        self.functions = _reachable(module, entry)
        self.function_index = {f.name: k for k, f in enumerate(self.functions)}
        self.instructions: list[Instruction] = []
        self.code: list[Step] = []
        self.first: list[int] = []  # pc of each function's first instruction
        for f in self.functions:
            self.first.append(len(self.instructions))
            self.instructions.extend(f.body)
            # Falling off the end returns.
            self.instructions.append(
                Instruction(len(f.body), "ret", (), (), None, f.line, None, "ret (implied)")
            )
        self.entry_pc = 0
        self.return_copies: dict[int, list[tuple[int, int, int]]] = {}  # pc of a call -> results to copy back
        self.register_sizes: list[int] = []
        self.register_index: list[dict[str, int]] = []
        self.local: list[dict[str, int]] = []
        self.local_size = 0  # bytes from one thread's local memory to the next one's
        self.local_used = 0
        for f in self.functions:
            self._registers(f)
        self.shared, self._static = self._layout_shared()
        self.params: dict[str, int] = {}
        self.param_size = self._layout_params()
        self.globals = {n: v for n, v in module.variables.items() if v.space in ("global", "const")}
        self.shared_is_read_elsewhere = any(_reads_shared_elsewhere(i) for i in self.instructions)
        self._decode()

    def _registers(self, f: Function) -> None:
        index = {}
        sizes = {"pred": 0}
        for name, type_ in f.registers.items():
            if type_ not in WIDTH and type_ != "pred":
                raise Unsupported(f".reg .{type_} {name}", f.line)
            index[name] = len(self.register_sizes)
            self.register_sizes.append(sizes.get(type_, WIDTH.get(type_, 0)))
        local = {}
        formal = {v.name: v for v in (*f.params, *f.returns)}
        variables = {
            n: v for n, v in f.variables.items() if v.space in ("local", "param") and n not in formal
        }
        if not f.is_entry:
            variables |= formal
        for v in variables.values():
            if v.space == "reg" or v.size is None:
                raise Unsupported(f".{v.space} {v.name}[]", f.line)
            align = max(v.align, min(WIDTH.get(v.type, 1), 16))
            self.local_size = -(-self.local_size // align) * align
            local[v.name] = self.local_size
            self.local_size += v.size
            self.local_used = self.local_size
        self.local_size = -(-self.local_size // 16) * 16
        self.register_index.append(index)
        self.local.append(local)

    def _layout_shared(self) -> tuple[dict[str, tuple[int, int]], int]:
        """name -> (offset, size); dynamic shared memory follows the static variables and has size -1."""
        variables: dict[str, Variable] = {
            n: v for n, v in self.module.variables.items() if v.space == "shared"
        }
        for f in self.functions:
            variables |= {n: v for n, v in f.variables.items() if v.space == "shared"}
        out: dict[str, tuple[int, int]] = {}
        end = 0
        for name, v in variables.items():
            if v.size is not None:
                align = max(v.align, WIDTH.get(v.type, 1))
                end = -(-end // align) * align
                out[name] = (end, v.size)
                end += v.size
        dynamic = [v for v in variables.values() if v.size is None]
        if dynamic:
            align = max(16, *(v.align for v in dynamic))
            end = -(-end // align) * align
            out |= {v.name: (end, -1) for v in dynamic}
        return out, end

    def shared_size(self, dynamic: int) -> int:
        """Bytes of shared memory of one CTA."""
        return self._static + dynamic

    def nearest_shared(self, offset: int) -> str:
        """ " (in `name`)", or how far past which variable; "" without variables."""
        best = max(((o, n, s) for n, (o, s) in self.shared.items() if o <= offset), default=None)
        if best is None:
            return ""
        start, name, size = best
        if size < 0 or offset < start + size:
            return f" ({name}+{offset - start})"
        return f" ({offset - start - size} bytes past {name}[{size}])"

    def _layout_params(self) -> int:
        end = 0
        for v in self.entry.params:
            if v.size is None:
                raise Unsupported(f".param {v.name}[]", self.entry.line)
            align = max(v.align, min(WIDTH.get(v.type, 1), 16))
            end = -(-end // align) * align
            self.params[v.name] = end
            end += v.size
        return end

    def bind(self, memory: Memory) -> dict[str, Buffer]:
        """The module's `.global` and `.const` variables in a memory: made at the first launch, then kept."""
        found = {}
        for name, v in self.globals.items():
            key = (id(self.module), name)
            if key not in memory.variables:
                memory._keep.append(self.module)
                data = _initial(v, self.entry.line)
                memory.variables[key] = memory.add(data, name)
            found[name] = memory.variables[key]
        return found

    def _decode(self) -> None:
        from . import ops_arith, ops_control, ops_integer, ops_matrix, ops_memory, ops_sync, ops_warp  # noqa: F401

        for k, f in enumerate(self.functions):
            first = self.first[k]
            for pc in range(first, first + len(f.body) + 1):
                d = Decoder(self, k, self.instructions[pc], pc)
                decode = OPS.get(d.ins.opcode)
                if decode is None:
                    raise d.fail()
                strange = unknown(d.ins.opcode, d.mods, WIDTH)
                if strange:
                    raise d.fail(f"modifier .{strange}")
                try:
                    step = decode(d)
                except (KeyError, IndexError, StopIteration, AttributeError, AssertionError, TypeError) as e:
                    raise d.fail(f"form not known ({e!r})") from e
                if d.ins.pred is not None and d.ins.opcode != "bra":
                    step = _guarded(step, d.pred(Reg(d.ins.pred[0])), d.ins.pred[1], pc)
                self.code.append(step)


def _guarded(step: Step, guard: Reader, negated: bool, pc: int) -> Step:
    """`@p step`: only lanes whose predicate holds execute it."""

    def run(g: Grid, sel: Selection) -> Any:
        p = guard(g, sel)
        if negated:
            p = ~p
        if p.all():
            return step(g, sel)
        if not p.any():
            return None
        lanes = g.lanes(sel)
        if p.size != lanes.size:
            p = np.broadcast_to(p, lanes.shape)
        acting = lanes[p]
        try:
            stopped = step(g, acting)
        except Fault as e:
            e.settle(acting)
            raise
        if stopped is None:
            return None
        g.machine.go(g, lanes[~p], pc + 1)
        return STOP

    return run


def _reads_shared_elsewhere(ins: Instruction) -> bool:
    """Whether an instruction may read shared memory from another CTA, or through the async proxy."""
    spaces = [m for m in ins.mods if m.split("::")[0] in ("global", "shared", "local", "param", "const")]
    if ins.opcode in ("ld", "atom"):
        return not spaces or "shared::cluster" in spaces
    return ins.opcode == "cp" and "bulk" in ins.mods and any("shared" in m for m in spaces[1:2])


def _reachable(module: Module, entry: Function) -> list[Function]:
    """The entry and every function that it calls, entry first. Raises Unsupported for recursion."""
    order: list[Function] = []
    active: set[str] = set()

    def visit(f: Function) -> None:
        if f.name in active:
            raise Unsupported(f"recursive call of {f.name}", f.line)
        if f in order:
            return
        active.add(f.name)
        order.append(f)
        for ins in f.body:
            if ins.opcode == "call" and isinstance(ins.operands[1], Symbol):
                callee = module.functions.get(ins.operands[1].name)
                if callee is not None and callee.body:
                    visit(callee)
        active.discard(f.name)

    visit(entry)
    return order


def _initial(v: Variable, line: int) -> Array:
    """Bytes of a module variable: its initialiser, then zeros."""
    if v.size is None:
        raise Unsupported(f".extern .{v.space} {v.name}", line, "its definition is in another module")
    data = np.zeros(v.size, np.uint8)
    text = v.init.strip()
    if not text:
        return data
    words = re.findall(r"[^\s{},]+", text)
    try:
        literals = [Imm(_number(w), w) for w in words]
    except ValueError:
        raise Unsupported(f".{v.space} {v.name} = {text[:40]}", line, "initialiser is not numeric") from None
    values = np.concatenate([immediate(x, v.type) for x in literals]).view(np.uint8)
    data[: values.size] = values
    return data


def _number(word: str) -> int | float:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", word):
        return float(struct.unpack(">f", bytes.fromhex(word[2:]))[0])
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", word):
        return float(struct.unpack(">d", bytes.fromhex(word[2:]))[0])
    try:
        return int(word.rstrip("U"), 0)
    except ValueError:
        return float(word)
