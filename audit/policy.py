"""The gate's demands, golden/policy.toml: the evidence that is needed, the findings that are accepted."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from .findings import Finding


class PolicyError(Exception):
    """One line: which entry of the policy does not fit."""


@dataclass(frozen=True)
class Tier:
    """A test tier. `code` names the files that define it; `reference`: it compares with reference/."""

    name: str
    code: tuple[str, ...] = ()
    reference: bool = False


@dataclass(frozen=True)
class Suppression:
    """One accepted finding. It stops counting on the day `expires`."""

    rule: str
    kernel: str
    fingerprint: str
    reason: str
    expires: date

    def covers(self, kernel: str, finding: Finding, today: date) -> bool:
        """True when `finding` of `kernel` is the accepted one and the suppression has not expired."""
        return today < self.expires and (self.kernel, self.rule, self.fingerprint) == (
            kernel,
            finding.rule,
            finding.fingerprint,
        )

    def __str__(self) -> str:
        return f"{self.rule} {self.fingerprint} until {self.expires}: {self.reason}"

    def fate(self, used: bool, today: date) -> str:
        """What became of it, as one line of a report."""
        end = "" if used else " (expired)" if today >= self.expires else " (matches nothing)"
        return f"{self.kernel}: {self}{end}"


@dataclass(frozen=True)
class Policy:
    """`required` maps an architecture to the tiers that must have run on it; `static_only` to why none must.

    `cases` maps (kernel, tier) to the cases that must be there.
    """

    tiers: dict[str, Tier] = field(default_factory=dict)
    required: dict[str, tuple[str, ...]] = field(default_factory=dict)
    static_only: dict[str, str] = field(default_factory=dict)
    cases: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    suppressions: tuple[Suppression, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read golden/policy.toml. Raises PolicyError in one line."""
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise PolicyError(f"{path.name}: {' '.join(str(e).split())}") from None
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            reason = f"missing field {e}" if isinstance(e, KeyError) else e
            raise PolicyError(f"{path.name}: {reason}") from None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Policy:
        tiers = {
            name: Tier(name, tuple(t.get("code", ())), bool(t.get("reference", False)))
            for name, t in data.get("tiers", {}).items()
        }
        required, static_only = {}, {}
        for arch, table in data["architectures"].items():
            required[arch] = tuple(table["required"])
            for tier in required[arch]:
                if tier not in tiers:
                    raise ValueError(f"{arch} requires tier {tier!r}, which [tiers] does not name")
            if not required[arch]:
                static_only[arch] = table["static_only"]
        cases = {
            (kernel, tier): tuple(names)
            for kernel, by_tier in data.get("cases", {}).items()
            for tier, names in by_tier.items()
        }
        return cls(tiers, required, static_only, cases, suppressions(data))


def suppressions(data: dict[str, Any]) -> tuple[Suppression, ...]:
    """The `[[suppress]]` tables of a policy or of a file of their own. Raises KeyError or ValueError."""
    found = []
    for table in data.get("suppress", ()):
        s = Suppression(
            **{name: table[name] for name in ("rule", "kernel", "fingerprint", "reason", "expires")}
        )
        if not isinstance(s.expires, date):
            raise ValueError(f"suppression of {s.rule}: expires must be a date, as in 2027-01-31")
        if not str(s.reason).strip():
            raise ValueError(f"suppression of {s.rule}: reason is empty")
        found.append(s)
    return tuple(found)
