"""PTX text -> :class:`Module`. Hand-written, one pass, linear in the size of the text.

What the parser does not understand is put on `Module.unknown` and never skipped in silence; text that is no
PTX raises :class:`PtxError`. Grammar: PTX ISA, chapters "Syntax", "State Spaces, Types, and Variables",
"Instruction Operands" and "Directives".
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace

from .ir import (
    Addr,
    Function,
    Imm,
    Instruction,
    Module,
    Not,
    Operand,
    Pair,
    Reg,
    SourceLoc,
    Symbol,
    TensorAddr,
    Variable,
    Vec,
)


class PtxError(ValueError):
    """The text is no PTX. `line` is 1-based."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.message = message


def parse(text: str | bytes, name: str = "<ptx>") -> Module:
    """Parse one PTX text. Raises PtxError when it is no PTX (bytes must be UTF-8)."""
    if isinstance(text, bytes):
        data = text
        try:
            text = data.decode()
        except UnicodeDecodeError as e:
            raise PtxError(data.count(b"\n", 0, e.start) + 1, "not UTF-8 text, so not PTX") from e
    return _Parser(text, name).module()


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIAL_REGISTERS = frozenset(
    f"%{r}"
    for r in (
        *(
            name + dimension
            for name in _words("tid ntid ctaid nctaid clusterid nclusterid cluster_ctaid cluster_nctaid")
            for dimension in ("", ".x", ".y", ".z", ".w")
        ),
        *_words(
            "laneid warpid nwarpid smid nsmid gridid is_explicit_cluster cluster_ctarank cluster_nctarank"
        ),
        *_words("lanemask_eq lanemask_le lanemask_lt lanemask_ge lanemask_gt clock clock_hi clock64"),
        *_words("globaltimer globaltimer_lo globaltimer_hi total_smem_size aggr_smem_size dynamic_smem_size"),
        *_words("current_graph_exec reserved_smem_offset_begin reserved_smem_offset_end"),
        *_words("reserved_smem_offset_cap reserved_smem_offset_0 reserved_smem_offset_1"),
        *(f"pm{i}{suffix}" for i in range(8) for suffix in ("", "_64")),
        *(f"envreg{i}" for i in range(32)),
    )
)

