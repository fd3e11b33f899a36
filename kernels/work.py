"""How much work a case is: floating-point operations, bytes, and the time they take at the device's ceilings.

These are lower bounds for a chunk-wise implementation with chunks of 64, so a share of speed of light never
passes 100 %: each input is read once and each output written once, intermediates cost nothing, matrix
products count the tokens a chunk really has, and Q K^T and K K^T are computed once per query/key head.

Needs neither torch nor tilelang.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.problem import CHUNK, HEAD_DIM, Case

if TYPE_CHECKING:
    import torch

BF16, FP32 = 2, 4  # bytes
# Dense BF16, of one SM of Hopper: 989 TFLOP/s of an H100 SXM over 132 SMs and 1830 MHz (NVIDIA's H100 white paper).
TENSOR_FLOPS_PER_CYCLE = 4096


@dataclass(frozen=True)
class Work:
    """Work of one forward pass."""

    flops: int  # multiply and add count as two
    bytes: int  # through device memory


@dataclass(frozen=True)
class Ceilings:
    """What the device sustains, as measured (see profiling.bench.measure_ceilings)."""

    flops_per_second: float  # dense BF16 matrix product
    bytes_per_second: float  # large copy, bytes read plus bytes written


@functools.cache
def sm_count(device: torch.device) -> int:
    """SMs of a device, of a MIG slice where it is one; a full H100 or H200 where there is no GPU to ask."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def core(case: Case) -> Work:
    """U, W, S and O from given g_cumsum and A.

    With W S computed as A (B Γ (K S)), the cheapest order, a chunk of ℓ tokens takes per value head K S, Q S
    and K^T Vnew at 2 ℓ dk dv each, A times its [ℓ, dv] operand and P Vnew at 2 ℓ² dv each, and per query/key
    head Q K^T at 2 ℓ² dk.
    """
    state = 3 * 2 * case.B * case.T * case.Hv * HEAD_DIM**2
    within = 2 * _squares(case) * HEAD_DIM * (2 * case.Hv + case.Hq)
    return Work(state + within, _io(case) + case.B * case.T * case.Hv * (CHUNK * BF16 + FP32 + FP32))


def full(case: Case) -> Work:
    """From raw log-gates: core, and K K^T at 2 ℓ² dk per query/key head, and the inverse at ℓ³/3 per value head.

    g_cumsum and A are intermediates: they cost no bytes, and g is read instead.
    """
    cubes = sum(length**3 for length in _lengths(case))
    preprocess = 2 * _squares(case) * HEAD_DIM * case.Hq + cubes * case.Hv // 3
    return Work(core(case).flops + preprocess, _io(case) + case.B * case.T * case.Hv * (FP32 + FP32))


WORK = {"core": core, "full": full}  # by phase


def intermediates(case: Case) -> int:
    """Bytes of A and g_cumsum, which a full forward in two steps keeps between them."""
    return case.B * case.T * case.Hv * (CHUNK * BF16 + FP32)


def formulations(case: Case) -> dict[str, Work]:
    """The core written in several ways, with what each asks for; further counts as in `core`.

    The recurrence takes, per token and value head, 7 dk dv: one product to decay S, two each for k S, for the
    update and for q S; it keeps S on the chip and needs no A. The ladder forms W (2 ℓ² dk) and P per value head; with
    dv in two tiles, each of them forms both again. Intermediates in device memory are U, W and Vnew, in FP32 per
    token, and S per chunk, each written once and read once.
    """
    tokens, chunks = case.B * case.T * case.Hv, len(_lengths(case)) * case.Hv
    least, squares = core(case), 2 * _squares(case) * HEAD_DIM * case.Hv
    states = 3 * 2 * tokens * HEAD_DIM**2
    stored = 2 * FP32 * HEAD_DIM * (3 * tokens + chunks * HEAD_DIM)
    return {
        "token recurrence": Work(7 * tokens * HEAD_DIM**2, _io(case) + tokens * (FP32 + FP32)),
        "chunk-wise, at least": least,
        "chunk-wise, W and P per value head": Work(states + 4 * squares, least.bytes),
        "… and dv in two tiles": Work(states + 6 * squares, least.bytes),
        "… and intermediates in device memory": Work(states + 4 * squares, least.bytes + stored),
    }


def chunk_cycles(dv_tile: int) -> float:
    """SM cycles that a full chunk takes on the tensor cores at least, where a CTA owns `dv_tile` columns of dv.

    Counted as in `core`, with Q K^T once in every CTA.
    """
    flops = 2 * CHUNK * (3 * HEAD_DIM * dv_tile + 2 * CHUNK * dv_tile + CHUNK * HEAD_DIM)
    return flops / TENSOR_FLOPS_PER_CYCLE


def speed_of_light(work: Work, ceilings: Ceilings) -> float:
    """Seconds below which no implementation of this work can run: the slower of arithmetic and memory."""
    return max(work.flops / ceilings.flops_per_second, work.bytes / ceilings.bytes_per_second)


def _lengths(case: Case) -> list[int]:
    """The number of tokens of each chunk; sequences share none."""
    parts = [divmod(tokens, CHUNK) for tokens in case.sequences]
    return [length for chunks, rest in parts for length in [CHUNK] * chunks + [rest] * (rest > 0)]


def _squares(case: Case) -> int:
    return sum(length**2 for length in _lengths(case))


def _io(case: Case) -> int:
    """Bytes of q, k, v, output and the states: what core and full have in common."""
    tokens = case.B * case.T * HEAD_DIM * BF16 * (2 * case.Hq + 2 * case.Hv)
    states = len(case.sequences) * case.Hv * HEAD_DIM**2 * FP32 * (2 if case.initial_state else 1)
    return tokens + states
