"""What is right: the operator in PyTorch, three ways that must agree, and the check against them.

All three take the raw log-gates, run on CPU or GPU and compute in FP64 unless told otherwise:

- `recurrence`: token by token, the definition;
- `chunkwise`: the formulas the kernels implement (Yang et al., "Gated Delta Networks", 2024, section 3.3);
- `affine_scan`: chunks as affine maps of the state, composed by a parallel scan (Blelloch, "Prefix Sums and
  Their Applications", 1990).

Each returns output [B,T,Hv,128] and final state [B,Hv,128,128].
"""

from __future__ import annotations

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


def check(actual: Result, expected: Result, elementwise: bool) -> dict[str, float]:
    """Compare (output, final_state) with the reference's; return the relative L2 error of each.

    Raises:
        WrongResult: the relative L2 error or, if `elementwise`, any single element is off by more than TOLERANCE.
    """
    errors = {}
    for name, a, e in zip(("output", "final_state"), actual, expected, strict=True):
        errors[name] = relative_error(a, e)
        if not errors[name] <= TOLERANCE:  # NaN fails too
            raise WrongResult(f"{name}: relative L2 error {errors[name]:.2e}, allowed {TOLERANCE:.0e}")
        if elementwise:
            try:
                torch.testing.assert_close(a.double(), e.double(), rtol=TOLERANCE, atol=TOLERANCE)
            except AssertionError as error:
                raise WrongResult(f"{name}: {' '.join(str(error).split())}") from None
    return errors


def recurrence(q, k, v, g, beta, initial_state=None, dtype=torch.float64) -> Result:
    """S' = exp(g_t) S;  S = S' + beta_t k_t^T (v_t - k_t S');  o_t = scale q_t S, one token after the other.

    `dtype` is that of the arithmetic and of what is returned.
    """
    q, k, v, g, beta, S = _heads_first(q, k, v, g, beta, initial_state, dtype)
    output = torch.empty_like(v)
    decay = g.exp()
    for t in range(q.shape[2]):
        S.mul_(decay[:, :, t, None, None])
        row = k[:, :, t, None, :]
        S += row.mT @ (beta[:, :, t, None, None] * (v[:, :, t, None, :] - row @ S))
        output[:, :, t] = SCALE * (q[:, :, t, None, :] @ S).squeeze(2)
    return output.transpose(1, 2), S


def chunkwise(q, k, v, g, beta, initial_state=None) -> Result:
    """Chunk by chunk, in matrix products: the formulas of DESIGN that every variant implements."""
    c = _Chunks(q, k, v, g, beta, initial_state)
    S, output = c.state, torch.empty_like(c.v)
    for i in range(c.v.shape[2]):
        Vnew = c.U[:, :, i] - c.W[:, :, i] @ S
        output[:, :, i] = SCALE * (c.gamma[:, :, i] * (c.q[:, :, i] @ S) + c.P[:, :, i] @ Vnew)
        S = c.last[:, :, i] * S + c.K_decayed[:, :, i].mT @ Vnew
    return c.join(output), S


def affine_scan(q, k, v, g, beta, initial_state=None) -> Result:
    """Chunks as maps S -> M S + N with M = γ_ℓ I - K̃^T W, N = K̃^T U (K̃ = diag(γ_ℓ/γ) K), composed by a scan.

    The scan is inclusive (Hillis and Steele): log2(chunks) rounds, each composing every map with the one
    2^round chunks before it, so the state before every chunk is known without a sequential loop.
    """
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


def _heads_first(q, k, v, g, beta, initial_state, dtype=torch.float64):
    """Copies as [B,Hv,T,...], query and key heads repeated, a zero state where none is given."""
    B, _, Hv, _ = v.shape
    group = Hv // q.shape[2]
    q, k = (x.to(dtype).repeat_interleave(group, dim=2).transpose(1, 2) for x in (q, k))
    v, g, beta = (x.to(dtype).transpose(1, 2) for x in (v, g, beta))
    if initial_state is None:
        return q, k, v, g, beta, v.new_zeros(B, Hv, HEAD_DIM, HEAD_DIM)
    return q, k, v, g, beta, initial_state.to(dtype, copy=True)


class _Chunks:
    """The per-chunk terms as [B,Hv,chunks,...]; a short last chunk is padded with tokens that change nothing."""

    def __init__(self, q, k, v, g, beta, initial_state):
        q, k, v, g, beta, self.state = _heads_first(q, k, v, g, beta, initial_state)
        self.tokens = q.shape[2]
        # k = 0, beta = 0 and g = 0 leave the state as it is.
        tail = -self.tokens % CHUNK
        self.q, k, self.v = (pad(x, (0, 0, 0, tail)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
        g, beta = (pad(x, (0, tail)).unflatten(2, (-1, CHUNK)).unsqueeze(-1) for x in (g, beta))
        g = g.cumsum(3)
        self.gamma = g.exp()
        self.last = self.gamma[:, :, :, -1:]
        decay = (g - g.mT).tril().exp().tril()  # γ_i / γ_j for i >= j; masked first, so nothing overflows
        eye = torch.eye(CHUNK, dtype=torch.float64, device=q.device)
        A = torch.linalg.inv(eye + (beta * decay * (k @ k.mT)).tril(-1))
        self.U = A @ (beta * self.v)
        self.W = A @ (beta * self.gamma * k)
        self.P = decay * (self.q @ k.mT)
        self.K_decayed = (g[:, :, :, -1:] - g).exp() * k

    def join(self, output: torch.Tensor) -> torch.Tensor:
        """Undo padding and layout: [B,Hv,chunks,64,128] -> [B,T,Hv,128]."""
        return output.flatten(2, 3)[:, :, : self.tokens].transpose(1, 2)
