"""Reports: one auditor's answer or one gate's answer, in the form that a person or a machine reads.

Each module renders both kinds: `scan(reports, texts)` and `gate(result, texts)`, where `texts` maps the file
named in a report to its PTX, for the forms that show code. All return the whole document as a string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..gate import GateResult
    from ..scan import KernelReport

FORMATS = ("terminal", "json", "sarif", "junit", "html")


def render_scan(form: str, reports: Sequence[KernelReport], texts: Mapping[str, str]) -> str:
    """The document of a scan in one of FORMATS, except "terminal", which needs a console."""
    render: Callable[..., str] = import_module(f"{__name__}.{form}").scan
    return render(reports, texts)


def render_gate(form: str, result: GateResult, texts: Mapping[str, str]) -> str:
    """The document of a gate run in one of FORMATS, except "terminal"."""
    render: Callable[..., str] = import_module(f"{__name__}.{form}").gate
    return render(result, texts)
