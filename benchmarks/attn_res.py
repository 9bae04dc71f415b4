"""AttnRes + RMSNorm on a GPU: our kernel, the peer's kernel and torch, side by side in one run.

    k3-audit build && python benchmarks/peer.py          # no GPU needed; carry build/ to the GPU machine
    python benchmarks/attn_res.py [--json FILE] [--against STORE ...]

Every candidate is captured into a CUDA graph of many launches with programmatic dependent launch, and the graphs
are replayed in turn, so that clocks and neighbours are the same for all. Times are medians over the replays,
divided by the number of launches; the spread is the interquartile range. Beside them the floors: an empty kernel
launched the same way, and the bytes of one launch over the measured copy bandwidth. `warm` reuses a few sets of
buffers (they stay in L2); `cold` walks through sets that together exceed L2. Before anything is timed each candidate
is checked against the formula in fp64.

Ours and the peer's kernel both read prefix and bank before the dependency wait, so in a model another launch must lie
between two of them. A chain of nothing but these launches leaves that out: it is a measure of time, not of results.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from k3_audit.artifact import Store
from k3_audit.artifact.atomic import write_atomic
from k3_audit.fused_backend.launch import Launcher, architecture

HIDDEN, EPS = 7168, 1e-5
PEER = Path("build/peer")


class Inputs:
    """One set of operands for T tokens and m bank rows. Both layouts hold the same numbers."""

    def __init__(self, tokens: int, bank_rows: int, seed: int):
        g = torch.Generator(device="cuda").manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, device="cuda", generator=g)  # noqa: E731
        self.tokens, self.bank_rows = tokens, bank_rows
        self.delta = normal(tokens, HIDDEN).bfloat16()
        self.prefix = normal(tokens, HIDDEN).bfloat16()
        self.bank = normal(tokens, 8, HIDDEN).bfloat16()
        self.res_norm = (1 + 0.1 * normal(HIDDEN)).bfloat16()
        self.res_proj = (normal(HIDDEN) / HIDDEN**0.5).bfloat16()
        self.norm = (1 + 0.1 * normal(HIDDEN)).bfloat16()
        self.out = torch.full_like(self.delta, float("nan"))

    def reference(self) -> torch.Tensor:
        """The formula in fp64: [T, 7168]."""
        p = (self.prefix.float() + self.delta.float()).bfloat16().double()
        rows = torch.cat([self.bank[:, : self.bank_rows].double(), p[:, None]], 1)
        c = self.res_norm.double() * self.res_proj.double()
        s = (rows @ c) * torch.rsqrt(rows.square().mean(-1) + EPS)
        h = (torch.softmax(s, 1)[..., None] * rows).sum(1)
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * self.norm.double()


def torch_attn_res(prefix, delta, bank, res_norm, res_proj, norm):
    """What torch.compile gets to fuse: the standard path of the same step."""
    p = (prefix.float() + delta.float()).bfloat16()
    rows = torch.cat([bank, p[:, None]], 1).float()
    c = res_norm.float() * res_proj.float()
    s = (rows @ c) * torch.rsqrt(rows.square().mean(-1) + EPS)
    h = (torch.softmax(s, 1)[..., None] * rows).sum(1)
    return p, (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * norm.float()).bfloat16()


class Raw:
    """A cubin launched through the driver API with arguments that cuda.core cannot pass: structs by value."""

    def __init__(self, cubin: bytes, entry: str, cluster: int, block: int, smem: int = 0):
        from cuda.bindings import driver

        self.driver, self.cluster, self.block, self.smem = driver, cluster, block, smem
        self.module = self._check(driver.cuModuleLoadData(cubin))
        self.function = self._check(driver.cuModuleGetFunction(self.module, entry.encode()))

    def _check(self, result):
        if int(result[0]):
            sys.exit(f"attn_res.py: driver error {result[0]}")
        return result[1] if len(result) > 1 else None

    def launch(self, arguments: list[ctypes.Structure], tokens: int) -> None:
        d, config = self.driver, self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.cluster, tokens, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
        config.sharedMemBytes = self.smem
        config.hStream = torch.cuda.current_stream().cuda_stream
        cluster, pdl = d.CUlaunchAttribute(), d.CUlaunchAttribute()
        cluster.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = (
            self.cluster,
            1,
            1,
        )
        pdl.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        pdl.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [cluster, pdl], 2
        pointers = (ctypes.c_void_p * max(1, len(arguments)))(*(ctypes.addressof(a) for a in arguments))
        self._check(d.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))


class Row(ctypes.Structure):
    """A rank-2 tensor as CuTe DSL passes it: pointer, shape, outer stride."""

    _fields_ = (("pointer", ctypes.c_uint64), ("shape", ctypes.c_int32 * 2), ("stride", ctypes.c_int64))


class Block(ctypes.Structure):
    """A rank-3 tensor as CuTe DSL passes it."""

    _fields_ = (("pointer", ctypes.c_uint64), ("shape", ctypes.c_int32 * 3), ("stride", ctypes.c_int64 * 2))


class Pointer(ctypes.Structure):
    """A tensor of static shape."""

    _fields_ = (("pointer", ctypes.c_uint64),)


class Float(ctypes.Structure):
    """A scalar."""

    _fields_ = (("value", ctypes.c_float),)


def ours(store: Store) -> Callable[[Inputs], None]:
    launcher = Launcher(store.get("attn_res", architecture()))

    def run(x: Inputs) -> None:
        args = [x.delta, x.prefix, x.bank, x.res_norm, x.res_proj, x.norm, x.out, x.bank_rows, -1, 1]
        launcher.launch(args, {"T": x.tokens})

    return run


def peer(bank_rows: int) -> Callable[[Inputs], None] | None:
    stem = f"attn_res.{architecture()}.bank{bank_rows}"
    if not (PEER / f"{stem}.json").is_file():
        return None
    info = json.loads((PEER / f"{stem}.json").read_text())
    code = (PEER / f"{stem}.cubin").read_bytes()
    kernel = Raw(code, info["entry"], info["cluster"][0], info["block"][0], info["dynamic_smem"])

    def run(x: Inputs) -> None:
        row = lambda t: Row(t.data_ptr(), tuple(t.shape), t.stride(0))  # noqa: E731
        bank = Block(x.bank.data_ptr(), tuple(x.bank.shape), x.bank.stride()[:2])
        weights = [Pointer(w.data_ptr()) for w in (x.res_norm, x.res_proj, x.norm)]
        kernel.launch(
            [row(x.delta), row(x.prefix), bank, *weights, row(x.out), Float(EPS), Float(EPS)], x.tokens
        )

    return run


def empty() -> Callable[[Inputs], None] | None:
    path = PEER / f"empty.{architecture()}.cubin"
    if not path.is_file():
        return None
    kernel = Raw(path.read_bytes(), "empty", 7, 128)
    return lambda x: kernel.launch([], x.tokens)


def capture(run: Callable[[Inputs], None], sets: list[Inputs], launches: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for x in sets:
            run(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                run(sets[i % len(sets)])
    return graph


def measure(
    graphs: dict[str, torch.cuda.CUDAGraph], launches: int, repeats: int
) -> dict[str, tuple[float, float]]:
    """Microseconds per launch, (median, interquartile range), with the candidates' replays interleaved."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for graph in graphs.values():
        graph.replay()
    for _ in range(repeats):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / launches)
    quartiles = {name: statistics.quantiles(t, n=4) for name, t in times.items()}
    return {name: (statistics.median(times[name]), q[2] - q[0]) for name, q in quartiles.items()}


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a large device-to-device copy."""
    a = torch.randn(2**29, device="cuda")
    b = torch.empty_like(a)
    graph = torch.cuda.CUDAGraph()
    torch.neg(a, out=b)  # an elementwise kernel: a plain copy inside a graph becomes a slower memcpy node
    with torch.cuda.graph(graph):
        torch.neg(a, out=b)
    return 8 * a.numel() / (measure({"copy": graph}, 1, 15)["copy"][0] * 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument(
        "--against", type=Path, nargs="*", default=[], help="further artifact stores to time as well"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--bank-rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument(
        "--no-torch", action="store_true", help="leave torch.compile out (it takes a minute to compile)"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attn_res.py: needs a GPU")
    bandwidth = copy_bandwidth()
    fused = {"ours": ours(Store())} | {str(p): ours(Store(p)) for p in arguments.against}
    artifact = Store().get("attn_res", architecture())
    record = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bandwidth": bandwidth,
        "rows": [],
    }
    record |= {
        "cubin_sha256": artifact.cubin_sha256,
        "launches": arguments.launches,
        "repeats": arguments.repeats,
    }
    print(f"{record['gpu']}, copy {bandwidth / 1e12:.2f} TB/s, cubin {artifact.cubin_sha256[:12]}")
    for state in ("warm", "cold"):
        for tokens in arguments.tokens:
            for rows in arguments.bank_rows:
                moved = (
                    2 * HIDDEN * (tokens * (rows + 4) + 3)
                )  # bank, delta, prefix in and out, out; weights once
                l2 = torch.cuda.get_device_properties(0).L2_cache_size
                count = 4 if state == "warm" else min(600, max(2, int(1.5 * l2 / moved)))
                sets = [Inputs(tokens, rows, seed) for seed in range(count)]
                candidates = dict(fused)
                if (other := peer(rows)) is not None:
                    candidates["vllm 0.33.0"] = other
                for name, run in candidates.items():
                    x = Inputs(tokens, rows, 1234)
                    expected = x.reference()
                    run(x)
                    error = ((x.out.double() - expected).norm() / expected.norm()).item()
                    if not error < 2**-8:  # two BF16 roundings
                        sys.exit(
                            f"attn_res.py: {name}, {tokens} tokens, {rows} rows: error {error:.3g}; not timed"
                        )
                if (nothing := empty()) is not None:
                    candidates["empty launch"] = nothing
                if not arguments.no_torch:
                    compiled = torch.compile(torch_attn_res, dynamic=False)

                    def run_compiled(x: Inputs, compiled=compiled, rows=rows) -> None:
                        compiled(x.prefix, x.delta, x.bank[:, :rows], x.res_norm, x.res_proj, x.norm)

                    candidates["torch.compile"] = run_compiled
                launches = max(arguments.launches, count)
                graphs = {name: capture(run, sets, launches) for name, run in candidates.items()}
                result = measure(graphs, launches, arguments.repeats)
                floor = moved / bandwidth * 1e6
                record["rows"].append(
                    {"state": state, "tokens": tokens, "bank_rows": rows, "bytes": moved, "floor_us": floor}
                    | {"us": {name: {"median": m, "iqr": s} for name, (m, s) in result.items()}}
                )
                cells = "  ".join(f"{name} {m:6.3f} ±{s:.3f}" for name, (m, s) in result.items())
                print(f"{state} T={tokens} m={rows}: {cells}  floor {floor:.3f} us", flush=True)
    if arguments.json:
        write_atomic(arguments.json, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
