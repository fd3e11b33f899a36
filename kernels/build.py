"""Compilation: the target, builders that compile on first use, and what the compiler made of a kernel."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tilelang
import torch
from tilelang import tvm

from kernels.errors import UserError
from kernels.markers import Marker, build_traced
from kernels.problem import CHUNK, HEAD_DIM, Case, UnsupportedCase


class ToolMissing(UserError):
    """A compiler or disassembler is not installed: which, where it was looked for, how to get it."""


@functools.cache
def target() -> dict[str, str]:
    """The compilation target: the architecture of the current GPU, or Hopper (sm_90a) where there is none.

    A dict of kind and arch alone, since it is part of the cache key: a cache filled on a machine without a
    GPU is then found on one with a Hopper GPU.
    """
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    # The "a" targets hold the instructions of one architecture only, such as Hopper's wgmma and setmaxnreg.
    return {"kind": "cuda", "arch": f"sm_{major}{minor}{'a' if major >= 9 else ''}"}


# Compiled kernels are replaced by their description while `launches_of` runs; see there.
_collected: list[Launch] | None = None
_traced = False


class Builder:
    """A `tilelang.jit` builder whose target is decided when it is first called, not when it is imported."""

    def __init__(self, function: Callable, pass_configs: dict):
        self._function = function
        self._jit = tilelang.jit(function, pass_configs=pass_configs)
        self._pass_configs = pass_configs
        self._compiled: dict[tuple, Callable] = {}

    def __call__(self, *args):
        """The compiled kernel for these builder arguments; compiled once in a process, then looked up."""
        if _collected is not None:
            prim_func, markers = build_traced(self._function, args) if _traced else (self._jit.get_tir(*args), ())
            source, noted = Source(prim_func, self._pass_configs, markers), _collected
            return lambda *arguments: noted.append(Launch(source, arguments))
        if args not in self._compiled:
            self._jit.target = target()
            self._compiled[args] = self._jit(*args)
        return self._compiled[args]


def jit(**pass_configs) -> Callable[[Callable], Builder]:
    """Decorate a function that returns a prim_func; keywords are TileLang pass configs without their `tl.`."""
    return lambda function: Builder(function, {f"tl.{name}": value for name, value in pass_configs.items()})


@dataclass(frozen=True)
class Source:
    """A kernel before compilation."""

    prim_func: object
    pass_configs: dict
    markers: tuple[Marker, ...] = ()  # those that record, in a traced build

    @property
    def name(self) -> str:
        """The prim_func's name; the device function adds `_kernel`."""
        return str(self.prim_func.attrs["global_symbol"])

    @property
    def dv_tile(self) -> int:
        """Columns of dv that a CTA owns. Tiles are the constant factor of a grid; the rest of it are arguments."""
        tiles = 1

        def count(node) -> None:
            nonlocal tiles
            if isinstance(node, tvm.tirx.For) and node.thread_binding is not None:
                factors = (node.extent.a, node.extent.b) if isinstance(node.extent, tvm.tirx.Mul) else (node.extent,)
                tiles *= math.prod(int(factor) for factor in factors if isinstance(factor, tvm.tirx.IntImm))

        tvm.tirx.stmt_functor.post_order_visit(self.prim_func.body, count)
        return HEAD_DIM // tiles


@dataclass(frozen=True)
class Launch:
    """A kernel and the tensors and numbers that it would be called with."""

    source: Source
    arguments: tuple[torch.Tensor | int, ...]


@dataclass(frozen=True)
class Facts:
    """What ptxas and the disassembler say of one device function."""

    kernel: str
    registers: int
    spill_bytes: int  # stores plus loads
    shared_bytes: int  # static plus dynamic
    hgmma: int  # warpgroup matrix instructions in the SASS
    ldl: int  # local-memory loads
    stl: int  # local-memory stores


def launches_of(forward: Callable, arguments: tuple, traced: bool = False) -> list[Launch]:
    """The kernels that `forward(*arguments)` launches, in order; none is compiled or run.

    Builders hand out a stand-in and note what they would have compiled. With `traced`, kernels record at their markers
    and want the trace as one more tensor, see kernels.markers.
    """
    global _collected, _traced
    _collected, _traced = [], traced
    try:
        forward(*arguments)
        return _collected
    finally:
        _collected, _traced = None, False


def kernels_of(forward: Callable, cases: tuple[Case, ...]) -> list[Source]:
    """The distinct kernels that `forward` builds for these cases, found on `meta` tensors, without a GPU.

    A case that it does not support has none.
    """
    sources: dict[tuple[str, str], Source] = {}
    for case in cases:
        with contextlib.suppress(UnsupportedCase):
            for source in (launch.source for launch in launches_of(forward, meta_inputs(case))):
                sources.setdefault((source.name, source.prim_func.script()), source)
    return list(sources.values())


