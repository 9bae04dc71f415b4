"""The launch plan: its bookkeeping against the standard path, bit for bit; its order; what reaches a kernel."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from k3_audit import reference
from k3_audit.artifact import Contract, Launch, Param, Role
from k3_audit.fused_backend import standard
from k3_audit.fused_backend.executor import (
    FusedAttnRes,
    FusedModel,
    Step,
    check_attn_res,
    check_plan,
    decode_plan,
)
from k3_audit.fused_backend.launch import LaunchError
from k3_audit.fused_backend.standard import Config, StandardModel
from k3_audit.fused_backend.support import Support

pytestmark = pytest.mark.unit

RELEASE = Config.from_json(reference.load_config("kimi-k3").to_json())
EARLY = {"bank": Role.STABLE, "prefix": Role.STABLE, "delta": Role.UPSTREAM, "out": Role.OUTPUT}
CONTRACT = Contract(
    "attn_res",
    tuple(
        Param(name, "bf16", EARLY.get(name, Role.WEIGHT), "w" if name == "out" else "r", ("T", "7168"))
        for name in ("delta", "prefix", "bank", "res_norm", "res_proj", "norm", "out")
    ),
    Launch(block=(128, 1, 1), pdl=True, stable_distance=2),
)


def up_to_8(batch: int, query_len: int) -> Support:
    return Support("" if batch * query_len <= 8 else "more than 8 rows")


# Bookkeeping.


def test_the_plan_of_the_release():
    """Against the counts and rows that the technical report's scheme gives for 93 layers in blocks of 12."""
    mixes = [step for step in decode_plan(RELEASE) if step.op == "attn_res"]
    assert len(mixes) == 2 * 93 + 1
    before_attention, before_ffn, output = mixes[0:-1:2], mixes[1:-1:2], mixes[-1]
    for l in (0, 1, 11, 12, 13, 84, 92):
        block = l // 12
        assert before_attention[l].args == {
            "bank_rows": block if l % 12 == 0 else block + 1,
            "bank_write": block if l % 12 == 0 else -1,
            "has_prefix": int(l > 0),
        }
        assert before_ffn[l].args == {
            "bank_rows": block + 1,
            "bank_write": -1,
            "has_prefix": int(l % 12 != 0),
        }
    assert [s.layer for s in mixes if s.args["bank_write"] >= 0] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert [s.layer for s in mixes if not s.args["has_prefix"]] == [0, 0, 12, 24, 36, 48, 60, 72, 84]
    assert output.args == {"bank_rows": 8, "bank_write": -1, "has_prefix": 1}
    assert [step.op for step in decode_plan(RELEASE)[-2:]] == ["attn_res", "head"]


def build(layers: int, block: int) -> StandardModel:
    document = reference.load_config("tiny").to_json()
    text = document["text_config"]
    mla = sorted({*range(4, layers + 1, 4), layers})
    kda = [l for l in range(1, layers + 1) if l not in mla]
    text |= {"num_hidden_layers": layers, "attn_res_block_size": block}
    text["linear_attn_config"] |= {"full_attn_layers": mla, "kda_layers": kda}
    return StandardModel(
        Config.from_json(document), reference.synthesise(reference.Config.from_json(document), 5)
    )


@pytest.fixture(
    scope="module",
    params=[(5, 2), (4, 2), (5, 3), (13, 12)],
    ids=lambda p: f"{p[0]} layers in blocks of {p[1]}",
)
def model(request):
    return build(*request.param)


def two_steps(party, tokens, prompt):
    """Logits of two decode steps after a prefill, for two sequences of different length."""
    caches = [
        party.model.empty_cache() if isinstance(party, FusedModel) else party.empty_cache() for _ in range(2)
    ]
    for i, cache in enumerate(caches):
        party.prefill(prompt[: 3 + i], cache)
    return torch.cat([party.decode(part, caches) for part in tokens.split(2, 1)], 1)


