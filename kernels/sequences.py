"""Sequences in device code: which one a CTA works on, where they lie one after the other among the tokens.

There are as many as a batch has, all of one length, or as `cu_seqlens` says: N + 1 offsets, where each of N sequences
begins and the last one ends. What a kernel is called with is the same in both cases, see `Layout`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Pieces of `unit` tokens are numbered so that nobody has to count those of earlier sequences: the first piece of
# sequence n has number begin_n / unit + n. A sequence of l tokens has at most l / unit + 1 pieces, rounded down, which
# is as much as that number grows by until the next one, or less; some numbers have no piece. A warp finds the sequence
# of a piece by comparing 32 offsets at a time. Offsets that can't be are clamped: `refuse_offsets` stops the
# process, but nothing must lead out of the tensors meanwhile.
FIND_PIECE = r"""
#include <cassert>
struct Piece {
  int sequence, begin, length, index;  // tokens of the sequence, and the piece's number within it
};

__device__ __forceinline__ Piece sequence_at(int sequence, const int* offsets, int stride, int tokens_each,
                                             int tokens) {
  if (tokens_each > 0) return {sequence, sequence * tokens_each, tokens_each, 0};
  const int begin = min(max(offsets[(long long)sequence * stride], 0), tokens);
  const int stop = min(offsets[(long long)(sequence + 1) * stride], tokens);
  return {sequence, begin, max(stop - begin, 0), 0};
}

__device__ __forceinline__ Piece find_piece(int number, int unit, const int* offsets, int stride, int sequences,
                                            int tokens_each, int tokens) {
  int first = 0, before = 0;  // the sequence, and the number of its first piece
  if (tokens_each > 0) {
    const int pieces = (tokens_each + unit - 1) / unit;
    first = number / pieces;
    before = first * pieces;
  } else {
    int end = sequences;
    while (end - first > 1) {
      const int step = (end - first + 31) / 32, candidate = first + (threadIdx.x & 31) * step;
      const bool begun = candidate < end && offsets[(long long)candidate * stride] / unit + candidate <= number;
      first += max(__popc(__ballot_sync(~0u, begun)) - 1, 0) * step;
      end = min(first + step, end);
    }
    before = offsets[(long long)first * stride] / unit + first;
  }
  Piece found = sequence_at(first, offsets, stride, tokens_each, tokens);
  found.index = number >= before ? number - before : 1 << 20;  // numbers below the first sequence's have no piece
  return found;
}

__device__ __forceinline__ void refuse_offsets(const int* offsets, int stride, int sequences, int tokens) {
  for (int n = threadIdx.x; n < sequences; n += blockDim.x) {
    const int begin = offsets[(long long)n * stride], end = offsets[(long long)(n + 1) * stride];
    assert(0 <= begin && begin <= end && end <= tokens &&
           "cu_seqlens were expected to rise, from 0 to the number of tokens at most, found others");
  }
}
"""


class Layout(NamedTuple):
    """How `find_piece` learns where the sequences lie."""

    offsets: torch.Tensor  # INT32; of INT64 offsets, their words
    stride: int  # of an offset among them
    sequences: int
    tokens_each: int  # 0 where the offsets count

    def pieces(self, unit: int, tokens: int) -> int:
        """How many numbers pieces of `unit` tokens have, `tokens` being those of all sequences together."""
        if self.tokens_each:
            return self.sequences * -(-self.tokens_each // unit)
        return tokens // unit + self.sequences


def layout(B: int, tokens_each: int, cu_seqlens: torch.Tensor | None, like: torch.Tensor) -> Layout:
    """Of B sequences, or of those that `cu_seqlens` [N+1] INT32 or INT64 marks; `like` is any tensor on the device."""
    if cu_seqlens is None:
        return Layout(like.new_empty(0, dtype=torch.int32), 1, B, tokens_each)
    words = cu_seqlens.view(torch.int32) if cu_seqlens.dtype == torch.int64 else cu_seqlens
    return Layout(words, len(words) // len(cu_seqlens), len(cu_seqlens) - 1, 0)
