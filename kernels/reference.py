"""What is right: the operator in PyTorch, three ways that must agree, and the check against them.

All three take the raw log-gates, run on CPU or GPU and compute in FP64 unless told otherwise:

- `recurrence`: token by token, the definition;
- `chunkwise`: the formulas the kernels implement (Yang et al., "Gated Delta Networks", 2024, section 3.3);
- `affine_scan`: chunks as affine maps of the state, composed by a parallel scan (Blelloch, "Prefix Sums and
  Their Applications", 1990).

Each returns output [B,T,Hv,128] and final state [B,Hv,128,128]. With `cu_seqlens` [N+1], B is 1 and N sequences lie one
after the other: each is computed alone, states are [N,Hv,128,128], one without tokens keeps its state, and the output
of tokens that are in none is zero.

`preprocessing` is what comes before the core: the chunk-local cumulative gates and the inverse A of every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch.nn.functional import pad

from kernels.errors import UserError
from kernels.problem import CHUNK, HEAD_DIM, SCALE

TOLERANCE = 5e-3  # absolute, relative, and on the relative L2 error; BF16 operands give about 3e-3

Result = tuple[torch.Tensor, torch.Tensor]


class WrongResult(UserError):
    """A kernel's result is not the reference's: which tensor, by how much."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in FP64; the absolute norm where expected is zero."""
    difference, norm = (actual.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / norm) if norm > 0 else float(difference)


def check(
    actual: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
    elementwise: bool,
    names: tuple[str, ...] = ("output", "final_state"),
) -> dict[str, float]:
    """Compare tensors of these names with the reference's; return the relative L2 error of each.

    Raises:
        WrongResult: the relative L2 error or, if `elementwise`, any single element is off by more than TOLERANCE.
    """
    errors = {}
    for name, a, e in zip(names, actual, expected, strict=True):
        errors[name] = relative_error(a, e)
        if not errors[name] <= TOLERANCE:  # NaN fails too
            raise WrongResult(f"{name}: relative L2 error {errors[name]:.2e}, allowed {TOLERANCE:.0e}")
        if elementwise:
            try:
                torch.testing.assert_close(a.double(), e.double(), rtol=TOLERANCE, atol=TOLERANCE)
            except AssertionError as error:
                raise WrongResult(f"{name}: {' '.join(str(error).split())}") from None
    return errors


def recurrence(q, k, v, g, beta, initial_state=None, cu_seqlens=None, dtype=torch.float64) -> Result:
    """S' = exp(g_t) S;  S = S' + beta_t k_t^T (v_t - k_t S');  o_t = scale q_t S, one token after the other.

    `dtype` is that of the arithmetic and of what is returned.
    """
    if cu_seqlens is not None:
        return _by_sequence(partial(recurrence, dtype=dtype), q, k, v, g, beta, initial_state, cu_seqlens, dtype)
    q, k, v, g, beta, S = _heads_first(q, k, v, g, beta, initial_state, dtype)
    output = torch.empty_like(v)
    decay = g.exp()
    for t in range(q.shape[2]):
        S.mul_(decay[:, :, t, None, None])
        row = k[:, :, t, None, :]
        S += row.mT @ (beta[:, :, t, None, None] * (v[:, :, t, None, :] - row @ S))
        output[:, :, t] = SCALE * (q[:, :, t, None, :] @ S).squeeze(2)
    return output.transpose(1, 2), S


def chunkwise(q, k, v, g, beta, initial_state=None, cu_seqlens=None) -> Result:
    """Chunk by chunk, in matrix products: the formulas of DESIGN that every variant implements."""
    if cu_seqlens is not None:
        return _by_sequence(chunkwise, q, k, v, g, beta, initial_state, cu_seqlens)
    c = _Chunks(q, k, v, g, beta, initial_state)
    S, output = c.state, torch.empty_like(c.v)
    for i in range(c.v.shape[2]):
        Vnew = c.U[:, :, i] - c.W[:, :, i] @ S
        output[:, :, i] = SCALE * (c.gamma[:, :, i] * (c.q[:, :, i] @ S) + c.P[:, :, i] @ Vnew)
        S = c.last[:, :, i] * S + c.K_decayed[:, :, i].mT @ Vnew
    return c.join(output), S


def affine_scan(q, k, v, g, beta, initial_state=None, cu_seqlens=None) -> Result:
    """Chunks as maps S -> M S + N with M = γ_ℓ I - K̃^T W, N = K̃^T U (K̃ = diag(γ_ℓ/γ) K), composed by a scan.

    The scan is inclusive (Hillis and Steele): log2(chunks) rounds, each composing every map with the one
    2^round chunks before it, so the state before every chunk is known without a sequential loop.
    """
    if cu_seqlens is not None:
        return _by_sequence(affine_scan, q, k, v, g, beta, initial_state, cu_seqlens)
    c = _Chunks(q, k, v, g, beta, initial_state)
    eye = torch.eye(HEAD_DIM, dtype=torch.float64, device=c.v.device)
    M = c.last * eye - c.K_decayed.mT @ c.W
    N = c.K_decayed.mT @ c.U
    step = 1
    while step < M.shape[2]:
        later, earlier = M[:, :, step:], M[:, :, :-step]
        N = torch.cat([N[:, :, :step], later @ N[:, :, :-step] + N[:, :, step:]], dim=2)
        M = torch.cat([M[:, :, :step], later @ earlier], dim=2)
        step *= 2
    S0 = c.state.unsqueeze(2)
    after = M @ S0 + N
    before = torch.cat([S0, after[:, :, :-1]], dim=2)
    Vnew = c.U - c.W @ before
    return c.join(SCALE * (c.gamma * (c.q @ before) + c.P @ Vnew)), after[:, :, -1]


