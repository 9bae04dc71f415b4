"""`attn_res` on a GPU over real long prompts: every step of a kernel-true layer stack, and the stack's logits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from k3_audit.artifact import Artifact, Store
from k3_audit.audit import evidence as records
from k3_audit.audit.findings import Verdict
from k3_audit.audit.numerics import judge, measure_logits
from k3_audit.audit.prompts import load_manifest, tokens
from k3_audit.audit.tokenizer import ByteTokenizer
from k3_audit.fused_backend import build, standard
from k3_audit.fused_backend.executor import AttnRes, FusedAttnRes, FusedModel
from k3_audit.fused_backend.launch import Launcher, architecture
from k3_audit.fused_backend.support import Support
from k3_audit.reference import Model, load_config, synthesise
from k3_audit.reference.router import route
from mixes import Capture, Mix, Windows, judge_mix

pytestmark = [pytest.mark.longctx, pytest.mark.gpu]

CONFIG = "rank"  # kernel-true shapes of one TP8 rank, 13 layers, up to 7 bank rows
PROMPTS = {"cpython-lib": 32768, "jargon-file": 32768}
STACK_PROMPTS = ("cpython-lib",)  # the standard path reads 32K tokens in a minute and a half
WINDOWS = 64


@dataclass
class Run:
    """One prompt through the fp64 reference: the operands of every step, and what the logits should be."""

    prompt: records.Prompt
    windows: Windows
    ids: torch.Tensor
    capture: Capture
    experts: dict[int, torch.Tensor]
    logits: torch.Tensor


@cache
def model_tensors() -> dict[str, torch.Tensor]:
    return synthesise(load_config(CONFIG), seed=0, device="cuda")


@cache
def reference_run(prompt_id: str) -> Run:
    config, tensors = load_config(CONFIG), model_tensors()
    prompt = next(p for p in load_manifest() if p.id == prompt_id)
    length = PROMPTS[prompt_id]
    ids = torch.as_tensor(tokens(prompt, ByteTokenizer(), length)).long().cuda()
    windows = Windows(length, WINDOWS)
    capture = Capture(windows.positions)
    model = Model(config, tensors, device="cuda")
    model.prefill(ids, model.empty_cache(), observer=capture)
    experts = {}
    for l, layer in enumerate(model.layers):
        if layer.is_moe:
            gate = layer.weights.below("block_sparse_moe.gate.")
            x = capture.normed(l, "ffn")
            experts[l] = route(x, gate["weight"], gate["e_score_correction_bias"], config).experts
    logits = capture.normed(len(model.layers), "output") @ model.weights["lm_head.weight"].T
    record = records.Prompt(prompt.id, prompt.sha256, length)
    return Run(record, windows, ids, capture, experts, logits)


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return build.current("attn_res", architecture(), Store())


def replayed(op: AttnRes, mix: Mix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same launches, captured into a CUDA graph with dependent launch and replayed."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        mix.run(op)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = mix.run(op)
        graph.replay()
        stream.synchronize()
    return result


@pytest.mark.parametrize("prompt_id", PROMPTS)
def test_every_step(prompt_id: str, artifact: Artifact, evidence) -> None:
    """Each AttnRes step alone, with the reference's operands injected: the six criteria."""
    run = reference_run(prompt_id)
    op = FusedAttnRes(Launcher(artifact))
    positions = torch.tensor(run.windows.positions)
    mixes = list(run.capture.mixes(load_config(CONFIG), model_tensors()))
    sums = sum(len(positions) * (2 * m.bank.shape[1] + 3) for m in mixes)
    judgements, wrong = [], []
    for mix in mixes:
        variants = {
            "one token a launch": lambda mix=mix: mix.run(op, group=1),
            "CUDA graph replay": lambda mix=mix: replayed(op, mix),
        }
        subject = f"attn_res, {run.prompt.name}"
        judgement, state = judge_mix(mix, op, variants, positions, subject=subject, sums=sums)
        judgements.append(judgement)
        wrong += state
        print(judgement.message)
    figures = worst_figures(judgements)
    counts = {
        "steps": len(mixes),
        "positions": len(positions),
        "elements": len(positions) * 7168 * len(mixes),
    }
    evidence.record(
        artifact,
        tier="longctx",
        case=f"steps-{prompt_id}",
        verdict=Verdict.CLEAN,
        gpu=True,
        counts=counts,
        figures=figures,
        seeds=[0],
        prompts=[run.prompt],
    )
    assert not wrong, "; ".join(wrong[:3])
    unclean = [j.message for j in judgements if j.verdict is not Verdict.CLEAN]
    assert not unclean, f"{len(unclean)} of {len(judgements)} steps: {unclean[0]}"


