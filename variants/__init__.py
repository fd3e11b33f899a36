"""How it is computed: the ladder of variants, one file each.

To add a rung, copy a file, rename its kernel and add the name here: every command, table and figure follows.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kernels.errors import UserError
from kernels.problem import CHUNK

if TYPE_CHECKING:
    import torch

# In order: each rung is compared with the one before it.
LADDER = ("naive", "fused", "smem", "multibuf", "ws", "rs", "split")


class UnknownVariant(UserError):
    """A name that is not on the ladder."""


def load(name: str) -> ModuleType:
    """The module of a rung; its `gdn_prefill_forward` is the operator. Needs torch and tilelang."""
    _known(name)
    return importlib.import_module(f"variants.{name}")


def label(name: str) -> str:
    """What tables call the rung: the first line of its docstring."""
    return docstring(name).splitlines()[0].removeprefix(f"{name}: ")


def docstring(name: str) -> str:
    """What a rung's file says of it, read without importing it; the rung's name where it says nothing."""
    _known(name)
    source = Path(importlib.util.find_spec(f"variants.{name}").origin).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or name


def dv_tile(B: int, Hv: int, device: torch.device) -> int:
    """Columns of the state that one CTA owns: 64 while every such CTA finds an SM of its own, else 128.

    From a sweep on an H200 (132 SMs), T = 2048, `multibuf` with two stages and A not yet swizzled, one CTA an SM: 64
    takes 31 % less time up to 66 heads, 128 takes 26 % less from 96 on. `smem`, of which two CTAs fit an SM at 64,
    loses 1 to 5 % by this rule from 96 heads on.
    """
    return 64 if 2 * B * Hv <= sm_count(device) else 128


def gdn_prefill_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The core forward by the rung that is fastest for its shape (`plan`), on the current stream.

    q, k [B,T,Hq,128], v [B,T,Hv,128] and A [B,T,Hv,64] BF16; g_cumsum and beta [B,T,Hv] and initial_state
    [B,Hv,128,128] FP32, all contiguous on one CUDA device; Hv a multiple of Hq. ‖k‖ <= 1 and 0 <= beta <= 2 are taken
    for granted, see variants/split.py. Returns output [B,T,Hv,128] BF16 and final_state [B,Hv,128,128] FP32.

    It changes no input, allocates only what it returns, waits for nothing and can be captured in a CUDA graph. Equal
    inputs give equal bits. A sequence alone gives the bits it gives in a batch where both have the same plan.

    Raises:
        TypeError, ValueError: see kernels.problem.check_core_inputs.
        RuntimeError: at the next synchronisation, if a log-gate is above 0, see kernels.gates.
    """
    from kernels.gates import refuse_growth
    from kernels.problem import check_core_inputs

    B, tokens, _, Hv = check_core_inputs(q, k, v, g_cumsum, beta, A, initial_state)
    refuse_growth(g_cumsum)
    rung = plan(B, tokens, Hv, v.device).rung
    return load(rung).gdn_prefill_forward(q, k, v, g_cumsum, beta, A, initial_state)


@dataclass(frozen=True)
class Plan:
    """How a shape is run."""

    rung: str
    dv_tile: int  # columns of the state a CTA, 64 or 128
    segments: int  # of a sequence
    exact: bool  # whether heads that hardly decay get exact starts, which takes two more launches


def plan(B: int, tokens: int, Hv: int, device: torch.device) -> Plan:
    """The plan for a shape, by its heads in all, its chunks and the SMs of the device.

    A CTA an SM is the aim: of 128 columns where that leaves long segments, else of 64. Whether heads decay is not known
    here, so a plan must do for both. From a sweep on an H200 (132 SMs) by a script, no recorded run: core, graph clock,
    in µs, where all heads decay and where a quarter never does; columns x segments, e with exact starts, and `rs`:

        T, heads    all decay / a quarter never does
         2048,  8   64x8 16.3/35.3    128x16 17.9/51.0    rs 46.4/46.2
         2048, 16   64x4 22.6/38.5    128x8 23.4/53.6     rs 46.7/46.8
         2048, 32   64x2 33.7/44.3    128x4 33.4/59.0     rs 48.5/48.4
         2048, 64   rs 51.8/52.1      128x2 50.6/67.9
         2048, 96   128x1 82.7/82.8   rs 98.1/98.6
         8192,  4   64x16 22.5/119    128x33 24.0/176     rs 171/171
         8192,  8   64x8e 39.6/112    64x8 34.0/126       128x16 32.1/182     rs 172/172
         8192, 16   64x4 60.7/139     64x4e 64.2/142      128x8e 57.5/156     rs 173/173
         8192, 32   64x2 107/165      128x4e 93.7/210     128x4 92.2/215      rs 176/178
         8192, 64   rs 187/189        128x2 166/247       128x2e 168/317
        32768,  4   64x16e 70.2/176   128x33e 66.7/253    rs 673/672
        32768,  8   128x16e 97.9/243  64x8e 111/256       rs 672/670
        32768, 16   128x8e 174/380    64x4e 209/453       rs 674/673
    """
    heads, chunks, sms = B * Hv, -(-tokens // CHUNK), sm_count(device)
    if (segments := sms // heads) >= 4 and chunks >= (32 if segments >= 8 else 64) * segments:
        return Plan("split", 128, segments, exact=True)
    if (segments := min(sms // (2 * heads), chunks - 3)) > 1:
        return Plan("split", 64, segments, exact=segments >= 8 and chunks >= 16 * segments)
    return Plan("rs", 64, 1, exact=False) if 2 * heads <= sms else Plan("split", 128, 1, exact=False)


@functools.cache
def sm_count(device: torch.device) -> int:
    """SMs of a device, of a MIG slice where it is one; a full H100 or H200 where there is no GPU to ask."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def select(names: str) -> tuple[str, ...]:
    """The rungs that a command line names: `all`, `last`, or names separated by commas, in ladder order."""
    if names == "all":
        return LADDER
    if names == "last":
        return LADDER[-1:]
    wanted = names.split(",")
    for name in wanted:
        _known(name)
    return tuple(name for name in LADDER if name in wanted)


def _known(name: str) -> None:
    if name not in LADDER:
        raise UnknownVariant(
            f"a variant was expected to be one of {', '.join(LADDER)}, found {name!r}: "
            "choose one of them, or add its file to variants/ and its name to LADDER in variants/__init__.py"
        )
