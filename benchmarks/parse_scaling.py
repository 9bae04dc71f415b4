"""Time and memory of parsing and auditing PTX against its size: both grow linearly.

    python benchmarks/parse_scaling.py [--lines 20000 50000 100000 200000] [--audit]

The text is one kernel made of the same mix of instructions again and again: arithmetic, vector loads and stores of
global and shared memory, branches, a loop, a barrier and a bulk copy with its mbarrier. Prints a table, and the
exponent of a least-squares fit of log(time) over log(lines): 1 is linear.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import time

from k3_audit.audit.ptx.parser import parse
from k3_audit.audit.scan import scan_ptx

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 smem[];
.visible .entry kernel(.param .u64 .ptr .global .align 16 x, .param .u64 .ptr .global .align 16 y)
.reqntid 128, 1, 1
{
    .reg .pred %p<REGS>;
    .reg .b32 %r<REGS>;
    .reg .b64 %rd<REGS>;
    .reg .f32 %f<REGS>;
    ld.param.u64 %rd0, [x];
    ld.param.u64 %rd1, [y];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, smem;
    setp.eq.s32 %p0, %r0, 0;
    @!%p0 bra READY;
    mbarrier.init.shared::cta.b64 [%r1], 1;
READY:
    bar.sync 0;
"""

# One section, about 50 lines. {n} numbers its registers and labels.
SECTION = """
    .loc 1 {line} 0
    mul.wide.u32 %rd{a}, %r0, 16;
    add.s64 %rd{b}, %rd0, %rd{a};
    ld.global.v4.f32 {{%f{a}, %f{b}, %f{c}, %f{d}}}, [%rd{b}+{offset}];
    fma.rn.f32 %f{e}, %f{a}, %f{b}, %f{c};
    add.f32 %f{f}, %f{e}, %f{d};
    shl.b32 %r{a}, %r0, 2;
    add.s32 %r{b}, %r1, %r{a};
    st.shared.f32 [%r{b}+1024], %f{f};
    bar.sync 0;
    @!%p0 bra ISSUED{n};
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+4096], [%rd0], 512, [%r1];
ISSUED{n}:
    and.b32 %r{c}, %r{b}, 1;
WAIT{n}:
    mbarrier.try_wait.parity.shared::cta.b64 %p{a}, [%r1], {parity};
    @!%p{a} bra WAIT{n};
    ld.shared.f32 %f{g}, [%r{b}+1028];
    mov.b32 %r{d}, 0;
LOOP{n}:
    .loc 1 {line} 4
    add.s32 %r{d}, %r{d}, 1;
    mad.lo.s32 %r{e}, %r{d}, 3, %r{a};
    xor.b32 %r{f}, %r{e}, %r{c};
    setp.lt.s32 %p{b}, %r{d}, 16;
    @%p{b} bra LOOP{n};
    add.s64 %rd{c}, %rd1, %rd{a};
    st.global.f32 [%rd{c}+{offset}], %f{g};
    bar.sync 0;
"""


def program(lines: int) -> str:
    """A kernel of about `lines` lines."""
    per_section = SECTION.count("\n")
    sections = []
    for n in range(max(1, lines // per_section)):
        names = {letter: 8 * n + 8 + i for i, letter in enumerate("abcdefg")}
        sections.append(SECTION.format(n=n, line=n + 1, offset=16 * (n % 64), parity=n % 2, **names))
    body = "".join(sections)
    return HEAD.replace("REGS", str(8 * len(sections) + 16)) + body + '    ret;\n}\n.file 1 "kernel.py"\n'


def seconds(work, text: str) -> float:
    gc.collect()
    start = time.perf_counter()
    work(text)
    return time.perf_counter() - start


def exponent(sizes: list[int], times: list[float]) -> float:
    """Slope of log(time) over log(size)."""
    xs, ys = [math.log(s) for s in sizes], [math.log(t) for t in times]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--lines", type=int, nargs="+", default=[20_000, 50_000, 100_000, 200_000])
    args.add_argument("--audit", action="store_true", help="also time the whole audit")
    options = args.parse_args()
    work = {"parse": parse, **({"audit": scan_ptx} if options.audit else {})}
    times: dict[str, list[float]] = {name: [] for name in work}
    sizes = []
    print(f"{'lines':>8} " + " ".join(f"{name + ' [s]':>10}" for name in work) + f" {'peak [MiB]':>11}")
    for lines in options.lines:
        text = program(lines)
        sizes.append(text.count("\n"))
        for name, function in work.items():
            times[name].append(seconds(function, text))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{sizes[-1]:>8} " + " ".join(f"{times[n][-1]:>10.2f}" for n in work) + f" {peak:>11.0f}",
            flush=True,
        )
    if len(sizes) > 1:
        print("exponent " + " ".join(f"{exponent(sizes, times[n]):>10.2f}" for n in work))


if __name__ == "__main__":
    main()
