"""Draft a contract from PTX: the facts that the text states, and guesses marked as such.

A fact (`.reqntid`, an mbarrier handoff that the code shows) is written plainly. Whatever depends on what other
kernels or the host do is a guess and ends in `?`, with a comment that says why it was guessed and what to check;
:mod:`.contracts` never uses it before a person has deleted the question mark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .ptx.effects import Access, Kind
from .ptx.ir import Function, Variable
from .rules.dependency import State, coverage
from .rules.memory import RANK, peer
from .rules.r07_weak_flag import polls
from .subject import Subject

_STRONG = frozenset({"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio"})
_WIDTH = 100


@dataclass
class _Use:
    """Accesses through one parameter."""

    at: list[tuple[int, Access]] = field(default_factory=list)

    def lines(self, s: Subject, which: Iterable[tuple[int, Access]]) -> str:
        found = sorted({s.body[i].line for i, _ in which})
        return (
            f"line {found[0]}" if len(found) == 1 else f"lines {found[0]}-{found[-1]}, {len(found)} of them"
        )


def draft(s: Subject, file: str = "") -> str:
    """The TOML text of a drafted contract for one kernel."""
    uses = _uses(s)
    flags = {index for index, use in uses.items() if _flag_scope(s, use) and not _multicast(use)}
    polled = _polled(s)
    lines = [
        *_comment(
            f"Draft of a contract for {s.kernel} ({s.arch}){f', from {file}' if file else ''}. A value that ends in ? "
            "is a guess: check what its comment says, then delete the question mark. Until then the auditor does not "
            "use it and stays inconclusive."
        ),
        f"kernel = {_string(s.kernel)}",
        "",
        *_launch(s, bool(flags & polled)),
    ]
    for index, param in enumerate(s.entry.params):
        lines += ["", *_param(s, index, param, uses.get(index, _Use()))]
    for handoff in _handoffs(s, flags, uses):
        lines += ["", *handoff]
    return "\n".join(lines) + "\n"


# -- launch -----------------------------------------------------------------------------------------------


def _launch(s: Subject, waits_for_others: bool) -> list[str]:
    lines = ["[launch]"]
    block = _shape(s.entry, "reqntid")
    if block:
        lines.append(f"block = {block}  # .reqntid")
    else:
        lines += [*_comment("The text does not fix the number of threads (.reqntid)."), 'block = "?"']
    cluster = _shape(s.entry, "reqnctapercluster")
    if cluster:
        lines.append(f"cluster = {cluster}  # .reqnctapercluster")
    elif _uses_cluster(s):
        lines += _comment("Cluster instructions without .reqnctapercluster: the host chooses the cluster.")
        lines.append('cluster = "?"')
    else:
        lines.append("cluster = [1, 1, 1]  # no instruction reaches another CTA of a cluster")
    waits = s.find(Kind.GRID_DEPENDENCY, op="wait")
    if waits:
        lines += _comment(
            f"griddepcontrol.wait at line {s.body[waits[0]].line}: is the kernel launched with programmatic stream "
            "serialization? Only then can the previous grid still be running."
        )
        lines.append('pdl = "true?"')
    else:
        lines += _comment(
            "No griddepcontrol.wait: launched in plain stream order, nothing of the previous grid is still running. "
            "Check that no launch sets the attribute for programmatic stream serialization."
        )
        lines.append('pdl = "false?"')
    if waits_for_others:
        lines += _comment(
            "The kernel polls a flag: how many CTAs must run at the same time for the wait to end, and does the launch "
            "make sure of it (cooperative launch, or a grid that fits)?"
        )
        lines += ['coresident_ctas = "?"', 'cooperative = "?"']
    return lines


def _shape(entry: Function, directive: str) -> str:
    numbers = entry.directives.get(directive, ())
    if not numbers or not all(n.isdigit() for n in numbers):
        return ""
    return f"[{', '.join([*numbers, '1', '1'][:3])}]"


def _uses_cluster(s: Subject) -> bool:
    if s.find(Kind.CLUSTER_BARRIER):
        return True
    return any(a.multicast or peer(s, i, a) for i in s.order.events for a in s.effects[i].accesses)


# -- parameters -------------------------------------------------------------------------------------------


def _uses(s: Subject) -> dict[int, _Use]:
    found: dict[int, _Use] = {}
    for i, a in s.accesses("global", "multimem"):
        if a.role == "data":
            for base, _ in s.address(i, a).parts:
                if base is not None and base.kind == "param":
                    found.setdefault(base.index, _Use()).at.append((i, a))
    return found


def _multicast(use: _Use) -> bool:
    return any(a.space == "multimem" for _, a in use.at)


def _flag_scope(s: Subject, use: _Use) -> str:
    """Widest scope of the strong accesses, "" where there are none or the words are too wide for a flag."""
    strong = [(i, a) for i, a in use.at if a.sem in _STRONG and not a.asynchronous]
    if not strong or any((s.width(i, a) or 16) > 8 for i, a in strong):
        return ""
    return max((a.scope for _, a in strong), key=lambda scope: RANK.get(scope, 0))


def _polled(s: Subject) -> set[int]:
    """Parameters that a loop waits on."""
    bases = (base for _, i, a in polls(s) for base, _ in s.address(i, a).parts)
    return {base.index for base in bases if base is not None and base.kind == "param"}


def _param(s: Subject, index: int, param: Variable, use: _Use) -> list[str]:
    lines = ["[[params]]", f"name = {_string(param.name)}", f"dtype = {_string(_dtype(s, param, use))}"]
    if param.type not in ("u64", "b64", "s64") or (param.size or 8) > 8:
        what = "a structure" if (param.size or 8) > 8 else "a scalar"
        if not use.at:
            return [*_comment(f"Parameter {index}: {what}."), *lines]
    role, why, check = _role(s, index, param, use)
    access = "".join(letter for letter, on in (("r", _reads(use)), ("w", _writes(use))) if on)
    head = _comment(f"Parameter {index}: {why}") + _comment(f"Check: {check}")
    lines = [*head, *lines, f"role = {_string(role)}"] if role else [*head, *lines]
    return [*lines, f'access = "{access}"'] if access else lines


def _reads(use: _Use) -> list[tuple[int, Access]]:
    return [(i, a) for i, a in use.at if a.reads]


def _writes(use: _Use) -> list[tuple[int, Access]]:
    return [(i, a) for i, a in use.at if a.writes]


def _role(s: Subject, index: int, param: Variable, use: _Use) -> tuple[str, str, str]:
    """(role with its question mark, why, what to check); role "" for what is no pointer."""
    reads, writes = _reads(use), _writes(use)
    if not use.at:
        if param.pointer_space:
            return "?", "a pointer through which no access was found.", "who uses it, and how."
        return (
            "",
            "no access through it was found: a scalar, or a pointer that is only passed on.",
            "that it is a scalar.",
        )
    if _multicast(use):
        return (
            "multicast?",
            f"used by multimem instructions ({use.lines(s, use.at)}).",
            "that it is a multicast address.",
        )
    scope = _flag_scope(s, use)
    if scope == "sys":
        why = f"strong accesses at system scope ({use.lines(s, use.at)})."
        return "peer?", why, "whether another GPU or the host is the other party; if not, it is a flag."
    if scope:
        why = f"strong accesses of words, widest scope .{scope} ({use.lines(s, use.at)})."
        return "flag?", why, "that it is a synchronisation word, and between whom."
    waits = s.find(Kind.GRID_DEPENDENCY, op="wait")
    before = coverage(s).before if waits else {}
    early = [(i, a) for i, a in reads if waits and before.get(i) is not State.COVERED]
    if reads and writes:
        why = f"read ({use.lines(s, reads)}) and written ({use.lines(s, writes)}) here."
        check = "whether it carries state from one launch to the next (state), or is private (scratch)"
        if early:
            why = f"{why[:-1]}, read before griddepcontrol.wait ({use.lines(s, early)})."
            check += "; or an older launch wrote what is read early (stable, with launch.stable_distance)"
        return "state?", why, f"{check}."
    if writes:
        why = f"only written here ({use.lines(s, writes)})."
        return "output?", why, "that later grids read it and no grid that may still run does."
    if waits:
        if early:
            why = f"read before griddepcontrol.wait ({use.lines(s, early)}), so somebody took it to be old."
            return (
                "weight?",
                why,
                "that no grid that may still run writes it (weight, or stable); if one does: upstream.",
            )
        why = f"read only after griddepcontrol.wait ({use.lines(s, reads)})."
        return "upstream?", why, "whether the previous grid writes it (upstream), or nobody does (weight)."
    why = f"only read here ({use.lines(s, reads)})."
    if all(a.proxy == "noncoherent" for _, a in reads):
        why = f"only read here, through the non-coherent path ({use.lines(s, reads)})."
    return "weight?", why, "that nobody writes it while this kernel runs; if an earlier grid does: upstream."


def _dtype(s: Subject, param: Variable, use: _Use) -> str:
    """The type of the first access, or that of the parameter."""
    for i, _ in use.at:
        types = [m for m in s.body[i].mods if m[0] in "bsuf" and m.lstrip("bsuf").rstrip("x2").isdigit()]
        if types:
            return types[-1]
    return param.type


# -- handoffs ---------------------------------------------------------------------------------------------


def _handoffs(s: Subject, flags: set[int], uses: dict[int, _Use]) -> Iterator[list[str]]:
    waits = s.find(Kind.GRID_DEPENDENCY, op="wait")
    if waits:
        yield _handoff(
            "previous_grid",
            "what the previous grid wrote",
            "previous grid",
            str(s.executors(waits[0])),
            "grid_dependency",
            "gpu",
            f"griddepcontrol.wait, line {s.body[waits[0]].line}",
        )
    objects: dict[str, list[int]] = {}
    for w in s.find(Kind.MBARRIER):
        if s.order.is_wait(w):
            objects.setdefault(s.address(w, s.effects[w].accesses[0]).describe(), []).append(w)
    for number, (name, waiting) in enumerate(objects.items()):
        yield _mbarrier(s, f"mbarrier_{number}", name, waiting)
    barriers = s.find(Kind.CLUSTER_BARRIER, op="wait")
    if barriers:
        yield _handoff(
            "cluster",
            "",
            "all CTAs of the cluster",
            "all CTAs of the cluster",
            "cluster_barrier",
            "cluster",
            f"barrier.cluster.wait, line {s.body[barriers[0]].line}; data: what is handed over here?",
        )
    for index in sorted(flags):
        scope = _flag_scope(s, uses[index])
        name = s.entry.params[index].name
        at = uses[index].lines(s, uses[index].at)
        yield _handoff(
            f"flag_{name}",
            "",
            "",
            "",
            "flag",
            f"{scope}?",
            f"flag {name}, {at}: who writes it, who reads it, what does it announce, and is .{scope} as wide as both?",
        )


def _mbarrier(s: Subject, name: str, where: str, waits: list[int]) -> list[str]:
    groups = {p for w in waits for p in s.order.predecessors.get(w, ()) if p > s.order.exit}
    sources = {
        a for g in groups for p in s.order.predecessors.get(g, ()) for a in s.order.predecessors.get(p, ())
    }
    arrivals = sorted(a for a in sources if a < len(s.body))
    remote = any(a.multicast or peer(s, i, a) for i in arrivals for a, _ in s.order.arrivals(i))
    who = ", ".join(dict.fromkeys(str(s.executors(i)) for i in arrivals)) or ""
    kinds = ", ".join(dict.fromkeys(s.body[i].opcode for i in arrivals))
    lines = f"wait at line {s.body[waits[0]].line}; completed by {kinds or 'nothing that was found'}"
    if arrivals:
        lines += f" at line{'s' if len(arrivals) > 1 else ''} " + ", ".join(
            str(s.body[i].line) for i in arrivals[:4]
        )
    scope = "cluster" if remote else "cta"
    return _handoff(
        name,
        "",
        who,
        str(s.executors(waits[0])),
        "mbarrier",
        scope,
        f"{where}: {lines}; data: what is handed over here?",
    )


def _handoff(
    name: str, data: str, producer: str, consumer: str, via: str, scope: str, comment: str
) -> list[str]:
    fields = {
        "name": name,
        "data": data,
        "producer": producer,
        "consumer": consumer,
        "via": via,
        "scope": scope,
    }
    return [*_comment(comment), "[[handoffs]]", *(f"{k} = {_string(v)}" for k, v in fields.items())]


# -- TOML -------------------------------------------------------------------------------------------------


def _string(text: str) -> str:
    return json.dumps(text)  # a JSON string is a TOML basic string


def _comment(text: str) -> list[str]:
    lines, line = [], "#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line]
