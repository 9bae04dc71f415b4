"""Has the auditor teeth? All mutants of clean programs, audited: what each rule kills, and what survives.

    programs -> mutants -> findings that the clean program does not have -> Outcome -> kill matrix

Outcomes are five, and only the first is a kill:

    killed         a finding (error or warning) that the clean program does not get, in the changed region
    elsewhere      such a finding, but about another place
    inconclusive   the auditor says that it cannot know, and what would settle it
    noted          the auditor says something, but only as a note
    survived       it says nothing new

A survivor is a hole, unless it is *argued*: `tests/corpus/survivors.toml` holds, per mutant, why it means the
same as the original (`equivalent`) or why no auditor of this kind can see it (`limit`). An argument for a
mutant that is killed by now is stale and counts as a hole too, so the list can only shrink.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from k3_audit.artifact.contract import Contract

from .findings import Finding, Severity, Verdict
from .mutate import Mutant, mutants, source_mutants
from .ptx.parser import parse
from .rules.base import rules
from .rules.dsl_inline_asm import check_sources
from .subject import Subject

RESULTS = ("killed", "elsewhere", "inconclusive", "noted", "survived")
KINDS = ("equivalent", "limit")

# Characters of PTX beyond which the mutants of one program are shared out between processes.
_LARGE = 20_000


@dataclass(frozen=True)
class Program:
    """One clean program. `name` says where it comes from ("attn_res sm_90a", "R01/bulk-store"); `sources` holds the
    Python files of a kernel (name -> text), which are mutated instead of `text` when there is no text."""

    name: str
    text: str = ""
    contract: Contract | None = None
    sources: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What the auditor said about one mutant. `rules` are those that spoke; `settle` is what an inconclusive answer
    asks for."""

    program: str
    operator: str
    line: int
    instruction: str
    source: str
    what: str
    fingerprint: str
    result: str
    rules: tuple[str, ...] = ()
    settle: str = ""


# -- one program ------------------------------------------------------------------------------------------


def bite(program: Program, part: int = 0, parts: int = 1) -> list[Outcome]:
    """Outcomes of every `parts`-th mutant of a program, from number `part` on; of all mutants by default."""
    if program.sources:
        return _bite_sources(dict(program.sources))[part::parts]
    known = {f.fingerprint for f in _findings(program.text, program.contract)}
    found = []
    for n, mutant in enumerate(mutants(program.text, program.contract)):
        if n % parts == part:
            new = [f for f in _findings(mutant.text, program.contract) if f.fingerprint not in known]
            found.append(_outcome(program.name, mutant, new, _touches))
    return found


def _findings(text: str, contract: Contract | None) -> list[Finding]:
    module = parse(text)
    (entry,) = module.entries
    subject = Subject(module, entry, contract)
    return [f for rule in rules().values() if rule.language == "ptx" for f in rule.check(subject)]


def _bite_sources(sources: dict[str, str]) -> list[Outcome]:
    known = {f.fingerprint for f in check_sources(sources)}
    found = []
    for file, text in sources.items():
        for mutant in source_mutants(text, file):
            new = [f for f in check_sources({**sources, file: mutant.text}) if f.fingerprint not in known]
            # A wrapper that loses its clobber is reported where it is called.
            found.append(_outcome(file, mutant, new, lambda finding, mutant: True))
    return found


def _outcome(
    program: str, mutant: Mutant, new: list[Finding], touches: Callable[[Finding, Mutant], bool]
) -> Outcome:
    firm = [f for f in new if f.verdict is Verdict.FINDING and f.severity is not Severity.NOTE]
    near = [f for f in firm if touches(f, mutant)]
    unsure = [f for f in new if f.verdict is Verdict.INCONCLUSIVE and f.severity is not Severity.NOTE]
    said = ((near, "killed"), (firm, "elsewhere"), (unsure, "inconclusive"), (new, "noted"), ([], "survived"))
    spoke, result = next((fs, r) for fs, r in said if fs or r == "survived")
    return Outcome(
        program,
        mutant.operator,
        mutant.site.line,
        mutant.site.text,
        mutant.site.source,
        mutant.what,
        mutant.fingerprint,
        result,
        tuple(sorted({f.rule for f in spoke})),
        next((f.settle for f in spoke if f.settle), ""),
    )


def _touches(finding: Finding, mutant: Mutant) -> bool:
    """Some place that the finding speaks of, or the way between two of them, lies in the changed region."""
    lines = [s.line for s in (*finding.sites, *finding.path) if s.line]
    return bool(lines) and min(lines) <= mutant.region[1] and mutant.region[0] <= max(lines)


# -- many programs ----------------------------------------------------------------------------------------


def bite_all(
    programs: Sequence[Program], jobs: int = 2, advance: Callable[[str], None] = lambda name: None
) -> list[Outcome]:
    """Outcomes of all mutants of all programs, in the order of the programs. `advance` is called with each
    program's name when a part of it is done."""
    tasks = []
    for program in programs:
        parts = jobs if len(program.text) > _LARGE else 1
        tasks += [(program, part, parts) for part in range(parts)]
    if jobs == 1:
        return _collect(tasks, map(_task, tasks), advance)
    with ProcessPoolExecutor(jobs) as pool:
        return _collect(tasks, pool.map(_task, tasks), advance)


