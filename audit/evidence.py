"""Evidence: what a tier measured on one kernel's machine code, and the lock file that keeps it.

    tier run --EvidenceWriter--> one JSON file per kernel, architecture, tier and case
    JSON files --golden/regenerate.py--> golden/kernels.lock --gate--> green or red

A record is bound to the sha256 of the cubin and of the launch metadata that it was measured on; for any
other cubin it counts as missing. Every record carries a digest of itself. That makes a hand edit show. It
does not make forging impossible: whoever can run this code can also compute a digest. Tamper-evident, not
tamper-proof.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from k3_audit.artifact.artifact import Artifact, sha256
from k3_audit.artifact.atomic import write_atomic

from .findings import Verdict

SCHEMA = 1

HEADER = """\
golden/kernels.lock: what is known about the machine code of every kernel, and what was measured on it.

Written by golden/regenerate.py and read by `k3-audit gate`. Never edit it by hand: every evidence record
carries a digest of itself, and the gate names a record whose digest does not fit. Review it like code: the
diff of `sync_skeleton` is what changed in the synchronisation, the diff of `evidence` is what was measured
on the result.
"""


class EvidenceError(Exception):
    """One line: which file or field does not fit, and what to do."""


@dataclass(frozen=True)
class Prompt:
    """One input text of a measurement. `tokens` is its length after tokenisation."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True)
class Evidence:
    """One measurement of one case.

    `gpu` is "" for the CPU form of a tier, which never counts as GPU evidence. `counts` are whole numbers
    (launches, tokens, histogram cells), `figures` are real ones (errors, ratios; their names say the unit);
    `reference_sha256` and `tier_sha256` hash the reference and the code of the tier.
    """

    kernel: str
    arch: str
    tier: str
    case: str
    verdict: Verdict
    cubin_sha256: str
    launch_sha256: str
    date: str
    command: str
    gpu: str = ""
    driver: str = ""
    toolkit: dict[str, str] = field(default_factory=dict)
    reference_sha256: str = ""
    tier_sha256: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    detail: str = ""

    @property
    def digest(self) -> str:
        """sha256 of the record as canonical JSON (sorted keys, no spaces)."""
        return sha256(json.dumps(asdict(self), sort_keys=True, separators=(",", ":")))

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.kernel, self.arch, self.tier, self.case)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with its digest, as written to JSON and to the lock."""
        return {**asdict(self), "digest": self.digest}

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Evidence:
        """Inverse of :meth:`to_dict`. Raises EvidenceError: a field is missing, the digest does not fit."""
        if not isinstance(data, dict):
            raise EvidenceError(f"{where}: an evidence record must be a table, not {type(data).__name__}")
        given = dict(data)
        digest = given.pop("digest", "")
        prompts = given.get("prompts", [])
        if isinstance(prompts, list):
            given["prompts"] = [_build(Prompt, p, f"{where}: prompt {i}") for i, p in enumerate(prompts)]
        record = _build(cls, given, where)
        if record.digest != digest:
            raise EvidenceError(
                f"{where}: the digest does not fit the record: it was edited or cut; measure again"
            )
        return record


@dataclass(frozen=True)
class AuditRecord:
    """The auditor's answer about one artifact, in numbers. `suppressed` holds "rule fingerprint: reason"."""

    verdict: Verdict
    findings: int = 0
    inconclusive: int = 0
    unknown: int = 0
    suppressed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """What the lock knows about one kernel on one architecture."""

    kernel: str
    arch: str
    reason: str
    ptx_sha256: str
    cubin_sha256: str
    launch_sha256: str
    audit: AuditRecord
    required: tuple[str, ...] = ()
    toolkit: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    sync_skeleton: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Reference:
    """One state of the reference. Two states with equal `values_sha256` compute the same numbers.

    `sha256` hashes reference/; `values_sha256` hashes golden/expected/, which is computed from it.
    """

    sha256: str
    values_sha256: str
    reason: str
    date: str


