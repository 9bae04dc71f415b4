"""Defects planted into the PTX of a kernel: each takes the text of the shipped kernel and returns a broken one."""

from __future__ import annotations

from collections.abc import Callable

WAIT = "griddepcontrol.wait;"
INIT_FENCE = "fence.mbarrier_init.release.cluster;"
CLUSTER_WAIT = "barrier.cluster.wait.acquire.aligned;"
TRY_WAIT = "mbarrier.try_wait.parity.acquire.cluster"
POLL = "@!done bra WAIT;"


def _once(ptx: str, old: str, new: str) -> str:
    if ptx.count(old) < 1:
        raise ValueError(f"the kernel has no {old!r}: the defect would change nothing")
    return ptx.replace(old, new, 1)


def wait_dropped(ptx: str) -> str:
    """No dependency wait at all: the kernel reads `delta` while the previous grid may still write it."""
    return _once(ptx, WAIT, "")


def load_above_wait(ptx: str) -> str:
    """The first load after the dependency wait, moved above it."""
    lines = ptx.splitlines()
    wait = next(i for i, line in enumerate(lines) if line.strip() == WAIT)
    load = next(i for i in range(wait, len(lines)) if "ld.global" in lines[i])
    lines[load] += f"\n{WAIT}"
    del lines[wait]
    return "\n".join(lines) + "\n"


def exchange_wait_dropped(ptx: str) -> str:
    """The first round of the exchange is read without waiting for its mbarrier."""
    lines = ptx.splitlines()
    wait = next(i for i, line in enumerate(lines) if TRY_WAIT in line)
    poll = next(i for i in range(wait, len(lines)) if lines[i].strip() == POLL)
    return "\n".join(lines[:wait] + lines[poll + 1 :]) + "\n"


def poll_dropped(ptx: str) -> str:
    """The first round tries its mbarrier once and goes on whatever the answer. A try blocks for a while, so this
    nearly always works."""
    return _once(ptx, POLL, "")


def acquire_narrowed(ptx: str) -> str:
    """The waits acquire at CTA scope, although the data comes from other CTAs of the cluster."""
    if TRY_WAIT not in ptx:
        raise ValueError("the kernel has no cluster-scope try_wait")
    return ptx.replace(TRY_WAIT, TRY_WAIT.replace(".cluster", ".cta"))


def init_fence_dropped(ptx: str) -> str:
    """The initialised mbarriers are never released to the cluster."""
    return _once(ptx, INIT_FENCE, "")


def cluster_wait_dropped(ptx: str) -> str:
    """The first push does not wait until its peers have initialised their mbarriers."""
    return _once(ptx, CLUSTER_WAIT, "")


SEEN_BY_HARDWARE: dict[str, Callable[[str], str]] = {
    "wait_dropped": wait_dropped,
    "load_above_wait": load_above_wait,
    "exchange_wait_dropped": exchange_wait_dropped,
}
# The others break the guarantee too, but hardware may keep order all the same; auditor and emulator must see all.
DEFECTS: dict[str, Callable[[str], str]] = {
    **SEEN_BY_HARDWARE,
    "poll_dropped": poll_dropped,
    "acquire_narrowed": acquire_narrowed,
    "init_fence_dropped": init_fence_dropped,
    "cluster_wait_dropped": cluster_wait_dropped,
}
