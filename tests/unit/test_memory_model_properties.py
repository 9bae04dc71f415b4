"""Laws of the memory model over random small programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from k3_audit.audit.memory_model import check, litmus, solver
from k3_audit.audit.memory_model.check import Engine
from k3_audit.audit.memory_model.events import unfold
from k3_audit.audit.memory_model.execution import Outcome
from k3_audit.audit.memory_model.explain import broken_axioms
from k3_audit.audit.memory_model.program import (
    Address,
    AsyncStore,
    Atomic,
    Barrier,
    Branch,
    BulkCommit,
    BulkCopy,
    BulkWait,
    Compare,
    Fence,
    Instruction,
    Label,
    Load,
    Local,
    MbarrierUpdate,
    MbarrierWait,
    Place,
    Program,
    Proxy,
    ProxyFence,
    Scope,
    Sem,
    Store,
    Thread,
    Variable,
)

pytestmark = pytest.mark.unit


def examples(count: int) -> settings:
    """The engines run in milliseconds, but a random program now and then takes a second: no deadline."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=count, deadline=None, suppress_health_check=checks)


LOCATIONS = ("x", "y")
ALIASES = {"z": Address("z", "z", "x"), "s": Address("s", "x", "x")}
scopes = st.sampled_from((Scope.CTA, Scope.GPU, Scope.SYS))
values = st.integers(1, 2)


def registers(position: int) -> str:
    return f"r{position}"


@st.composite
def loads(draw: st.DrawFn, position: int, mixed: bool) -> Load:
    address = draw(st.sampled_from((*LOCATIONS, *ALIASES) if mixed else LOCATIONS))
    if address == "s":
        return Load(registers(position), address, proxy=Proxy.SURFACE)
    sem = draw(st.sampled_from((Sem.WEAK, Sem.RELAXED, Sem.ACQUIRE)))
    return Load(registers(position), address, sem, Scope.SYS if sem == Sem.WEAK else draw(scopes))


@st.composite
def stores(draw: st.DrawFn, position: int, mixed: bool) -> Store:
    address = draw(st.sampled_from((*LOCATIONS, *ALIASES) if mixed else LOCATIONS))
    value = draw(st.one_of(values, st.sampled_from([registers(k) for k in range(position)] or [1])))
    if address == "s":
        return Store(address, value, proxy=Proxy.SURFACE)
    sem = draw(st.sampled_from((Sem.WEAK, Sem.RELAXED, Sem.RELEASE)))
    return Store(address, value, sem, Scope.SYS if sem == Sem.WEAK else draw(scopes))


@st.composite
def atomics(draw: st.DrawFn, position: int, mixed: bool) -> Atomic:
    op = draw(st.sampled_from(("add", "exch", "cas")))
    sem = draw(st.sampled_from((Sem.RELAXED, Sem.ACQUIRE, Sem.RELEASE, Sem.ACQ_REL)))
    arguments = (0, draw(values)) if op == "cas" else (draw(values),)
    return Atomic(registers(position), draw(st.sampled_from(LOCATIONS)), op, arguments, sem, draw(scopes))


fences = st.builds(Fence, st.sampled_from((Sem.ACQUIRE, Sem.RELEASE, Sem.ACQ_REL, Sem.SC)), scopes)
proxy_fences = st.sampled_from((ProxyFence(Proxy.ALIAS), ProxyFence(Proxy.SURFACE), ProxyFence(Proxy.ASYNC)))


@st.composite
def synchronization(draw: st.DrawFn, position: int, mixed: bool) -> Instruction:
    return draw(
        st.sampled_from(
            (
                Barrier(False, 0),
                Barrier(True, 1, 2),
                Barrier(False, 1, 2),
                MbarrierUpdate("b"),
                MbarrierUpdate("b", sem=Sem.RELAXED),
                MbarrierUpdate("b", 1, 4),
                MbarrierWait("b", 0),
                MbarrierWait("b", 1, register=registers(position)),
                AsyncStore("x", 2, "b"),
                BulkCopy("y", "x", 4, "b"),
                BulkCopy("y", "x", 4),
                BulkCommit(),
                BulkWait(0),
                BulkWait(0, True),
            )
        )
    )


@st.composite
def threads(draw: st.DrawFn, number: int, length: int, mixed: bool) -> Thread:
    body: list[Instruction] = []
    for position in range(draw(st.integers(1, length))):
        kinds = [loads, stores, loads, stores, atomics, *([synchronization] if mixed else [])]
        kind = draw(st.sampled_from((*kinds, None)))
        if kind is None:
            body.append(draw(st.one_of(fences, proxy_fences) if mixed else fences))
        else:
            body.append(draw(kind(position, mixed)))
    if draw(st.integers(0, 5)) == 0 and len(body) > 1:
        body[1:] = [Branch("OUT", "ne", registers(0), 1), *body[1:], Label("OUT")]
    if draw(st.integers(0, 5)) == 0:
        body.append(Local("r9", "add", registers(0), 1))
    place = Place(cta=draw(st.sampled_from((0, 0, 1))), gpu=draw(st.sampled_from((0, 0, 0, 1))))
    return Thread(f"P{number}", place, tuple(body))


@st.composite
def programs(draw: st.DrawFn, count: int = 2, length: int = 3, mixed: bool = False) -> Program:
    made = tuple(draw(threads(t, length, mixed)) for t in range(count))
    show = tuple(
        Variable(t.name, x.register)
        for t in made
        for x in t.body
        if isinstance(x, (Load, Atomic, MbarrierWait)) and x.register is not None
    )
    show += tuple(Variable(None, v) for v in draw(st.sampled_from(((), (), LOCATIONS))))
    mbarriers = {"b": draw(st.integers(1, 2))} if mixed else {}
    return Program("random", made, {}, mbarriers, ALIASES if mixed else {}, show=tuple(dict.fromkeys(show)))


