"""The operator's contract: constants, benchmark cases, seeded inputs, input validation.

Importing this module needs neither torch nor tilelang: `analysis/` reads the cases on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

from kernels.errors import UserError

if TYPE_CHECKING:
    import torch

CHUNK = 64  # tokens of a chunk, C
HEAD_DIM = 128  # dk = dv
SCALE = HEAD_DIM**-0.5  # of the output


class UnsupportedCase(ValueError):
    """The one exception that means "skip this case, and say so": what is not supported, and why."""


@dataclass(frozen=True)
class Case:
    """One shape of the operator: B sequences of T tokens, Hq query/key heads, Hv value heads.

    With `lengths`, sequences of so many tokens lie one after the other, packed as one (B = 1) of T, their sum.
    """

    name: str
    B: int
    T: int
    Hq: int
    Hv: int
    initial_state: bool = False
    gates: str = "random"  # a key of GATES
    lengths: tuple[int, ...] = ()  # 0 is one too

    def __post_init__(self) -> None:
        if min(self.B, self.T, self.Hq, self.Hv) < 1 or self.Hv % self.Hq:
            raise ValueError(
                f"case {self.name}: B, T, Hq, Hv must be positive and Hv a multiple of Hq, "
                f"found B={self.B} T={self.T} Hq={self.Hq} Hv={self.Hv}"
            )
        if self.gates not in GATES:
            raise ValueError(f"case {self.name}: gates must be one of {', '.join(GATES)}, found {self.gates!r}")
        if self.lengths and (self.B != 1 or sum(self.lengths) != self.T or min(self.lengths) < 0):
            raise ValueError(
                f"case {self.name}: lengths of packed sequences must be at least 0, B must be 1 and T their sum, "
                f"found B={self.B} T={self.T} lengths={self.lengths}"
            )

    @property
    def sequences(self) -> tuple[int, ...]:
        """The number of tokens of each sequence."""
        return self.lengths or (self.T,) * self.B

    @property
    def decays(self) -> bool:
        """Whether every head forgets. One that doesn't adds up the rounding error of every token, so single
        elements of its state pass 5e-3 where the relative L2 error does not."""
        return self.gates in ("random", "mixed", "steep", "spike", "twelve")

    @property
    def shape(self) -> str:
        """The shape as tables print it."""
        tokens = f"T={_packed(self.lengths)}" if self.lengths else f"B={self.B} T={self.T}"
        return f"{tokens} Hq={self.Hq} Hv={self.Hv}" + (" S0" if self.initial_state else "")


def _packed(lengths: tuple[int, ...]) -> str:
    """Lengths in short: 28672+4096, or 8x4096 for equal ones."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    return "+".join(f"{count}x{length}" if count > 1 else str(length) for length, count in runs)


def _mixed(g: torch.Tensor) -> torch.Tensor:
    g[:, 1::2] = 0.0
    return g


def _quarter_off(g: torch.Tensor) -> torch.Tensor:
    g[:, :, ::4] = 0.0
    return g


def _half_off(g: torch.Tensor) -> torch.Tensor:
    g[:, :, ::2] = 0.0
    return g


def _spike(g: torch.Tensor) -> torch.Tensor:
    g[:, g.shape[1] // 2] = -30.0
    return g


# How a case turns its random log-gates g [B,T,Hv] into the ones it uses (in place).
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda g: g,
    "mixed": _mixed,  # every second token does not decay
    "quarter_off": _quarter_off,  # a quarter of the heads never decays
    "zero": lambda g: g.zero_(),  # nothing decays
    "steep": lambda g: g.fill_(-20.0),  # everything decays at once
    "half_off": _half_off,  # half of the heads never decays
    "spike": _spike,  # all is forgotten at one token in the middle
    "slow": lambda g: g.mul_(1 / 30),  # a token keeps 0.99 to 1
    "twelve": lambda g: g.fill_(-3 / CHUNK),  # four chunks decay by e^-12 exactly, where `split` stops to warm up
}

