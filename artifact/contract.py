"""What a kernel promises its neighbours, in one dataclass that stands beside the kernel's code.

The auditor proves a contract against PTX and then SASS; the launcher obeys it. Kernels of other people
carry the same thing as a small TOML file beside the code, see :func:`Contract.from_dict`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Who else touches the memory behind a pointer argument, and when."""

    WEIGHT = "weight"  # never written while the backend lives: may be read before the dependency wait
    STABLE = "stable"  # written by a grid that has completed before this one may start (see Launch.stable_distance)
    UPSTREAM = "upstream"  # written by the previous grid: reading it before the dependency wait is a race
    OUTPUT = "output"  # written here, read by later grids
    STATE = "state"  # read and written here, by one grid after the other
    FLAG = "flag"  # synchronisation word shared with concurrent grids or CTAs
    PEER = "peer"  # memory of this launch's ranks on other GPUs
    MULTICAST = "multicast"  # a multimem address
    SCRATCH = "scratch"  # private to this launch


@dataclass(frozen=True)
class Param:
    """One kernel parameter, in the order of the `.entry`.

    `dtype` is a CUDA-side name (`bf16`, `f32`, `i32`, `i64`); `role` is None for scalars.
    `access` is what this kernel does through the pointer: "r", "w" or "rw".
    `shape` is documentation, in symbols ("T", "7168").
    """

    name: str
    dtype: str
    role: Role | None = None
    access: str = ""
    shape: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Handoff:
    """Data that one set of threads publishes and another consumes inside one launch or across two.

    `via` is the mechanism ("mbarrier", "cluster_barrier", "cta_barrier", "grid_dependency", "flag", "mailbox");
    `scope` is the narrowest PTX scope that includes both parties ("cta", "cluster", "gpu", "sys").
    """

    name: str
    data: str
    producer: str
    consumer: str
    via: str
    scope: str
    note: str = ""


@dataclass(frozen=True)
class Launch:
    """Launch shape that the machine code relies on. `grid` is in symbols of the arguments.

    `stable_distance`: the writers of every STABLE argument lie at least this many launches back in the stream
    order (1 = the previous launch). 0 means that the contract does not rely on it.
    """

    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    grid: tuple[str, str, str] = ("1", "1", "1")
    dynamic_smem: int = 0
    pdl: bool = False
    cooperative: bool = False
    coresident_ctas: int = 1
    stable_distance: int = 0


@dataclass(frozen=True)
class Contract:
    """Everything about a kernel's environment that its machine code depends on."""

    kernel: str
    params: tuple[Param, ...]
    launch: Launch
    handoffs: tuple[Handoff, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def param(self, index: int) -> Param | None:
        """The parameter at `index` of the `.entry`, or None when the contract names fewer."""
        return self.params[index] if 0 <= index < len(self.params) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as stored in an artifact's metadata."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Contract:
        """Inverse of :meth:`to_dict`. Raises ValueError that names the field which does not fit."""
        try:
            params = tuple(
                Param(
                    **{
                        **p,
                        "role": Role(p["role"]) if p.get("role") else None,
                        "shape": tuple(p.get("shape", ())),
                    }
                )
                for p in data.get("params", ())
            )
            handoffs = tuple(Handoff(**h) for h in data.get("handoffs", ()))
            launch = {k: tuple(v) if isinstance(v, list) else v for k, v in dict(data["launch"]).items()}
            return cls(data["kernel"], params, Launch(**launch), handoffs, tuple(data.get("notes", ())))
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"contract of kernel {data.get('kernel', '?')!r}: {e}") from e
