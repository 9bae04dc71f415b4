"""Contracts of foreign kernels: a small TOML beside the code, in which a guess stays a question.

    kernel.ptx   kernel.contract.toml

The file holds one contract (`kernel = ...`) or several (`[[contract]]`), with the fields of
:class:`k3_audit.artifact.contract.Contract`. A value that ends in `?` is a guess or unknown: it is never used.
The auditor takes the reading that assumes least in its place and adds an *inconclusive* finding that names it,
until a person has decided and deleted the question mark.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3_audit.artifact.contract import Contract

from .findings import Finding, Severity, Site, Verdict, worst
from .scan import KernelReport, scan_ptx

SUFFIX = ".contract.toml"
RULE = "contract"

# What is assumed of the launch while a field is open. The largest cluster: CUDA C++ Programming Guide, "Thread
# Block Clusters"; the largest CTA: ibid., "Compute Capabilities".
_ASSUMED: dict[str, Any] = {
    "block": [1024, 1, 1],
    "cluster": [16, 1, 1],
    "pdl": True,
    "cooperative": False,
    "coresident_ctas": 1,
    "stable_distance": 0,
    "dynamic_smem": 0,
}


class ContractError(Exception):
    """One line: which contract file does not fit, and why."""


@dataclass(frozen=True)
class Question:
    """An open value: `where` names the field, `value` is as written ("?", "weight?")."""

    where: str
    value: str

    def __str__(self) -> str:
        guess = f" (guessed: {self.value[:-1]})" if len(self.value) > 1 else ""
        return f"{self.where} is open{guess}"


@dataclass(frozen=True)
class Promise:
    """One contract as read from `file`, and what is still open in it."""

    contract: Contract
    file: str = ""
    questions: tuple[Question, ...] = ()

    def fits(self, kernel: str, only: bool = False) -> bool:
        """It speaks of `kernel`, by its symbol or a part of it; `only` says that no other kernel is there."""
        return only or self.contract.kernel in kernel


def beside(path: Path) -> list[Promise]:
    """The contracts in `kernel.contract.toml` beside `kernel.ptx`; none where there is no such file."""
    file = path.with_name(path.name.removesuffix(path.suffix) + SUFFIX) if path.name else path
    return read(file) if path.name and file.is_file() else []


def scan(text: str, file: str, promises: Sequence[Promise], sass: str = "") -> list[KernelReport]:
    """Audit every kernel of a PTX text, each with the contract that fits it. Raises PtxError."""
    chosen: dict[str, Promise] = {}

    def contract_of(kernel: str, kernels: int) -> Contract | None:
        promise = choose(promises, kernel, only=kernels == 1)
        if promise is None:
            return None
        chosen[kernel] = promise
        return promise.contract

    reports = scan_ptx(text, file, contract_of, sass)
    return [apply(r, chosen[r.name]) if r.name in chosen else r for r in reports]


def read(path: Path) -> list[Promise]:
    """The contracts of one file. Raises ContractError in one line."""
    try:
        return parse(path.read_text(encoding="utf-8"), path.name)
    except OSError as e:
        raise ContractError(f"{path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ContractError(f"{path}: not UTF-8 text, so not TOML") from e


def parse(text: str, file: str = "<contract>") -> list[Promise]:
    """The contracts of a TOML text. Raises ContractError in one line."""
    try:
        data = tomllib.loads(text)
        tables = data.get("contract", [data])
        return [_promise(dict(table), file) for table in tables]
    except (tomllib.TOMLDecodeError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise ContractError(f"{file}: not a contract: {' '.join(str(e).split())}") from e


def _promise(table: dict[str, Any], file: str) -> Promise:
    questions: list[Question] = []
    if not isinstance(table.get("kernel"), str):
        raise ValueError("kernel must be the name of the kernel")
    if "launch" not in table:
        raise ValueError('launch is missing: at least launch.block, which may be "?"')
    launch = dict(table["launch"])
    for name, value in launch.items():
        if _open(value):
            questions.append(Question(f"launch.{name}", value))
            if name not in _ASSUMED:
                raise ValueError(f"launch.{name} has no reading to assume: give a value")
            launch[name] = _ASSUMED[name]
    params = []
    for n, given in enumerate(table.get("params", ())):
        param = dict(given)
        if _open(param.get("role")):
            questions.append(
                Question(f"the role of parameter {n} ({param.get('name', '?')})", param.pop("role"))
            )
        params.append(param)
    handoffs = []
    for given in table.get("handoffs", ()):
        doubtful = [(name, value) for name, value in given.items() if _open(value)]
        questions += [
            Question(f"{name} of handoff {given.get('name', '?')!r}", value) for name, value in doubtful
        ]
        if not doubtful:
            handoffs.append(given)
    table |= {"launch": launch, "params": params, "handoffs": handoffs}
    return Promise(Contract.from_dict(table), file, tuple(questions))


def _open(value: object) -> bool:
    return isinstance(value, str) and value.endswith("?")


def apply(report: KernelReport, promise: Promise) -> KernelReport:
    """The report of a kernel with the open questions of its contract as *inconclusive* findings."""
    added = [
        Finding(
            RULE,
            Severity.WARNING,
            Verdict.INCONCLUSIVE,
            report.name,
            f"{promise.file}: {question}, and the verdict may depend on it",
            (Site(0, question.where, "contract", promise.file),),
            missing=f"a decision on {question.where}",
            settle=f"decide it in {promise.file} and write it there without the question mark",
        )
        for question in promise.questions
    ]
    if not added:
        return report
    return replace(
        report,
        findings=(*report.findings, *added),
        verdict=worst([report.verdict, Verdict.INCONCLUSIVE]),
    )


def choose(promises: Iterable[Promise], kernel: str, only: bool = False) -> Promise | None:
    """The contract for a kernel: the one with its exact name, else one that fits."""
    known = list(promises)
    exact = [p for p in known if p.contract.kernel == kernel]
    return next(iter([*exact, *(p for p in known if p.fits(kernel, only and len(known) == 1))]), None)


def unused(promises: Iterable[Promise], kernels: Iterable[str]) -> Iterator[Promise]:
    """Contracts that speak of no kernel that is there."""
    names = list(kernels)
    return (p for p in promises if not any(p.fits(name) for name in names))