def worst_figures(judgements: list) -> dict[str, float]:
    """The largest of each figure over all steps."""
    names = ("bound_ratio", "bound_max_ulp", "control_max_ratio", "control_rms_ratio", "drift_growth_high")
    names += ("integrity_cosine_defect", "integrity_unwritten", "schedule_different")
    return {name: max(j.figures[name] for j in judgements) for name in names}


def bank_row_skipped(op: AttnRes) -> AttnRes:
    """The same operator, blind to the newest bank row."""

    def defective(
        *tensors: torch.Tensor, bank_rows: int, bank_write: int, has_prefix: int, out: torch.Tensor
    ) -> None:
        rows = max(0, bank_rows - 1)
        op(*tensors, bank_rows=rows, bank_write=bank_write, has_prefix=has_prefix, out=out)

    return defective


@pytest.mark.parametrize("prompt_id", STACK_PROMPTS)
def test_layer_stack(prompt_id: str, artifact: Artifact, evidence) -> None:
    """Teacher-forced decode of every window by the fused and the standard path, from one prefilled state.

    Experts are forced to the reference's choice, so that router ties do not decide the comparison; the natural
    choice is measured beside it.
    """
    run, config = reference_run(prompt_id), load_config(CONFIG)
    op = FusedAttnRes(Launcher(artifact))
    model = standard.StandardModel(standard.Config.from_json(config.to_json()), model_tensors(), "cuda")
    paths = {
        "standard": model,
        "fused": FusedModel(model, op, supported=lambda *_: Support(), contract=artifact.contract),
        "bank row skipped": FusedModel(model, bank_row_skipped(op), supported=lambda *_: Support()),
    }
    logits: dict[str, list[torch.Tensor]] = {}
    cache, done = model.empty_cache(), 0
    for w, start in enumerate(run.windows.starts):
        model.prefill(run.ids[done:start], cache)
        done, width = start, run.windows.width
        draft = run.ids[None, start : start + width]
        forced = {l: e[w * width : (w + 1) * width] for l, e in run.experts.items()}
        for name, path in paths.items():
            logits.setdefault(name, []).append(
                path.decode(draft, [copy.deepcopy(cache)], expert_ids=forced)[0]
            )
        for name in ("standard", "fused"):
            got = paths[name].decode(draft, [copy.deepcopy(cache)])[0]
            logits.setdefault(f"{name}, natural routing", []).append(got)
    out = {name: torch.cat(parts) for name, parts in logits.items()}
    positions = torch.tensor(run.windows.positions)
    judgement = judge(
        out["fused"],
        run.logits,
        out["standard"],
        subject=f"layer stack around attn_res, {run.prompt.name}",
        layer="logits",
        positions=positions,
        window=run.windows.width,
        planted={"bank row skipped": out["bank row skipped"]},
        horizon=float(run.windows.length),
        only=("control", "drift", "teeth"),  # no bound is derived through 13 layers
    )
    figures = {k: v for k, v in judgement.figures.items() if not k.startswith("teeth")}
    for name in ("standard", "fused", "standard, natural routing", "fused, natural routing"):
        errors = measure_logits(out[name], run.logits)
        key = name.replace(", natural routing", "_natural")
        figures |= {
            f"{key}_kl_mean": errors.kl_mean,
            f"{key}_kl_p99": errors.kl_p99,
            f"{key}_kl_max": errors.kl_max,
        }
        figures |= {f"{key}_flips": errors.flips, f"{key}_top20_overlap": errors.top20_overlap}
    print(judgement.message, figures)
    evidence.record(
        artifact,
        tier="longctx",
        case=f"stack-{prompt_id}",
        verdict=Verdict.CLEAN,
        gpu=True,
        counts={
            "layers": config.num_hidden_layers,
            "positions": len(positions),
            "vocabulary": out["fused"].shape[1],
        },
        figures=figures,
        seeds=[0],
        prompts=[run.prompt],
    )
    assert judgement.verdict is Verdict.CLEAN, judgement.message
