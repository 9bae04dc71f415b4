"""What a rule looks at: one kernel of a PTX text with all analyses, its contract, its machine code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from k3_audit.artifact.contract import Contract, Param, Role

from .findings import Finding, Severity, Site, Verdict
from .ptx.cfg import CFG
from .ptx.effects import Access, Effect, Kind, bytes_of, effect
from .ptx.inline import inline
from .ptx.ir import Function, Instruction, Module
from .ptx.order import Order
from .ptx.provenance import Address, Base, Provenance
from .ptx.ssa import SSA
from .ptx.threads import Executors, Threads

_LONGEST_TEXT = 160


@dataclass
class Subject:
    """One kernel under audit.

    `function` has its calls inlined, so instruction indices are those of the inlined body while lines are
    those of the text. `sass` is the disassembly (`nvdisasm -c`) of the code that will run, or "". Analyses
    are made when a rule first asks for them.
    """

    module: Module
    entry: Function
    contract: Contract | None = None
    sass: str = ""

    @property
    def kernel(self) -> str:
        return self.entry.name

    @property
    def arch(self) -> str:
        return self.module.target

    @cached_property
    def function(self) -> Function:
        return inline(self.module, self.entry)

    @cached_property
    def body(self) -> list[Instruction]:
        return self.function.body

    @cached_property
    def cfg(self) -> CFG:
        return CFG(self.function)

    @cached_property
    def effects(self) -> list[Effect]:
        return [effect(i) for i in self.body]

    @cached_property
    def ssa(self) -> SSA:
        return SSA(self.cfg)

    @cached_property
    def provenance(self) -> Provenance:
        size = 16  # the largest (non-portable) cluster: CUDA C++ Programming Guide, "Thread Block Clusters"
        if self.contract is not None:
            x, y, z = self.contract.launch.cluster
            size = x * y * z
        return Provenance(self.module, self.function, self.cfg, self.ssa, size)

    @cached_property
    def threads(self) -> Threads:
        return Threads(self.cfg, self.ssa, self.provenance)

    @cached_property
    def order(self) -> Order:
        return Order(self.cfg, self.effects, self.provenance, self.threads)

    # -- instructions -------------------------------------------------------------------------------------

    @cached_property
    def _by_kind(self) -> dict[Kind, list[int]]:
        out: dict[Kind, list[int]] = {}
        for i, e in enumerate(self.effects):
            if self.cfg.block_of[i] in self.cfg.reachable:
                out.setdefault(e.kind, []).append(i)
        return out

    def find(self, *kinds: Kind, op: str | None = None) -> list[int]:
        """Reachable instructions of some kinds, in program order; `op` narrows to one operation."""
        found = sorted(i for k in kinds for i in self._by_kind.get(k, ()))
        return found if op is None else [i for i in found if self.effects[i].op == op]

    def accesses(self, *spaces: str) -> list[tuple[int, Access]]:
        """Reachable accesses in some state spaces; generic ones count for the spaces they may be in."""
        found = self._accesses.get(spaces)
        if found is None:
            found = self._accesses[spaces] = [
                (i, a)
                for i in self.order.events
                for a in self.effects[i].accesses
                if a.space in spaces or (a.space == "generic" and self._may_be_in(i, a, spaces))
            ]
        return found

    @cached_property
    def _accesses(self) -> dict[tuple[str, ...], list[tuple[int, Access]]]:
        return {}

    def _may_be_in(self, index: int, access: Access, spaces: tuple[str, ...]) -> bool:
        wanted = {s.split("::")[0] for s in spaces}
        for base, _ in self.address(index, access).parts:
            if base is None or base.kind == "unknown":
                return True
            home = {"param": "global", "loaded": "global", "param_space": "param"}.get(base.kind, base.kind)
            if home in wanted and (home != "shared" or "shared::cluster" in spaces or not base.peer):
                return True
        return False

    def address(self, index: int, access: Access) -> Address:
        return self.order.address(index, access)

    def width(self, index: int, access: Access) -> int | None:
        return bytes_of(self.body[index], access)

    def executors(self, index: int) -> Executors:
        return self.threads.executors(index)

    # -- contract -----------------------------------------------------------------------------------------

    def param(self, base: Base | None) -> Param | None:
        """What the contract says about the parameter that an address comes from."""
        if self.contract is None or base is None or base.kind != "param":
            return None
        return self.contract.param(base.index)

    def role(self, base: Base | None) -> Role | None:
        found = self.param(base)
        return found.role if found is not None else None

    def name(self, base: Base | None) -> str:
        """An origin in words, with the contract's name for a parameter."""
        if base is None:
            return "an absolute address"
        found = self.param(base)
        return f"{base} ({found.name})" if found is not None else str(base)

    # -- findings -----------------------------------------------------------------------------------------

    def site(self, index: int, role: str = "") -> Site:
        ins = self.body[index]
        text = f"@{'!' * ins.pred[1]}{ins.pred[0]} {ins.name}" if ins.pred else ins.text
        text = ins.text if not ins.pred or ins.text.startswith("@") else text
        return Site(ins.line, text[:_LONGEST_TEXT], role, str(ins.loc) if ins.loc else "")

    def path(self, route: Iterable[int]) -> tuple[Site, ...]:
        """A route through the order graph as the sites of its events; a long one is cut in the middle."""
        sites = []
        for node in route:
            i = self.order.instruction(node)
            if i is not None:
                sites.append(self.site(i, str(self.effects[i].kind)))
        if len(sites) > 14:
            sites = [*sites[:7], Site(0, f"... {len(sites) - 13} more events ..."), *sites[-6:]]
        return tuple(sites)

    def finding(
        self,
        rule: str,
        severity: Severity,
        message: str,
        sites: Iterable[Site],
        *,
        missing: str = "",
        fix: str = "",
        settle: str = "",
        path: Iterable[int] = (),
    ) -> Finding:
        """A finding of this kernel; with `settle` the verdict is *inconclusive*."""
        verdict = Verdict.INCONCLUSIVE if settle else Verdict.FINDING
        clean = re.sub(r"\s+", " ", message).strip()
        return Finding(
            rule, severity, verdict, self.kernel, clean, tuple(sites), missing, fix, settle, self.path(path)
        )
