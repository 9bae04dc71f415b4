"""The program that the auditor sees: modules, functions, instructions and operands of PTX."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reg:
    """A register or special register (`%tid.x`); `_` is the sink. `name` keeps its `%`.

    A register declared in a nested scope whose name is taken gets a unique name: `r`, `r#1`, `r#2`, ...
    """

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate. Floats written as 0f/0d hex are decoded; `bits` is the raw text."""

    value: int | float
    bits: str


@dataclass(frozen=True, slots=True)
class Addr:
    """`[base+offset]`. `base` is a Reg, or a Symbol for `[param_0+8]`, or None for an absolute address."""

    base: Reg | Symbol | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that is neither register nor immediate: parameter, shared variable, label, function."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b, c, d}`, and the lists `(a, b)` of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """`!p`: a predicate operand used negated."""

    item: Reg


@dataclass(frozen=True, slots=True)
class Pair:
    """`p|q`: the two destinations of `setp`, `shfl`, `match`, `elect`; either may be the sink `_`."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class TensorAddr:
    """`[descriptor, {coordinates}]` of tensor copies; a texture's sampler comes first among `coordinates`."""

    base: Reg | Symbol
    coordinates: tuple[Operand, ...]


Operand = Reg | Imm | Addr | Symbol | Vec | TensorAddr | Not | Pair


@dataclass(frozen=True, slots=True)
class SourceLoc:
    """Line of the kernel source that the compiler named with `.loc`; `inlined_at` is the caller's line."""

    file: str
    line: int
    inlined_at: SourceLoc | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One PTX instruction.

    `opcode` is the part before the first dot, `mods` the rest in order: `ld.acquire.gpu.global.b32` is
    ("ld", ("acquire", "gpu", "global", "b32")). State-space modifiers keep their `::`: "shared::cluster".
    `pred` is (register, negated) or None. `operands` follow the text, destination first; a `call` always has
    (Vec of results, target, Vec of arguments) and then its prototype or target list if the text names one.
    `inline_asm` marks text between the compiler's `// begin inline asm` and `// end inline asm`.
    `line` is the 1-based line in the PTX text. `index` is the position in the function body.
    """

    index: int
    opcode: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    pred: tuple[str, bool] | None
    line: int
    loc: SourceLoc | None
    text: str
    inline_asm: bool = False

    @property
    def name(self) -> str:
        """Opcode with its modifiers, as written."""
        return ".".join((self.opcode, *self.mods))

    def has(self, *mods: str) -> bool:
        """True when every one of `mods` is among the modifiers."""
        return all(m in self.mods for m in mods)


@dataclass(frozen=True, slots=True)
class Variable:
    """A `.shared`, `.global`, `.const`, `.local` or `.param` declaration.

    `size` is in bytes, None if the array has no extent; `init` is the initialiser's raw text; `linkage` is
    "extern", "visible", "weak", "common" or "".
    """

    name: str
    space: str
    type: str
    size: int | None
    align: int = 1
    pointer_space: str = ""
    init: str = ""
    linkage: str = ""


@dataclass
class Function:
    """An `.entry` or `.func`. `labels` maps a label to the index of the instruction after it.

    `registers` holds the declared type of every register that the body uses. `branch_targets` maps the name
    of a `.branchtargets` or `.calltargets` list to its labels or functions, `prototypes` that of a
    `.callprototype` to its text; `directives` holds `.reqntid`, `.reqnctapercluster`, ... as written.
    `has_body` is False for a declaration alone.
    """

    name: str
    is_entry: bool
    params: list[Variable] = field(default_factory=list)
    returns: list[Variable] = field(default_factory=list)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prototypes: dict[str, str] = field(default_factory=dict)
    directives: dict[str, tuple[str, ...]] = field(default_factory=dict)
    line: int = 0
    has_body: bool = True


@dataclass
class Module:
    """One PTX text. `unknown` lists what the parser did not understand, as (line, text)."""

    version: tuple[int, int]
    target: str
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    unknown: list[tuple[int, str]] = field(default_factory=list)
    name: str = "<ptx>"

    @property
    def entries(self) -> list[Function]:
        return [f for f in self.functions.values() if f.is_entry and f.has_body]
