"""A module of recipes that compiles nothing, for the tests of the runner: it is imported in fresh processes."""

import os
import signal
import sys
import time
from dataclasses import dataclass

from k3_audit.audit.capture.cutedsl import Code

PRELOAD = ()
ARCHITECTURES = ("sm_90a",)
WHEELS = ()
PTX = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry nothing()
{
    ret;
}
"""


@dataclass(frozen=True)
class Recipe:
    name: str
    arguments: tuple = ()


def recipes():
    return [Recipe(n, (1, (2,))) for n in ("good", "two", "wrong", "crash", "exit", "hang", "none")]


def build(name, arch):
    if name == "wrong":
        raise RuntimeError("\x1b[91merror:\x1b[0m PTX assembly failed\n  second line\n")
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "exit":
        sys.exit(7)
    if name == "hang":
        time.sleep(60)
    print("compilers talk a lot")
    count = {"none": 0, "two": 2}.get(name, 1)
    return [Code("Kernel", "nothing", PTX, b"\x7fELF") for _ in range(count)]


def answer(value):
    return value


def leave():
    os._exit(3)