def _task(task: tuple[Program, int, int]) -> list[Outcome]:
    return bite(*task)


def _collect(
    tasks: Sequence[tuple[Program, int, int]],
    results: Iterable[list[Outcome]],
    advance: Callable[[str], None],
) -> list[Outcome]:
    found: list[Outcome] = []
    for (program, _, _), outcomes in zip(tasks, results, strict=True):
        advance(program.name)
        found += outcomes
    order = {t[0].name: n for n, t in enumerate(tasks)}
    return sorted(found, key=lambda o: (order.get(o.program, len(order)), o.line))


def corpus(root: Path) -> Iterator[Program]:
    """The passing programs of a corpus folder: `RULE/case.pass.ptx`, with `case.contract.toml` where it exists."""
    for path in sorted(root.glob("*/*.pass.ptx")):
        case = path.name.removesuffix(".pass.ptx")
        promised = path.with_name(f"{case}.contract.toml")
        contract = Contract.from_dict(tomllib.loads(promised.read_text())) if promised.exists() else None
        yield Program(f"{path.parent.name}/{case}", path.read_text(), contract)


# -- arguments for survivors ------------------------------------------------------------------------------


class ArgumentError(Exception):
    """One line: which entry of survivors.toml does not fit."""


@dataclass(frozen=True)
class Arguments:
    """fingerprint -> (kind, reason). `about` says for which program and mutant each was written."""

    by_fingerprint: dict[str, tuple[str, str]] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Arguments:
        """Read survivors.toml: `[[argument]]` tables of kind, reason, and mutants ("FINGERPRINT PROGRAM: WHAT").
        Raises ArgumentError in one line."""
        by_fingerprint, about = {}, {}
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8")).get("argument", [])
            for table in tables:
                if table["kind"] not in KINDS:
                    raise ValueError(f"kind {table['kind']!r} is neither {' nor '.join(KINDS)}")
                if len(table["reason"].split()) < 8:
                    raise ValueError(f"reason {table['reason']!r} argues nothing")
                for line in table["mutants"]:
                    name, _, text = line.partition(" ")
                    if not re.fullmatch(r"[0-9a-f]{12}", name) or name in by_fingerprint:
                        raise ValueError(f"mutant {line!r}: a fingerprint, once, comes first")
                    by_fingerprint[name] = (table["kind"], " ".join(table["reason"].split()))
                    about[name] = text
        except OSError as e:
            raise ArgumentError(f"{path}: {e.strerror}") from e
        except (tomllib.TOMLDecodeError, ValueError, KeyError, TypeError, AttributeError) as e:
            reason = f"missing field {e}" if isinstance(e, KeyError) else e
            raise ArgumentError(f"{path.name}: {reason}") from e
        return cls(by_fingerprint, about)


@dataclass(frozen=True)
class Teeth:
    """Outcomes with the arguments for those that are no kills."""

    outcomes: tuple[Outcome, ...]
    arguments: Arguments = field(default_factory=Arguments)

    def kind(self, o: Outcome) -> str:
        """ "equivalent", "limit", or "" for a mutant that nobody has argued about."""
        return self.arguments.by_fingerprint.get(o.fingerprint, ("", ""))[0]

    @property
    def unargued(self) -> list[Outcome]:
        """Holes: neither killed nor inconclusive nor argued."""
        return [o for o in self.outcomes if o.result not in ("killed", "inconclusive") and not self.kind(o)]

    @property
    def stale(self) -> list[Outcome]:
        """Killed, and yet somebody argues that they cannot be."""
        return [o for o in self.outcomes if o.result == "killed" and self.kind(o)]

    @property
    def rate(self) -> float:
        """Kills per mutant that is not argued to be equivalent; 1 where there is none."""
        real = [o for o in self.outcomes if self.kind(o) != "equivalent"]
        return sum(o.result == "killed" for o in real) / len(real) if real else 1.0

    def by_operator(self) -> dict[str, Counter[str]]:
        """operator -> result -> mutants."""
        table: dict[str, Counter[str]] = {}
        for o in sorted(self.outcomes, key=lambda o: o.operator):
            table.setdefault(o.operator, Counter())[o.result] += 1
        return table

    def by_rule(self) -> dict[str, Counter[str]]:
        """rule -> operator -> mutants that the rule killed, alone or with others."""
        table: dict[str, Counter[str]] = {}
        for rule, operator in sorted(
            (r, o.operator) for o in self.outcomes if o.result == "killed" for r in o.rules
        ):
            table.setdefault(rule, Counter())[operator] += 1
        return table

    def survivors(self) -> list[tuple[str, str, list[Outcome]]]:
        """(kind, reason, mutants) of what is not killed, one entry per argument, the unargued first.
        For inconclusive ones the auditor's own words are the reason."""
        rest = [o for o in self.outcomes if o.result != "killed"]

        def argument(o: Outcome) -> tuple[str, str]:
            known = self.arguments.by_fingerprint.get(o.fingerprint)
            if known is not None:
                return known
            return (
                ("inconclusive", f"would settle it: {o.settle}") if o.result == "inconclusive" else ("", "")
            )

        return [
            (kind, reason, list(group))
            for (kind, reason), group in groupby(sorted(rest, key=argument), argument)
        ]
