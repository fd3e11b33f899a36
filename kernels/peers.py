"""The public libraries behind one interface, each in its own conventions and through its own entry points.

| name            | phases     | library                                                                 |
| --------------- | ---------- | ----------------------------------------------------------------------- |
| flashqla        | all four   | FlashQLA, which splits a sequence over SMs where its cost model says so |
| flashqla_nocp   | core, full | the same, never split                                                   |
| fla             | all four   | Flash Linear Attention's Triton kernels, tuned anew for every case      |
| flashinfer      | full       | FlashInfer's fused kernel, which splits where its rule says so          |
| flashinfer_nocp | full       | the same, never split                                                   |
| token_loop      | full       | PyTorch, token by token in FP32: what the formula costs as it stands    |

core starts from the library's own A and cumulative gates, full from log-gates per token. The other two are what full
does before its core: cumsum sums log-gates over every chunk, and A makes the inverse from these sums. FlashInfer can't
be split in phases. What differs from `kernels.problem.Inputs` is converted outside the timed region:

| library    | gates                        | A                          | state   | layout        | cu_seqlens |
| ---------- | ---------------------------- | -------------------------- | ------- | ------------- | ---------- |
| FlashQLA   | natural logarithm            | ungated, gated in the core | [dk,dv] | as ours       | INT32      |
| FLA        | base-2 logarithm once summed | gated                      | [dk,dv] | as ours       | INT64      |
| FlashInfer | exp(g)                       | inside                     | [dv,dk] | packed tokens | INT64      |

What FlashQLA and FLA derive from cu_seqlens on the host, they keep while they are given that same tensor, as all layers
of a model give it; so it is no part of their times.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable

import torch

from kernels.problem import CHUNK, SCALE, Implementation, Inputs, UnsupportedCase
from kernels.reference import recurrence

LONGEST_TOKEN_LOOP = 1025  # tokens: the two shortest cases; the rest would take minutes

Phases = dict[str, Implementation]


def find() -> tuple[dict[str, Phases], dict[str, str]]:
    """Implementations by name and phase of every library that is installed, and why the others are missing, by name."""
    found, missing = {}, {}
    for package, module, names, make in _LIBRARIES:
        if importlib.util.find_spec(module) is None:
            missing |= dict.fromkeys(names, f"{package} is not installed: pip install '.[peers]'")
            continue
        try:
            found |= make()
        except Exception as error:  # whatever a library raises where it does not support this machine
            said = " ".join(str(error).split())[:200]
            missing |= dict.fromkeys(names, f"{package} could not be imported: {type(error).__name__}: {said}")
    return found | {"token_loop": {"full": _token_loop()}}, missing


def _flashqla() -> dict[str, Phases]:
    from flash_qla.ops.gated_delta_rule import chunk
    from flash_qla.ops.gated_delta_rule.chunk.cp import FlashQLACPContext, build_cp_context

    def context_of(inputs: Inputs, split: bool):
        B, T, Hv = inputs.g.shape
        offsets = inputs.cu_seqlens
        if not split or B > 1:  # the library splits sequences that are packed, or a single one
            return FlashQLACPContext(cu_seqlens=offsets)
        if offsets is None:
            offsets = torch.tensor([0, T], dtype=torch.int32, device=inputs.g.device)
        return build_cp_context(offsets, enable_intra=True, num_v_heads=Hv, chunk_size=CHUNK)

    def cumsum(g, offsets):
        return (chunk.chunk_local_cumsum(g=g, cu_seqlens=offsets, chunk_size=CHUNK),)

    def cumsum_inputs(inputs: Inputs) -> tuple:
        return inputs.g, context_of(inputs, split=True).cu_seqlens

    def inverse(k, beta, offsets):
        return (chunk.kkt_solve(k=k, b=beta, cu_seqlens=offsets, chunk_size=CHUNK),)

    def inverse_inputs(inputs: Inputs) -> tuple:
        return inputs.k, inputs.beta, context_of(inputs, split=True).cu_seqlens

    def convert(split: bool) -> Callable[[Inputs], tuple]:
        def core_inputs(inputs: Inputs) -> tuple:
            context = context_of(inputs, split)
            (g_cumsum,) = cumsum(inputs.g, context.cu_seqlens)
            (A,) = inverse(inputs.k, inputs.beta, context.cu_seqlens)
            return inputs.q, inputs.k, inputs.v, g_cumsum, inputs.beta, A, inputs.initial_state, context

        return core_inputs

    def core(q, k, v, g_cumsum, beta, A, state, context):
        state, _ = chunk.cp_preprocess_fwd(
            context, k=k, v=v, a=A, g=g_cumsum, beta=beta, initial_state=state, state_v_first=False,
            enable_fwd_cp_cache=False,
        )  # fmt: skip
        output, _, final_state = chunk.fused_gdr_fwd(
            q=q, k=k, v=v, a=A, g=g_cumsum, b=beta, initial_state=state,
            cu_seqlens=context.intra_cp_cu_seqlens if context.is_intra else context.cu_seqlens,
            cp_seq_map=context.seq_map_c2r, raw_cu_seqlens=context.cu_seqlens,
        )  # fmt: skip
        return output, final_state

    def full(split: bool) -> Callable[..., tuple]:
        def forward(q, k, v, g, beta, state, offsets):
            _, _, output, _, final_state, _ = chunk.chunk_gated_delta_rule_fwd(
                q, k, v, g, beta, initial_state=state, cu_seqlens=offsets, auto_cp=split
            )
            return output, final_state

        return forward

    def phases(label: str, split: bool) -> Phases:
        return {
            "core": Implementation(label, core, convert(split)),
            "full": Implementation(label, full(split), tuple),
        }

    return {
        "flashqla": phases("FlashQLA", split=True)
        | {
            "cumsum": Implementation("FlashQLA", cumsum, cumsum_inputs),
            "A": Implementation("FlashQLA", inverse, inverse_inputs, lambda A, inputs: (_gated(*A, inputs),)),
        },
        "flashqla_nocp": phases("FlashQLA, sequence not split", split=False),
    }


def _fla() -> dict[str, Phases]:
    # All are read at import. Else FLA hands the call to FlashQLA where that is installed, and takes the fastest
    # configuration of an earlier process from the disk, whatever the length that one saw.
    os.environ.update(FLA_FLASH_QLA="0", FLA_DISABLE_BACKEND_DISPATCH="1", FLA_CACHE_RESULTS="0")
    from fla.ops.common import chunk_delta_h, chunk_o
    from fla.ops.gated_delta_rule import chunk, chunk_fwd, wy_fast
    from fla.ops.utils import cumsum
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    tuned_for = None

    def tune_anew(inputs: Inputs, offsets: torch.Tensor | None) -> None:
        # FLA's choice is kept by heads, not by T: the first length that it sees would decide for all others.
        nonlocal tuned_for
        case = inputs.v.shape, None if offsets is None else offsets.tolist()
        if tuned_for == case:
            return
        tuned_for = case
        for module in (chunk_delta_h, chunk_o, chunk_fwd, wy_fast, cumsum):
            for kernel in vars(module).values():
                while isinstance(kernel, KernelInterface) and hasattr(kernel, "fn"):
                    if isinstance(kernel, Autotuner):
                        kernel.cache.clear()
                    kernel = kernel.fn

    def cumsum_inputs(inputs: Inputs) -> tuple:
        offsets = None if inputs.cu_seqlens is None else inputs.cu_seqlens.long()
        tune_anew(inputs, offsets)
        return inputs.g, offsets

    def sums(g, offsets):
        return (cumsum.chunk_local_cumsum(g, chunk_size=CHUNK, scale=chunk.RCP_LN2, cu_seqlens=offsets),)

    def inverse_inputs(inputs: Inputs) -> tuple:
        g, offsets = cumsum_inputs(inputs)
        (g_cumsum,) = sums(g, offsets)
        return inputs.k, g_cumsum, inputs.beta, offsets

    def inverse(k, g_cumsum, beta, offsets):
        # Step 1 of chunk_gated_delta_rule_fwd_intra, as it stands there. Step 2 makes U and W, as `core` does.
        (B, T, Hv), (_, _, Hq, D) = g_cumsum.shape, k.shape
        places = None if offsets is None else chunk_fwd.prepare_chunk_indices(offsets, CHUNK)
        chunks = -(-T // CHUNK) if places is None else len(places)
        A = torch.zeros(B, T, Hv, CHUNK, device=k.device, dtype=k.dtype)
        chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel[(chunks, B * Hv)](
            k=k, g=g_cumsum, beta=beta, A=A, cu_seqlens=offsets, chunk_indices=places, T=T, H=Hq, HV=Hv, K=D, BT=CHUNK,
            BC=16,
        )  # fmt: skip
        return (A,)

    def core_inputs(inputs: Inputs) -> tuple:
        k, g_cumsum, beta, offsets = inverse_inputs(inputs)
        (A,) = inverse(k, g_cumsum, beta, offsets)
        return inputs.q, k, inputs.v, g_cumsum, beta, A, inputs.initial_state, offsets

    def core(q, k, v, g_cumsum, beta, A, state, offsets):
        w, u = wy_fast.recompute_w_u_fwd(k=k, v=v, beta=beta, A=A, g=g_cumsum, cu_seqlens=offsets)
        h, v_new, final_state = chunk_delta_h.chunk_gated_delta_rule_fwd_h(
            k=k, w=w, u=u, g=g_cumsum, initial_state=state, output_final_state=True, cu_seqlens=offsets
        )
        output = chunk_o.chunk_fwd_o(q=q, k=k, v=v_new, h=h, g=g_cumsum, scale=SCALE, cu_seqlens=offsets)
        return output, final_state

    def full_inputs(inputs: Inputs) -> tuple:
        _, offsets = cumsum_inputs(inputs)
        return *inputs[:-1], offsets

    def full(q, k, v, g, beta, state, offsets):
        return chunk.chunk_gated_delta_rule(
            q, k, v, g, beta, scale=SCALE, initial_state=state, output_final_state=True, cu_seqlens=offsets
        )

    label = "Flash Linear Attention"
    return {
        "fla": {
            "cumsum": Implementation(label, sums, cumsum_inputs, lambda base2, _: (base2[0] / chunk.RCP_LN2,)),
            "A": Implementation(label, inverse, inverse_inputs),
            "core": Implementation(label, core, core_inputs),
            "full": Implementation(label, full, full_inputs),
        }
    }


def _flashinfer() -> dict[str, Phases]:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    def packed(inputs: Inputs) -> tuple:
        q, k, v, g, beta, state, offsets = inputs
        B, T, _ = g.shape
        offsets = torch.arange(B + 1, device=g.device) * T if offsets is None else offsets.long()
        transposed = None if state is None else state.mT.contiguous()
        return *(x.flatten(0, 1) for x in (q, k, v, g.exp(), beta)), transposed, offsets, int(offsets.diff().max())

    def forward(use_cp: bool | str) -> Callable[..., tuple]:
        def full(q, k, v, alpha, beta, state, offsets, longest):
            _, Hv, D = v.shape
            final_state = torch.empty(len(offsets) - 1, Hv, D, D, dtype=torch.float32, device=v.device)
            return chunk_gated_delta_rule(
                q, k, v, alpha, beta, SCALE, state, True, offsets, output_state=final_state, use_cp=use_cp,
                max_seqlen=longest,
            )  # fmt: skip

        return full

    def result(returned: tuple, inputs: Inputs) -> tuple:
        output, final_state = returned
        return output.view_as(inputs.v), final_state.mT

    def phases(label: str, use_cp: bool | str) -> Phases:
        return {"full": Implementation(label, forward(use_cp), packed, result)}

    return {
        "flashinfer": phases("FlashInfer", use_cp="auto"),
        "flashinfer_nocp": phases("FlashInfer, sequence not split", use_cp=False),
    }


def _token_loop() -> Implementation:
    def forward(q, k, v, g, beta, state, offsets):
        if q.shape[1] > LONGEST_TOKEN_LOOP:
            raise UnsupportedCase(f"the token loop is timed up to {LONGEST_TOKEN_LOOP} tokens, found {q.shape[1]}")
        if offsets is not None:
            raise UnsupportedCase("the token loop takes sequences of one length")
        return recurrence(q, k, v, g, beta, state, dtype=torch.float32)

    return Implementation("PyTorch, token by token", forward, tuple, many_launches=True)


def _gated(A: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """A[i,j] exp(g_i - g_j) for j <= i: FlashQLA's A [B,T,Hv,64] as the others have it, FP64."""
    (_, T, _), device = inputs.g.shape, A.device
    offsets = torch.tensor([0, T], device=device) if inputs.cu_seqlens is None else inputs.cu_seqlens.long()
    tokens, columns = torch.arange(T, device=device), torch.arange(CHUNK, device=device)
    rows = (tokens - offsets[torch.searchsorted(offsets, tokens, right=True) - 1]) % CHUNK  # of tokens in their chunks
    other = (tokens - rows)[:, None] + columns  # [T,64]: the token of each column
    g = inputs.g.double().cumsum(1)  # not by chunk: differences are the same
    exponent = g[:, :, None] - g[:, other.clamp(max=T - 1)]  # [B,T,64,Hv]
    above = columns > rows[:, None]
    return A * exponent.masked_fill(above[..., None], -math.inf).exp().transpose(2, 3)


# package on PyPI, module, names in the tidy table, what makes them
_LIBRARIES = (
    ("flash-qla", "flash_qla", ("flashqla", "flashqla_nocp"), _flashqla),
    ("fla-core", "fla", ("fla",), _fla),
    ("flashinfer-python", "flashinfer", ("flashinfer", "flashinfer_nocp"), _flashinfer),
)
PACKAGES = tuple(package for package, *_ in _LIBRARIES)
