"""R25 on the machine code that we ship: silent as built, and it speaks when the listing loses or moves something."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from k3_audit.artifact import ARCHITECTURES, Artifact, Store
from k3_audit.audit.findings import Finding, Verdict
from k3_audit.audit.scan import scan_ptx
from k3_audit.fused_backend import build

pytestmark = pytest.mark.unit


@cache
def artifact(arch: str) -> Artifact:
    return build.current("attn_res", arch, Store())


def spoken(arch: str, sass: str) -> list[Finding]:
    """What R25 says about our kernel with this listing."""
    kernel = artifact(arch)
    (report,) = scan_ptx(kernel.ptx, "attn_res", kernel.contract, sass)
    return [f for f in report.findings if f.rule == "R25"]


def first(lines: list[str], opcode: str, start: int = 0) -> int:
    return next(i for i in range(start, len(lines)) if opcode in lines[i])


def load_above_wait(lines: list[str]) -> list[str]:
    wait = first(lines, "ACQBULK")
    load = first(lines, "LDG", wait)
    return [*lines[:wait], lines[load], *lines[wait:load], *lines[load + 1 :]]


def without(opcode: str) -> Callable[[list[str]], list[str]]:
    def delete(lines: list[str]) -> list[str]:
        at = first(lines, opcode)
        return [*lines[:at], *lines[at + 1 :]]

    return delete


DEFECTS = {
    "load above the dependency wait": load_above_wait,
    "dependency wait dropped": without("ACQBULK"),
    "invalidation behind an acquire dropped": without("CCTL.IVALL"),
    "cluster barrier wait dropped": without("UCGABAR_WAIT"),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_shipped_machine_code_conforms(arch: str) -> None:
    assert spoken(arch, artifact(arch).sass) == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_in_the_listing_is_a_finding(name: str, arch: str) -> None:
    broken = "\n".join(DEFECTS[name](artifact(arch).sass.splitlines()))
    assert Verdict.FINDING in {f.verdict for f in spoken(arch, broken)}


def test_a_listing_of_another_kernel_is_inconclusive() -> None:
    other = artifact("sm_90a").sass.replace(".text.attn_res", ".text.other").replace("attn_res", "other")
    assert [f.verdict for f in spoken("sm_90a", other)] == [Verdict.INCONCLUSIVE]


def test_text_that_is_no_listing_is_inconclusive() -> None:
    assert [f.verdict for f in spoken("sm_90a", "hello")] == [Verdict.INCONCLUSIVE]