def meta_inputs(case: Case) -> tuple:
    """What `preprocess.core_inputs` returns for a case, as `meta` tensors, which have shapes and no content."""

    def meta(*shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    B, T, Hq, Hv = case.B, case.T, case.Hq, case.Hv
    bf16, sequences = torch.bfloat16, len(case.sequences)
    core = (
        meta(B, T, Hq, HEAD_DIM, dtype=bf16),
        meta(B, T, Hq, HEAD_DIM, dtype=bf16),
        meta(B, T, Hv, HEAD_DIM, dtype=bf16),
        meta(B, T, Hv),
        meta(B, T, Hv),
        meta(B, T, Hv, CHUNK, dtype=bf16),
        meta(sequences, Hv, HEAD_DIM, HEAD_DIM) if case.initial_state else None,
    )
    return (*core, meta(sequences + 1, dtype=torch.int32)) if case.lengths else core


def compile_into_cache(source: Source) -> Callable:
    """The kernel, compiled into TileLang's cache (TILELANG_CACHE_DIR), where a later process or machine finds it."""
    return tilelang.compile(source.prim_func, target=target(), pass_configs=source.pass_configs)


@dataclass(frozen=True)
class Cubin:
    """What nvcc made of a kernel."""

    content: bytes
    log: str  # of ptxas, verbose
    dynamic_shared: dict[str, int]  # bytes, by device function


def cubin(source: Source) -> Cubin:
    """Cross-compile a kernel.

    Raises:
        ToolMissing: nvcc can't be found.
    """
    from tilelang.contrib import nvcc

    compiler = find_tool("nvcc")
    hopper = tvm.target.Target(target())
    with tvm.transform.PassContext(opt_level=3, config=source.pass_configs), hopper:
        artifact = tilelang.lower(source.prim_func, target=hopper)
    fast_math = ["--use_fast_math"] if source.pass_configs.get("tl.enable_fast_math") else []
    with tempfile.TemporaryDirectory() as folder:
        text, made = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
        text.write_text(artifact.kernel_source)
        command = [compiler, "--cubin", "-O3", f"-arch={target()['arch']}", *nvcc.default_compile_options(), *fast_math]
        log = _run([*command, "-Xptxas", "-v", "-o", str(made), str(text)])
        content = made.read_bytes()
    dynamic = {
        str(function.attrs["global_symbol"]): int(function.attrs.get("dyn_shared_memory_buf", 0))
        for function in artifact.device_mod.functions.values()
    }
    return Cubin(content, log, dynamic)


def facts(source: Source) -> list[Facts]:
    """Cross-compile a kernel to a cubin and read its resources and instruction counts.

    Raises:
        ToolMissing: nvcc, cuobjdump or nvdisasm can't be found.
    """
    made = cubin(source)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(made.content)
        sass = _run([find_tool("nvdisasm"), "-c", str(path)])
        usage = _run([find_tool("cuobjdump"), "--dump-resource-usage", str(path)])
    return parse_facts(made.log, usage, sass, made.dynamic_shared)


def parse_facts(ptxas_log: str, usage: str, sass: str, dynamic_shared: dict[str, int]) -> list[Facts]:
    """Join ptxas' verbose log, cuobjdump's resource usage, nvdisasm's listing and the dynamic shared memory."""
    spills = {
        name: int(stores) + int(loads)
        for name, stores, loads in re.findall(
            r"Function properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            ptxas_log,
        )
    }
    bodies = dict(re.findall(r"^\.text\.(\S+):$(.*?)(?=^\.text\.|\Z)", sass, re.MULTILINE | re.DOTALL))
    found = []
    for name, registers, shared in re.findall(r"Function (\S+):\s+REG:(\d+) .*?SHARED:(\d+)", usage):
        count = functools.partial(_count, bodies[name])
        found.append(
            Facts(
                name,
                int(registers),
                spills[name],
                int(shared) + dynamic_shared.get(name, 0),
                count("HGMMA"),
                count("LDL"),
                count("STL"),
            )
        )
    return found


def _count(sass: str, opcode: str) -> int:
    return len(re.findall(rf"\b{opcode}[.\s]", sass))


@functools.cache
def find_tool(name: str) -> str:
    """The path of a CUDA tool: from CUDA_HOME, from the PyPI packages of the `gpu` extra, or from PATH."""
    site = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    places = [Path(home, "bin") for home in (os.environ.get("CUDA_HOME"),) if home] + [site]
    path = shutil.which(name, path=os.pathsep.join(map(str, places))) or shutil.which(name)
    if path is None:
        raise ToolMissing(
            f"{name} is needed and was found neither in CUDA_HOME, nor in {site}, nor on PATH: "
            "`make env` installs it with the other requirements, or set CUDA_HOME to a CUDA 13 toolkit"
        )
    return path


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
