"""A small world for the tests of lock, gate and reports: one kernel, its audit, its evidence, all green."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from k3_audit.artifact import Artifact, Contract, Launch, Param, Role
from k3_audit.audit.evidence import AuditRecord, Entry, Evidence, Lock, Prompt, Reference, launch_sha256
from k3_audit.audit.findings import Finding, Severity, Site, Verdict
from k3_audit.audit.gate import GateResult, gate
from k3_audit.audit.policy import Policy
from k3_audit.audit.scan import KernelReport
from k3_audit.audit.tree import Tree

TODAY = date(2026, 11, 30)

POLICY = Policy.from_dict(
    {
        "tiers": {
            "longctx": {"code": ["tests/longctx"], "reference": True},
            "sync": {"code": ["tests/sync"]},
        },
        "architectures": {
            "sm_90a": {"required": ["longctx", "sync"]},
            "sm_100a": {"required": [], "static_only": "no such GPU was available"},
        },
    }
)

TREE = Tree(
    reference="ref-1",
    expected="values-1",
    tiers={"longctx": "tier-longctx", "sync": "tier-sync"},
    sources={"attn_res": {"fused_backend/kernels/attn_res.py": "source-1"}},
)

SKELETON = (
    "griddepcontrol.wait  # before the loads of `delta`",
    "barrier.cluster.arrive.release",
    "st.global",
)

UNORDERED = Finding(
    rule="R15",
    severity=Severity.ERROR,
    verdict=Verdict.FINDING,
    kernel="attn_res",
    message="`delta` is read before the dependency wait",
    sites=(
        Site(3, "ld.global.b32 %r1, [%rd1];", "load", "attn_res.py:88"),
        Site(5, "griddepcontrol.wait;", "wait", "attn_res.py:90"),
    ),
    path=(Site(4, "add.s32 %r2, %r1, 1;", "", "attn_res.py:89"),),
    missing="previous grid -> load",
    fix="move the load below the wait",
)
UNDECIDED = Finding(
    rule="R06",
    severity=Severity.WARNING,
    verdict=Verdict.INCONCLUSIVE,
    kernel="attn_res",
    message="the flag's address has unknown provenance <&>",
    sites=(Site(2, "ld.relaxed.gpu.global.b32 %r0, [%rd0];", "flag"),),
    settle="a contract that names the flag",
)


def artifact(arch: str = "sm_90a", **changes: Any) -> Artifact:
    """The kernel as built; `changes` replace fields."""
    contract = Contract(
        "attn_res", (Param("delta", "bf16", Role.UPSTREAM, "r"),), Launch((128, 1, 1), pdl=True)
    )
    made = Artifact(
        kernel="attn_res",
        arch=arch,
        entry="attn_res",
        ptx="// line 1\nflag\nld.global.b32 %r1, [%rd1];\nadd.s32 %r2, %r1, 1;\ngriddepcontrol.wait;\nret;\n",
        cubin=f"machine code {arch}".encode(),
        sass="",
        contract=contract,
        toolkit={"nvidia-cutlass-dsl": "4.8.1", "ptxas": "13.5.37"},
        sources=dict(TREE.sources["attn_res"]),
    )
    return replace(made, **changes)


def report(
    *findings: Finding,
    arch: str = "sm_90a",
    verdict: Verdict | None = None,
    skeleton: tuple[str, ...] = SKELETON,
) -> KernelReport:
    """What the auditor says; the verdict is that of the findings unless given."""
    from k3_audit.audit.findings import worst

    return KernelReport(
        name="attn_res",
        file=f"attn_res.{arch}.ptx",
        arch=arch,
        verdict=verdict or worst([f.verdict for f in findings]),
        findings=findings,
        sync_skeleton=skeleton,
        unknown=(),
    )


def record(tier: str, made: Artifact, **changes: Any) -> Evidence:
    """A clean measurement of `made` on a GPU."""
    return replace(
        Evidence(
            kernel=made.kernel,
            arch=made.arch,
            tier=tier,
            case="prompt-32k" if tier == "longctx" else "handoff",
            verdict=Verdict.CLEAN,
            cubin_sha256=made.cubin_sha256,
            launch_sha256=launch_sha256(made),
            date="2026-11-29T10:00:00Z",
            command="python -m pytest tests/longctx --seed 0",
            gpu="NVIDIA H200",
            driver="580.1",
            toolkit={"torch": "2.13.0"},
            reference_sha256="ref-1",
            tier_sha256=f"tier-{tier}",
            counts={"tokens": 32768},
            figures={"max_error_ratio": 0.75, "slope": -1e-9},
            seeds=(1, 2),
            prompts=(Prompt("stdlib", "ab" * 32, 32768),),
        ),
        **changes,
    )


def entry(made: Artifact, *evidence: Evidence, **changes: Any) -> Entry:
    """The lock's entry for `made` as it was when it was locked."""
    return replace(
        Entry(
            kernel=made.kernel,
            arch=made.arch,
            reason="first kernel",
            ptx_sha256=made.ptx_sha256,
            cubin_sha256=made.cubin_sha256,
            launch_sha256=launch_sha256(made),
            audit=AuditRecord(Verdict.CLEAN),
            required=POLICY.required[made.arch],
            toolkit=made.toolkit,
            sources=made.sources,
            sync_skeleton=SKELETON,
            evidence=evidence,
        ),
        **changes,
    )


def lock() -> Lock:
    """The lock of the green world."""
    hopper, blackwell = artifact(), artifact("sm_100a")
    reference = Reference("ref-1", "values-1", "first reference", "2026-11-28T10:00:00Z")
    evidence = (record("longctx", hopper), record("sync", hopper))
    return Lock((reference,), (entry(blackwell), entry(hopper, *evidence)))


@dataclass(frozen=True)
class World:
    """Everything that the gate looks at; `with_` makes a world that differs in some of it."""

    hopper: Artifact
    lock: Lock
    findings: tuple[Finding, ...] = ()
    skeleton: tuple[str, ...] = SKELETON
    policy: Policy = POLICY
    tree: Tree = TREE

    def judge(self) -> GateResult:
        """The gate's answer. The sm_100a row stays as it is in the green world."""
        reports = {
            ("attn_res", "sm_90a"): [report(*self.findings, skeleton=self.skeleton)],
            ("attn_res", "sm_100a"): [report(arch="sm_100a")],
        }
        return gate([self.hopper, artifact("sm_100a")], self.lock, reports, self.policy, self.tree, TODAY)


def green() -> World:
    return World(artifact(), lock())
