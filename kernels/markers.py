"""Markers: named instants in a kernel's loop over chunks, at which a traced build reads the SM's clock.

A variant says at the top of the loop who runs it, and marks where each step begins:

    for c in T.serial(chunks):
        role("state", 0, c)
        mark("wait w_full")
        T.barrier_wait(w_full[0], c % 2)
        mark("issue W S")

A span lasts from its mark to the role's next one, so a role's spans tile its loop. What a marker is called begins with
one of VERBS, which says of what kind it is, followed by a barrier or a formula. `arrive` is an instant and ends no
span; it stands before the arrival, and a wait for the same barrier and chunk ends after it. Where a step is about
another chunk than the loop's, `ahead` says by how many: `mark("wait va_full", 1)`.

Built as usual, a kernel has no trace of its markers: they are calls that do nothing while TileLang builds it. A traced
one (`build_traced`) has one more argument, the buffer, and stores the clock there: of CTA (0, 0, 0), by one thread a
role, into a place that chunk and marker fix, so there is nothing to count and nothing to overrun.

Named ranges recorded from inside a kernel, by warp, are an idea of Triton's Proton and TileLang's IKET, which needs a
tool of NVIDIA's to read them. Importing this module needs neither torch nor tilelang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kernels.errors import UserError

if TYPE_CHECKING:
    from tilelang import tvm

CHUNKS = 512  # of a sequence that the buffer holds: every sequence of the suites
MARKERS = 128  # of a kernel that the buffer holds
VERBS = {  # the first word of a marker, and the kind of its span
    "wait": "wait",  # for a barrier
    "issue": "tensor",  # a matrix product that runs on its own from then on
    "drain": "tensor",  # it is waited for
    "matmul": "tensor",  # both
    "compute": "elementwise",
    "copy": "copy",  # between registers, shared and global memory
    "arrive": "arrive",  # at a barrier: an instant
}


class BadMarker(UserError):
    """A marker that can't be read: which, and how to write it."""


@dataclass(frozen=True)
class Marker:
    """One marker: what runs it, its text, and the chunk it is about, counted from the loop's."""

    role: str
    text: str
    ahead: int = 0

    @property
    def kind(self) -> str:
        """wait, tensor, elementwise, copy or arrive."""
        return VERBS[self.text.split()[0]]


# The clock is read by one instruction block with the store, which the compiler keeps in order with barriers and wgmma.
_DEVICE = f"""
__device__ __forceinline__ void gdn_mark(void* trace, int marker, int chunk, int thread) {{
  bool recorded = threadIdx.x == thread && (unsigned)chunk < {CHUNKS} && !(blockIdx.x | blockIdx.y | blockIdx.z);
  asm volatile(
      "{{ .reg .pred p; .reg .u64 t; setp.ne.u32 p, %1, 0; mov.u64 t, %%clock64; @p st.global.u64 [%0], t; }}"
      :: "l"((long long*)trace + (size_t)chunk * {MARKERS} + marker), "r"((unsigned)recorded) : "memory");
}}
"""


@dataclass
class _Recorder:
    """What the markers of one kernel leave while it is built."""

    buffer: tvm.tirx.Buffer
    markers: list[Marker] = field(default_factory=list)
    where: tuple | None = None  # the role, its thread, the loop's chunk

    def mark(self, text: str, ahead: int) -> None:
        import tilelang.language as T

        verb, _, what = text.partition(" ")
        if self.where is None or verb not in VERBS or not what:
            raise BadMarker(
                f'a marker after a `role`, of a verb ({", ".join(VERBS)}) and a name, such as mark("wait w_full"), was '
                f"expected, found {text!r}{'' if self.where else ' with no role before it'}: correct it in the variant"
            )
        role, thread, chunk = self.where
        if role is None:
            return
        if len(self.markers) == MARKERS:
            raise BadMarker(
                f"at most {MARKERS} markers in a kernel were expected, found one more, {text!r}: leave some out, or "
                "raise MARKERS in kernels/markers.py"
            )
        call = T.call_extern("handle", "gdn_mark", T.address_of(self.buffer[0, 0]), len(self.markers), chunk, thread)
        if self.markers:
            T.evaluate(call)
        else:
            with T.attr(0, "pragma_import_c", _DEVICE):  # the source of gdn_mark, once in a kernel
                T.evaluate(call)
        self.markers.append(Marker(role, text, ahead))


_recorder: _Recorder | None = None


def role(name: str | None, thread: int, chunk) -> None:
    """From here on, markers are of this role, read by this thread of the CTA, in the loop's chunk `chunk`.

    None: from here on, nothing is recorded.
    """
    if _recorder is not None:
        _recorder.where = (name, thread, chunk)


def mark(text: str, ahead: int = 0) -> None:
    """A step begins here, about the chunk `ahead` of the loop's.

    Raises:
        BadMarker: in a traced build, where the text has no verb or no name, or no role was said.
    """
    if _recorder is not None:
        _recorder.mark(text, ahead)


def build_traced(build: Callable, args: tuple) -> tuple[tvm.tirx.PrimFunc, tuple[Marker, ...]]:
    """A kernel that records, and its markers: build(*args) with one more argument, the trace.

    The trace is an int64 tensor [CHUNKS, MARKERS], to be zeroed before the launch. Row c, column i then holds the SM's
    clock, in cycles, when chunk c came to marker i; 0 where it did not. A kernel without markers comes back as it is.

    Raises:
        BadMarker: a marker of it can't be read.
    """
    from tilelang import tvm

    global _recorder
    _recorder = recorder = _Recorder(tvm.tirx.decl_buffer((CHUNKS, MARKERS), "int64", name="trace"))
    try:
        function = build(*args)
    finally:
        _recorder = None
    if not recorder.markers:
        return function, ()
    handle = tvm.tirx.Var("trace_handle", "handle")
    buffers = {**dict(function.buffer_map.items()), handle: recorder.buffer}
    return (
        tvm.tirx.PrimFunc([*function.params, handle], function.body, function.ret_type, buffers, function.attrs),
        tuple(recorder.markers),
    )
