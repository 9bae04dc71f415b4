"""The effects table: meaning and defaults of each form, and that ptxas accepts every form tested here."""

from __future__ import annotations

import pytest
from k3_audit.artifact.toolchain import assemble
from k3_audit.audit.ptx.effects import SEMS, Effect, Kind, bytes_of, defined, effect, used
from k3_audit.audit.ptx.parser import parse

pytestmark = pytest.mark.unit

REGISTERS = """
.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<70>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .b128 %q;
.shared .align 128 .b8 sm[1024];
"""


def program(lines: list[str], arch: str) -> str:
    code = "\n".join(lines)
    head = f".version 9.0\n.target {arch}\n.address_size 64\n"
    return f"{head}.visible .entry k(.param .align 64 .b8 map[128])\n{{{REGISTERS}\n{code}\nret;\n}}\n"


def summary(e: Effect) -> str:
    """`kind/op sem scope | access access`, an access as `rw:space[:proxy][:role]`."""
    head = f"{e.kind}/{e.op}" if e.op else str(e.kind)
    words = [w for w in (head, e.sem, e.scope, e.proxy, e.space, e.restrict) if w]
    for a in e.accesses:
        proxy = f":{a.proxy}" if a.proxy != "generic" else ""
        role = f":{a.role}" if a.role != "data" else ""
        words.append(f"{'r' * a.reads}{'w' * a.writes}:{a.space}{proxy}{role}{'!' * a.asynchronous}")
    return " ".join(words)