# Bytes of one element of a fundamental type.
TYPE_BYTES = {
    **{f"{k}{b}": b // 8 for k in "bsu" for b in (8, 16, 32, 64, 128)},
    **{"f16": 2, "f16x2": 4, "bf16": 2, "bf16x2": 4, "tf32": 4, "f32": 4, "f64": 8, "f32x2": 8, "pred": 1},
    **{"texref": 8, "samplerref": 8, "surfref": 8},
}

_LINKAGE = ("extern", "visible", "weak", "common")
_SPACES = ("global", "shared", "const", "local", "param", "tex", "reg")
_HEADER_DIRECTIVES = frozenset(
    _words(
        "reqntid maxntid maxnreg minnctapersm maxnctapersm reqnctapercluster explicitcluster maxclusterrank"
    )
    + _words("noreturn pragma blocksareclusters abi_preserve abi_preserve_control unique")
)

# Comments and strings. A string becomes "N", its number, so that no later pattern trips over its contents.
_LEXICAL = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/|"|/\*', re.DOTALL)
_DEEPEST = 200  # nested blocks; compilers emit two or three
_BEGIN_ASM, _END_ASM = "\x01", "\x02"
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")
_TOP = re.compile(r"\s*(?:(?P<mark>[\x01\x02])|(?P<word>\.\w+)|(?P<end>\Z)|(?P<other>[^\s][^\n]*))")
_STATEMENT = re.compile(
    r"[\s;]*(?:(?P<mark>[\x01\x02{}])|(?P<label>[\w$%]+)\s*:(?!:)|(?P<directive>\.[a-z_]\w*)"
    r"|(?P<instruction>[^;\x01\x02]+);|(?P<rest>.+)|(?P<end>\Z))",
    re.DOTALL,
)
_INSTRUCTION = re.compile(
    r"(?:@\s*(?P<neg>!?)\s*(?P<pred>[\w%$]+)\s+)?(?P<op>[a-z]\w*)(?P<mods>(?:\.\w+(?:::\w+)*)*)(?:\s+(?P<args>.*)|$)",
    re.DOTALL,
)
_OPERAND = re.compile(r"((?:[^,\[{(]++|\[[^\]]*+\]|\{[^}]*+\}|\([^)]*+\))++)(?:,|$)", re.DOTALL)
_NAME = r"[A-Za-z_$%][\w$.]*"
_PLAIN = re.compile(_NAME)
_SUM = re.compile(rf"({_NAME})\s*([+-])\s*(-?\w+)")
_INT = re.compile(r"([+-]?)\s*(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)U?")
_FLOAT_BITS = re.compile(r"0([fF])([0-9a-fA-F]{8})|0([dD])([0-9a-fA-F]{16})")
_FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")
_LOC = re.compile(
    r"\s+(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})(?:\s*,\s*function_name\s+[\w$]+(?:\s*\+\s*\d+)?\s*,"
    r"\s*inlined_at\s+(\d{1,9})\s+(\d{1,9})\s+(\d{1,9}))?"
)
_FILE = re.compile(r'\s+(\d{1,9})\s+"(\d+)"(?:\s*,\s*\d+\s*,\s*\d+)?')
_PARAM = re.compile(
    r"\.(?P<space>param|reg)\s+(?:\.align\s+(?P<align>\d{1,9})\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr(?:\s+\.(?P<pspace>global|shared|const|local))?(?:\s+\.align\s+(?P<palign>\d{1,9}))?\s+)?"
    r"(?P<name>[\w$%.]+)\s*(?P<dims>(?:\[[^\]]*\]\s*)*)"
)
_DECLARED = re.compile(r"(?P<name>[\w$%]+)\s*(?:<\s*(?P<count>\d+)\s*>)?\s*(?P<dims>(?:\[[^\]]*\]\s*)*)")
_VARIABLES = re.compile(r"((?:\.[\w:]++\s*+(?:\d{1,9}\s++)?)++)(.+)", re.DOTALL)
_ATTRIBUTE = re.compile(r"\.attribute\s*\((?:[^()]|\([^()]*\))*\)")


class _Scope:
    """Names declared between one `{` and its `}`: text name -> name in the IR. `ranges` holds `%r<5>`."""

    __slots__ = ("depth", "labels", "names", "operands", "parent", "ranges")

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.names: dict[str, str] = {}
        self.ranges: dict[str, tuple[int, str, str]] = {}  # prefix -> (count, type, suffix of the IR name)
        self.labels: dict[str, str] = {}
        self.operands: dict[str, Operand] = {}


class _Unknown(Exception):
    """A statement or operand that the parser does not understand."""


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.strings: list[str] = []
        self.text = self._strip(text)
        self.pos = 0
        self.line = 1
        self.counted = 0  # position up to which newlines have been counted
        self.result = Module((0, 0), "", name=name)
        self.inline_asm = False

    # -- text ---------------------------------------------------------------------------------------------

    def _strip(self, text: str) -> str:
        bad = _CONTROL.search(text)
        if bad:
            raise PtxError(text.count("\n", 0, bad.start()) + 1, "control characters: binary, not PTX text")

        def keep(m: re.Match[str]) -> str:
            token = m.group().rstrip()
            if token.startswith("//"):
                if token.endswith("begin inline asm"):
                    return _BEGIN_ASM
                return _END_ASM if token.endswith("end inline asm") else ""
            if token == '"' or token == "/*":
                line = text.count("\n", 0, m.start()) + 1
                raise PtxError(line, f"{'string' if token == chr(34) else 'comment'} is not closed")
            if token.startswith("/*"):
                return " " + "\n" * token.count("\n")
            self.strings.append(token[1:-1])
            return f'"{len(self.strings) - 1}"'

        return _LEXICAL.sub(keep, text)

    def _at(self, pos: int) -> int:
        """1-based line of a position at or after the last one asked for."""
        if pos > self.counted:
            self.line += self.text.count("\n", self.counted, pos)
            self.counted = pos
        return self.line

    def _until(self, ch: str, pos: int, what: str) -> int:
        end = self.text.find(ch, pos)
        if end < 0:
            raise PtxError(self._at(pos), f"{what}: no {ch!r} follows")
        return end

    def _skip_line(self, pos: int) -> int:
        end = self.text.find("\n", pos)
        return len(self.text) if end < 0 else end

    def _unknown(self, pos: int, end: int) -> int:
        self.result.unknown.append((self._at(pos), " ".join(self.text[pos:end].split())[:200]))
        return end

    # -- module -------------------------------------------------------------------------------------------

    def module(self) -> Module:
        text, module = self.text, self.result
        for file in re.finditer(r"^\s*\.file" + _FILE.pattern, text, re.MULTILINE):
            module.files[int(file[1])] = self.strings[int(file[2])]
        pos = 0
        while True:
            m = _TOP.match(text, pos)
            assert m is not None  # the last alternatives match anything
            kind = m.lastgroup
            if kind == "end":
                break
            start = m.start(kind or 0)
            if kind == "mark":
                pos = m.end()
            elif kind == "word":
                pos = self._top_directive(m["word"], start, m.end())
            elif module.version == (0, 0):
                raise PtxError(self._at(start), "expected `.version`: this is not PTX")
            elif text[start] in "{}":
                raise PtxError(self._at(start), f"unbalanced {text[start]!r}")
            else:
                pos = self._unknown(start, m.end())
        if module.version == (0, 0):
            raise PtxError(1, "no `.version` directive: this is not PTX")
        for alias, target in module.aliases.items():
            if target in module.functions:
                module.functions.setdefault(alias, module.functions[target])
        return module

    def _top_directive(self, word: str, start: int, end: int) -> int:
        text, module = self.text, self.result
        if module.version == (0, 0) and word != ".version":
            raise PtxError(self._at(start), f"{word} before `.version`: this is not PTX")
        if word == ".version":
            m = re.compile(r"\s+(\d{1,3})\.(\d{1,3})\b").match(text, end)
            if not m:
                raise PtxError(self._at(start), "`.version` without a number")
            module.version = (int(m[1]), int(m[2]))
            return m.end()
        if word == ".target":
            stop = self._skip_line(end)
            module.target = text[end:stop].split(",")[0].strip()
            if not module.target:
                raise PtxError(self._at(start), "`.target` without an architecture")
            return stop
        if word == ".address_size":
            m = re.compile(r"\s+(32|64)\b").match(text, end)
            if not m or m[1] == "32":
                raise PtxError(self._at(start), "only `.address_size 64` is supported")
            return m.end()
        if word in (".file", ".loc"):
            m = (_FILE if word == ".file" else _LOC).match(text, end)
            return m.end() if m else self._unknown(start, self._skip_line(start))
        if word == ".section":  # debug information: no instruction in it
            return self._until("}", self._until("{", end, word), word) + 1
        if word == ".pragma":
            return self._until(";", end, word) + 1
        if word == ".alias":
            stop = self._until(";", end, word)
            names = [n.strip() for n in text[end:stop].split(",")]
            if len(names) != 2:
                return self._unknown(start, stop + 1)
            module.aliases[names[0]] = names[1]
            return stop + 1
        linkage, pos = "", start
        while True:
            m = re.compile(r"\s*\.(\w+)").match(text, pos)
            if not m:
                return self._unknown(start, self._skip_line(start))
            if m[1] not in _LINKAGE:
                break
            linkage, pos = m[1], m.end()
        if m[1] in ("entry", "func"):
            return self._function(m[1] == "entry", m.end(), linkage)
        if m[1] in _SPACES:
            stop = self._until(";", pos, word)
            try:
                for var in self._variables(text[pos:stop], linkage):
                    module.variables[var.name] = var
            except _Unknown:
                return self._unknown(start, stop + 1)
            return stop + 1
        return self._unknown(start, self._skip_line(start))

    def _variables(self, declaration: str, linkage: str = "") -> list[Variable]:
        """`.shared .align 16 .b8 buffer[1024]`; several names may follow, or one with an initialiser."""
        declaration, _, init = declaration.partition("=")
        declaration = _ATTRIBUTE.sub("", declaration)
        m = _VARIABLES.fullmatch(declaration.strip())
        if not m:
            raise _Unknown
        words = m[1].split()
        space, align, type_, vector = "", 1, "", 1
        i = 0
        while i < len(words):
            word = words[i].lstrip(".")
            if word == "align" and i + 1 < len(words):
                align, i = int(words[i + 1]), i + 1
            elif word.split("::")[0] in _SPACES:
                space = word
            elif word in ("v2", "v4", "v8"):
                vector = int(word[1])
            elif word in TYPE_BYTES:
                type_ = word
            elif word == "ptr":
                pass
            else:
                raise _Unknown
            i += 1
        if not space or not type_:
            raise _Unknown
        out = []
        for part in m[2].split(","):
            d = _DECLARED.fullmatch(part.strip())
            if not d or len(d["count"] or "") > 9:
                raise _Unknown
            size: int | None = _bytes(TYPE_BYTES[type_] * vector, d["dims"])
            for n in self._expand(d) if space != "reg" else [d["name"]]:
                out.append(
                    Variable(n, space, type_, size, align, init=" ".join(init.split()), linkage=linkage)
                )
        return out

    @staticmethod
    def _expand(d: re.Match[str]) -> list[str]:
        if d["count"] is None:
            return [d["name"]]
        if int(d["count"]) > 1_000_000:
            raise _Unknown
        return [f"{d['name']}{i}" for i in range(int(d["count"]))]

    # -- functions ----------------------------------------------------------------------------------------

    def _params(self, text: str, pos: int) -> list[Variable]:
        out = []
        text = text.strip()
        for part in text.split(",") if text else ():
            m = _PARAM.fullmatch(part.strip())
            if not m or m["type"] not in TYPE_BYTES:
                raise PtxError(self._at(pos), f"cannot read parameter {' '.join(part.split())[:80]!r}")
            out.append(
                Variable(
                    m["name"],
                    m["space"],
                    m["type"],
                    _bytes(TYPE_BYTES[m["type"]], m["dims"]),
                    int(m["align"] or m["palign"] or 1),
                    m["pspace"] or "",
                )
            )
        return out

    def _function(self, is_entry: bool, pos: int, linkage: str) -> int:
        text, module = self.text, self.result
        line = self._at(pos)
        pos_attr = re.compile(r"\s*" + _ATTRIBUTE.pattern).match(text, pos)
        pos = pos_attr.end() if pos_attr else pos
        m = re.compile(r"\s*(?:\(([^()]*)\)\s*)?([\w$%]+)\s*(?:\(([^()]*)\))?").match(text, pos)
        if not m:
            raise PtxError(line, "`.entry` or `.func` without a name")
        function = Function(m[2], is_entry, line=line)
        function.returns = self._params(m[1] or "", pos)
        function.params = self._params(m[3] or "", pos)
        for v in (*function.returns, *function.params):
            function.variables[v.name] = v
        pos = m.end()
        while True:
            m = re.compile(r"\s*(?:\.(\w+)([^.;{\x01\x02]*)|([;{]))").match(text, pos)
            if not m:
                raise PtxError(self._at(pos), f"function {function.name}: expected `{{` or `;`")
            pos = m.end()
            if m[3]:
                break
            if m[1] not in _HEADER_DIRECTIVES:
                self._unknown(m.start(1) - 1, m.end())
            elif m[1] == "pragma":
                pos = self._until(";", pos, ".pragma") + 1
            else:
                function.directives[m[1]] = tuple(w.strip() for w in m[2].split(",") if w.strip())
        previous = module.functions.get(function.name)
        if m[3] == ";":
            function.has_body = False
            if previous is None:
                module.functions[function.name] = function
            return pos
        if previous is not None and previous.has_body:
            raise PtxError(line, f"function {function.name} is defined twice")
        module.functions.pop(function.name, None)
        module.functions[function.name] = function
        return _Body(self, function).read(pos)


class _Body:
    """The statements between the braces of one function."""

    def __init__(self, parser: _Parser, function: Function) -> None:
        self.parser = parser
        self.function = function
        self.scope = _Scope(None)
        self.scope.names.update({v: v for v in function.variables})
        self.scope.operands["_"] = Reg("_")
        for v in (*function.returns, *function.params):
            if v.space == "reg":
                function.registers[v.name] = v.type
        self.taken: dict[str, int] = {}  # text name -> how often it has been declared
        for name in function.variables:
            self.taken[name] = 1
        self.branches: list[tuple[int, _Scope]] = []  # instructions whose labels are resolved at the end
        self.loc: SourceLoc | None = None
        self.locs: dict[tuple[str, ...], SourceLoc] = {}

    def read(self, pos: int) -> int:
        parser, text = self.parser, self.parser.text
        function = self.function
        match, at = _STATEMENT.match, parser._at
        while True:
            m = match(text, pos)
            assert m is not None
            kind = m.lastgroup
            if kind == "instruction":
                start = m.start("instruction")
                pos = m.end()
                self._instruction(m["instruction"], at(start))
            elif kind == "mark":
                mark = m["mark"]
                pos = m.end()
                if mark == "{":
                    if self.scope.depth == _DEEPEST:
                        raise PtxError(at(pos), f"blocks nested deeper than {_DEEPEST}")
                    self.scope = _Scope(self.scope)
                elif mark == "}":
                    if self.scope.parent is None:
                        break
                    self.scope = self.scope.parent
                else:
                    parser.inline_asm = mark == _BEGIN_ASM
            elif kind == "directive":
                pos = self._directive(m["directive"], m.start("directive"), m.end())
            elif kind == "label":
                pos = self._label(m["label"], m.start("label"), m.end())
            elif kind == "rest":
                raise PtxError(at(m.start("rest")), f"function {function.name}: statement without `;`")
            else:
                raise PtxError(at(m.end()), f"function {function.name}: `}}` is missing")
        at(pos)
        self._resolve_labels()
        return pos

    # -- statements ---------------------------------------------------------------------------------------

    def _label(self, name: str, start: int, end: int) -> int:
        parser, function = self.parser, self.function
        line = parser._at(start)
        list_ = re.compile(r"\s*\.(branchtargets|calltargets|callprototype)\b").match(parser.text, end)
        if list_:
            stop = parser._until(";", end, "." + list_[1])
            text = parser.text[list_.end() : stop]
            if list_[1] == "callprototype":
                function.prototypes[name] = " ".join(text.split())
            else:
                function.branch_targets[name] = tuple(t.strip() for t in text.split(","))
            return stop + 1
        if name in self.scope.labels:
            raise PtxError(line, f"label {name} stands twice in one scope")
        unique = self._unique(name)
        self.scope.labels[name] = unique
        function.labels[unique] = len(function.body)
        return end

    def _unique(self, name: str) -> str:
        # A first declaration may still shadow an outer range: `%r1` inside the scope of `%r<9>`.
        n = self.taken.get(name) or int(isinstance(self._lookup(name), Reg))
        self.taken[name] = n + 1
        return f"{name}#{n}" if n else name

    def _directive(self, word: str, start: int, end: int) -> int:
        parser = self.parser
        text = parser.text
        if word == ".loc":
            m = _LOC.match(text, end)
            if not m:
                return parser._unknown(start, parser._skip_line(start))
            self.loc = self._source(m.groups())
            return m.end()
        if word == ".pragma":
            return parser._until(";", end, word) + 1
        if word.lstrip(".") in _SPACES or word in (".extern", ".visible"):
            linkage = word[1:] if word in (".extern", ".visible") else ""
            stop = parser._until(";", end, word)
            try:
                self._declare(text[end if linkage else start : stop], linkage)
            except _Unknown:
                parser._unknown(start, stop + 1)
            return stop + 1
        newline = parser._skip_line(end)
        stop = text.find(";", end, newline)
        return parser._unknown(start, newline if stop < 0 else stop)

    def _source(self, groups: tuple[str, ...]) -> SourceLoc:
        found = self.locs.get(groups)
        if found is None:
            files = self.parser.result.files
            outer = None
            if groups[3]:
                outer = SourceLoc(files.get(int(groups[3]), f"file {groups[3]}"), int(groups[4]))
            found = SourceLoc(files.get(int(groups[0]), f"file {groups[0]}"), int(groups[1]), outer)
            self.locs[groups] = found
        return found

    def _declare(self, declaration: str, linkage: str) -> None:
        scope, function = self.scope, self.function
        if declaration.lstrip().startswith(".reg"):
            m = re.fullmatch(r"\s*\.reg\s+(?:\.(v[248])\s+)?\.(\w+)\s+(.*?)\s*", declaration, re.DOTALL)
            if not m or m[2] not in TYPE_BYTES:
                raise _Unknown
            for part in m[3].split(","):
                d = _DECLARED.fullmatch(part.strip())
                if not d or d["dims"]:
                    raise _Unknown
                name = d["name"]
                unique = self._unique(name)
                if d["count"] is None:
                    scope.names[name] = unique
                    function.registers[unique] = m[2]
                    if m[1]:
                        for c in ("x", "y", "z", "w")[: int(m[1][1])]:
                            scope.names[f"{name}.{c}"] = f"{unique}.{c}"
                            function.registers[f"{unique}.{c}"] = m[2]
                else:
                    scope.ranges[name] = (int(d["count"][:12]), m[2], unique[len(name) :])
            scope.operands.clear()
            scope.operands["_"] = Reg("_")
            return
        for var in self.parser._variables(declaration, linkage):
            unique = self._unique(var.name)
            scope.names[var.name] = unique
            function.variables[unique] = Variable(
                unique, var.space, var.type, var.size, var.align, var.pointer_space, var.init, linkage
            )
        scope.operands.clear()
        scope.operands["_"] = Reg("_")

    def _instruction(self, statement: str, line: int) -> None:
        text = " ".join(statement.split())
        m = _INSTRUCTION.fullmatch(text)
        parser, function = self.parser, self.function
        if not m:
            if not text or not text.isprintable():
                raise PtxError(line, "not PTX")
            parser.result.unknown.append((line, text[:200]))
            return
        neg, pred, opcode, mods, args = m.groups()
        try:
            operands: tuple[Operand, ...] = ()
            if args:
                nested = "[" in args or "{" in args or "(" in args
                parts = _split(args) if nested else args.split(",")
                cache = self.scope.operands
                found = []
                for part in parts:
                    part = part.strip()
                    operand = cache.get(part)
                    if operand is None:
                        operand = cache[part] = self._operand(part)
                    found.append(operand)
                operands = tuple(found)
            if opcode == "call":
                operands = _call_operands(operands)
            guard = None
            if pred:
                reg = self._name(pred)
                if not isinstance(reg, Reg):
                    raise _Unknown
                guard = (reg.name, neg == "!")
        except _Unknown:
            parser.result.unknown.append((line, text[:200]))
            return
        index = len(function.body)
        if opcode in ("bra", "brx", "call", "mov"):
            self.branches.append((index, self.scope))
        function.body.append(
            Instruction(
                index,
                opcode,
                tuple(mods[1:].split(".")) if mods else (),
                operands,
                guard,
                line,
                self.loc,
                text,
                parser.inline_asm,
            )
        )

    # -- operands -----------------------------------------------------------------------------------------

    def _lookup(self, name: str) -> Reg | Symbol | None:
        """The declaration that a name means: innermost scope first."""
        function = self.function
        scope: _Scope | None = self.scope
        prefix = name.rstrip("0123456789")
        digits = name[len(prefix) :]
        while scope is not None:
            if name in scope.names:
                unique = scope.names[name]
                return Reg(unique) if unique in function.registers else Symbol(unique)
            if digits and prefix in scope.ranges:
                count, type_, suffix = scope.ranges[prefix]
                if len(digits) < 12 and int(digits) < count and (digits[0] != "0" or digits == "0"):
                    unique = name + suffix
                    function.registers[unique] = type_
                    return Reg(unique)
            scope = scope.parent
        return None

    def _name(self, name: str) -> Reg | Symbol | Imm:
        found = self._lookup(name)
        if found is not None:
            return found
        if name in SPECIAL_REGISTERS:
            return Reg(name)
        if name == "WARP_SZ":
            return Imm(32, name)
        if name.startswith("%"):
            raise _Unknown
        return Symbol(name)

    def _operand(self, part: str) -> Operand:
        if not part:
            raise _Unknown
        first = part[0]
        if first == "[":
            if part[-1] != "]":
                raise _Unknown
            return self._address(part[1:-1].strip())
        if first in "{(":
            if part[-1] != ("}" if first == "{" else ")"):
                raise _Unknown
            inner = part[1:-1].strip()
            return Vec(tuple(self._operand(p.strip()) for p in inner.split(","))) if inner else Vec(())
        if first == "!":
            reg = self._name(part[1:].strip())
            if not isinstance(reg, Reg):
                raise _Unknown
            return Not(reg)
        if "|" in part:
            a, _, b = part.partition("|")
            return Pair(self._operand(a.strip()), self._operand(b.strip()))
        if first.isdigit() or first in "+-.":
            return _immediate(part)
        if part == "_":
            return Reg("_")
        if _PLAIN.fullmatch(part):
            return self._name(part)
        m = _SUM.fullmatch(part)
        if m:
            base = self._name(m[1])
            if isinstance(base, Symbol):
                return Symbol(base.name, _offset(m))
        raise _Unknown

    def _address(self, inner: str) -> Operand:
        if "," in inner:
            base_text, _, rest = inner.partition(",")
            base = self._operand(base_text.strip())
            if not isinstance(base, Reg | Symbol):
                raise _Unknown
            coordinates: list[Operand] = []
            for part in _split(rest):
                operand = self._operand(part.strip())
                coordinates.extend(operand.items if isinstance(operand, Vec) else (operand,))
            return TensorAddr(base, tuple(coordinates))
        m = _SUM.fullmatch(inner)
        if m:
            base = self._name(m[1])
            return Addr(base, _offset(m)) if isinstance(base, Reg | Symbol) else _fail()
        if _PLAIN.fullmatch(inner):
            base = self._name(inner)
            return Addr(base) if isinstance(base, Reg | Symbol) else _fail()
        number = _immediate(inner)
        return Addr(None, number.value) if isinstance(number.value, int) else _fail()

    # -- labels -------------------------------------------------------------------------------------------

    def _resolve_labels(self) -> None:
        """Labels may stand after their use and inner scopes may reuse a name: bind them at the end."""
        function, module = self.function, self.parser.result
        for name, targets in function.branch_targets.items():
            function.branch_targets[name] = tuple(self.scope.labels.get(t, t) for t in targets)
        for index, scope in self.branches:
            ins = function.body[index]
            operands = tuple(self._bind(op, scope) for op in ins.operands)
            if operands != ins.operands:
                ins = replace(ins, operands=operands)
                function.body[index] = ins
            if ins.opcode == "bra":
                target = ins.operands[0] if len(ins.operands) == 1 else None
                if not isinstance(target, Symbol) or target.name not in function.labels:
                    raise PtxError(ins.line, f"branch to a label that does not exist: {ins.text[:80]}")
            elif ins.opcode == "brx":
                name = ins.operands[-1].name if ins.operands and isinstance(ins.operands[-1], Symbol) else ""
                missing = [t for t in function.branch_targets.get(name, ()) if t not in function.labels]
                if missing or name not in function.branch_targets:
                    module.unknown.append((ins.line, ins.text[:200]))

    @staticmethod
    def _bind(op: Operand, scope: _Scope | None) -> Operand:
        if not isinstance(op, Symbol):
            return op
        while scope is not None:
            if op.name in scope.labels:
                unique = scope.labels[op.name]
                return op if unique == op.name else Symbol(unique, op.offset)
            scope = scope.parent
        return op


# -- pieces of syntax -------------------------------------------------------------------------------------


def _fail() -> Operand:
    raise _Unknown


def _split(args: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts = []
    pos = 0
    while True:
        m = _OPERAND.match(args, pos)
        if not m:
            raise _Unknown
        parts.append(m[1])
        pos = m.end()
        if pos >= len(args):
            if args[-1] == ",":
                raise _Unknown
            return parts


def _call_operands(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """`call (r), f, (a), p` with the lists that the text leaves out."""
    rest = list(operands)
    results = rest.pop(0) if rest and isinstance(rest[0], Vec) else Vec(())
    if not rest or not isinstance(rest[0], Symbol | Reg):
        raise _Unknown
    target = rest.pop(0)
    arguments = rest.pop(0) if rest and isinstance(rest[0], Vec) else Vec(())
    if len(rest) > 1:
        raise _Unknown
    return (results, target, arguments, *rest)


def _offset(m: re.Match[str]) -> int:
    number = _immediate(m[3])
    if not isinstance(number.value, int):
        raise _Unknown
    return -number.value if m[2] == "-" else number.value


def _immediate(text: str) -> Imm:
    if len(text) > 64:
        raise _Unknown
    m = _INT.fullmatch(text)
    if m:
        digits = m[2]
        if digits[:2] in ("0x", "0X"):
            value = int(digits, 16)
        elif digits[:2] in ("0b", "0B"):
            value = int(digits[2:], 2)
        else:
            value = int(digits, 8 if digits[0] == "0" else 10)
        return Imm(-value if m[1] == "-" else value, text)
    m = _FLOAT_BITS.fullmatch(text)
    if m:
        if m[1]:
            return Imm(struct.unpack(">f", bytes.fromhex(m[2]))[0], text)
        return Imm(struct.unpack(">d", bytes.fromhex(m[4]))[0], text)
    if _FLOAT.fullmatch(text):
        return Imm(float(text), text)
    raise _Unknown


def _bytes(element: int, dims: str | None) -> int | None:
    """Size of an array of `element`-byte elements; None for `[]`."""
    size = element
    for dim in re.findall(r"\[\s*([^\]]*?)\s*\]", dims or ""):
        if not dim:
            return None
        try:
            size *= int(dim[:20], 0)
        except ValueError as e:
            raise _Unknown from e
    return size
