"""Mutants of a kernel's Python source, for mistakes that leave no trace in PTX."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from ..findings import Site
from .mutant import Mutant, fingerprint


def source_mutants(text: str, file: str) -> Iterator[Mutant]:
    """Mutants of a kernel's Python source: inline assembly that no longer says that it touches memory."""
    spans = []
    for m in re.finditer(r",?~\{\{?memory\}\}?", text):
        spans.append(("drop-clobber", m.start(), m.end(), "", "memory clobber deleted"))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.keyword) or node.arg != "has_side_effects":
            continue
        if isinstance(node.value, ast.Constant) and node.value.value is True:
            lines = text.split("\n")
            at = sum(len(x) + 1 for x in lines[: node.value.lineno - 1]) + node.value.col_offset
            spans.append(("drop-side-effects", at, at + len("True"), "False", "side effects off"))
    code = _code_lines(text)
    seen: Counter[tuple[str, str]] = Counter()
    for operator, start, end, new, what in sorted(spans, key=lambda s: s[1]):
        line = text.count("\n", 0, start) + 1
        if line not in code:
            continue
        shown = text.split("\n")[line - 1].strip()
        seen[operator, shown] += 1
        yield Mutant(
            file, operator, Site(line, shown, "", f"{file}:{line}"), (line, line), what,
            text[:start] + new + text[end:], fingerprint(file, operator, shown, seen[operator, shown]),
        )  # fmt: skip


def _code_lines(text: str) -> set[int]:
    """Lines of a Python text that are not part of a docstring."""
    tree = ast.parse(text)
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return set(range(1, text.count("\n") + 2)) - prose
