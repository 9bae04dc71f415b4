"""DSL01: inline assembly that touches memory or synchronises, but does not tell the compiler so.

The rule reads kernel *source* (Python with `llvm.inline_asm`, directly or through wrappers) and compiler IR
(MLIR `llvm.inline_asm`, LLVM `asm`), because in PTX it is too late: what the compiler moved or merged
leaves no trace.

Source is evaluated symbolically: a string is a set of possible texts in which a hole stands for what is not
known. An assembly text and its constraints are found together, as arguments of one call or as members of
one returned tuple; a wrapper is any function that passes its own parameters on to `llvm.inline_asm`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from ..findings import Finding, Severity, Site, Verdict
from .base import Mutation, Rule

HOLE = "\0"
_MOST_TEXTS = 32
_CLOBBER = "~{memory}"

_STATEMENT = re.compile(r"(?:@!?[\w%$.\0]+\s+)?([a-z][a-z0-9_]*)((?:[.:]{1,2}[\w:\0]+)*)", re.ASCII)
_ORDERING = frozenset(
    """bar barrier fence membar mbarrier griddepcontrol atom red cp multimem clusterlaunchcontrol tensormap
    wgmma tcgen05""".split()  # noqa: SIM905
)
_LOADS = frozenset(["ld", "ldu", "ldmatrix", "tex", "suld"])
_STORES = frozenset(["st", "stmatrix", "sust"])
_STRONG = frozenset(["relaxed", "acquire", "release", "volatile", "mmio", "async"])
_HARMLESS_SPACES = frozenset(["nc", "param", "const", "local"])  # nobody writes them while the kernel runs
_PREFETCH = frozenset(["prefetch"])


def memory_statements(assembly: str) -> list[tuple[str, bool]]:
    """(instruction, orders) of each statement of an assembly text that touches memory; `orders` marks those
    that synchronise or are strong."""
    found = []
    for statement in re.split(r"[;{}\n]", assembly):
        text = re.sub(r"^\s*[\w$]+:(?!:)", "", statement).strip()
        m = _STATEMENT.match(text)
        if m is None:
            continue
        opcode, mods = m[1], set(re.split(r"[.]", m[2]))
        if mods & _PREFETCH or (opcode in _LOADS and mods & _HARMLESS_SPACES):
            continue
        if opcode in _ORDERING:
            found.append((opcode + m[2].replace(HOLE, "*"), True))
        elif opcode in _LOADS | _STORES:
            found.append((opcode + m[2].replace(HOLE, "*"), bool(mods & _STRONG)))
    return found


@dataclass(frozen=True)
class InlineAsm:
    """One inline assembly of the source. `clobbers` and `effects` are True, False, or None for "cannot tell"."""

    file: str
    line: int
    function: str
    assembly: frozenset[str]
    clobbers: bool | None
    effects: bool | None


def judge(site: InlineAsm) -> Finding | None:
    """The finding for one inline assembly, None if it says all that it must."""
    touched = {s for text in site.assembly for s in memory_statements(text)}
    if not touched:
        return None
    always = all(memory_statements(text) for text in site.assembly)
    orders = any(o for _, o in touched)
    names = ", ".join(sorted({n for n, _ in touched}))[:120]
    if site.effects is True and site.clobbers is True:
        return None
    definite = always and (site.effects is False or site.clobbers is False)
    lacks = []
    if site.effects is not True:
        lacks.append("side effects are off" if site.effects is False else "side effects may be off")
    if site.clobbers is not True:
        lacks.append(
            f"{_CLOBBER} is {'not' if site.clobbers is False else 'perhaps not'} among the constraints"
        )
    consequence = (
        "the compiler may merge, move or drop it"
        if site.effects is not True
        else "the compiler may move ordinary loads and stores across it"
    )
    verdict = Verdict.FINDING if definite else Verdict.INCONCLUSIVE
    return Finding(
        "DSL01",
        Severity.ERROR if orders else Severity.WARNING,
        verdict,
        site.function,
        f"inline assembly `{names}` {'orders' if orders else 'touches'} memory, but {' and '.join(lacks)}: "
        f"{consequence}",
        (Site(site.line, names, "inline assembly", f"{site.file}:{site.line}"),),
        missing="side effects and a memory clobber on the assembly",
        fix=f"pass has_side_effects=True and end the constraints with {_CLOBBER}",
        settle=""
        if definite
        else "constraints and side effects that can be read from the source at this place",
    )


# -- Python source ----------------------------------------------------------------------------------------

Texts = frozenset[str]
UNKNOWN: Texts = frozenset([HOLE])


class _Strings:
    """Possible values of string expressions, by a walk over a function's statements in order."""

    def __init__(self, constants: Mapping[str, Texts]) -> None:
        self.values: dict[str, Texts] = dict(constants)

    def of(self, node: ast.expr) -> Texts:
        if isinstance(node, ast.Constant):
            return frozenset([node.value]) if isinstance(node.value, str) else UNKNOWN
        if isinstance(node, ast.Name):
            return self.values.get(node.id, UNKNOWN)
        if isinstance(node, ast.JoinedStr):
            return self._join([self._part(v) for v in node.values])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._join([self.of(node.left), self.of(node.right)])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return self._join([self.of(node.left), UNKNOWN])
        if isinstance(node, ast.IfExp):
            return self._cap(self.of(node.body) | self.of(node.orelse))
        if isinstance(node, ast.List | ast.Tuple):
            return self._join([x for e in node.elts for x in (self.of(e), frozenset([","]))])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            return self._join([self.of(a) for a in node.args])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return self.of(node.func.value)
        return UNKNOWN

    def _part(self, node: ast.expr) -> Texts:
        return self.of(node.value) if isinstance(node, ast.FormattedValue) else self.of(node)

    def _join(self, parts: list[Texts]) -> Texts:
        out: Texts = frozenset([""])
        for part in parts:
            out = self._cap(frozenset(a + b for a, b in product(out, part)))
        return out

    @staticmethod
    def _cap(texts: Texts) -> Texts:
        return texts if len(texts) <= _MOST_TEXTS else frozenset(sorted(texts)[:_MOST_TEXTS])

    def run(self, statement: ast.stmt) -> None:
        """Take an assignment into account. Branches unite: each of their assignments may or may not happen."""
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                self._assign(target, statement.value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, statement.value)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            old = self.values.get(name, UNKNOWN)
            self.values[name] = self._join([old, self.of(statement.value)])
        else:
            for field in ("body", "orelse", "finalbody"):
                block = getattr(statement, field, [])
                before = dict(self.values)
                for inner in block if isinstance(block, list) else []:
                    if isinstance(inner, ast.stmt):
                        self.run(inner)
                for name, value in before.items():
                    self.values[name] = self._cap(self.values[name] | value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.values[target.id] = self.of(value)
        elif (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for t, v in zip(target.elts, value.elts, strict=True):
                self._assign(t, v)
        elif isinstance(target, ast.Tuple):
            for t in target.elts:
                if isinstance(t, ast.Name):
                    self.values[t.id] = UNKNOWN


@dataclass(frozen=True)
class _Wrapper:
    """A function that ends in `llvm.inline_asm`. None: taken from an argument that is not known here."""

    clobbers: bool | None
    effects: bool | None
    effects_keyword: str = ""
    negated: bool = False


def check_sources(sources: Mapping[str, str]) -> list[Finding]:
    """Findings of Python sources, given as file name -> text. A file that does not parse gives an *error*."""
    trees = {}
    findings: list[Finding] = []
    for file, text in sources.items():
        try:
            trees[file] = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            line = getattr(e, "lineno", 0) or 0
            findings.append(
                Finding("DSL01", Severity.ERROR, Verdict.ERROR, "", f"{file}: not Python that can be read: {e}",
                        (Site(line, "", "", f"{file}:{line}"),))
            )  # fmt: skip
    wrappers = {name: w for tree in trees.values() for name, w in _wrappers(tree)}
    for file, tree in trees.items():
        for site in _sites(file, tree, wrappers):
            finding = judge(site)
            if finding is not None:
                findings.append(finding)
    return findings


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _calls(function: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield node


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _inline_asm(call: ast.Call) -> tuple[ast.expr | None, ast.expr | None, ast.expr | None] | None:
    """(assembly, constraints, has_side_effects) of `llvm.inline_asm(type, operands, assembly, constraints, ...)`."""
    if _name(call.func) != "inline_asm":
        return None
    keywords = {k.arg: k.value for k in call.keywords}
    positional = dict(enumerate(call.args))
    return (
        keywords.get("asm_string", positional.get(2)),
        keywords.get("constraints", positional.get(3)),
        keywords.get("has_side_effects", positional.get(4)),
    )


def _flag(node: ast.expr | None, default: bool | None = False) -> tuple[bool | None, str, bool]:
    """(value, name of the parameter that decides, negated) of a boolean expression."""
    if node is None:
        return default, "", False
    if isinstance(node, ast.Constant):
        return bool(node.value), "", False
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value, name, negated = _flag(node.operand)
        return (None if value is None else not value), name, not negated
    return None, _name(node), False


def _wrappers(tree: ast.AST) -> Iterator[tuple[str, _Wrapper]]:
    for function in _functions(tree):
        strings = _Strings({})
        for statement in function.body:
            strings.run(statement)
        for call in _calls(function):
            parts = _inline_asm(call)
            if parts is None or parts[0] is None or HOLE not in "".join(strings.of(parts[0])):
                continue
            constraints = strings.of(parts[1]) if parts[1] is not None else UNKNOWN
            clobbers = True if all(_CLOBBER in c for c in constraints) else None
            effects, keyword, negated = _flag(parts[2])
            yield function.name, _Wrapper(clobbers, effects, keyword, negated)


def _sites(file: str, tree: ast.Module, wrappers: Mapping[str, _Wrapper]) -> Iterator[InlineAsm]:
    module = _Strings({})
    for statement in tree.body:
        module.run(statement)
    for function in _functions(tree):
        strings = _Strings(module.values)
        arguments = function.args
        for a in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs):
            strings.values.pop(a.arg, None)
        yield from _sites_of(file, function, strings, wrappers)


def _sites_of(
    file: str,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    strings: _Strings,
    wrappers: Mapping[str, _Wrapper],
) -> Iterator[InlineAsm]:
    def visit(statements: Iterable[ast.stmt]) -> Iterator[InlineAsm]:
        for statement in statements:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            inner = [getattr(statement, f, None) for f in ("body", "orelse", "finalbody")]
            blocks = [b for b in inner if isinstance(b, list) and b]
            if blocks:
                for block in blocks:
                    yield from visit(block)
            else:
                yield from _here(file, function, statement, strings, wrappers)
            if not blocks:
                strings.run(statement)

    yield from visit(function.body)


def _here(
    file: str,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    statement: ast.stmt,
    strings: _Strings,
    wrappers: Mapping[str, _Wrapper],
) -> Iterator[InlineAsm]:
    for call in _calls(statement):
        parts = _inline_asm(call)
        if parts is not None and parts[0] is not None:
            constraints = strings.of(parts[1]) if parts[1] is not None else UNKNOWN
            effects = _flag(parts[2])[0]
            texts = strings.of(parts[0])
            if HOLE not in texts:
                yield InlineAsm(file, call.lineno, function.name, texts, _has_clobber(constraints), effects)
            continue
        wrapper = wrappers.get(_name(call.func))
        if wrapper is None or not call.args:
            continue
        texts = strings.of(call.args[0])
        if HOLE in texts:
            continue
        constraints = strings.of(call.args[1]) if len(call.args) > 1 else frozenset([""])
        clobbers = True if wrapper.clobbers else _has_clobber(constraints)
        yield InlineAsm(file, call.lineno, function.name, texts, clobbers, _effects(call.keywords, wrapper))
    if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
        yield from _returned(file, function, statement.value, strings, wrappers)


def _returned(
    file: str,
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    value: ast.Tuple,
    strings: _Strings,
    wrappers: Mapping[str, _Wrapper],
) -> Iterator[InlineAsm]:
    """`return assembly, constraints, operands` of a function whose decorator makes the call."""
    if len(value.elts) < 2 or not function.decorator_list:
        return
    texts, constraints = strings.of(value.elts[0]), strings.of(value.elts[1])
    if HOLE in texts or not any(";" in t for t in texts):
        return
    for decorator in function.decorator_list:
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
        pure = next((_flag(k.value)[0] for k in keywords if k.arg == "pure"), False)
        effects = None if pure is None else not pure
        last = value.elts[-1]
        if len(value.elts) > 4 or (
            len(value.elts) == 4 and isinstance(last, ast.UnaryOp | ast.Constant | ast.Name)
        ):
            effects = None  # the function itself decides whether it is pure
        yield InlineAsm(file, value.lineno, function.name, texts, _has_clobber(constraints), effects)
        return


def _effects(keywords: list[ast.keyword], wrapper: _Wrapper) -> bool | None:
    if wrapper.effects is not None or not wrapper.effects_keyword:
        return wrapper.effects
    for k in keywords:
        if k.arg == wrapper.effects_keyword:
            value = _flag(k.value)[0]
            return None if value is None else value != wrapper.negated
    return None


def _has_clobber(constraints: Texts) -> bool | None:
    found = {_CLOBBER in c for c in constraints}
    if found == {True}:
        return True
    if found == {False} and not any(HOLE in c for c in constraints):
        return False
    return None


# -- compiler IR ------------------------------------------------------------------------------------------

_STRING = r'"((?:[^"\\]|\\.)*)"'
_MLIR = re.compile(r"llvm\.inline_asm\b([^\"\n]*)" + _STRING + r"\s*,\s*" + _STRING)
_LLVM = re.compile(
    r"\basm\s+((?:sideeffect|alignstack|inteldialect|unwind)?(?:\s+\w+)*?)\s*"
    + _STRING
    + r"\s*,\s*"
    + _STRING
)


def check_ir(text: str, file: str) -> list[Finding]:
    """Findings of MLIR or LLVM IR text."""
    findings = []
    for pattern, effect in ((_MLIR, "has_side_effects"), (_LLVM, "sideeffect")):
        for m in pattern.finditer(text):
            assembly = re.sub(r"\\(?:0A|09|n|t)", "\n", m[2])
            line = text.count("\n", 0, m.start()) + 1
            site = InlineAsm(file, line, "", frozenset([assembly]), _CLOBBER in m[3], effect in m[1])
            finding = judge(site)
            if finding is not None:
                findings.append(finding)
    return findings


_PASSING = """
from cutlass._mlir.dialects import llvm


def ordering(assembly, constraints="", operands=()):
    llvm.inline_asm(None, list(operands), assembly, f"{constraints},~{{memory}}", has_side_effects=True)


def publish(address, value):
    ordering("st.release.gpu.global.u32 [$0], $1;", "l,r", (address, value))


def arrive(barrier):
    llvm.inline_asm(
        None, [barrier], "mbarrier.arrive.shared::cta.b64 _, [$0];", "r,~{memory}", has_side_effects=True
    )


def double(x, result_type):
    return llvm.inline_asm(result_type, [x], "add.f32 $0, $1, $1;", "=f,f", has_side_effects=False)
"""

RULE = Rule(
    id="DSL01",
    title="inline assembly orders or touches memory without telling the compiler",
    severity=Severity.ERROR,
    meaning=(
        "To the compiler an inline assembly is a function of its operands, unless it is told more. Without side "
        "effects "
        "two equal ones may be merged, one may be moved out of a loop or above a barrier, and one whose result is "
        "unused "
        "may be dropped: a polling load is then read once. With side effects but without a memory clobber it "
        "stays, but "
        "ordinary loads and stores may move across it, so a flag can be stored before the data that it announces. What "
        "orders memory, or reads what another thread writes, needs both. Loads of memory that nobody writes while the "
        "kernel runs (.nc, .const, .param) need neither."
    ),
    looks_for=(
        "assembly texts with loads, stores or synchronising instructions whose `has_side_effects` is false or whose "
        "constraints lack ~{memory}: in `llvm.inline_asm` calls, in calls of wrappers around it, in tuples that such a "
        "wrapper's decorator turns into a call, and in MLIR or LLVM IR text"
    ),
    isa_section="LLVM Language Reference: Inline Assembler Expressions (sideeffect, memory clobber)",
    fix="has_side_effects=True and ~{memory} in the constraints",
    failing=_PASSING.replace('"r,~{memory}", has_side_effects=True', '"r", has_side_effects=True'),
    passing=_PASSING,
    mutations=(
        Mutation("clobber dropped", '"r,~{memory}"', '"r"'),
        Mutation("clobber dropped in the wrapper", 'f"{constraints},~{{memory}}"', "constraints"),
        Mutation(
            "side effects off",
            '"r,~{memory}", has_side_effects=True',
            '"r,~{memory}", has_side_effects=False',
        ),
        Mutation("side effects left out", '"r,~{memory}", has_side_effects=True', '"r,~{memory}"'),
        Mutation("pure arithmetic becomes a load", "add.f32 $0, $1, $1;", "ld.volatile.global.f32 $0, [$1];"),
    ),
    check=lambda text: check_sources({"<snippet>": text}),
    language="python",
)
