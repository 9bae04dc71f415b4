"""The support table: each reason alone, the first of several, and the counter of fallbacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from k3_audit import reference
from k3_audit.artifact import Store
from k3_audit.fused_backend import support
from k3_audit.fused_backend.support import Deployment, FallbackCounter, Support, check, describe

pytestmark = pytest.mark.unit

GOOD = Deployment(
    torch=True,
    cuda_core=True,
    arch="sm_90a",
    missing_artifacts=(),
    model_type="kimi_linear",
    dtype="bfloat16",
    hidden_size=7168,
    rms_norm_eps=1e-5,
    num_hidden_layers=93,
    attn_res_block_size=12,
)

# One change for each row of the table, in its order, with a part of the reason.
AGAINST = [
    ({"torch": False}, "torch is not installed"),
    ({"arch": ""}, "no CUDA device is visible"),
    ({"arch": "sm_80a"}, "no kernels for sm_80a; they exist for sm_90a, sm_100a, sm_103a"),
    ({"cuda_core": False}, "pip install 'k3-audit[gpu]'"),
    ({"missing_artifacts": ("attn_res",)}, "lacks attn_res for sm_90a; run `k3-audit build`"),
    ({"model_type": "llama"}, "the model type is 'llama'"),
    ({"dtype": "float16"}, "activations are float16"),
    ({"hidden_size": 128}, "hidden_size is 128, the kernels are built for 7168"),
    ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, the kernels are built for 1e-05"),
    ({"attn_res_block_size": 0}, "the model has no AttnRes"),
    ({"attn_res_block_size": 10}, "93 layers in blocks of 10 need 10 bank rows, the kernels hold 8"),
    ({"tensor_parallel_size": 8}, "tensor parallel size is 8"),
    ({"batch_size": 3, "query_len": 3}, "a step of 3 x 3 tokens, the kernels take 1 to 8"),
]


def test_the_release_on_one_gpu_is_supported():
    assert check(GOOD) and check(GOOD).reason == ""
    for batch, query in ((1, 1), (8, 1), (1, 8), (2, 4)):
        assert GOOD.step(batch, query)
    for batch, query in ((9, 1), (0, 1), (1, 9), (3, 3)):
        assert not GOOD.step(batch, query)


def test_every_row_of_the_table_has_its_case():
    assert len(AGAINST) == len(support.TABLE)
    for i, (change, _) in enumerate(AGAINST):
        rows = enumerate(holds for holds, _ in support.TABLE)
        assert next(j for j, holds in rows if not holds(replace(GOOD, **change))) == i, change


@pytest.mark.parametrize(("change", "reason"), AGAINST)
def test_reasons(change, reason):
    answer = check(replace(GOOD, **change))
    assert not answer and reason in answer.reason and "\n" not in answer.reason and "{" not in answer.reason


def test_the_first_reason_in_order_is_the_one_shown():
    for i, (earlier, reason) in enumerate(AGAINST):
        for later, _ in AGAINST[i + 1 :]:
            assert reason in check(replace(GOOD, **{**later, **earlier})).reason


def test_constants_agree_with_the_kernel():
    attn_res = pytest.importorskip(
        "k3_audit.fused_backend.kernels.attn_res", reason="needs the kernel toolkit"
    )
    assert (support.HIDDEN, support.EPS, support.BANK_ROWS) == (
        attn_res.HIDDEN,
        attn_res.EPS,
        attn_res.BANK_ROWS,
    )


def test_describe_reads_config_machine_and_store(tmp_path, monkeypatch):
    document = reference.load_config("kimi-k3").to_json()
    here = describe(document, tensor_parallel_size=1, batch_size=2, query_len=4, store=Store(tmp_path))
    assert (here.hidden_size, here.bank_rows, here.rows, here.torch) == (7168, 8, 8, True)
    assert here.missing_artifacts == support.KERNELS
    assert (here.arch == "") == (not torch.cuda.is_available())
    assert describe(document["text_config"], batch_size=2, query_len=4, store=Store(tmp_path)) == here

    monkeypatch.setattr(support, "_architecture", lambda: "sm_90a")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "attn_res.sm_90a.json").write_text('{"key": "k", "object": "o"}')
    assert "attn_res" not in describe(document, store=Store(tmp_path)).missing_artifacts
    (tmp_path / "built" / "attn_res.sm_90a.json").write_text("{")
    assert "attn_res" in describe(document, store=Store(tmp_path)).missing_artifacts


def test_describe_names_missing_fields():
    with pytest.raises(ValueError, match="config: hidden_size, attn_res_block_size missing"):
        text = reference.load_config("tiny").to_json()["text_config"]
        describe({k: v for k, v in text.items() if k not in ("hidden_size", "attn_res_block_size")})


def test_counter():
    counter = FallbackCounter()
    for reason in ("", "b", "a", "b", ""):
        counter.count(Support(reason))
    assert (counter.fused, counter.fallback, counter.reasons) == (2, 3, {"b": 2, "a": 1})
    assert str(counter).splitlines() == ["2 of 5 decode steps on the fused kernels", "  2 x b", "  1 x a"]


# The commands.


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--arch", "sm_90a"], 0, "supported"),
        (["--arch", "sm_90a", "--tp", "8"], 1, "tensor parallel size is 8"),
        (["--arch", "sm_80"], 1, "no kernels for sm_80"),
        (["--arch", "sm_90a", "--batch", "4", "--q", "4"], 1, "4 x 4 tokens"),
        (["--batch", "many"], 3, "many"),
    ],
)
def test_the_command_gives_yes_or_one_reason(
    options: list[str],
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from k3_audit.audit import cli

    monkeypatch.setattr("k3_audit.fused_backend.commands._lacking", lambda arch: ())
    assert cli.run(["support", *options]) == code
    told = capsys.readouterr()
    assert words in told.out + told.err
    assert len((told.out + told.err).strip().splitlines()) == 1
