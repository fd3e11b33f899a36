"""How it is computed: the ladder of variants, one file each.

To add a rung, copy a file, rename its kernel and add the name here: every command, table and figure follows.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kernels.errors import UserError
from kernels.problem import CHUNK, HEAD_DIM, SCALE, UnsupportedCase
from kernels.work import sm_count

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


def core_forward(name: str) -> Callable[..., tuple]:
    """A rung's forward, for what `core_inputs` makes of any case.

    It raises UnsupportedCase at packed sequences where the rung has no `cu_seqlens`.
    """
    forward = load(name).gdn_prefill_forward
    parameters = inspect.signature(forward).parameters
    if "cu_seqlens" in parameters:
        return forward

    @functools.wraps(forward)
    def of_one_length(*core):
        if len(core) > len(parameters):
            raise UnsupportedCase("it takes sequences of one length, found packed ones")
        return forward(*core)

    return of_one_length


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


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The full forward, from log-gates per token: what FLA and FlashQLA call by this name, with their semantics.

    q, k [B,T,Hq,128] and v [B,T,Hv,128] BF16; g, natural logarithms <= 0, and beta [B,T,Hv] FP32 or BF16; scale, above
    0, is 128**-0.5 if left out. With cu_seqlens [N+1], INT32 or INT64, B is 1, and N sequences, some perhaps empty, lie
    in it one after the other; initial_state is [N,Hv,128,128] FP32 then, else [B,Hv,128,128]. All on one CUDA device;
    what is not contiguous is copied. With use_qk_l2norm_in_kernel q and k are normalised first, into copies; else
    ‖k‖ <= 1 is taken for granted, as 0 <= beta <= 2 is, see variants/split.py.

    Returns output [B,T,Hv,128] BF16, whose rows past the last offset are not written, and the final states, FP32 and of
    the initial ones' shape, or None. It waits for nothing and can be captured in a CUDA graph; beyond what it returns
    it allocates A and g_cumsum (kernels.preprocess), and the copies named above.

    Raises:
        TypeError, ValueError: see kernels.problem.check_inputs; scale is not above 0.
        RuntimeError: at the next synchronisation, if a log-gate is above 0 or offsets can't be, see kernels.preprocess.
    """
    import torch

    from kernels.preprocess import l2norm, prepare
    from kernels.problem import check_inputs

    scale = SCALE if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale must be above 0, found {scale}: leave it out for {HEAD_DIM}**-0.5")
    q, k, v = (x.contiguous() for x in (q, k, v))
    g, beta = (x.contiguous().float() if x.dtype == torch.bfloat16 else x.contiguous() for x in (g, beta))
    B, tokens, _, Hv = check_inputs(q, k, v, g, beta, initial_state, cu_seqlens)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    g_cumsum, A = prepare(k, g, beta, cu_seqlens)
    core = (q, k, v, g_cumsum, beta, A, initial_state)
    # The other rungs know neither packed sequences nor another scale.
    if cu_seqlens is None and scale == SCALE and (rung := plan(B, tokens, Hv, v.device).rung) != "split":
        output, final_state = load(rung).gdn_prefill_forward(*core)
        return output, final_state if output_final_state else None
    return load("split").gdn_prefill_forward(*core, cu_seqlens, scale, output_final_state)


@dataclass(frozen=True)
class Plan:
    """How a shape is run."""

    rung: str
    dv_tile: int  # columns of the state a CTA, 64 or 128
    segments: int  # of a sequence
    exact: int  # segments of a head that hardly decays, with exact starts, which take two more launches; 0 for none


def plan(B: int, tokens: int, Hv: int, device: torch.device, packed: int = 1) -> Plan:
    """The plan for a shape, by its heads in all, its chunks and the SMs of the device.

    Where a batch of one packs several sequences, the segments are those of all of them together, as if they were one:
    each sequence gets as many as its length allows. Exact starts are for sequences of eight segments then, too.

    A CTA an SM is the aim: of 128 columns where that leaves long segments, else of 64. Whether heads decay is not known
    here, so a plan must do for both. From sweeps on an H200 (132 SMs) by scripts, no recorded run: core, graph clock,
    in µs, where all heads decay and where a quarter never does; columns x segments, e and how many exact ones:

        T, heads    all decay / a quarter never does
         2048,  8   64x8 15.6/32.5    128x16 17.0/35.2    rs 46.1/46.2
         2048, 16   64x4 21.5/35.7    128x8 23.4/38.4     rs 46.8/46.6
         2048, 32   64x2 32.2/41.8    128x4 34.8/44.6     rs 48.0/48.2
         2048, 64   rs 51.6/51.5      128x2 51.8/59.2     64x1 54.0/54.2
         8192,  4   64x16e9 30/63      64x16 21/109       128x33e9 28/85
         8192,  8   64x8e9 41/66       64x8e7 39/70       64x12e9 55/68
         8192, 16   128x8e9 59/95      128x6e9 68/89      128x10e9 89/92
         8192, 24   128x5e9 83/132     128x5e6 81/120     128x3e5 110/119
         8192, 32   128x4e8 103/164    128x3e8 118/146    128x6e9 137/156
         8192, 48   128x2 149/200      128x2e6 162/198    64x1 189/188
         8192, 64   128x2 160/213      64x1 204/205       128x3 217/216
        16384,  8   128x16e18 61/115   64x8e18 71/107     128x16 52/244
        16384, 16   128x8e16 101/161   128x8e12 99/155    128x8 87/276
        16384, 32   128x4e8 170/261    128x4 160/346
        32768,  8   128x16e24 99/161   128x12e20 116/153  128x24e32 138/158
        32768, 16   128x8e16 171/273   128x6e16 207/257   128x6e12 205/267
        32768, 24   128x5e11 256/350   128x5e7 255/348    128x7e12 364/370
        32768, 32   128x4e8 313/443    128x4e9 319/457    128x8e8 327/445
        32768, 48   128x2 549/757      128x2e8 570/698    128x3e8 782/678
        32768, 64   128x2 587/825      64x1 798/799

    All are of main loops before this one, which took 4 to 10 % longer; those of 4 heads, of 16384, and of 48 heads at
    32768, of the `split_fold` before this one too, which took twice as long.
    """
    heads, chunks, sms = B * Hv, -(-tokens // CHUNK), sm_count(device)
    # Half the SMs for a quarter of the heads. 14 chunks have room for M, N and a start (variants/split.py). More than
    # 24 gained nothing: 128x16e32 took longer than 128x16e24 with either `split_fold`.
    exact = min(2 * sms // heads, chunks // 14, 24)
    exact = exact if exact >= 4 * max(packed, 2) else 0
    if (segments := sms // heads) > 1 and chunks >= (16 if exact else 24) * segments:
        return Plan("split", 128, segments, exact)
    if (segments := min(sms // (2 * heads), chunks - 3)) > 1:
        return Plan("split", 64, segments, exact)
    return Plan("rs", 64, 1, exact=0) if 2 * heads <= sms else Plan("split", 128, 1, exact=0)


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