def fused(model, attn_res=standard.attn_res_norm, *, poison=math.nan, **options) -> FusedModel:
    party = FusedModel(model, attn_res, supported=up_to_8, **options)
    for buffer in (party.bank, party.prefix, party.x):
        buffer.fill_(poison)  # a NaN spreads to the logits of whoever reads what the step has not written
    return party


def test_bookkeeping_is_the_standard_path_bit_for_bit(model, seed):
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab_size, (2, 4), generator=rng)
    prompt = torch.randint(0, model.config.vocab_size, (4,), generator=rng)
    right = two_steps(model, tokens, prompt)
    party = fused(model, contract=CONTRACT)
    assert torch.equal(two_steps(party, tokens, prompt), right)
    assert right.isfinite().all() and party.fallbacks.fused == 2 and party.fallbacks.fallback == 0

    blocks = -(-model.config.num_hidden_layers // model.config.attn_res_block_size)
    planted = {
        "a row is not stored": ("bank_write", lambda args: -1),
        "the prefix outlives its block": ("has_prefix", lambda args: 1),
        "the bank's last row is skipped": ("bank_rows", lambda args: max(args["bank_rows"] - 1, 0)),
        "a row too many": ("bank_rows", lambda args: min(args["bank_rows"] + 1, blocks)),
    }
    for name, (key, change) in planted.items():
        broken = fused(model, poison=1.0)
        broken.plan = [
            replace(step, args={**step.args, key: change(step.args)}) if step.args else step
            for step in broken.plan
        ]
        assert not torch.equal(two_steps(broken, tokens, prompt), right), name


def single_rounding(delta, prefix, bank, res_norm, res_proj, norm, *, bank_rows, bank_write, has_prefix, out):
    """What the fused kernel computes: like the standard operator, but fp32 from the rows to one rounding of `out`."""
    prefix.copy_((prefix.float() + delta.float()).bfloat16() if has_prefix else delta)
    rows = torch.cat([bank[:, :bank_rows], prefix[:, None]], 1).float()
    logits = (rows * res_norm.float() * res_proj.float()).sum(-1) * (rows.square().mean(-1) + 1e-5).rsqrt()
    if bank_write >= 0:
        bank[:, bank_write] = prefix
    h = (torch.softmax(logits, -1)[..., None] * rows).sum(1)
    out.copy_(h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.float())


def test_another_attn_res_runs_in_the_same_plan(seed):
    """One layer, so that nothing amplifies: the kernel's single rounding stays within the standard path's three."""
    model = build(1, 12)
    tokens = torch.randint(0, model.config.vocab_size, (2, 4), generator=torch.Generator().manual_seed(seed))
    right = two_steps(model, tokens, tokens[0]).double()
    out = two_steps(fused(model, single_rounding), tokens, tokens[0]).double()
    assert not torch.equal(out, right)
    assert (out - right).norm() <= 2**-8 * math.sqrt(3 * 3 + 2 * 4) * right.norm()

    def null(*args, out, **kwargs):
        out.zero_()

    broken = two_steps(fused(model, null), tokens, tokens[0]).double()
    assert (broken - right).norm() > 2**-8 * math.sqrt(17) * right.norm()


def test_unsupported_steps_fall_back_and_are_counted(seed):
    model = build(1, 12)
    tokens = torch.randint(0, model.config.vocab_size, (3, 3), generator=torch.Generator().manual_seed(seed))

    def never(*args, **kwargs):
        raise AssertionError("nine rows must not reach the kernel")

    party = fused(model, never)
    caches = [[model.empty_cache() for _ in range(3)] for _ in range(2)]
    assert torch.equal(party.decode(tokens, caches[0]), model.decode(tokens, caches[1]))
    assert party.fallbacks.fused == 0 and party.fallbacks.reasons == {"more than 8 rows": 1}
    with pytest.raises(ValueError, match="vocabulary"):
        party.decode(tokens + 1000, caches[0])
    assert party.fallbacks.fallback == 1


# Order.


def test_plans_of_shipped_configs_are_sound():
    for name in reference.config_names():
        config = Config.from_json(reference.load_config(name).to_json())
        assert check_plan(decode_plan(config)) == []
        assert check_plan(decode_plan(config, CONTRACT)) == []


def test_the_shipped_contract_is_read():
    attn_res = pytest.importorskip(
        "k3_audit.fused_backend.kernels.attn_res", reason="needs the kernel toolkit"
    )
    plan = decode_plan(RELEASE, attn_res.CONTRACT)
    step = next(step for step in plan if step.op == "attn_res" and step.layer == 13)
    assert step.pdl and step.stable_distance == 2 and {"bank.0", "bank.1"} <= {*step.early} <= {*step.reads}
    assert "delta" not in step.early and "model.layers.13.input_layernorm.weight" in step.early
    assert check_plan(plan) == []


def test_fused_neighbours_make_early_reads_a_race():
    """Were attention and feed-forward fused kernels that trigger early, the bank would be read while it is written."""
    plan = [
        replace(step, pdl=True, trigger="early") if step.op in ("attention", "ffn") else step
        for step in decode_plan(RELEASE, CONTRACT)
    ]
    problems = check_plan(plan)
    assert any("layer 12 attn_res reads bank.1 before its dependency wait, while" in p for p in problems)
    late = [replace(step, trigger="late") if step.op in ("attention", "ffn") else step for step in plan]
    assert check_plan(late) == []


def chain(*steps):
    """Launches "name reads>writes trigger", pdl and early reads where the name ends in '!'."""
    plan = []
    for text in steps:
        name, io, trigger = text.split()
        reads, writes = (tuple(filter(None, part.split(","))) for part in io.split(">"))
        pdl = name.endswith("!")
        plan.append(
            Step(
                name,
                None,
                reads,
                writes,
                early=reads if pdl else (),
                pdl=pdl,
                trigger=trigger,
                stable_distance=2 * pdl,
            )
        )
    return plan


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (["a >x exit", "b! x>y early"], "b! reads x before its dependency wait, while a may"),
        (["a >x exit", "b >y exit", "c! x>z early"], None),
        (["a >x exit", "b! >y late", "c! x>z early"], None),
        (["a >x exit", "b! >y early", "c! x>z early"], "c! reads x before its dependency wait, while a may"),
        # not launched with the attribute, b starts after a has completed, whenever it triggers
        (["a >x exit", "b >y early", "c! x>z early"], None),
        (["a >x exit", "b! >y early", "c! >w early", "d! x>z early"], "d! reads x"),
        (["a >x exit", "b! >y late", "c! >w early", "d! x>z early"], None),
        # the steps before are still running when the plan starts again
        (["a! x>y early", "b >w exit", "c >x exit"], "a! reads x before any launch of the step writes it"),
        (
            ["a! cache.0>y early", "b >w exit", "c >cache.0 exit"],
            "a! reads cache.0 before its dependency wait, while c",
        ),
        (["a! cache.0>y early", "c >cache.0 exit", "b >w exit"], None),
    ],
)
def test_check_plan(steps, problem):
    problems = check_plan(chain(*steps))
    if problem is None:
        assert problems == []
    else:
        assert problem in problems[0]