def outcomes(program: Program, engine: Engine = Engine.ENUMERATE) -> set[Outcome]:
    return set(check.check(program, engine).outcomes)


needs_solver = pytest.mark.skipif(not solver.available(), reason="needs z3-solver")


@needs_solver
@examples(60)
@given(programs(count=2, length=4))
def test_engines_agree(program: Program) -> None:
    assert outcomes(program, Engine.SOLVE) == outcomes(program)


@needs_solver
@examples(25)
@given(programs(count=3, length=2))
def test_engines_agree_on_three_threads(program: Program) -> None:
    assert outcomes(program, Engine.SOLVE) == outcomes(program)


@needs_solver
@examples(100)
@given(programs(count=2, length=4, mixed=True))
def test_engines_agree_on_proxies_barriers_and_copies(program: Program) -> None:
    assert outcomes(program, Engine.SOLVE) == outcomes(program)


@examples(60)
@given(programs(length=3), st.integers(0, 1), st.integers(0, 3), fences)
def test_a_fence_never_adds_an_outcome(program: Program, t: int, at: int, fence: Fence) -> None:
    body = list(program.threads[t].body)
    body.insert(min(at, len(body)), fence)
    assert outcomes(_with_body(program, t, body)) <= outcomes(program)


@examples(60)
@given(programs(length=3, mixed=True), st.integers(0, 1), st.integers(0, 3), proxy_fences)
def test_a_proxy_fence_never_adds_an_outcome(program: Program, t: int, at: int, fence: ProxyFence) -> None:
    body = list(program.threads[t].body)
    body.insert(min(at, len(body)), fence)
    assert outcomes(_with_body(program, t, body)) <= outcomes(program)


@examples(60)
@given(programs(length=3), st.integers(0, 1), st.integers(0, 3))
def test_a_wider_scope_never_adds_an_outcome(program: Program, t: int, at: int) -> None:
    body = list(program.threads[t].body)
    assume(at < len(body) and hasattr(body[at], "scope") and getattr(body[at], "sem", None) != Sem.WEAK)
    body[at] = replace(body[at], scope=Scope.SYS)
    assert outcomes(_with_body(program, t, body)) <= outcomes(program)


STRONGER = {Sem.WEAK: Sem.RELAXED, Sem.ACQUIRE: Sem.ACQ_REL, Sem.RELEASE: Sem.ACQ_REL, Sem.ACQ_REL: Sem.SC}


@examples(60)
@given(programs(length=3), st.integers(0, 1), st.integers(0, 3))
def test_stronger_semantics_never_add_an_outcome(program: Program, t: int, at: int) -> None:
    body = list(program.threads[t].body)
    assume(at < len(body))
    x = body[at]
    if isinstance(x, Load) and x.sem != Sem.ACQUIRE:
        body[at] = replace(x, sem=Sem.RELAXED if x.sem == Sem.WEAK else Sem.ACQUIRE)
    elif isinstance(x, Store) and x.sem != Sem.RELEASE:
        body[at] = replace(x, sem=Sem.RELAXED if x.sem == Sem.WEAK else Sem.RELEASE)
    elif isinstance(x, Fence) and x.sem != Sem.SC:
        body[at] = replace(x, sem=STRONGER[x.sem])
    else:
        assume(False)
    assert outcomes(_with_body(program, t, body)) <= outcomes(program)


@examples(40)
@given(programs(length=3))
def test_one_thread_after_the_other_is_always_allowed(program: Program) -> None:
    """Sequential consistency is among the behaviours: the model never forbids everything."""
    assert outcomes(program)


@examples(40)
@given(programs(length=3, mixed=True))
def test_what_is_returned_breaks_no_axiom(program: Program) -> None:
    result = check.check(program, Engine.ENUMERATE)
    for execution in result.executions.values():
        assert broken_axioms(execution) == {}


@examples(40)
@given(programs(length=2))
def test_what_is_not_returned_breaks_an_axiom(program: Program) -> None:
    """Every candidate with another outcome is explained by an axiom that it breaks."""
    allowed = outcomes(program)
    for variable in program.show[:1]:
        for value in range(3):
            if any(o.state.get(variable) == value for o in allowed):
                continue
            asked = replace(program, condition=Compare("eq", variable, value))
            found = check.why_forbidden(check.check(asked))
            assert found is None or found.broken


@examples(150)
@given(programs(count=2, length=4, mixed=True))
def test_the_printer_is_the_inverse_of_the_parser(program: Program) -> None:
    again = litmus.parse(litmus.text(program))
    assert again.threads == program.threads
    assert again.addresses == program.addresses
    assert again.observed == program.observed
    assert litmus.text(again) == litmus.text(program)


@examples(40)
@given(st.integers(0, 3))
def test_polling_needs_no_bound(unroll: int) -> None:
    """A loop that only polls has one path, whatever the bound."""
    text = "PTX p\n{}\nP0@cta 0,gpu 0 ;\nL: ;\nld.acquire.gpu r0, x ;\nadd r1, r0, 1 ;\nbne r1, 2, L ;\n"
    unfolded = unfold(litmus.parse(text + "exists (P0:r0 == 1)"), 0, unroll)
    assert len(unfolded.paths) == 1 and not unfolded.truncated


def _with_body(program: Program, t: int, body: list[Instruction]) -> Program:
    made = list(program.threads)
    made[t] = replace(made[t], body=tuple(body))
    return replace(program, threads=tuple(made))
