"""Renew golden/: the expected values of the reference, and the lock with what was measured on the kernels.

    python golden/regenerate.py --reason "AttnRes reads two rows a step"     # build, audit, lock again
    python golden/regenerate.py --tier longctx --arch sm_90a --reason "..."  # and measure, on such a GPU
    python golden/regenerate.py --from evidence/ --reason "..."              # fold another machine's evidence

What runs depends on what is here. With CuTe DSL the kernels are built; without, the artifact store is used as
it is, if it was built from these sources. With a GPU the tiers whose evidence is missing are run on it;
without, they stay missing, and the gate says so. Exit codes: 0 done, 1 refused, 3 error.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from k3_audit.artifact import Artifact, sha256
from k3_audit.artifact.atomic import write_atomic
from k3_audit.audit import cli
from k3_audit.audit.evidence import (
    AuditRecord,
    Entry,
    Evidence,
    EvidenceError,
    Lock,
    Reference,
    launch_sha256,
    now,
    read_folder,
    this_machine,
)
from k3_audit.audit.findings import ExitCode, Verdict
from k3_audit.audit.gate import (
    changed,
    judge,
    missing_evidence,
    regenerate_command,
    skeleton_diff,
    why_stale,
)
from k3_audit.audit.policy import Policy, Suppression
from k3_audit.audit.tree import EXPECTED, Tree, combine, tree_hashes
from k3_audit.fused_backend.build import source_hashes
from k3_audit.fused_backend.kernels import KERNELS

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "golden" / "kernels.lock"
LOGITS = ROOT / "golden" / "expected" / "tiny-logits.json"
EVIDENCE = ROOT / "build" / "evidence"

# The text whose logits are kept: plain, accented and Chinese letters, code, digits.
TEXT = "x = 4096  # μ, 注意力\n"
# Two computations of the reference differ by float64 round-off: 4e-13 of the logits' RMS was measured between
# decode token by token and chunked prefill. A changed formula, or float32 anywhere, moves them by far more.
SAME = 1e-10


class Refused(Exception):
    """One line: why nothing was written, and what would be accepted."""


# The expected values of the reference.


def reference_model(**options: Any) -> Any:
    """The reference (float64, unless `options` say otherwise) on the reduced configuration with seed 0."""
    from k3_audit.reference import Model, load_config, synthesise

    config = load_config("tiny")
    return Model(config, synthesise(config, seed=0), **options)


@dataclass(frozen=True)
class Values:
    """The logits that the reference computes for `tokens`: a row of floats for each position."""

    config: str
    seed: int
    tokens: tuple[int, ...]
    logits: tuple[tuple[float, ...], ...]

    def dumps(self) -> str:
        """JSON with a line for each position; floats in hexadecimal, so that no bit is lost."""
        head = json.dumps({"config": self.config, "seed": self.seed, "tokens": self.tokens})
        rows = ",\n".join(json.dumps([x.hex() for x in row]) for row in self.logits)
        return f'{head[:-1]},\n"logits": [\n{rows}\n]}}\n'

    @classmethod
    def load(cls, path: Path) -> Values:
        """Inverse of :meth:`dumps`. Raises EvidenceError for a file that is not one."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            logits = tuple(tuple(float.fromhex(x) for x in row) for row in data["logits"])
            return cls(data["config"], data["seed"], tuple(data["tokens"]), logits)
        except (OSError, ValueError, TypeError, KeyError) as e:
            raise EvidenceError(f"{path.name}: {e}; restore it from version control") from None

    def difference(self, other: Values) -> float:
        """Largest difference of the logits over their RMS; infinite for other inputs or shapes, or NaN."""
        mine, theirs = ([x for row in v.logits for x in row] for v in (self, other))
        if replace(self, logits=()) != replace(other, logits=()) or len(mine) != len(theirs):
            return math.inf
        rms = math.sqrt(sum(x * x for x in mine) / len(mine))
        gaps = [abs(x - y) for x, y in zip(mine, theirs, strict=True)]
        return max(gaps) / rms if rms and math.isfinite(sum(gaps) / rms) else math.inf