def test_stable_distance_of_the_contract_counts():
    plan = chain("a >x exit", "b >y exit", "c! x>z early")
    assert check_plan([*plan[:2], replace(plan[2], stable_distance=3)]) == [
        "c! reads x before its dependency wait, 2 launches after a wrote it; its contract needs 3"
    ]


def test_a_plan_that_is_not_sound_is_refused():
    model = build(1, 12)
    unsound = replace(CONTRACT, launch=replace(CONTRACT.launch, stable_distance=5))
    with pytest.raises(ValueError, match="launch plan: layer 0 attn_res reads"):
        FusedModel(model, standard.attn_res_norm, supported=up_to_8, contract=unsound)


# Arguments.


def arguments(tokens: int = 3, hidden: int = 7168) -> dict:
    def make(*shape):
        return torch.ones(*shape, dtype=torch.bfloat16)

    tensors = {name: make(tokens, hidden) for name in ("delta", "prefix", "out")}
    tensors |= {name: make(hidden) for name in ("res_norm", "res_proj", "norm")}
    return tensors | {"bank": make(tokens, 8, hidden), "bank_rows": 2, "bank_write": 2, "has_prefix": 1}


class Recorder:
    """Stands for the launcher: keeps what would reach the GPU."""

    def __init__(self):
        self.artifact, self.launches = SimpleNamespace(contract=CONTRACT), []

    def launch(self, args, symbols):
        self.launches.append((args, symbols))