@dataclass(frozen=True)
class Lock:
    """golden/kernels.lock.

    `references` ends with the current one; older ones stay while evidence refers to them.
    """

    references: tuple[Reference, ...] = ()
    entries: tuple[Entry, ...] = ()

    @property
    def reference(self) -> Reference | None:
        return self.references[-1] if self.references else None

    def entry(self, kernel: str, arch: str) -> Entry | None:
        return next((e for e in self.entries if (e.kernel, e.arch) == (kernel, arch)), None)

    def same_values(self, reference_sha256: str) -> bool:
        """True when the reference with this hash computed the numbers that the current one computes."""
        now = self.reference
        return now is not None and any(
            r.sha256 == reference_sha256 and r.values_sha256 == now.values_sha256 for r in self.references
        )

    def with_entry(self, entry: Entry) -> Lock:
        """The lock with one entry replaced or added."""
        rest = [e for e in self.entries if (e.kernel, e.arch) != (entry.kernel, entry.arch)]
        return replace(self, entries=(*rest, entry))

    def with_reference(self, reference: Reference) -> Lock:
        """The lock with `reference` as the current one; older ones that no evidence refers to are dropped."""
        used = {record.reference_sha256 for e in self.entries for record in e.evidence}
        older = (r for r in self.references if r.sha256 in used and r.sha256 != reference.sha256)
        return replace(self, references=(*older, reference))

    def dumps(self) -> str:
        """TOML: sorted, one fact a line, so that a diff reads well. Equal locks give equal bytes."""
        return _dumps(self)

    def save(self, path: Path) -> None:
        write_atomic(path, self.dumps())

    @classmethod
    def load(cls, path: Path) -> Lock:
        """Read the lock; an absent file is an empty lock. Raises EvidenceError in one line."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError) as e:
            raise EvidenceError(f"{path.name}: {_one_line(e)}; restore it from version control") from None
        return cls.loads(text, path.name)

    @classmethod
    def loads(cls, text: str, name: str = "kernels.lock") -> Lock:
        try:
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as e:
            raise EvidenceError(f"{name}: {_one_line(e)}; restore it from version control") from None
        if data.get("schema") != SCHEMA:
            raise EvidenceError(
                f"{name}: schema {data.get('schema')!r}, this version of k3-audit reads {SCHEMA}; "
                "regenerate it or install the version that wrote it"
            )
        references = tuple(
            _build(Reference, r, f"{name}: reference {i}")
            for i, r in enumerate(_list(data, "reference", name))
        )
        entries = tuple(
            _entry(kernel, arch, table, f"{name}: {kernel} {arch}")
            for kernel, archs in _table(data.get("kernels", {}), f"{name}: kernels").items()
            for arch, table in _table(archs, f"{name}: {kernel}").items()
        )
        return cls(references, entries)


def launch_sha256(artifact: Artifact) -> str:
    """Hash of what the launcher adds to the cubin: symbol, launch shape, order and types of arguments."""
    contract = artifact.contract
    facts = [artifact.entry, asdict(contract.launch), [(p.dtype, p.role) for p in contract.params]]
    return sha256(json.dumps(facts, sort_keys=True))


def now() -> str:
    """UTC time to the second, as the records write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Machine:
    """Where a measurement ran. `gpu` is "" without one; `arch` is our name of its architecture, or ""."""

    gpu: str = ""
    arch: str = ""
    driver: str = ""
    toolkit: dict[str, str] = field(default_factory=dict)


def without_gpu() -> Machine:
    """This machine as the CPU form of a tier uses it."""
    return Machine(toolkit={"python": platform.python_version(), "torch": version("torch")})