def expected_values() -> Values:
    """What the reference computes at every position of TEXT."""
    model = reference_model()
    tokens = (model.config.bos_token_id, *TEXT.encode())
    logits = model.prefill(tokens, model.empty_cache(), keep=len(tokens))
    return Values("tiny", 0, tokens, tuple(tuple(row) for row in logits.tolist()))


def renew_reference(lock: Lock, tree: Tree, reason: str) -> tuple[Lock, str]:
    """(the lock with the reference as it is now, the new text of LOGITS or "" to keep the file).

    Raises Refused when the reference moved and there is no reason.
    """
    new = expected_values()
    moved = Values.load(LOGITS).difference(new) if LOGITS.exists() else math.inf
    before = lock.reference
    if before is None:
        what = "it was not locked before"
    elif before.sha256 != tree.reference:
        what = "its files changed"
    elif moved > SAME:
        what = "its values changed"
    elif before.values_sha256 != tree.expected:
        what = "golden/expected/ was edited"
    else:
        click.echo(f"reference  unchanged (values agree to {moved:.1g} of their RMS)")
        return lock, ""
    if not reason:
        gap = f"values differ by {moved:.2g} of their RMS"
        raise Refused(f"the reference moved ({what}; {gap}): say why with --reason")
    click.echo(
        f"reference  {what}; values {'differ by' if moved > SAME else 'agree to'} {moved:.2g} of their RMS"
    )
    text = new.dumps() if moved > SAME else ""
    hashes = tree_hashes(ROOT, EXPECTED)
    if text:
        hashes[LOGITS.relative_to(ROOT).as_posix()] = sha256(text)
    return lock.with_reference(Reference(tree.reference, combine(hashes), reason, now())), text


# Kernels.


def locked(artifact: Artifact, before: Entry | None, policy: Policy, reason: str) -> Entry:
    """Audit one artifact; its entry, with the evidence that `before` had. Raises Refused for a defect."""
    reports = cli.audit_artifact(artifact, ROOT)
    used: set[Suppression] = set()
    verdict, left = judge(artifact.kernel, reports, policy.suppressions, datetime.now(UTC).date(), used)
    name = f"{artifact.kernel} {artifact.arch}"
    if verdict in (Verdict.FINDING, Verdict.ERROR):
        rules = ", ".join(sorted({f.rule for f in left})) or "unreadable"
        raise Refused(
            f"{name}: the audit says {verdict} ({rules}); `k3-audit gate` shows it. Nothing was locked"
        )
    entry = Entry(
        kernel=artifact.kernel,
        arch=artifact.arch,
        reason=before.reason if before else reason,
        ptx_sha256=artifact.ptx_sha256,
        cubin_sha256=artifact.cubin_sha256,
        launch_sha256=launch_sha256(artifact),
        audit=AuditRecord(
            verdict,
            findings=0,
            inconclusive=sum(f.verdict == Verdict.INCONCLUSIVE for f in left),
            unknown=sum(len(r.unknown) for r in reports),
            suppressed=tuple(sorted(map(str, used))),
        ),
        required=policy.required[artifact.arch],
        toolkit=artifact.toolkit,
        sources=artifact.sources,
        sync_skeleton=tuple(line for r in reports for line in r.sync_skeleton),
        evidence=before.evidence if before else (),
    )
    if entry == before:
        click.echo(f"lock  {name}: unchanged")
        return entry
    if not reason:
        raise Refused(f"{name}: {'changed' if before else 'new'}; say why with --reason")
    click.echo(f"lock  {name}: {'changed' if before else 'new'}")
    if before:
        for field in ("cubin_sha256", "ptx_sha256", "launch_sha256"):
            a, b = getattr(before, field), getattr(entry, field)
            if a != b:
                click.echo(f"    {field}  {a[:12]} -> {b[:12]}")
        for label, a, b in (
            ("source", before.sources, entry.sources),
            ("toolkit", before.toolkit, entry.toolkit),
        ):
            if names := changed(a, b):
                click.echo(f"    {label}  {', '.join(names)}")
        if before.audit != entry.audit:
            click.echo(f"    audit  {before.audit.verdict} -> {entry.audit.verdict}")
        for line in skeleton_diff(before.sync_skeleton, entry.sync_skeleton):
            click.echo(f"    {line}")
    return replace(entry, reason=reason)


