"""`k3-audit support` and `k3-audit plan`: what a serving engineer asks before turning the backend on."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
from k3_audit.artifact import ARCHITECTURES, Store, StoreError

from .kernels import KERNELS
from .support import check, describe


def _config(path: Path | None) -> dict[str, Any]:
    text = (
        files("k3_audit.reference").joinpath("configs", "kimi-k3.json").read_text()
        if path is None
        else path.read_text(encoding="utf-8")
    )
    config = json.loads(text)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a config.json of a model")
    return config


_config_option = click.option(
    "--config",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A model's config.json (default: the released Kimi K3).",
)


@click.command()
@click.option("--arch", help="The GPU's target, such as sm_90a (default: that of this machine).")
@click.option("--tp", default=1, show_default=True, help="Tensor parallel size.")
@click.option("--batch", default=1, show_default=True, help="Sequences in a decode step.")
@click.option("--q", "query_len", default=1, show_default=True, help="Tokens of each sequence in a step.")
@_config_option
def support(arch: str | None, tp: int, batch: int, query_len: int, path: Path | None) -> int:
    """Is a deployment supported by the fused kernels? Yes (exit 0), or no with the one reason (exit 1).

    With --arch the question is about that GPU, whatever this machine has.
    """
    deployment = describe(_config(path), tensor_parallel_size=tp, batch_size=batch, query_len=query_len)
    if arch is not None:
        deployment = replace(
            deployment, arch=arch, torch=True, cuda_core=True, missing_artifacts=_lacking(arch)
        )
    answer = check(deployment)
    click.echo(
        "supported" if answer else f"not supported: {answer.reason}; decode stays on the standard path"
    )
    return 0 if answer else 1


def _lacking(arch: str) -> tuple[str, ...]:
    store = Store()
    try:
        return tuple(k for k in KERNELS if arch in ARCHITECTURES and store.built(k, arch) is None)
    except StoreError:
        return KERNELS


@click.command()
@_config_option
def plan(path: Path | None) -> int:
    """The launches of one decode step, what each reads and writes, and what runs before its dependency wait."""
    from .executor import check_plan, decode_plan
    from .standard import Config

    store = Store()
    built = next(((k, a) for k, a in store.list() if k == KERNELS[0]), None)
    if built is None:
        raise StoreError(f"no build of {KERNELS[0]} in {store.root}; run `k3-audit build`")
    steps = decode_plan(Config.from_json(_config(path)), store.get(*built).contract)
    for i, step in enumerate(steps):
        click.echo(f"{i:4} {step}")
    problems = check_plan(steps)
    for problem in problems:
        click.echo(f"unsound: {problem}")
    return 1 if problems else 0