@cache
def this_machine() -> Machine:
    """This machine with the first GPU that torch sees, if any. Imports torch."""
    import torch

    machine = without_gpu()
    if not torch.cuda.is_available():
        return machine
    major, minor = torch.cuda.get_device_capability(0)
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        driver = []
    return Machine(
        gpu=torch.cuda.get_device_name(0),
        arch=f"sm_{major}{minor}a",
        driver=driver[0] if driver else "",
        toolkit={**machine.toolkit, "cuda_runtime": torch.version.cuda or ""},
    )


class EvidenceWriter:
    """Turns the results of one tier run into evidence files.

    `folder` receives one JSON file per (kernel, architecture, tier, case); `tier_hashes` maps a tier to the
    hash of its code; `command` is what a reader types to repeat the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        command: str,
        reference_sha256: str = "",
        tier_hashes: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.command = command
        self.reference_sha256 = reference_sha256
        self.tier_hashes = dict(tier_hashes or {})

    def write(
        self,
        artifact: Artifact,
        *,
        tier: str,
        case: str,
        verdict: Verdict,
        machine: Machine,
        counts: Mapping[str, int] | None = None,
        figures: Mapping[str, float] | None = None,
        seeds: Sequence[int] = (),
        prompts: Sequence[Prompt] = (),
        detail: str = "",
    ) -> Evidence:
        """Write one record atomically and return it. `machine` is Machine() for the CPU form of the tier.

        Raises EvidenceError for a count that is not a whole number or a figure that is not a number.
        """
        record = Evidence(
            kernel=artifact.kernel,
            arch=artifact.arch,
            tier=tier,
            case=case,
            verdict=verdict,
            cubin_sha256=artifact.cubin_sha256,
            launch_sha256=launch_sha256(artifact),
            date=now(),
            command=self.command,
            gpu=machine.gpu,
            driver=machine.driver,
            toolkit={**artifact.toolkit, **machine.toolkit},
            reference_sha256=self.reference_sha256,
            tier_sha256=self.tier_hashes.get(tier, ""),
            counts={k: _number(int, v, k) for k, v in sorted((counts or {}).items())},
            figures={k: _number(float, v, k) for k, v in sorted((figures or {}).items())},
            seeds=tuple(int(s) for s in seeds),
            prompts=tuple(prompts),
            detail=detail,
        )
        name = re.sub(r"[^\w.-]+", "_", ".".join(record.key))
        write_atomic(
            self.folder / f"{name}.json", json.dumps(record.to_dict(), indent=1, sort_keys=True) + "\n"
        )
        return record


def read_folder(folder: Path) -> list[Evidence]:
    """All records under `folder`, sorted. Raises EvidenceError for a file that is not a whole record."""
    if not folder.is_dir():
        raise EvidenceError(
            f"{folder} is not a folder; give the folder that the tiers wrote with --evidence-dir"
        )
    records = []
    for path in sorted(folder.rglob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise EvidenceError(f"{path.name}: not an evidence record: {_one_line(e)}") from None
        records.append(Evidence.from_dict(data, path.name))
    return sorted(records, key=lambda r: r.key)


# Reading plain data into the dataclasses above, with the field's name in every complaint.


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _number(kind: type, value: Any, name: str) -> Any:
    """`value` (also of numpy or torch) as a Python number, never a rounded one."""
    number = kind(value)
    if number != value and number == number:
        raise EvidenceError(f"{name} = {value!r} is not a whole number: report it under `figures`")
    return number


def _table(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise EvidenceError(f"{where} must be a table, not {type(data).__name__}")
    return data


def _list(data: dict[str, Any], name: str, where: str) -> list[Any]:
    value = data.get(name, [])
    if not isinstance(value, list):
        raise EvidenceError(f"{where}: {name} must be an array, not {type(value).__name__}")
    return value


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(arguments[0], v, where) for v in value)
    if origin is dict and isinstance(value, dict):
        return {str(k): _convert(arguments[1], v, f"{where}.{k}") for k, v in sorted(value.items())}
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind is Verdict and value in list(Verdict):
        return Verdict(value)
    raise EvidenceError(f"{where}: {value!r} is not {getattr(kind, '__name__', kind)}")


def _build(cls: type, data: Any, where: str) -> Any:
    """A dataclass from a table, checked field by field."""
    table, hints = _table(data, where), typing.get_type_hints(cls)
    names = {f.name for f in fields(cls)}
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(needed - table.keys()):
        raise EvidenceError(f"{where}: missing field {missing[0]!r}")
    if extra := sorted(table.keys() - names):
        raise EvidenceError(f"{where}: unknown field {extra[0]!r}")
    return cls(**{k: _convert(hints[k], v, f"{where}: {k}") for k, v in table.items()})


def _entry(kernel: str, arch: str, data: Any, where: str) -> Entry:
    table = dict(_table(data, where))
    for name in ("kernel", "arch"):
        if name in table:
            raise EvidenceError(f"{where}: unknown field {name!r}")
    evidence = [
        Evidence.from_dict({"kernel": kernel, "arch": arch, **_table(r, where)}, f"{where}: evidence {i}")
        for i, r in enumerate(_list(table, "evidence", where))
    ]
    audit = _build(AuditRecord, table.get("audit", {}), f"{where}: audit")
    return _build(
        Entry, {**table, "kernel": kernel, "arch": arch, "audit": audit, "evidence": evidence}, where
    )


# Writing. tomlkit decides how a value looks; the order is ours.


def _dumps(lock: Lock) -> str:
    import tomlkit

    def lines(items: Sequence[str]) -> Any:
        array = tomlkit.array()
        array.extend(items)
        return array.multiline(len(items) > 0)

    def inline(items: Mapping[str, Any]) -> Any:
        table = tomlkit.inline_table()
        table.update(dict(sorted(items.items())))
        return table

    def record(evidence: Evidence) -> Any:
        table = tomlkit.table()
        data = evidence.to_dict()
        for name in ("kernel", "arch"):
            del data[name]
        for name, value in data.items():
            if isinstance(value, dict):
                table.add(name, inline(value))
            elif name == "prompts":
                array = tomlkit.array()
                array.extend(inline(p) for p in value)
                table.add(name, array.multiline(len(value) > 0))
            else:
                table.add(name, list(value) if isinstance(value, tuple) else value)
        return table

    document = tomlkit.document()
    for line in HEADER.splitlines():
        document.add(tomlkit.comment(line) if line else tomlkit.comment(""))
    document.add(tomlkit.nl())
    document.add("schema", SCHEMA)
    references = tomlkit.aot()
    for reference in lock.references:
        table = tomlkit.table()
        table.update(asdict(reference))
        references.append(table)
    document.add("reference", references)
    kernels = tomlkit.table(is_super_table=True)
    by_kernel: dict[str, Any] = {}
    for entry in sorted(lock.entries, key=lambda e: (e.kernel, e.arch)):
        table = tomlkit.table()
        for name in ("reason", "ptx_sha256", "cubin_sha256", "launch_sha256"):
            table.add(name, getattr(entry, name))
        table.add("required", list(entry.required))
        table.add("toolkit", inline(entry.toolkit))
        table.add("sync_skeleton", lines(entry.sync_skeleton))
        sources = tomlkit.table()
        sources.update(dict(sorted(entry.sources.items())))
        table.add("sources", sources)
        audit = tomlkit.table()
        for name, value in asdict(entry.audit).items():
            audit.add(name, lines(value) if name == "suppressed" else value)
        table.add("audit", audit)
        if entry.evidence:
            records = tomlkit.aot()
            for evidence in sorted(entry.evidence, key=lambda r: r.key):
                records.append(record(evidence))
            table.add("evidence", records)
        if entry.kernel not in by_kernel:
            by_kernel[entry.kernel] = tomlkit.table(is_super_table=True)
            kernels.add(entry.kernel, by_kernel[entry.kernel])
        by_kernel[entry.kernel].add(entry.arch, table)
    document.add("kernels", kernels)
    return tomlkit.dumps(document)