# Evidence.


def run_tier(tier: str, kernel: str, arch: str) -> bool:
    """`pytest -m TIER` for one kernel on this machine's GPU; True when it passed."""
    command = ["-m", "pytest", f"tests/{tier}", "-m", tier, "--kernel", kernel, "--arch", arch]
    command += ["--evidence-dir", str(EVIDENCE), "-p", "no:cacheprovider"]
    click.echo(f"measure  python {' '.join(command)}")
    for old in EVIDENCE.glob(f"{kernel}.{arch}.{tier}.*.json"):
        old.unlink()
    return subprocess.run([sys.executable, *command], cwd=ROOT, env={**os.environ}).returncode == 0


def fold(entry: Entry, records: Sequence[Evidence], artifact: Artifact, lock: Lock, policy: Policy) -> Entry:
    """`entry` with `records` of its own kernel and architecture in place of older ones.

    A record that says nothing about this machine code, or says that it fails, is refused.
    """
    for record in records:
        if reason := why_stale(record, artifact, lock, policy):
            raise Refused(f"{'.'.join(record.key)}: {reason}; nothing was locked")
    tiers = {r.tier for r in records}
    kept = []
    for old in entry.evidence:
        new = next((r for r in records if r.key == old.key), None)
        if new is None and not (old.tier in tiers and why_stale(old, artifact, lock, policy)):
            kept.append(old)
    for record in records:
        old = next((r for r in entry.evidence if r.key == record.key), None)
        click.echo(f"evidence  {'.'.join(record.key)}: {record.verdict} on {record.gpu}")
        for name, value in {**record.counts, **record.figures}.items():
            before = {**old.counts, **old.figures}.get(name) if old else None
            was = f"   (was {before:.6g})" if before is not None else ""
            click.echo(f"    {name} = {value:.6g}{was}")
    return replace(entry, evidence=tuple(sorted([*kept, *records], key=lambda r: r.key)))


def regenerate(
    reason: str, tiers: Sequence[str], kernels: Sequence[str], archs: Sequence[str], source: Path | None
) -> None:
    """The whole of it. Writes the lock once, at the end. Raises Refused or an error of a room."""
    policy = Policy.load(ROOT / "golden" / "policy.toml")
    for given, known, what in (
        (tiers, policy.tiers, "tier"),
        (archs, policy.required, "architecture"),
        (kernels, KERNELS, "kernel"),
    ):
        for name in given:
            if name not in known:
                raise EvidenceError(f"there is no {what} {name!r}; known: {', '.join(known)}")
    lock = before = Lock.load(LOCK)
    store = cli.open_store(ROOT)
    wanted_kernels, wanted_archs = kernels or KERNELS, archs or tuple(policy.required)
    sources = {k: source_hashes(k) for k in KERNELS}
    tree = Tree.read(ROOT, policy, sources)
    lock, logits = renew_reference(lock, tree, reason)

    if cli.toolkit_is_here():
        artifacts = cli.build_artifacts(store, wanted_archs, wanted_kernels)
    else:
        click.echo(f"build  skipped: no CuTe DSL here, using {store.root}")
        artifacts = [store.get(k, a) for k in wanted_kernels for a in wanted_archs]
        for artifact in artifacts:
            if stale := changed(artifact.sources, sources[artifact.kernel]):
                raise Refused(
                    f"{store.root} was built from another version of {', '.join(stale)}; build it again"
                )
    for artifact in artifacts:
        lock = lock.with_entry(locked(artifact, lock.entry(artifact.kernel, artifact.arch), policy, reason))
    if not kernels and not archs:
        alive = {(a.kernel, a.arch) for a in artifacts}
        lock = replace(lock, entries=tuple(e for e in lock.entries if (e.kernel, e.arch) in alive))

    brought = _brought(source, {(a.kernel, a.arch) for a in artifacts}, tiers) if source is not None else []
    for artifact in artifacts:
        entry = lock.entry(artifact.kernel, artifact.arch)
        assert entry is not None
        if source is None:
            records = measure(artifact, entry, lock, policy, tiers)
        else:
            records = [r for r in brought if (r.kernel, r.arch) == (artifact.kernel, artifact.arch)]
        lock = lock.with_entry(fold(entry, records, artifact, lock, policy))
    assert lock.reference is not None
    lock = lock.with_reference(lock.reference)
    if logits:
        write_atomic(LOGITS, logits)
    if lock.dumps() == before.dumps() and LOCK.exists():
        click.echo("golden/kernels.lock  unchanged")
    else:
        lock.save(LOCK)
        click.echo("golden/kernels.lock  written; `k3-audit gate` judges it")


