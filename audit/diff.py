"""What changed in the synchronisation of two builds, by their sync skeletons.

    read(path) -> {(kernel, arch): Build, ...}
    compare(old, new) -> KernelDiff(kernel, changes), ...

A skeleton holds no register and no line number (:mod:`.skeleton`), so every change that is shown is one of
meaning: an instruction that came or went, moved against its neighbours, got another scope or order, is executed by
other threads, or stands between other memory accesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from k3_audit.artifact.store import Store

from .evidence import Lock
from .rules.memory import RANK

# Two lines are one changed instruction, not one gone and one new, from this similarity on.
_ALIKE = 0.6
_SEMANTICS = ("relaxed", "acquire", "release", "acq_rel", "sc", "weak", "volatile")


class DiffError(Exception):
    """One line: what cannot be compared."""


@dataclass(frozen=True)
class Build:
    """One side: the skeleton of one kernel. `form` is "PTX", or "SASS" where there was no PTX."""

    kernel: str
    arch: str
    skeleton: tuple[str, ...]
    form: str = "PTX"


@dataclass(frozen=True)
class Change:
    """`kind` is "gone", "new", "moved" or "changed"; `old` and `new` are skeleton lines, "" on the side where there is
    none; `notes` say in words what differs. `at` is the position in the new skeleton (in the old one for "gone")."""

    kind: str
    old: str
    new: str
    notes: tuple[str, ...] = ()
    at: int = 0


@dataclass(frozen=True)
class KernelDiff:
    """One kernel. `status` is "same", "changed", "gone" or "new"; `title` names both sides where they differ."""

    title: str
    status: str
    changes: tuple[Change, ...] = ()


# -- the two sides ----------------------------------------------------------------------------------------


def read(path: Path) -> dict[tuple[str, str], Build]:
    """The builds in a lock file, an artifact store, one object of a store, or anything that holds PTX or SASS.

    Raises DiffError when nothing in it can be compared, and whatever the readers of those formats raise.
    """
    if path.suffix == ".lock":
        if not path.is_file():
            raise DiffError(f"{path}: no such lock file")
        builds = [Build(e.kernel, e.arch, e.sync_skeleton) for e in Lock.load(path).entries]
    elif (path / "built").is_dir():
        store = Store(path)
        artifacts = [store.get(kernel, arch) for kernel, arch in store.list()]
        builds = [b for a in artifacts for b in _of_ptx(a.ptx, a.contract)]
    elif (path / "artifact.json").is_file():
        artifact = Store(path.parent.parent).load(path.name)
        builds = list(_of_ptx(artifact.ptx, artifact.contract))
    else:
        builds = list(_of_code(path))
    if not builds:
        raise DiffError(f"{path}: no kernel in it that could be compared")
    return {(b.kernel, b.arch): b for b in builds}


def _of_code(path: Path) -> Iterator[Build]:
    from .contracts import beside, choose
    from .frontend import load

    for unit in load(path):
        if unit.ptx:
            promises = beside(path) or beside(Path(unit.file))
            promise = choose(promises, "", only=True)
            yield from _of_ptx(unit.ptx, promise.contract if promise else None)
        elif unit.sass:
            yield from _of_sass(unit.sass)


def _of_ptx(text: str, contract: object = None) -> Iterator[Build]:
    from k3_audit.artifact.contract import Contract

    from .ptx.parser import parse
    from .skeleton import skeleton
    from .subject import Subject

    module = parse(text)
    for entry in module.entries:
        promised = contract if isinstance(contract, Contract) and len(module.entries) == 1 else None
        subject = Subject(module, entry, promised)
        yield Build(entry.name, module.target, tuple(skeleton(subject)))


# Opcodes that order, wait, signal or are strong, in SASS of sm_90a and sm_100a.
_SASS = re.compile(
    r"^(?:MEMBAR|FENCE|ERRBAR|CGAERRBAR|BAR|WARPSYNC|SYNCS|UCGABAR_\w+|ACQBULK|PREEXIT|DEPBAR|UTMACMDFLUSH|UTMACCTL"
    r"|WARPGROUP|UTCBAR|UTCATOMSWS|STAS|UBLKCP|UTMALDG|UTMASTG|UTMAREDG|ATOM\w*|REDG?|CCTL|ARRIVES)\b"
)


def _of_sass(listing: str) -> Iterator[Build]:
    from .sass.parser import parse

    for function in parse(listing).values():
        lines = [i.name for i in function.body if _SASS.match(i.opcode) or "STRONG" in i.mods]
        yield Build(function.name, function.arch, tuple(lines), "SASS")


# -- comparison -------------------------------------------------------------------------------------------


def compare(old: Mapping[tuple[str, str], Build], new: Mapping[tuple[str, str], Build]) -> list[KernelDiff]:
    """One entry per kernel of either side. Kernels are paired by name and architecture; where each side has only one
    kernel of a name, or only one at all, those are paired whatever they are called."""
    pairs = {key: (old[key], new[key]) for key in old.keys() & new.keys()}
    rest_old = {k: b for k, b in old.items() if k not in pairs}
    rest_new = {k: b for k, b in new.items() if k not in pairs}
    for key, build in list(rest_old.items()):
        same_name = [k for k in rest_new if k[0] == key[0]]
        alone = len(old) == 1 and len(rest_new) == 1
        if len(same_name) == 1 or alone:
            other = same_name[0] if len(same_name) == 1 else next(iter(rest_new))
            pairs[key] = (build, rest_new.pop(other))
            del rest_old[key]
    found = [_kernel(a, b) for _, (a, b) in sorted(pairs.items())]
    found += [KernelDiff(_title(b), "gone") for _, b in sorted(rest_old.items())]
    found += [KernelDiff(_title(b), "new") for _, b in sorted(rest_new.items())]
    return found


def _title(build: Build) -> str:
    return f"{build.kernel} {build.arch}".strip()


def _kernel(old: Build, new: Build) -> KernelDiff:
    if old.form != new.form:
        raise DiffError(
            f"{_title(old)}: {old.form} on one side, {new.form} on the other: give the same form twice"
        )
    title = _title(new) if _title(old) == _title(new) else f"{_title(old)} -> {_title(new)}"
    changes = tuple(_changes(old.skeleton, new.skeleton))
    return KernelDiff(title, "changed" if changes else "same", changes)


def _changes(old: Sequence[str], new: Sequence[str]) -> Iterator[Change]:
    gone: list[tuple[int, str]] = []
    come: list[tuple[int, str]] = []
    found: list[Change] = []
    for tag, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        left, right = list(enumerate(old[a:b], a)), list(enumerate(new[c:d], c))
        for i, line in left:
            best = max(right, key=lambda r: _likeness(line, r[1]), default=None)
            if best is not None and _likeness(line, best[1]) >= _ALIKE:
                right.remove(best)
                found.append(Change("changed", line, best[1], tuple(_notes(line, best[1])), best[0]))
            else:
                gone.append((i, line))
        come += right
    for i, line in gone:
        moved = next((c for c in come if c[1] == line), None)
        if moved is None:
            found.append(Change("gone", line, "", (), i))
        else:
            come.remove(moved)
            found.append(Change("moved", line, line, (_neighbours(old, i, new, moved[0]),), moved[0]))
    found += [Change("new", "", line, (), i) for i, line in come]
    return iter(sorted(found, key=lambda change: change.at))


def _likeness(a: str, b: str) -> float:
    """Of the instruction without its guards; 0 for another opcode."""
    (left, _), (right, _) = _split(a), _split(b)
    if left.split(".")[0].split()[0] != right.split(".")[0].split()[0]:
        return 0.0
    words = [re.split(r"[.\s]+", x) for x in (left, right)]
    return SequenceMatcher(None, *words).ratio()


def _split(line: str) -> tuple[str, str]:
    """(instruction with object and executors, guards)."""
    head, _, guards = line.partition(" | ")
    return head, guards


def _neighbours(old: Sequence[str], i: int, new: Sequence[str], j: int) -> str:
    def before(lines: Sequence[str], n: int) -> str:
        return f"after {_split(lines[n - 1])[0]}" if n else "first"

    return f"was {before(old, i)}; is {before(new, j)}"


def _notes(old: str, new: str) -> Iterator[str]:
    """The differences of two lines, in words."""
    (a, before), (b, after) = _split(old), _split(new)
    m, n = (re.fullmatch(r"(\S+)(.*?)(?: by (.*?))?(?:  x(\d+))?", x) for x in (a, b))
    if m is None or n is None:
        return
    yield from _modifiers(m[1].split("."), n[1].split("."))
    if m[2].strip() != n[2].strip():
        yield f"object: {m[2].strip() or 'none'} -> {n[2].strip() or 'none'}"
    if m[3] != n[3]:
        yield f"executed by {m[3]} -> {n[3]}"
    for label, x, y in zip(("before it", "after it"), _sides(before), _sides(after), strict=True):
        if x != y:
            yield f"accesses {label}: {x or 'none'} -> {y or 'none'}"
    counts = [re.search(r"  x(\d+)$", x) for x in (old, new)]
    times = [int(c[1]) if c else 1 for c in counts]
    if times[0] != times[1]:
        yield f"in a row: {times[0]} -> {times[1]}"


def _sides(guards: str) -> tuple[str, str]:
    left, _, right = re.sub(r"  x\d+$", "", guards).partition(" ; ")
    return left.strip(), right.strip(" ;")


def _modifiers(old: list[str], new: list[str]) -> Iterator[str]:
    left, right = [x for x in old if x not in new], [x for x in new if x not in old]
    for label, known in (("scope", tuple(RANK)), ("order", _SEMANTICS)):
        a, b = (next((x for x in side if x in known), "") for side in (left, right))
        if a or b:
            left, right = [x for x in left if x != a], [x for x in right if x != b]
            narrower = label == "scope" and a in RANK and b in RANK and RANK[b] < RANK[a]
            yield f"{label}: .{a or '(default)'} -> .{b or '(default)'}" + (" (narrower)" if narrower else "")
    if left or right:
        yield f"modifiers: {'.'.join(left) or 'none'} -> {'.'.join(right) or 'none'}"
