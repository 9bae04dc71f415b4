"""Compile the CuTe DSL kernels of a package that cannot be imported whole. Needs no GPU.

Packages that ship kernels as Python also ship compiled extensions that do not load here. Their kernel
modules import with empty parents (`empty_packages`), and what they hand to `cute.compile` can be recorded
(`recording`): the PTX with source lines and the cubin.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 228 KB for 9.0, 10.0 and 10.3.
_SHARED_MEMORY_PER_SM = 228 * 1024


@dataclass(frozen=True)
class Code:
    """One compiled kernel. `kernel` is the class that describes it; `ptx` names source files as in the wheel."""

    kernel: str
    entry: str
    ptx: str
    cubin: bytes


def empty_packages(root: Path, *packages: str) -> None:
    """Make dotted packages below `root` importable without running their `__init__`.

    Only packages that are not imported yet are touched, so that it can be called again.
    """
    for package in packages:
        parts = package.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            module = types.ModuleType(name)
            module.__path__ = [str(root.joinpath(*parts[:i]))]
            sys.modules.setdefault(name, module)


def stub(name: str, **members: Any) -> None:
    """Put a module with nothing but `members` where the package expects one of its own."""
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


@contextlib.contextmanager
def recording(
    arch: str, folder: Path | str, root: Path | str = "", *, line_info: bool = True
) -> Iterator[list[Code]]:
    """While it lasts, `cute.compile` builds for `arch` and appends what it built to the list.

    `folder` is scratch space for the compiler. Paths below `root` become relative in the PTX, so that the
    text is the same on every machine. Where the compiler asks the device for its shared memory, it gets the
    documented size; nothing else of a CUDA device is needed.
    """
    import cutlass.cute as cute
    import torch

    built: list[Code] = []

    def recorder(original: Any) -> Any:
        def compile(kernel: Any, *args: Any, options: str = "", **kwargs: Any) -> Any:
            # How the host calls the kernel (TVM-FFI) does not change the kernel.
            options = re.sub(r"--gpu-arch=\S+|--enable-tvm-ffi", "", options)
            options += f" --gpu-arch={arch} --keep-ptx --keep-cubin --dump-dir {folder}"
            options += " --generate-line-info" * line_info
            code = original(kernel, *args, options=options.strip(), **kwargs)
            ptx = code.artifacts.PTX.replace(f'"{root}/', '"') if root else code.artifacts.PTX
            owner = getattr(kernel, "__self__", kernel)  # a method: the object that it belongs to
            name = type(owner).__name__ if not isinstance(owner, types.FunctionType) else owner.__name__
            entry = re.findall(r"\.entry\s+([\w$]+)", ptx)
            built.append(Code(name, entry[0] if entry else "", ptx, code.artifacts.CUBIN))
            return code

        return compile

    def device_attribute(attribute: Any, *_: Any) -> int:
        if attribute.name.endswith("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"):
            return _SHARED_MEMORY_PER_SM
        raise RuntimeError(f"the kernel asks the device for {attribute.name}; there is none here")

    runtime = importlib.import_module("cutlass.base_dsl.runtime.cuda")
    with contextlib.ExitStack() as patches:
        replace = unittest.mock.patch.object
        patches.enter_context(replace(cute, "compile", recorder(cute.compile)))
        if hasattr(cute, "experimental"):
            compile_ = recorder(cute.experimental.compile)
            patches.enter_context(replace(cute.experimental, "compile", compile_))
        patches.enter_context(replace(torch.accelerator, "device_index", contextlib.nullcontext))
        patches.enter_context(replace(runtime, "get_device_attribute", device_attribute))
        yield built