COMMON = [
    ("ld.global.b32 %r1, [%rd1];", "load weak r:global"),
    ("ld.relaxed.gpu.global.b32 %r1, [%rd1];", "load relaxed gpu r:global"),
    ("ld.acquire.sys.b32 %r1, [%rd1];", "load acquire sys r:generic"),
    ("ld.volatile.global.b32 %r1, [%rd1];", "load volatile sys r:global"),
    ("ld.mmio.relaxed.sys.global.b32 %r1, [%rd1];", "load mmio sys r:global"),
    (
        "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1];",
        "load weak r:global:noncoherent",
    ),
    ("ld.shared.b32 %r1, [sm+4];", "load weak r:shared::cta"),
    ("ld.shared::cluster.b32 %r1, [%r2];", "load weak r:shared::cluster"),
    ("st.global.wb.v2.b32 [%rd1], {%r1,%r2};", "store weak w:global"),
    ("st.release.cluster.shared::cluster.b32 [%r1], %r2;", "store release cluster w:shared::cluster"),
    ("atom.add.u32 %r1, [%rd1], %r2;", "atomic relaxed gpu rw:generic"),
    ("atom.acq_rel.sys.global.cas.b32 %r1, [%rd1], %r2, %r3;", "atomic acq_rel sys rw:global"),
    ("red.release.gpu.global.add.u32 [%rd1], %r2;", "reduction release gpu rw:global"),
    ("fence.acq_rel.gpu;", "fence acq_rel gpu"),
    ("fence.sc.sys;", "fence sc sys"),
    ("membar.gl;", "fence sc gpu"),
    ("membar.cta;", "fence sc cta"),
    ("fence.mbarrier_init.release.cluster;", "fence release cluster mbarrier_init"),
    ("fence.proxy.async;", "proxy_fence async"),
    ("fence.proxy.async.shared::cta;", "proxy_fence async shared::cta"),
    ("fence.proxy.async.global;", "proxy_fence async global"),
    ("fence.proxy.alias;", "proxy_fence alias"),
    ("fence.proxy.tensormap::generic.release.gpu;", "proxy_fence release gpu tensormap"),
    (
        "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;",
        "proxy_fence acquire gpu tensormap r:generic:tensormap:tensormap",
    ),
    (
        "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;",
        "proxy_fence acquire cluster async shared::cluster shared::cluster",
    ),
    ("fence.release.sync_restrict::shared::cta.cluster;", "fence release cluster shared::cta"),
    ("bar.sync 1, 64;", "barrier/sync acq_rel cta"),
    ("barrier.cta.arrive 1, 64;", "barrier/arrive release cta"),
    ("bar.red.popc.u32 %r1, 0, %p1;", "barrier/red acq_rel cta"),
    ("bar.warp.sync 0xffffffff;", "warp_barrier/sync acq_rel cta"),
    ("barrier.cluster.arrive.aligned;", "cluster_barrier/arrive release cluster"),
    ("barrier.cluster.arrive.relaxed.aligned;", "cluster_barrier/arrive relaxed cluster"),
    ("barrier.cluster.wait.aligned;", "cluster_barrier/wait acquire cluster"),
    ("mbarrier.init.shared.b64 [%r1], 1;", "mbarrier/init weak shared::cta rw:shared::cta:mbarrier"),
    (
        "mbarrier.arrive.shared.b64 %rd1, [%r1];",
        "mbarrier/arrive release cta shared::cta rw:shared::cta:mbarrier",
    ),
    (
        "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r1], 16;",
        "mbarrier/arrive_expect_tx release cluster shared::cluster rw:shared::cluster:mbarrier",
    ),
    (
        "mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 16;",
        "mbarrier/expect_tx relaxed cta shared::cta rw:shared::cta:mbarrier",
    ),
    (
        "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2;",
        "mbarrier/try_wait acquire cta shared::cta r:shared::cta:mbarrier",
    ),
    (
        "mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p1, [%r1], %r2, 0x989680;",
        "mbarrier/try_wait acquire cluster shared::cta r:shared::cta:mbarrier",
    ),
    (
        "mbarrier.test_wait.relaxed.cta.shared.b64 %p1, [%r1], %rd2;",
        "mbarrier/test_wait relaxed cta shared::cta r:shared::cta:mbarrier",
    ),
    ("mbarrier.inval.shared.b64 [%r1];", "mbarrier/inval weak shared::cta rw:shared::cta:mbarrier"),
    ("cp.async.cg.shared.global [%r1], [%rd1], 16;", "async_copy weak w:shared::cta! r:global!"),
    ("cp.async.commit_group;", "async_group/commit"),
    ("cp.async.wait_group 0;", "async_group/wait"),
    ("cp.async.wait_all;", "async_group/wait_all"),
    (
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];",
        "async_group/mbarrier_arrive rw:shared::cta:mbarrier",
    ),
    (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 64, [%r2];",
        "bulk/copy shared::cluster w:shared::cluster:async! r:global:async! rw:shared::cluster:mbarrier",
    ),
    (
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 64;",
        "bulk/copy global w:global:async! r:shared::cta:async!",
    ),
    (
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 64;",
        "bulk/reduce global rw:global:async! r:shared::cta:async!",
    ),
    (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r1], [%rd1, {%r3, %r4}], [%r2], %h1;",
        "bulk/tensor_copy shared::cluster w:shared::cluster:async! r:global:async:tensor! "
        "r:generic:tensormap:tensormap rw:shared::cluster:mbarrier",
    ),
    (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r3, %r4}], [%r1];",
        "bulk/tensor_copy global w:global:async:tensor! r:shared::cta:async! r:generic:tensormap:tensormap",
    ),
    (
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%rd1, {%r3}], [%r1];",
        "bulk/tensor_reduce global rw:global:async:tensor! r:shared::cta:async! "
        "r:generic:tensormap:tensormap",
    ),
    ("cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%rd1, {%r3}];", "prefetch/bulk"),
    ("cp.async.bulk.commit_group;", "bulk_group/commit"),
    ("cp.async.bulk.wait_group.read 0;", "bulk_group/wait_read"),
    ("cp.async.bulk.wait_group 0;", "bulk_group/wait"),
    (
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r1], {%r2,%r3}, [%r4];",
        "bulk/st_async weak w:shared::cluster! rw:shared::cluster:mbarrier",
    ),
    (
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r4];",
        "bulk/red_async relaxed cluster rw:shared::cluster! rw:shared::cluster:mbarrier",
    ),
    ("multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd1];", "load/multimem relaxed sys r:multimem"),
    ("multimem.red.global.add.f32 [%rd1], %f1;", "reduction/multimem relaxed sys rw:multimem"),
    ("multimem.st.weak.global.f32 [%rd1], %f1;", "store/multimem weak w:multimem"),
    (
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %rd2;",
        "store/tensormap weak rw:shared::cta:tensormap",
    ),
    (
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[%rd1], [%r1], 128;",
        "proxy_fence/copy release gpu tensormap w:global:tensormap r:shared::cta:tensormap",
    ),
    ("griddepcontrol.wait;", "grid_dependency/wait"),
    ("griddepcontrol.launch_dependents;", "grid_dependency/launch"),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1,%r2,%r3,%r4}, [%r5];", "load/matrix weak r:shared::cta"),
    ("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r1};", "store/matrix weak w:shared::cta"),
    ("elect.sync %r1|%p1, 0xffffffff;", "warp"),
    ("shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;", "warp"),
    ("prefetch.global.L2 [%rd1];", "prefetch"),
    ("discard.global.L2 [%rd1], 128;", "store/discard weak w:global"),
    ("mapa.shared::cluster.u32 %r1, %r2, 1;", "compute"),
    ("exit;", "exit"),
]
HOPPER = [
    ("wgmma.fence.sync.aligned;", "wgmma/fence"),
    (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd1, %rd2, 1, 1, 1, 0, 0;",
        "wgmma/mma r:shared::cta:async! r:shared::cta:async!",
    ),
    (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, "
        "{%r1,%r2,%r3,%r4}, %rd2, 1, 1, 1, 0;",
        "wgmma/mma r:shared::cta:async!",
    ),
    ("wgmma.commit_group.sync.aligned;", "wgmma/commit"),
    ("wgmma.wait_group.sync.aligned 0;", "wgmma/wait"),
]
BLACKWELL = [
    (
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
        "tcgen05/alloc cta_group::1 w:shared::cta",
    ),
    ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;", "tcgen05/dealloc cta_group::1"),
    ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", "tcgen05/relinquish cta_group::1"),
    ("tcgen05.fence::before_thread_sync;", "tcgen05/before_thread_sync"),
    ("tcgen05.fence::after_thread_sync;", "tcgen05/after_thread_sync"),
    ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1,%r2}, [%r3];", "tcgen05/ld r:tmem:tensor!"),
    ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r1};", "tcgen05/st w:tmem:tensor!"),
    ("tcgen05.wait::ld.sync.aligned;", "tcgen05/wait_ld"),
    ("tcgen05.wait::st.sync.aligned;", "tcgen05/wait_st"),
    (
        "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;",
        "tcgen05/cp cta_group::1 w:tmem:tensor! r:shared::cta:async!",
    ),
    (
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
        "tcgen05/mma cta_group::1 rw:tmem:tensor! r:shared::cta:async! r:shared::cta:async!",
    ),
    (
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r4], %rd2, %r2, %p1;",
        "tcgen05/mma cta_group::1 rw:tmem:tensor! r:tmem:tensor! r:shared::cta:async!",
    ),
    (
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];",
        "tcgen05/commit release cluster cta_group::1 rw:shared::cluster:mbarrier",
    ),
    (
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];",
        "bulk/try_cancel w:shared::cta:async! rw:shared::cluster:mbarrier",
    ),
]
GROUPS = {"sm_90a": COMMON + HOPPER, "sm_100a": COMMON + BLACKWELL}
ALL = COMMON + HOPPER + BLACKWELL