_LAB = (
    Case("short_tail_state", 1, 1025, 2, 8, initial_state=True),
    Case("chain_equal", 1, 8192, 4, 4),
    Case("parallel_equal", 1, 2048, 16, 16),
    Case("parallel_gva", 1, 2048, 4, 16, gates="mixed"),
    Case("long_low_gva", 1, 32768, 2, 8),
    Case("batch_split_gva", 4, 8192, 2, 8),
    Case("wide_gva_state", 1, 8192, 16, 64, initial_state=True),
    Case("deep_gva_state", 1, 16384, 8, 32, initial_state=True),
)


def _qwen() -> tuple[Case, ...]:
    """Head counts of Qwen3.5 and 3.6 under tensor parallelism 1 to 8, by sequence length."""

    def case(name: str, B: int, T: int, Hq: int, Hv: int) -> Case:
        return Case(name, B, T, Hq, Hv, initial_state=True, gates="quarter_off")

    heads = ((2, 8), (4, 16), (8, 24), (8, 32), (16, 48), (16, 64))
    grid = tuple(case(f"q{Hq}_{Hv}_{T}", 1, T, Hq, Hv) for Hq, Hv in heads for T in (2048, 8192, 32768))
    return (*grid, case("q16_64_4x8192", 4, 8192, 16, 64), case("q8_32_8x1024", 8, 1024, 8, 32))


def _varlen() -> tuple[Case, ...]:
    """Packed sequences, few and long to many and short, at a few, some and many heads."""

    def case(lengths: tuple[int, ...], Hq: int, Hv: int) -> Case:
        name = f"v{Hq}_{Hv}_{_packed(lengths).replace('+', '_')}"
        return Case(name, 1, sum(lengths), Hq, Hv, initial_state=True, lengths=lengths)

    packings = ((28672, 4096), (16384,) * 2, (4096,) * 8, (1024,) * 8)
    return tuple(case(lengths, Hq, Hv) for Hq, Hv in ((2, 8), (8, 32), (16, 64)) for lengths in packings)


SUITES: dict[str, tuple[Case, ...]] = {"lab": _LAB, "qwen": _qwen(), "varlen": _varlen()}
CASES: dict[str, Case] = {case.name: case for suite in SUITES.values() for case in suite}


class UnknownCase(UserError):
    """A name that is neither a case nor a suite."""


def select(names: str) -> tuple[Case, ...]:
    """The cases that a command line names: suites and cases, separated by commas, each case once."""
    found: dict[str, Case] = {}
    for name in names.split(","):
        if name not in SUITES and name not in CASES:
            raise UnknownCase(
                f"a case was expected to be a suite ({', '.join(SUITES)}) or one of {', '.join(CASES)}, "
                f"found {name!r}: choose from these, or add it to kernels/problem.py"
            )
        found.update((case.name, case) for case in SUITES.get(name) or (CASES[name],))
    return tuple(found.values())


class Inputs(NamedTuple):
    """Inputs of the full forward: log-gates per token, not yet summed over chunks. N sequences: B, or those packed."""

    q: torch.Tensor  # [B,T,Hq,128] BF16, L2-normalised
    k: torch.Tensor  # [B,T,Hq,128] BF16, L2-normalised
    v: torch.Tensor  # [B,T,Hv,128] BF16
    g: torch.Tensor  # [B,T,Hv] FP32, natural log, <= 0
    beta: torch.Tensor  # [B,T,Hv] FP32, in (0, 1)
    initial_state: torch.Tensor | None  # [N,Hv,128,128] FP32 as [dk,dv]
    cu_seqlens: torch.Tensor | None = None  # [N+1] INT32 where packed: where sequences begin and the last one ends


@dataclass(frozen=True)
class Implementation:
    """An operator as the benchmark calls it. What it wants or gives in another form is converted outside the time."""

    label: str  # what tables call it
    forward: Callable[..., tuple]  # what is timed
    convert: Callable[[Inputs], tuple]  # inputs of a case -> arguments of `forward`
    result: Callable[[tuple, Inputs], tuple] = lambda returned, inputs: returned  # -> what its phase is checked for
    many_launches: bool = False  # thousands a call: a CUDA graph holds one call, not one per copy of the inputs


