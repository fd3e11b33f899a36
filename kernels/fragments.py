"""Layouts of register fragments that the hardware fixes, for where TileLang has no matmul to infer them from."""

import tilelang.language as T

from kernels.problem import CHUNK


def accumulator(rows: int, columns: int = CHUNK) -> T.Fragment:
    """That of a wgmma's result [rows, columns], 64 rows a warpgroup (PTX ISA: wgmma, register fragments of D)."""
    return T.Fragment(
        [rows, columns],
        forward_thread_fn=lambda i, j: i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
        forward_index_fn=lambda i, j: j // 8 * 4 + i % 16 // 8 * 2 + j % 2,
    )
