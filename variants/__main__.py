"""Compile rungs without running them, into TileLang's cache, and show what the compiler made of them.

    python -m variants [--variant all] [--case lab]

Works without a GPU, for Hopper: fill a cache on a machine with a network, set TILELANG_CACHE_DIR to the same
folder on the GPU machine, and nothing is compiled there.
"""

from __future__ import annotations

import argparse

import variants
from kernels import build, preprocess, problem
from kernels.errors import command


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="all", help="all, or names separated by commas")
    parser.add_argument("--case", default="lab", help="suites and cases separated by commas")
    options = parser.parse_args()
    cases = problem.select(options.case)
    print(f"target {build.target()['arch']}")
    print(f"{'kernel':<28}{'registers':>10}{'spill bytes':>13}{'shared':>12}{'HGMMA':>8}{'LDL':>6}{'STL':>6}")
    forwards = [variants.load(name).gdn_prefill_forward for name in variants.select(options.variant)]
    for forward in (preprocess.on_core_inputs, *forwards):
        for source in build.kernels_of(forward, cases):
            build.compile_into_cache(source)
            for f in build.facts(source):
                print(
                    f"{f.kernel:<28}{f.registers:>10}{f.spill_bytes:>13}{f.shared_bytes / 1024:>8.1f} KiB"
                    f"{f.hgmma:>8}{f.ldl:>6}{f.stl:>6}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