def _brought(source: Path, asked: set[tuple[str, str]], tiers: Sequence[str]) -> list[Evidence]:
    """The GPU records in `source` that were asked for; says what is left out."""
    records, left_out = [], []
    for record in read_folder(source):
        wanted = (record.kernel, record.arch) in asked and (not tiers or record.tier in tiers)
        (records if wanted and record.gpu else left_out).append(record)
    for record in left_out:
        why = "not asked for" if record.gpu else "the CPU form of the tier, which is never locked"
        click.echo(f"evidence  left out {'.'.join(record.key)}: {why}")
    return records


def measure(
    artifact: Artifact, entry: Entry, lock: Lock, policy: Policy, tiers: Sequence[str]
) -> list[Evidence]:
    """Run on this GPU the tiers that were asked for, or those whose evidence is missing; their records."""
    kernel, arch = artifact.kernel, artifact.arch

    def missing(tier: str) -> bool:
        records = [r for r in entry.evidence if r.tier == tier]
        return any(missing_evidence(artifact, tier, records, lock, policy))

    todo = [t for t in policy.required[arch] if (t in tiers if tiers else missing(t))]
    if not todo:
        return []
    if this_machine().arch != arch:
        for tier in todo:
            again = regenerate_command(kernel=kernel, arch=arch, tier=tier)
            if tiers:
                raise Refused(f"{tier} for {arch} needs a GPU of {arch}; on such a machine: {again}")
            click.echo(f"measure  {tier} for {kernel} needs a GPU of {arch}; on such a machine: {again}")
        return []
    failed = [tier for tier in todo if not run_tier(tier, kernel, arch)]
    if failed:
        raise Refused(f"{kernel} {arch}: {', '.join(failed)} failed, see above; nothing was locked")
    records = [
        r for r in read_folder(EVIDENCE) if (r.kernel, r.arch) == (kernel, arch) and r.tier in todo and r.gpu
    ]
    if silent := set(todo) - {r.tier for r in records}:
        raise Refused(f"{kernel} {arch}: {', '.join(sorted(silent))} passed but measured nothing on this GPU")
    return records


@click.command(help=__doc__.split("\n\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--reason", default="", help="Why the goldens change; kept in the lock.")
@click.option("--tier", "tiers", multiple=True, help="Measure this tier even if its evidence is fresh.")
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel.")
@click.option("--arch", "archs", multiple=True, help="Only this architecture.")
@click.option(
    "--from", "source", type=click.Path(path_type=Path), help="Folder of evidence from another machine."
)
def command(
    reason: str, tiers: tuple[str, ...], kernels: tuple[str, ...], archs: tuple[str, ...], source: Path | None
) -> int:
    if reason and not reason.strip(" ."):
        raise click.UsageError("--reason must say why, in words")
    try:
        regenerate(reason, tiers, kernels, archs, source)
    except Refused as e:
        click.echo(f"refused: {e}", err=True)
        return ExitCode.FINDINGS
    return ExitCode.CLEAN


def main(arguments: Sequence[str]) -> int:
    """Exit code of one command line: 0 done, 1 refused, 3 error in one line."""
    try:
        return int(command.main(list(arguments), prog_name="regenerate.py", standalone_mode=False) or 0)
    except Exception as e:
        cli.complain(cli.reason(e))
    return ExitCode.ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
