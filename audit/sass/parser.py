"""SASS listing -> functions. Reads what `nvdisasm -c` prints (with or without `-gp`), and `cuobjdump -sass`.

One pass, linear in the text. A line inside a function that fits nothing known goes to `SassFunction.unknown` with its
number; nothing is skipped in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


class SassError(ValueError):
    """The text is no SASS listing; one line."""


@dataclass(frozen=True, slots=True)
class SassInstruction:
    """One machine instruction.

    `opcode` and `mods` as in :class:`k3_audit.audit.ptx.ir.Instruction`; `operands` are the texts between the commas.
    `pred` is (predicate register, negated), also for uniform predicates ("UP0"). `line` is the 1-based line of the
    listing, `ptx_line` that of the PTX that the instruction was made from, 0 where the listing does not say.
    """

    index: int
    address: int
    opcode: str
    mods: tuple[str, ...]
    operands: tuple[str, ...]
    pred: tuple[str, bool] | None
    line: int
    ptx_line: int
    text: str

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.mods))

    def has(self, *mods: str) -> bool:
        """True when every one of `mods` is among the modifiers."""
        return all(m in self.mods for m in mods)


@dataclass
class SassFunction:
    """The code of one `.text` section: a kernel with the helpers that the assembler put behind it.

    `labels` maps a label to the index of the instruction that follows it (`len(body)` at the very end);
    `attributes` holds the section's flags ("SHF_BARRIERS": "2"); `has_ptx_lines` says whether the listing names PTX
    lines; `unknown` lists what was not understood: (line, text).
    """

    name: str
    line: int
    body: list[SassInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    unknown: list[tuple[int, str]] = field(default_factory=list)
    arch: str = ""
    has_ptx_lines: bool = False

    def target(self, operand: str) -> int | None:
        """Index of the instruction that a branch operand (`` `(.L_x_3) `` or 0x1f0) names; None when unknown."""
        if found := _TARGET.fullmatch(operand):
            return self.labels.get(found[1])
        if operand.startswith("0x") and self.body:
            # Every instruction has the same size; the first two addresses give it.
            size = self.body[1].address - self.body[0].address if len(self.body) > 1 else 16
            index, rest = divmod(int(operand, 16) - self.body[0].address, size or 16)
            return index if rest == 0 and 0 <= index < len(self.body) else None
        return None


# The two shapes that carry instructions, after the leading blanks: `/*0130*/   @!UP0 SYNCS.EXCH.64 URZ, [UR6], UR4 ;`
_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<neg>!?)(?P<pred>U?P(?:\d+|T))\s+)?"
    r"(?P<name>[A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)(?:\s+(?P<rest>[^;]*?))?\s*;\s*(?:/\*\s*0x[0-9a-f]+\s*\*/)?"
)
_LABEL = re.compile(r"(\.?[\w$.]+):")
_SECTION = re.compile(r"\.section\s+(\S+?)(?:,|\s|$)")
_FLAGS = re.compile(r'\.sectionflags\s+@"([^"]*)"')
_PTX_LINE = re.compile(r'//## File "[^"]*", line (\d+)')
_TARGET = re.compile(r"`\(([^)]*)\)")
_HEADER = re.compile(r"Function : (\S+)")
_ARCH = re.compile(r"(?:\.target\s+|code for |arch = )(sm_\d+[af]?)")
_OLD_ARCH = re.compile(r"\.headerflags\s.*\bEF_CUDA_SM(\d+)\b")  # ELF of toolkit 12: the flag says "a"
# Second encoding word of `cuobjdump -sass`, and the directives between a section's head and its first instruction.
_IGNORED = re.compile(
    r"/\*\s*0x[0-9a-f]+\s*\*/|\.(?:align|global|type|size|other|weak|local|target|elftype|headerflags|sectioninfo)\b.*|"
    r"//-{4,}.*|\.{4,}|//## .*"
)
_PTX_TABLE = ".nv_debug_ptx_txt"


def parse(text: str) -> dict[str, SassFunction]:
    """Functions of one listing by name, in the order of the text.

    Raises SassError when the text holds no code section.
    """
    functions: dict[str, SassFunction] = {}
    current: SassFunction | None = None
    arch = ""
    ptx_line = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line:
            continue
        if current is not None and line.startswith("/*") and (m := _INSTRUCTION.fullmatch(line)):
            opcode, *mods = m["name"].split(".")
            pred = (m["pred"], bool(m["neg"])) if m["pred"] else None
            rest = m["rest"] or ""
            current.body.append(
                SassInstruction(
                    len(current.body),
                    int(m["address"], 16),
                    opcode,
                    tuple(mods),
                    _operands(rest),
                    pred,
                    number,
                    ptx_line,
                    f"{m['name']} {rest}".strip(),
                )
            )
        elif m := _PTX_LINE.match(line):
            # With `-g` the file is a source file: only lines of the embedded PTX count.
            if _PTX_TABLE in line:
                ptx_line = int(m[1])
                if current is not None:
                    current.has_ptx_lines = True
        elif m := _SECTION.match(line):
            name = m[1].strip('"')
            current, ptx_line = None, 0
            if name.startswith(".text."):
                current = functions[name[6:]] = SassFunction(name[6:], number, arch=arch)
        elif m := _HEADER.match(line):
            current, ptx_line = SassFunction(m[1], number, arch=arch), 0
            functions[m[1]] = current
        elif line.startswith("Fatbin "):
            current = None
        elif m := _ARCH.match(line):
            arch = m[1]
            if current is not None:
                current.arch = arch
        elif m := _OLD_ARCH.match(line):
            arch = f"sm_{m[1]}" + ("a" if "EF_CUDA_ACCELERATORS" in line else "")
            if current is not None:
                current.arch = arch
        elif current is not None:
            if m := _LABEL.fullmatch(line):
                current.labels[m[1]] = len(current.body)
            elif m := _FLAGS.match(line):
                for flag in filter(None, m[1].split(",")):
                    key, _, value = flag.partition("=")
                    current.attributes[key.strip()] = value
            elif not _IGNORED.fullmatch(line):
                current.unknown.append((number, line))
    if not functions:
        raise SassError("no code section: this is not a SASS listing (nvdisasm -c, or cuobjdump -sass)")
    return functions


def _operands(text: str) -> tuple[str, ...]:
    """Split at the commas that stand outside brackets."""
    if "," not in text:
        return (text,) if text else ()
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "[(":
            depth += 1
        elif ch in "])":
            depth -= 1
        elif ch == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return tuple(parts)
