"""Compile rungs without running them, into TileLang's cache, and show what the compiler made of them.

    python -m variants [--variant all] [--case lab]

Works without a GPU, for Hopper: fill a cache on a machine with a network, set TILELANG_CACHE_DIR to the same
folder on the GPU machine, and nothing is compiled there. What the public functions launch beside the rungs is compiled
too. Every core of this machine takes a kernel at a time.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import variants
from kernels import build, preprocess, problem
from kernels.errors import command

Cases = tuple[problem.Case, ...]


def _forward(name: str) -> Callable:
    """A rung, or what stands beside the rungs."""

    def public(q, k, v, g_cumsum, beta, A, initial_state, cu_seqlens=None):
        if cu_seqlens is None:  # else it is `split` alone
            variants.gdn_prefill_forward(q, k, v, g_cumsum, beta, A, initial_state)

    def full(q, k, v, g, beta, A, initial_state, cu_seqlens=None):
        for normalised in (False, True):
            variants.chunk_gated_delta_rule(
                q, k, v, g, beta, None, initial_state, True, cu_seqlens, use_qk_l2norm_in_kernel=normalised
            )

    beside = {"preprocessing": preprocess.on_core_inputs, "public": public, "full": full}
    return beside[name] if name in beside else variants.core_forward(name)


def _sources(name: str, cases: Cases) -> list[build.Source]:
    return build.kernels_of(_forward(name), cases)


def _compile(name: str, cases: Cases, number: int) -> None:
    # A kernel can't be sent to another process: it is built there again.
    build.compile_into_cache(_sources(name, cases)[number])


def _facts(name: str, cases: Cases, number: int) -> list[build.Facts]:
    return build.facts(_sources(name, cases)[number])


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="all", help="all, or names separated by commas")
    parser.add_argument("--case", default="lab", help="suites and cases separated by commas")
    options = parser.parse_args()
    cases, names = problem.select(options.case), variants.select(options.variant)
    print(f"target {build.target()['arch']}")
    print(f"{'kernel':<28}{'registers':>10}{'spill bytes':>13}{'shared':>12}{'HGMMA':>8}{'LDL':>6}{'STL':>6}")
    found = {}  # each kernel once, whoever launches it
    for name in ("preprocessing", *names, "public", "full"):
        for number, source in enumerate(_sources(name, cases)):
            found.setdefault((source.name, source.prim_func.script()), (name, cases, number))
    here = importlib.import_module("variants.__main__")  # by a name that other processes know it by
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        compiled = [pool.submit(here._compile, *which) for which in found.values()]
        facts = [pool.submit(here._facts, *which) for which in found.values()]
        for one, other in zip(compiled, facts, strict=True):
            one.result()
            for f in other.result():
                print(
                    f"{f.kernel:<28}{f.registers:>10}{f.spill_bytes:>13}{f.shared_bytes / 1024:>8.1f} KiB"
                    f"{f.hgmma:>8}{f.ldl:>6}{f.stl:>6}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