def make_inputs(case: Case, device: str = "cuda", seed: int = 42) -> Inputs:
    """Random inputs of a case: drawn on the CPU, so that every machine and device gets the same ones.

    g = logsigmoid(N(0,1)) / 16, beta = sigmoid(N(0,1)), v and the initial state ~ N(0,1), q and k
    L2-normalised N(0,1).
    """
    import torch
    from torch.nn.functional import logsigmoid, normalize

    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    B, T, Hq, Hv = case.B, case.T, case.Hq, case.Hv
    q = normalize(randn(B, T, Hq, HEAD_DIM), dim=-1).bfloat16()
    k = normalize(randn(B, T, Hq, HEAD_DIM), dim=-1).bfloat16()
    v = randn(B, T, Hv, HEAD_DIM).bfloat16()
    g = GATES[case.gates](logsigmoid(randn(B, T, Hv)) / 16)
    beta = randn(B, T, Hv).sigmoid()
    state = randn(len(case.sequences), Hv, HEAD_DIM, HEAD_DIM) if case.initial_state else None
    offsets = [0, *accumulate(case.lengths)]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device) if case.lengths else None
    return Inputs(q, k, v, g, beta, state, cu_seqlens)


def check_core_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cumsum: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[int, int, int, int]:
    """Return (B, T, Hq, Hv) of a core call, or refuse it. What `cu_seqlens` holds is not looked at.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: wrong shape, device or memory layout.
    """
    return _check(q, k, v, "g_cumsum", g_cumsum, beta, A, initial_state, cu_seqlens)


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[int, int, int, int]:
    """Return (B, T, Hq, Hv) of a call of the full forward, or refuse it as `check_core_inputs` does."""
    return _check(q, k, v, "g", g, beta, None, initial_state, cu_seqlens)


def _check(q, k, v, gates: str, g, beta, A, initial_state, cu_seqlens) -> tuple[int, int, int, int]:
    """Both checks; `gates` is what errors call g."""
    import torch

    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"q and v must be [B,T,H,{HEAD_DIM}], found q {list(q.shape)}, v {list(v.shape)}: add what is missing"
        )
    (B, T, Hq, _), Hv = q.shape, v.shape[2]
    if min(B, T, Hq, Hv) < 1 or Hv % Hq:
        raise ValueError(
            f"B, T, Hq, Hv must be positive and Hv a multiple of Hq, found B={B} T={T} Hq={Hq} Hv={Hv}: "
            "repeat or regroup the heads"
        )
    bf16, fp32 = torch.bfloat16, torch.float32
    device, on_cpu = q.device, q.device.type == "cpu"  # asked once: this runs before every launch
    expected = [
        ("q", q, (B, T, Hq, HEAD_DIM), bf16),
        ("k", k, (B, T, Hq, HEAD_DIM), bf16),
        ("v", v, (B, T, Hv, HEAD_DIM), bf16),
        (gates, g, (B, T, Hv), fp32),
        ("beta", beta, (B, T, Hv), fp32),
        ("A", A, (B, T, Hv, CHUNK), bf16),
    ]
    sequences = B
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or B != 1:
            raise ValueError(
                "cu_seqlens must be [N+1], the offsets of N >= 1 sequences packed as B=1, found shape "
                f"{list(cu_seqlens.shape)} and B={B}: pack the sequences one after the other"
            )
        sequences = len(cu_seqlens) - 1
        integer = torch.int64 if cu_seqlens.dtype == torch.int64 else torch.int32
        expected.append(("cu_seqlens", cu_seqlens, (sequences + 1,), integer))
    expected.append(("initial_state", initial_state, (sequences, Hv, HEAD_DIM, HEAD_DIM), fp32))
    for name, tensor, shape, dtype in expected:
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, found {list(tensor.shape)}: reshape or slice it")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, found {tensor.dtype}: convert it with .to({dtype})")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, found strides {list(tensor.stride())}: pass {name}.contiguous()"
            )
        if on_cpu or tensor.device != device:
            raise ValueError(
                f"all tensors must be on one CUDA device, found {name} on {tensor.device} and q on {device}: "
                "move them there; on a CPU use kernels.reference"
            )
    return B, T, Hq, Hv