@pytest.mark.parametrize(("line", "expected"), ALL, ids=[line.split()[0].strip(";") for line, _ in ALL])
def test_meaning(line, expected):
    module = parse(program([line], "sm_100a"))
    assert module.unknown == []
    found = effect(module.functions["k"].body[0])
    assert found.why == ""
    assert summary(found) == expected


@pytest.mark.parametrize("arch", GROUPS)
def test_ptxas_accepts_every_form(arch):
    assert assemble(program([line for line, _ in GROUPS[arch]], arch), arch)


def first(line: str):
    return parse(program([line], "sm_90a")).functions["k"].body[0]


@pytest.mark.parametrize(
    "line",
    [
        "frobnicate.sync %r1, %r2;",
        "ld.consume.global.b32 %r1, [%rd1];",
        "fence.gpu.strange;",
        "mbarrier.poke.b64 [%r1];",
        "cp.async.bulk.moon.global.bulk_group [%rd1], [%r1], 64;",
        "tcgen05.frob [%r1];",
        "st.relaxed.galaxy.global.b32 [%rd1], %r1;",
        "fence.acq_rel;",
    ],
)
def test_what_the_table_does_not_know_is_unknown(line):
    found = effect(first(line))
    assert found.kind is Kind.UNKNOWN
    assert line.split()[0].rstrip(";") in found.why


@pytest.mark.parametrize(
    ("line", "writes", "reads"),
    [
        ("ld.global.v2.b32 {%r1,_}, [%rd1];", ("%r1",), ("%rd1",)),
        ("@%p2 setp.lt.and.s32 %p1|_, %r1, %r2, !%p3;", ("%p1",), ("%r1", "%r2", "%p3", "%p2")),
        ("st.shared.b32 [%r1], %r2;", (), ("%r1", "%r2")),
        ("bar.sync %r1, %r2;", (), ("%r1", "%r2")),
        ("bar.red.popc.u32 %r1, 0, %p1;", ("%r1",), ("%p1",)),
        ("mbarrier.arrive.shared::cluster.b64 _, [%r1];", (), ("%r1",)),
        (
            "cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes "
            "[%r1], [%rd1,{%r2}], [%r3];",
            (),
            ("%r1", "%rd1", "%r2", "%r3"),
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;",
            ("%f1",),
            ("%f1", "%rd1", "%rd2"),
        ),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;", (), ("%r1",)),
    ],
)
def test_defined_and_used(line, writes, reads):
    ins = first(line)
    assert defined(ins) == writes
    assert used(ins) == reads


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1];", 16),
        ("st.shared.b16 [%r1], %h1;", 2),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 64;", 64),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2;", None),
    ],
)
def test_width(line, width):
    ins = first(line)
    assert bytes_of(ins, effect(ins).accesses[0]) == width


def test_semantics_are_known_words():
    for line, _ in ALL:
        found = effect(first(line))
        assert found.sem == "" or found.sem in SEMS
