"""The herd-style `.litmus` dialect for PTX: parser and printer.

The dialect is that of the public Dat3M collection (PTX name, quoted comments, initial state in braces, one column per
thread, a quantified condition). Beyond it, in the words of the PTX ISA:

    P0@cta 0,cluster 0,gpu 0,grid 1,pdl 1      clusters, several grids of one stream, programmatic launch
    b @ mbarrier 2                             in the initial state: an initialised mbarrier of two arrivals
    fence.{acquire,release}.s   membar.{cta,gl,sys}   fence.proxy.async   fence.mbarrier_init.release.cluster
    bar.sync id, count                         a barrier of the ISA; `bar.cta.sync instance, id, count` is the dialect's
    barrier.cluster.{arrive,wait}   griddepcontrol.{wait,launch_dependents}
    mbarrier.{init,arrive,arrive.expect_tx,expect_tx,complete_tx,try_wait,test_wait} b, ...
    st.async x, value, b        cp.async.bulk to, from, bytes, b       cp.async.bulk.{commit_group,wait_group}

State spaces and types are accepted and ignored; brackets around addresses and `%` before registers are optional.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .program import (
    ARITHMETIC,
    Address,
    AsyncStore,
    Atomic,
    Barrier,
    Branch,
    BulkCommit,
    BulkCopy,
    BulkWait,
    ClusterBarrier,
    Compare,
    Condition,
    Fence,
    GridTrigger,
    GridWait,
    Instruction,
    Label,
    Load,
    Local,
    Logic,
    MbarrierInit,
    MbarrierInitFence,
    MbarrierUpdate,
    MbarrierWait,
    ModelError,
    Operand,
    Place,
    Program,
    Proxy,
    ProxyFence,
    Quantifier,
    Scope,
    Sem,
    Store,
    Thread,
    Variable,
)


class LitmusError(ModelError):
    """A text that is not of the dialect; the message says where."""


_COMMENT = re.compile(r"\(\*.*?\*\)|<<.*?>>", re.DOTALL)
_TAIL = re.compile(r"(?:^|;)\s*((?:locations|filter|exists|forall|final)\b|(?:~|not\b)\s*exists\b)")
_NUMBER = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|\d+)\Z")
_NAME = re.compile(r"[A-Za-z_$][\w$.]*\Z")
_REGISTER = re.compile(r"(?:%[\w$.]+|r\d+)\Z")


def parse(text: str) -> Program:
    """The program of one litmus text. Raises LitmusError."""
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
    head, brace, rest = text.partition("{")
    header = re.match(r"\s*(?:PTX|ptx)\s+(\S+)(.*)\Z", head, re.DOTALL)
    if header is None or not brace:
        raise LitmusError("a litmus text begins with `PTX name` and an initial state in braces")
    initial, brace, body = rest.partition("}")
    if not brace:
        raise LitmusError("the initial state has no closing brace")
    tail = _TAIL.search(body)
    columns, final = (body[: tail.start(1)], body[tail.start(1) :]) if tail else (body, "")
    places, rows = _columns(columns)
    state = _initial_state(initial, [name for name, _ in places])
    threads = tuple(
        Thread(name, place, tuple(_instructions(name, rows[i])), state.registers.get(name, {}))
        for i, (name, place) in enumerate(places)
    )
    quantifier, condition, restriction, show = _Final(final, {name for name, _ in places}).parse()
    return Program(
        header.group(1),
        threads,
        state.memory,
        state.mbarriers,
        state.addresses,
        quantifier,
        condition,
        restriction,
        show,
        " ".join(re.sub(r'"', " ", header.group(2)).split()),
    )


# Initial state.


@dataclass
class _Initial:
    memory: dict[str, int] = field(default_factory=dict)
    registers: dict[str, dict[str, int]] = field(default_factory=dict)
    mbarriers: dict[str, int] = field(default_factory=dict)
    addresses: dict[str, Address] = field(default_factory=dict)


_DECLARATION: list[tuple[str, re.Pattern[str]]] = [
    ("mbarrier", re.compile(r"(?P<name>[\w$]+)\s*@\s*mbarrier\s+(?P<value>\d+)\Z")),
    ("alias", re.compile(r"(?P<name>[\w$]+)\s*@\s*(?P<proxy>\w+)\s+aliases\s+(?P<of>[\w$]+)\Z")),
    ("register", re.compile(r"P?(?P<thread>\d+)\s*:\s*%?(?P<name>[\w$.]+)\s*=\s*(?P<value>\S+)\Z")),
    ("memory", re.compile(r"\[?(?P<name>[\w$]+)\]?\s*=\s*(?P<value>\S+)\Z")),
]


def _initial_state(text: str, threads: Sequence[str]) -> _Initial:
    out = _Initial()
    for item in (" ".join(part.split()) for part in text.split(";")):
        if not item:
            continue
        found = next(((kind, m) for kind, pattern in _DECLARATION if (m := pattern.match(item))), None)
        if found is None:
            raise LitmusError(f"initial state: cannot read `{item}`")
        kind, m = found
        if kind == "mbarrier":
            out.mbarriers[m["name"]] = int(m["value"])
        elif kind == "alias":
            out.addresses[m["name"]] = _alias(out, m["name"], m["proxy"], m["of"])
        elif kind == "register":
            if f"P{m['thread']}" not in threads:
                raise LitmusError(f"initial state: `{item}` names no thread")
            out.registers.setdefault(f"P{m['thread']}", {})[m["name"]] = _initial_value(item, m["value"])
        elif m["value"] in out.memory:
            out.memory[m["name"]] = out.memory[m["value"]]
        else:
            out.memory[m["name"]] = _initial_value(item, m["value"])
    out.registers = {t: values for t, kept in out.registers.items() if (values := _not_zero(kept))}
    return out


def _not_zero(values: dict[str, int]) -> dict[str, int]:
    return {k: v for k, v in values.items() if v}


def _initial_value(item: str, text: str) -> int:
    if not _NUMBER.match(text):
        raise LitmusError(
            f"initial state: `{item}`: only numbers are values; addresses in registers are not modelled"
        )
    return int(text, 0)


def _alias(state: _Initial, name: str, proxy: str, of: str) -> Address:
    if proxy not in (Proxy.GENERIC, Proxy.SURFACE, Proxy.TEXTURE, Proxy.CONSTANT):
        raise LitmusError(
            f"`{name} @ {proxy} aliases {of}`: the proxy is generic, surface, texture or constant"
        )
    target = state.addresses.get(of) or Address(of, of, of)
    return Address(name, name if proxy == Proxy.GENERIC else target.generic, target.physical)


# Threads.

_PLACE_KEYS = ("cta", "cluster", "gpu", "grid", "pdl")


def _columns(text: str) -> tuple[list[tuple[str, Place]], list[list[str]]]:
    """Names and places of the threads, and the cells of each column."""
    lines = [line.split("|") for line in text.strip().lstrip(";").split(";") if line.strip()]
    if not lines:
        raise LitmusError("there are no threads")
    places = [_thread_header(cell.strip()) for cell in lines[0]]
    if len({name for name, _ in places}) != len(places):
        raise LitmusError("two threads have the same name")
    columns: list[list[str]] = [[] for _ in places]
    for row in lines[1:]:
        if len(row) > len(places):
            raise LitmusError(
                f"a row has {len(row)} cells for {len(places)} threads: {' | '.join(row).strip()}"
            )
        for column, cell in zip(columns, row, strict=False):
            if cell.strip():
                column.append(" ".join(cell.split()))
    return places, columns


def _thread_header(text: str) -> tuple[str, Place]:
    m = re.match(r"(P\d+)\s*@\s*(.+)\Z", text, re.DOTALL)
    if m is None:
        raise LitmusError(f"`{text}`: a thread is declared as `P0@cta 0,gpu 0`")
    numbers: dict[str, int] = {}
    for part in m.group(2).split(","):
        key = re.match(r"\s*(\w+)\s+(\d+)\s*\Z", part)
        if key is None or key.group(1) not in _PLACE_KEYS:
            raise LitmusError(f"`{text}`: a place is made of {', '.join(_PLACE_KEYS)} and their numbers")
        numbers[key.group(1)] = int(key.group(2))
    return m.group(1), Place(
        numbers.get("cta", 0),
        numbers.get("gpu", 0),
        numbers.get("cluster"),
        numbers.get("grid", 0),
        bool(numbers.get("pdl", 0)),
    )


def _instructions(thread: str, cells: Sequence[str]) -> list[Instruction]:
    out: list[Instruction] = []
    for cell in cells:
        label = re.match(r"([A-Za-z_$][\w$]*)\s*:\s*(.*)\Z", cell)
        if label:
            out.append(Label(label.group(1)))
            cell = label.group(2)
        if cell:
            try:
                out.append(instruction(cell))
            except ModelError as e:
                raise LitmusError(f"thread {thread}: `{cell}`: {e}") from e
    return out


# Instructions.


@dataclass
class _Text:
    """An opcode taken apart, and its operands."""

    mods: list[str]
    operands: list[str]

    def take(self, *words: str) -> str:
        """The first modifier among `words`, removed; "" if there is none."""
        for mod in self.mods:
            if mod in words:
                self.mods.remove(mod)
                return mod
        return ""

    def sem(self, default: Sem | None = None) -> Sem:
        word = self.take(*(s.value for s in Sem))
        if not word and default is None:
            raise LitmusError("the memory semantics are missing")
        return Sem(word) if word else default  # type: ignore[return-value]

    def scope(self, default: Scope | None = None) -> Scope:
        word = self.take("cta", "cluster", "gpu", "sys")
        if not word and default is None:
            raise LitmusError("the scope is missing")
        return Scope[word.upper()] if word else default  # type: ignore[return-value]

    def done(self) -> None:
        left = [m for m in self.mods if m not in _IGNORED and not _TYPE.match(m)]
        if left:
            raise LitmusError(f".{left[0]} is not modelled here")

    def want(self, count: int) -> list[str]:
        if len(self.operands) != count:
            raise LitmusError(f"{count} operands are needed, {len(self.operands)} are there")
        return self.operands


_IGNORED = {
    *("global", "shared", "shared::cta", "shared::cluster", "local", "generic", "aligned", "b8", "tile"),
    *("mbarrier::complete_tx::bytes", "bulk_group", "parity"),
}
_TYPE = re.compile(r"[busf](?:8|16|32|64)\Z")
_BRANCHES = {"beq": "eq", "bne": "ne", "blt": "lt", "ble": "le", "bgt": "gt", "bge": "ge"}
_LOADS = {"ld": Proxy.GENERIC, "tld": Proxy.TEXTURE, "suld": Proxy.SURFACE, "cold": Proxy.CONSTANT}
_STORES = {"st": Proxy.GENERIC, "sust": Proxy.SURFACE}
_ATOMICS = {"atom": Proxy.GENERIC, "suatom": Proxy.SURFACE}
_REDUCTIONS = {"red": Proxy.GENERIC, "sured": Proxy.SURFACE}
_SYNONYMS = {"plus": "add", "minus": "sub", "mult": "mul"}  # older spellings of the dialect
_OPERATIONS = {*ARITHMETIC} - {"mov"} | {"cas"}


def instruction(text: str) -> Instruction:
    """One instruction. Raises LitmusError."""
    opcode, _, rest = text.strip().rstrip(";").partition(" ")
    name, *mods = opcode.split(".")
    operands = [_strip(o) for o in rest.split(",")] if rest.strip() else []
    t = _Text(mods, operands)
    reader = _READERS.get(name)
    if reader is None:
        raise LitmusError("no such instruction in the model")
    out = reader(name, t)
    t.done()
    return out


def _strip(operand: str) -> str:
    operand = operand.strip()
    return operand[1:-1].strip() if operand.startswith("[") and operand.endswith("]") else operand


def _is_register(text: str) -> bool:
    return bool(_REGISTER.match(text))


def _register(text: str) -> str:
    if not _is_register(text):
        raise LitmusError(f"{text or 'nothing'} is no register (r0, r1, ... or %name)")
    return text.removeprefix("%")


def _location(text: str) -> str:
    if not _NAME.match(text) or _is_register(text):
        raise LitmusError(f"{text or 'nothing'} is no location")
    return text


def _number(text: str) -> int:
    if not _NUMBER.match(text):
        raise LitmusError(f"{text or 'nothing'} is no number")
    return int(text, 0)


def _operand(text: str) -> Operand:
    return int(text, 0) if _NUMBER.match(text) else _register(text)


def _strong(t: _Text) -> tuple[Sem, Scope]:
    """Semantics and scope of a load or store: weak unless said; `.volatile` and `.mmio` are relaxed.sys (§8.4)."""
    if t.take("volatile", "mmio"):
        t.take("relaxed"), t.take("sys")  # .mmio is written with them
        return Sem.RELAXED, Scope.SYS
    if t.take("nc"):
        raise LitmusError("ld.global.nc is outside the memory consistency model")
    sem = t.sem(Sem.WEAK)
    if sem == Sem.WEAK:
        if t.take("cta", "cluster", "gpu", "sys"):
            raise LitmusError("a weak access has no scope")
        return sem, Scope.SYS
    return sem, t.scope()


def _load(name: str, t: _Text) -> Instruction:
    target, source = t.want(2)
    if _NUMBER.match(source) or _is_register(source):
        t.sem(Sem.WEAK)  # the dialect also writes `ld.weak r0, 1`
        return Local(_register(target), "mov", _operand(source))
    sem, scope = _strong(t)
    if sem not in (Sem.WEAK, Sem.RELAXED, Sem.ACQUIRE):
        raise LitmusError(f"a load is not {sem}")
    return Load(_register(target), _location(source), sem, scope, _LOADS[name])


def _store(name: str, t: _Text) -> Instruction:
    if t.take("async"):
        return _async_store(t)
    address, value = t.want(2)
    sem, scope = _strong(t)
    if sem not in (Sem.WEAK, Sem.RELAXED, Sem.RELEASE):
        raise LitmusError(f"a store is not {sem}")
    return Store(_location(address), _operand(value), sem, scope, _STORES[name])


def _width(t: _Text) -> int:
    """Bytes of an access, from its type and vector length; 4 if the text does not say."""
    vector = t.take("v2", "v4")
    kind = next((m for m in t.mods if _TYPE.match(m)), "b32")
    return int(kind[1:]) // 8 * (int(vector[1:]) if vector else 1)


def _async_store(t: _Text) -> Instruction:
    t.take("weak")
    address, value, barrier = t.want(3)
    return AsyncStore(_location(address), _operand(value), _location(barrier), _width(t))


def _atomic(name: str, t: _Text) -> Instruction:
    returns = name in _ATOMICS
    word = t.take(*_OPERATIONS, *_SYNONYMS)
    op = _SYNONYMS.get(word, word)
    sem, scope = t.sem(Sem.RELAXED), t.scope(Scope.GPU)
    if sem in (Sem.WEAK, Sem.SC):
        raise LitmusError(f"an atomic is not {sem}")
    if not op or (not returns and op in ("cas", "exch")):
        raise LitmusError("the operation is missing, or not one of the model")
    operands = t.want(returns + 1 + (2 if op == "cas" else 1))
    register = _register(operands[0]) if returns else None
    address, *arguments = operands[returns:]
    proxy = (_ATOMICS if returns else _REDUCTIONS)[name]
    return Atomic(register, _location(address), op, tuple(_operand(a) for a in arguments), sem, scope, proxy)


def _fence(_: str, t: _Text) -> Instruction:
    if t.take("proxy"):
        kind = t.take(*(p.value for p in Proxy))
        if not kind:
            raise LitmusError("the proxy is alias, async, constant, generic, surface or texture")
        if t.mods:
            raise LitmusError(f".{t.mods[0]}: a proxy fence of some state space only is not modelled")
        return ProxyFence(Proxy(kind))
    if t.take("mbarrier_init"):
        if (t.sem(), t.scope()) != (Sem.RELEASE, Scope.CLUSTER):
            raise LitmusError("the form is fence.mbarrier_init.release.cluster")
        return MbarrierInitFence()
    sem = t.sem(Sem.ACQ_REL)
    if sem in (Sem.WEAK, Sem.RELAXED):
        raise LitmusError(f"a fence is not {sem}")
    return Fence(sem, t.scope())


def _membar(_: str, t: _Text) -> Instruction:
    level = t.take("cta", "gl", "sys")
    if not level:
        raise LitmusError("the level is cta, gl or sys")
    return Fence(Sem.SC, Scope.GPU if level == "gl" else Scope[level.upper()])


def _barrier(name: str, t: _Text) -> Instruction:
    if t.take("cluster"):
        arrive = t.take("arrive", "wait") == "arrive"
        return ClusterBarrier(arrive, t.sem(Sem.RELEASE if arrive else Sem.ACQUIRE))
    dialect = bool(t.take("cta")) and name == "bar"
    operation = t.take("arrive", "sync")
    if not operation:
        raise LitmusError("the barrier operation is sync or arrive")
    arrive = operation == "arrive"
    operands = t.operands
    if dialect and len(operands) in (2, 3):
        instance, identity, *count = operands
        return Barrier(arrive, _operand(identity), _number(count[0]) if count else None, _number(instance))
    if not 1 <= len(operands) <= 2:
        raise LitmusError("a barrier has an id, and may have a count")
    count_of = _number(operands[1]) if len(operands) == 2 else None
    return Barrier(arrive, _operand(operands[0]), count_of)


def _mbarrier(_: str, t: _Text) -> Instruction:
    op = t.take("init", "arrive", "expect_tx", "complete_tx", "try_wait", "test_wait")
    if op == "init":
        barrier, count = t.want(2)
        return MbarrierInit(_location(barrier), _number(count))
    if op in ("try_wait", "test_wait"):
        register = None
        if len(t.operands) == 3:
            register = _register(t.operands.pop(0))
        barrier, parity = t.want(2)
        sem, scope = t.sem(Sem.ACQUIRE), t.scope(Scope.CTA)
        return MbarrierWait(_location(barrier), _number(parity), sem, scope, register)
    if not op:
        raise LitmusError("the mbarrier operation is not one of the model")
    expects = op == "arrive" and bool(t.take("expect_tx"))
    sem = t.sem(Sem.RELEASE if op == "arrive" else Sem.RELAXED)
    scope = t.scope(Scope.CTA)
    operands = t.operands[1:] if t.operands[:1] == ["_"] else t.operands
    if not 1 <= len(operands) <= 2 or (len(operands) == 1 and (expects or op != "arrive")):
        raise LitmusError("an mbarrier operation has a barrier, and a count of arrivals or bytes")
    barrier, value = _location(operands[0]), _number(operands[1]) if len(operands) == 2 else 1
    if op == "arrive":
        return MbarrierUpdate(barrier, 1 if expects else value, value if expects else 0, sem, scope)
    return MbarrierUpdate(barrier, 0, value if op == "expect_tx" else -value, sem, scope)


def _copy(_: str, t: _Text) -> Instruction:
    if not (t.take("async") and t.take("bulk")):
        raise LitmusError("only cp.async.bulk is modelled")
    if t.take("commit_group"):
        return BulkCommit()
    if t.take("wait_group"):
        read = bool(t.take("read"))
        return BulkWait(_number(t.want(1)[0]), read)
    if not 3 <= len(t.operands) <= 4:
        raise LitmusError("a bulk copy has a destination, a source, bytes, and may have an mbarrier")
    to, source, size, *barrier = t.operands
    return BulkCopy(
        _location(to), _location(source), _number(size), _location(barrier[0]) if barrier else None
    )


def _grid(_: str, t: _Text) -> Instruction:
    op = t.take("wait", "launch_dependents")
    if not op:
        raise LitmusError("the operation is wait or launch_dependents")
    t.want(0)
    return GridWait() if op == "wait" else GridTrigger()


def _arithmetic(name: str, t: _Text) -> Instruction:
    t.take("lo", "wide")
    if name == "mov":
        target, a = t.want(2)
        return Local(_register(target), "mov", _operand(a))
    target, a, b = t.want(3)
    return Local(_register(target), name, _operand(a), _operand(b))


def _branch(name: str, t: _Text) -> Instruction:
    t.take("uni")
    if name in ("goto", "bra"):
        return Branch(t.want(1)[0])
    a, b, label = t.want(3)
    return Branch(label, _BRANCHES[name], _operand(a), _operand(b))


_READERS: dict[str, Callable[[str, _Text], Instruction]] = {
    **dict.fromkeys(_LOADS, _load),
    **dict.fromkeys(_STORES, _store),
    **dict.fromkeys((*_ATOMICS, *_REDUCTIONS), _atomic),
    **dict.fromkeys(("mov", "add", "sub", "mul", "div", "and", "or", "xor", "min", "max"), _arithmetic),
    **dict.fromkeys((*_BRANCHES, "goto", "bra"), _branch),
    "fence": _fence,
    "membar": _membar,
    "bar": _barrier,
    "barrier": _barrier,
    "mbarrier": _mbarrier,
    "cp": _copy,
    "griddepcontrol": _grid,
}


# The final condition.

_TOKEN = re.compile(
    r"\s*(/\\|\\/|&&|\|\||==|!=|<=|>=|[()\[\]~=<>;:]|[-+]?0[xX][0-9a-fA-F]+|[-+]?\d+|%?[A-Za-z_$][\w$.]*)"
)
_COMPARE = {"=": "eq", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}


class _Final:
    """A parser by recursive descent; "or" binds weaker than "and"."""

    def __init__(self, text: str, threads: set[str]):
        self.threads, self.tokens = threads, []
        at = 0
        while text[at:].strip():
            m = _TOKEN.match(text, at)
            if m is None:
                raise LitmusError(f"condition: cannot read `{text[at:].strip()[:20]}`")
            self.tokens.append(m.group(1))
            at = m.end()

    def parse(self) -> tuple[Quantifier, Condition | None, Condition | None, tuple[Variable, ...]]:
        quantifier, condition, restriction = Quantifier.EXISTS, None, None
        show: list[Variable] = []
        while self.tokens:
            word = self._next()
            if word == "locations":
                show += self._locations()
            elif word == "filter":
                restriction = self._or()
            elif word in ("~", "not"):
                self._expect("exists")
                quantifier, condition = Quantifier.NOT_EXISTS, self._or()
            elif word in ("exists", "forall"):
                quantifier, condition = Quantifier(word), self._or()
            elif word != ";":
                raise LitmusError(
                    f"condition: `{word}` is none of locations, filter, exists, ~exists, forall"
                )
        return quantifier, condition, restriction, tuple(show)

    def _next(self) -> str:
        if not self.tokens:
            raise LitmusError("condition: it ends too early")
        return self.tokens.pop(0)

    def _peek(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def _expect(self, word: str) -> None:
        if (found := self._next()) != word:
            raise LitmusError(f"condition: `{found}` where `{word}` should be")

    def _locations(self) -> list[Variable]:
        self._expect("[")
        out = []
        while self._peek() != "]":
            if self._peek() == ";":
                self._next()
                continue
            value = self._value()
            if isinstance(value, Variable):
                out.append(value)
        self._expect("]")
        return out

    def _or(self) -> Condition:
        return self._chain("or", ("\\/", "||"), self._and)

    def _and(self) -> Condition:
        return self._chain("and", ("/\\", "&&"), self._not)

    def _chain(self, op: str, words: tuple[str, ...], item: Callable[[], Condition]) -> Condition:
        items = [item()]
        while self._peek() in words:
            self._next()
            items.append(item())
        return items[0] if len(items) == 1 else Logic(op, tuple(items))

    def _not(self) -> Condition:
        if self._peek() in ("~", "not"):
            self._next()
            return Logic("not", (self._not(),))
        if self._peek() == "(":
            self._next()
            inside = self._or()
            self._expect(")")
            return inside
        a = self._value()
        word = self._next()
        if word not in _COMPARE:
            raise LitmusError(f"condition: `{word}` is no comparison")
        return Compare(_COMPARE[word], a, self._value())

    def _value(self) -> Variable | int:
        word = self._next()
        if word == "[":
            name = self._next()
            self._expect("]")
            return Variable(None, name)
        if self._peek() == ":":
            self._next()
            thread = word if word.startswith("P") else f"P{word}"
            if thread not in self.threads:
                raise LitmusError(f"condition: there is no thread {thread}")
            return Variable(thread, self._next().removeprefix("%"))
        if _NUMBER.match(word):
            return int(word, 0)
        if not _NAME.match(word):
            raise LitmusError(f"condition: `{word}` is no value")
        return Variable(None, word)


# Printing.


def instruction_text(x: Instruction) -> str:
    """The instruction in the dialect. Inverse of :func:`instruction`."""
    match x:
        case Load():
            return f"{_prefix(_LOADS, x.proxy)}{_order(x.sem, x.scope)} {x.register}, {x.address}"
        case Store():
            return f"{_prefix(_STORES, x.proxy)}{_order(x.sem, x.scope)} {x.address}, {x.value}"
        case Atomic():
            table = _REDUCTIONS if x.register is None else _ATOMICS
            operands = [x.address, *(str(a) for a in x.arguments)]
            if x.register is not None:
                operands.insert(0, x.register)
            return f"{_prefix(table, x.proxy)}{_order(x.sem, x.scope)}.{x.op} {', '.join(operands)}"
        case Fence():
            return f"fence{_order(x.sem, x.scope)}"
        case ProxyFence():
            return f"fence.proxy.{x.proxy}"
        case MbarrierInitFence():
            return "fence.mbarrier_init.release.cluster"
        case Barrier():
            return _barrier_text(x)
        case ClusterBarrier():
            return f"barrier.cluster.{'arrive' if x.arrive else 'wait'}.{x.sem}"
        case MbarrierInit():
            return f"mbarrier.init {x.barrier}, {x.count}"
        case MbarrierUpdate():
            return _update_text(x)
        case MbarrierWait():
            register = f"{x.register}, " if x.register is not None else ""
            name = "test_wait" if x.register is not None else "try_wait"
            return f"mbarrier.{name}.parity{_order(x.sem, x.scope)} {register}{x.barrier}, {x.parity}"
        case AsyncStore():
            size = {4: "", 8: ".b64", 16: ".v4.b32"}.get(x.bytes, f".b{8 * x.bytes}")
            return f"st.async{size} {x.address}, {x.value}, {x.barrier}"
        case BulkCopy():
            end = f", {x.barrier}" if x.barrier is not None else ""
            return f"cp.async.bulk {x.to}, {x.source}, {x.bytes}{end}"
        case BulkCommit():
            return "cp.async.bulk.commit_group"
        case BulkWait():
            return f"cp.async.bulk.wait_group{'.read' if x.read else ''} {x.pending}"
        case GridWait():
            return "griddepcontrol.wait"
        case GridTrigger():
            return "griddepcontrol.launch_dependents"
        case Local():
            operands = [x.register, str(x.a), *([] if x.op == "mov" else [str(x.b)])]
            return f"{x.op} {', '.join(operands)}"
        case Branch():
            if x.comparison is None:
                return f"goto {x.label}"
            return f"b{x.comparison} {x.a}, {x.b}, {x.label}"
        case Label():
            return f"{x.name}:"


def _prefix(table: dict[str, Proxy], proxy: Proxy) -> str:
    return next(name for name, p in table.items() if p == proxy)


def _order(sem: Sem, scope: Scope) -> str:
    return f".{sem}" if sem == Sem.WEAK else f".{sem}.{scope}"


def _barrier_text(x: Barrier) -> str:
    op = "arrive" if x.arrive else "sync"
    count = [] if x.count is None else [str(x.count)]
    if x.instance is not None:
        return f"bar.cta.{op} {', '.join([str(x.instance), str(x.id), *count])}"
    return f"bar.{op} {', '.join([str(x.id), *count])}"


def _update_text(x: MbarrierUpdate) -> str:
    order = _order(x.sem, x.scope)
    if x.count == 0:
        name, value = ("expect_tx", x.tx) if x.tx >= 0 else ("complete_tx", -x.tx)
        return f"mbarrier.{name}{order} {x.barrier}, {value}"
    if x.tx:
        return f"mbarrier.arrive.expect_tx{order} {x.barrier}, {x.tx}"
    return f"mbarrier.arrive{order} {x.barrier}, {x.count}"


def condition_text(condition: Condition) -> str:
    if isinstance(condition, Compare):
        signs = {name: sign for sign, name in _COMPARE.items() if sign != "="}
        return f"{condition.a} {signs[condition.comparison]} {condition.b}"
    if condition.op == "not":
        return f"~({condition_text(condition.items[0])})"
    sign = " /\\ " if condition.op == "and" else " \\/ "
    return sign.join(
        condition_text(i) if isinstance(i, Compare) else f"({condition_text(i)})" for i in condition.items
    )


def place_text(place: Place) -> str:
    parts = [f"cta {place.cta}"]
    if place.cluster is not None:
        parts.append(f"cluster {place.cluster}")
    parts.append(f"gpu {place.gpu}")
    if place.grid:
        parts.append(f"grid {place.grid}")
    if place.pdl:
        parts.append("pdl 1")
    return ",".join(parts)


def text(program: Program) -> str:
    """The program in the dialect. Inverse of :func:`parse`, up to layout."""
    declared = [f"{name} = {value};" for name, value in program.memory.items()]
    declared += [f"{name} @ mbarrier {count};" for name, count in program.mbarriers.items()]
    declared += [_address_text(program, a) for a in program.addresses.values()]
    declared += [f"{t.name}:{r} = {v};" for t in program.threads for r, v in t.registers.items()]
    columns = [
        [f"{t.name}@{place_text(t.place)}", *(instruction_text(x) for x in t.body)] for t in program.threads
    ]
    widths = [max(map(len, c)) for c in columns]
    rows = []
    for i in range(max(map(len, columns))):
        cells = [(c[i] if i < len(c) else "").ljust(w) for c, w in zip(columns, widths, strict=True)]
        rows.append(" " + " | ".join(cells) + " ;")
    out = [
        f"PTX {program.name}",
        *([f'"{program.note}"'] if program.note else []),
        "{",
        *declared,
        "}",
        *rows,
    ]
    if program.show:
        out.append(f"locations [{'; '.join(map(str, program.show))}]")
    if program.filter is not None:
        out.append(f"filter ({condition_text(program.filter)})")
    if program.condition is not None:
        out += [str(program.quantifier), f"({condition_text(program.condition)})"]
    return "\n".join(out) + "\n"


def _address_text(program: Program, address: Address) -> str:
    if address.generic == address.name:
        return f"{address.name} @ generic aliases {address.physical};"
    proxy = next(
        (
            x.proxy
            for t in program.threads
            for x in t.body
            if isinstance(x, (Load, Store, Atomic)) and x.address == address.name
        ),
        Proxy.SURFACE,
    )
    proxy = Proxy.SURFACE if proxy == Proxy.GENERIC else proxy
    return f"{address.name} @ {proxy} aliases {address.generic};"