def test_fused_attn_res_launches_in_the_contracts_order():
    recorder, args = Recorder(), arguments()
    FusedAttnRes(recorder)(**args)
    ((sent, symbols),) = recorder.launches
    order = (
        "delta",
        "prefix",
        "bank",
        "res_norm",
        "res_proj",
        "norm",
        "out",
        "bank_rows",
        "bank_write",
        "has_prefix",
    )
    assert symbols == {"T": 3} and all(a is args[name] for a, name in zip(sent, order, strict=True))


@pytest.mark.parametrize(
    "good", [{}, {"bank_rows": 0, "bank_write": 0}, {"bank_rows": 8, "bank_write": -1}, {"has_prefix": 0}]
)
def test_arguments_at_the_edges_pass(good):
    check_attn_res(**(arguments() | good), hidden=7168)


BAD = {
    "9 tokens": (lambda a: a.update(arguments(9)), "1 to 8 tokens, got 9"),
    "no tokens": (lambda a: a.update(arguments(0)), "1 to 8 tokens, got 0"),
    "another width": (lambda a: a.update(arguments(3, 128)), r"delta must be \[3, 7168\], got \[3, 128\]"),
    "tokens differ": (
        lambda a: a.update(out=arguments(2)["out"]),
        r"out must be \[3, 7168\], got \[2, 7168\]",
    ),
    "released shape": (lambda a: a.update(res_proj=a["res_proj"][None]), r"res_proj must be \[7168\]"),
    "fp32": (lambda a: a.update(norm=a["norm"].float()), "norm must be bfloat16, got torch.float32"),
    "device": (lambda a: a.update(norm=a["norm"].to("meta")), "norm is on meta, delta on cpu"),
    "strided": (
        lambda a: a.update(prefix=torch.ones(7168, 3, dtype=torch.bfloat16).t()),
        "prefix must be contiguous and 16-byte aligned",
    ),
    "misaligned": (
        lambda a: a.update(norm=torch.ones(7169, dtype=torch.bfloat16)[1:]),
        "norm must be contiguous and 16-byte aligned",
    ),
    "in place": (lambda a: a.update(out=a["prefix"]), "prefix and out overlap"),
    "out over delta": (lambda a: a.update(out=a["delta"]), "delta and out overlap"),
    "prefix in bank": (
        lambda a: a.update(prefix=a["bank"].view(-1)[: 3 * 7168].view(3, 7168)),
        "prefix and bank overlap",
    ),
    "rows -1": (lambda a: a.update(bank_rows=-1), "bank_rows must be 0 to 8, got -1"),
    "rows 9": (lambda a: a.update(bank_rows=9, bank_write=-1), "bank_rows must be 0 to 8, got 9"),
    "write -2": (
        lambda a: a.update(bank_write=-2),
        "bank_write must be -1 or a row not read, 2 to 7, got -2",
    ),
    "write 8": (lambda a: a.update(bank_write=8), "got 8"),
    "write a row that is read": (lambda a: a.update(bank_write=1), "got 1"),
    "has_prefix 2": (lambda a: a.update(has_prefix=2), "has_prefix must be 0 or 1, got 2"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_arguments_out_of_range_never_reach_a_kernel(change, message):
    recorder, args = Recorder(), arguments()
    change(args)
    with pytest.raises(LaunchError, match=message) as caught:
        FusedAttnRes(recorder)(**args)
    assert recorder.launches == [] and "\n" not in str(caught.value)
