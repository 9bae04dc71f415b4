"""R18: a tensor map is changed and then used by a copy, without the fences of the tensormap proxy."""

from __future__ import annotations

from collections.abc import Iterator

from ..findings import Finding, Severity
from ..ptx.effects import Access, Kind
from ..ptx.provenance import may_overlap
from ..subject import Subject
from .base import Mutation, Rule, snippet


def check(s: Subject) -> Iterator[Finding]:
    changes = [
        (i, a) for i in s.find(Kind.STORE, Kind.PROXY_FENCE) for a in s.effects[i].accesses
        if a.role == "tensormap" and a.writes
    ]  # fmt: skip
    uses = [(i, a) for i in s.find(Kind.BULK) for a in s.effects[i].accesses if a.role == "tensormap"]
    acquires = {
        i for i in s.find(Kind.PROXY_FENCE) if s.effects[i].proxy == "tensormap" and s.effects[i].acquires
    }
    releases = {
        i for i in s.find(Kind.PROXY_FENCE) if s.effects[i].proxy == "tensormap" and s.effects[i].releases
    }
    for i, a in changes:
        users = [(u, b) for u, b in uses if may_overlap(s.address(i, a), 128, s.address(u, b), 128)]
        if not users:
            continue
        without = s.order.search([i], stop=acquires.__contains__)
        unreleased = s.order.search([i], stop=releases.__contains__)
        for u, b in users:
            if u in without:
                yield _finding(
                    s, i, a, u, b, "no fence.proxy.tensormap::generic.acquire of it comes before the copy",
                    "change -> release -> fence.proxy.tensormap::generic.acquire -> copy",
                    f"fence.proxy.tensormap::generic.acquire.<scope> [map], 128 before line {s.body[u].line}, in the "
                    "issuing thread", s.order.trace(without, u, [i]),
                )  # fmt: skip
                return
            if i not in releases and u in unreleased:
                yield _finding(
                    s, i, a, u, b, "the change is not released to the tensormap proxy",
                    "change -> fence.proxy.tensormap::generic.release -> acquire -> copy",
                    f"fence.proxy.tensormap::generic.release.<scope> after line {s.body[i].line} (or "
                    "tensormap.cp_fenceproxy)", s.order.trace(unreleased, u, [i]),
                )  # fmt: skip
                return


def _finding(
    s: Subject, i: int, a: Access, u: int, b: Access, message: str, missing: str, fix: str, route: list[int]
) -> Finding:
    known = s.address(i, a).known and s.address(u, b).known and len(s.address(i, a).parts) == 1
    return s.finding(
        "R18",
        Severity.ERROR,
        f"a tensor map is changed and then used by a bulk tensor copy, and {message}: the copy may use the old map",
        [s.site(i, "change"), s.site(u, "copy")],
        missing=missing,
        fix=fix,
        settle="" if known else "that the changed map and the used one are different",
        path=route,
    )


_PASSING = snippet(
    """
    ld.param.u64 %rd1, [map];
    ld.param.u64 %rd2, [x];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, smem;
    mov.u32 %r3, full;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra DONE;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512;
    tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;
    fence.proxy.tensormap::generic.release.gpu;
    fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;
    mov.b32 %r4, 0;
    cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r4}], [%r3];
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    DONE:
    """,
    params=".param .u64 .ptr .global .align 128 map, .param .u64 .ptr .global .align 16 x",
    declare=".shared .align 128 .b8 smem[512];\n.shared .align 8 .b64 full;",
)

RULE = Rule(
    id="R18",
    title="changed tensor map is used without tensormap fences",
    severity=Severity.ERROR,
    meaning=(
        "Copies read their tensor map through the tensormap proxy, which has caches of its own; a kernel changes it "
        "through the generic proxy. The change must be released with `fence.proxy.tensormap::generic.release` (or "
        "copied "
        "with `tensormap.cp_fenceproxy`, which contains it), and every user must acquire exactly that map with "
        "`fence.proxy.tensormap::generic.acquire [map], 128` before its copy. A map in global memory is not "
        "acquired by "
        "the start of the kernel either; a map that is a `__grid_constant__` parameter needs nothing."
    ),
    looks_for=(
        "a path from tensormap.replace or cp_fenceproxy to a bulk tensor copy that may use the same map, without an "
        "acquiring tensormap fence, or without a releasing one"
    ),
    isa_section="membar / fence: fence.proxy.tensormap; tensormap.replace; tensormap.cp_fenceproxy",
    fix="release after the change, acquire of the map in each thread that issues a copy with it",
    failing=_PASSING.replace("    fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;\n", ""),
    passing=_PASSING,
    mutations=(
        Mutation("acquire deleted", "    fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;\n", ""),
        Mutation("release deleted", "    fence.proxy.tensormap::generic.release.gpu;\n", ""),
        Mutation("async fence instead", "fence.proxy.tensormap::generic.release.gpu", "fence.proxy.async"),
        Mutation(
            "ordinary fence instead",
            "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128",
            "fence.acq_rel.gpu",
        ),
    ),
    check=check,
)