def preprocessing(k, g, beta, cu_seqlens=None) -> Result:
    """Chunk-local sums of the log-gates g [B,T,Hv], and A = (I + StrictLower(B Γ K K^T Γ^-1))^-1 as [B,T,Hv,64].

    Row t of A holds the row of token t in its chunk's matrix; in a short chunk the columns past the end are zero.
    """
    Hv = g.shape[2]
    if cu_seqlens is not None:
        g_cumsum = torch.zeros(g.shape, dtype=torch.float64, device=g.device)
        A = g_cumsum.new_zeros(*g.shape, CHUNK)
        for _, rows in _of_one_length(cu_seqlens):
            g_cumsum[0, rows], A[0, rows] = preprocessing(k[0, rows], g[0, rows], beta[0, rows])
        return g_cumsum, A
    tokens = g.shape[1]
    k, g, beta = (_by_chunk(_by_head(x, Hv, torch.float64)) for x in (k, g, beta))
    g = g.cumsum(3)
    A = _inverse(k, beta.unsqueeze(-1), _decay(g.unsqueeze(-1)))
    g_cumsum, A = (x.flatten(2, 3)[:, :, :tokens].transpose(1, 2) for x in (g, A))
    return g_cumsum, A


def _by_sequence(
    form: Callable[..., Result], q, k, v, g, beta, initial_state, cu_seqlens, dtype=torch.float64
) -> Result:
    """`form` of packed sequences; those of one length are a batch, so that a loop over tokens takes as many steps."""
    states = v.new_zeros(len(cu_seqlens) - 1, v.shape[2], HEAD_DIM, HEAD_DIM, dtype=dtype)
    if initial_state is not None:
        states.copy_(initial_state)
    output = torch.zeros(v.shape, dtype=dtype, device=v.device)
    for members, rows in _of_one_length(cu_seqlens):
        output[0, rows], states[members] = form(*(x[0, rows] for x in (q, k, v, g, beta)), states[members])
    return output, states


def _of_one_length(cu_seqlens: torch.Tensor) -> Iterator[tuple[list[int], torch.Tensor]]:
    """The numbers of all sequences of one length, and their tokens as [sequences, length]; none without tokens."""
    offsets, by_length = cu_seqlens.tolist(), {}
    for n, (begin, end) in enumerate(pairwise(offsets)):
        by_length.setdefault(end - begin, []).append(n)
    by_length.pop(0, None)
    for length, members in by_length.items():
        begins = torch.tensor([offsets[n] for n in members], device=cu_seqlens.device)
        yield members, begins[:, None] + torch.arange(length, device=cu_seqlens.device)


def _heads_first(q, k, v, g, beta, initial_state, dtype=torch.float64):
    """Copies as [B,Hv,T,...], query and key heads repeated, a zero state where none is given."""
    B, _, Hv, _ = v.shape
    q, k, v, g, beta = (_by_head(x, Hv, dtype) for x in (q, k, v, g, beta))
    if initial_state is None:
        return q, k, v, g, beta, v.new_zeros(B, Hv, HEAD_DIM, HEAD_DIM)
    return q, k, v, g, beta, initial_state.to(dtype, copy=True)


def _by_head(x: torch.Tensor, Hv: int, dtype: torch.dtype) -> torch.Tensor:
    """[B,T,H,...] -> [B,Hv,T,...], heads repeated."""
    return x.to(dtype).repeat_interleave(Hv // x.shape[2], dim=2).transpose(1, 2)


def _by_chunk(x: torch.Tensor) -> torch.Tensor:
    """[B,Hv,T,...] -> [B,Hv,chunks,64,...]; a short last chunk is padded with zeros."""
    return pad(x, (0, 0) * (x.ndim - 3) + (0, -x.shape[2] % CHUNK)).unflatten(2, (-1, CHUNK))


def _decay(g: torch.Tensor) -> torch.Tensor:
    """γ_i / γ_j for i >= j, else 0, from cumulative gates [...,64,1]; masked first, so nothing overflows."""
    return (g - g.mT).tril().exp().tril()


def _inverse(k: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """A [...,64,64] from k [...,64,128], beta [...,64,1] and γ_i / γ_j."""
    eye = torch.eye(CHUNK, dtype=k.dtype, device=k.device)
    return torch.linalg.inv(eye + (beta * decay * (k @ k.mT)).tril(-1))


class _Chunks:
    """The per-chunk terms as [B,Hv,chunks,...]; a short last chunk is padded with tokens that change nothing."""

    def __init__(self, q, k, v, g, beta, initial_state):
        q, k, v, g, beta, self.state = _heads_first(q, k, v, g, beta, initial_state)
        self.tokens = q.shape[2]
        # k = 0, beta = 0 and g = 0 leave the state as it is.
        self.q, k, self.v, g, beta = (_by_chunk(x) for x in (q, k, v, g, beta))
        g, beta = g.cumsum(3).unsqueeze(-1), beta.unsqueeze(-1)
        self.gamma = g.exp()
        self.last = self.gamma[:, :, :, -1:]
        decay = _decay(g)
        A = _inverse(k, beta, decay)
        self.U = A @ (beta * self.v)
        self.W = A @ (beta * self.gamma * k)
        self.P = decay * (self.q @ k.mT)
        self.K_decayed = (g[:, :, :, -1:] - g).exp() * k

    def join(self, output: torch.Tensor) -> torch.Tensor:
        """Undo padding and layout: [B,Hv,chunks,64,128] -> [B,T,Hv,128]."""
        return output.flatten(2, 3)[:, :, : self.tokens].transpose(1, 2)
