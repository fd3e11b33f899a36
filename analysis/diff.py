"""What moved between two rungs on one case: time, then Nsight Compute's counters, each with its name and meaning.

    python -m analysis.diff [--a smem] [--b multibuf] [--case wide_gva_state] [--run FOLDER]

The row of a group that changed by the largest factor is in bold. A rung of several kernels counts as one, see
analysis.tables.profile.
"""

from __future__ import annotations

import argparse
import math
from itertools import pairwise
from pathlib import Path

import pandas as pd

from analysis import present, tables
from analysis.load import DEFAULT, Run, load
from analysis.present import NONE, Table, digits, microseconds, occupancy_limit, percent, times, with_spread
from kernels import work
from kernels.errors import UserError, command
from kernels.problem import CASES
from profiling.metrics import METRICS, STALLS

SECTOR = 32  # bytes; the L2 cache counts its traffic in these
# Groups in reading order: from what the hardware does to why it can't do more.
GROUPS = {
    "How busy the GPU is": ("tensor_pipe", "issue_active", "sm_throughput", "l2_throughput", "dram_throughput"),
    "What is moved": ("dram_read", "dram_write", "l2_sectors", "l2_hit"),
    "What is executed": (
        "instructions",
        "tensor_flops",
        "shared_loads",
        "shared_stores",
        "global_loads",
        "global_stores",
        "tma_loads",
        "bank_conflicts",
    ),
    "What an SM holds": ("occupancy", "registers", "shared_memory", "waves"),
}
WAITS = "What warps wait for, per issued instruction"
MOST = 6  # waits that are listed, those that moved most


class NoDiff(UserError):
    """Two rungs that this run can't compare on this case."""


def diff(run: Run, a: str, b: str, case: str) -> pd.DataFrame:
    """One row per counter that both rungs have, in reading order; of the waits, the MOST that moved most.

    Columns: group, metric (short name), a, b in base units, change (b over a; NaN where a is 0).

    Raises:
        NoDiff: a rung is not in the run, or the case was not profiled for it.
    """
    return _changes(*_profiled(run, a, b, case))


def headline(run: Run, a: str, b: str, case: str) -> str:
    """The benchmark's verdict on b against a, and what of speed of light each reaches."""
    _check_rungs(run, a, b)
    ladder = tables.ladder(run).set_index(["case", "variant"])
    rows = [ladder.loc[case, name] if (case, name) in ladder.index else None for name in (a, b)]
    if any(row is None for row in rows):
        return f"The benchmark of this run has no time of both {a} and {b} on {case}."
    before, after = rows
    spread = math.hypot(before["spread"], after["spread"])
    ratio = with_spread(times(before["time_s"] / after["time_s"])[:-1], spread)
    return (
        f"On {case} ({CASES[case].shape}) {a} takes {microseconds(before['time_s'])} µs and {b} "
        f"{microseconds(after['time_s'])} µs: {b} is {ratio} times as fast. Of speed of light {a} reaches "
        f"{percent(before['light_share'])}, {b} {percent(after['light_share'])}."
    )


def explain(run: Run, a: str, b: str, case: str) -> list[Table]:
    """`diff` as printed tables, one per group, with notes that put the numbers in proportion.

    Raises:
        NoDiff: see `diff`.
    """
    of_a, of_b = _profiled(run, a, b, case)
    notes = {
        "What is moved": _moved(of_a, of_b, a, b, case),
        "What is executed": _conflicts(of_a, of_b, a, b),
        "What an SM holds": f"{_limit(of_a, a)} {_limit(of_b, b)}",
        WAITS: f"Warps waiting, by reason; the {MOST} that moved most.",
    }
    return [
        Table(
            title=group,
            head=["Metric", "Meaning", "Nsight Compute's name", a, b, "Change"],
            rows=[
                [
                    METRICS[row.metric].label,
                    METRICS[row.metric].meaning,
                    METRICS[row.metric].counter,
                    value(row.metric, row.a),
                    value(row.metric, row.b),
                    times(row.change),
                ]
                for row in part.itertuples()
            ],
            note=notes.get(group, ""),
            text_columns=3,
            bold=[(_moved_most(part["change"]), column) for column in (0, 5)],
        )
        for group, part in _changes(of_a, of_b).groupby("group", sort=False)
    ]


def changes(run: Run, case: str | None) -> pd.DataFrame:
    """`diff` of each profiled rung and the next, one below the other, with the columns case, from and to before it."""
    found = tables.profiles(run, case)
    pairs = list(pairwise(found.index))
    frames = [_changes(*(found.loc[name].dropna().to_dict() for name in pair)) for pair in pairs]
    both = pd.concat(frames, keys=pairs, names=["from", "to"]) if pairs else pd.DataFrame()
    return both.reset_index(["from", "to"]).assign(case=case) if pairs else both


def neighbours(run: Run, case: str | None) -> list[Table]:
    """From each profiled rung to the next: of every group of counters the one that changed by the largest factor.

    Of the waits it is the one that changed by most warps. Empty where fewer than two rungs were profiled on this case.
    """
    found = tables.profiles(run, case)
    return [_moved_table(found.loc[a], found.loc[b], a, b, case) for a, b in pairwise(found.index)]


def _moved_table(of_a: pd.Series, of_b: pd.Series, a: str, b: str, case: str) -> Table:
    changes = _changes(of_a.dropna().to_dict(), of_b.dropna().to_dict())
    shown = [
        part.iloc[0 if group == WAITS else _moved_most(part["change"])]  # waits are in order of their change
        for group, part in changes.groupby("group", sort=False)
    ]
    return Table(
        title=f"From {a} to {b}: what moved most on {case}",
        head=["Group", "Metric", "Meaning", a, b, "Change"],
        rows=[
            [
                row.group,
                METRICS[row.metric].label,
                METRICS[row.metric].meaning,
                value(row.metric, row.a),
                value(row.metric, row.b),
                times(row.change),
            ]
            for row in shown
        ],
        text_columns=3,
    )


def value(metric: str, value: float) -> str:
    """A metric of Nsight Compute in base units, as tables print it."""
    unit = METRICS[metric].unit
    if unit == "ratio":
        return percent(value)
    if unit == "byte":
        return f"{digits(value / 1e6, 3)} MB" if value >= 1e6 else f"{digits(value / 2**10, 3)} KiB"
    for scale, letter in ((1e9, " G"), (1e6, " M")):
        if value >= scale:
            return digits(value / scale, 3) + letter
    return digits(value, 3)


def _check_rungs(run: Run, *names: str) -> None:
    for name in names:
        if name not in run.variants:
            raise NoDiff(
                f"{run.folder}: two rungs of {', '.join(run.variants)} were expected, found {name!r}: name two of "
                "them, as in `make diff A=smem B=multibuf`"
            )


def _profiled(run: Run, a: str, b: str, case: str) -> list[dict[str, float]]:
    """The counters of both rungs."""
    _check_rungs(run, a, b)
    both = []
    for variant in (a, b):
        both.append(tables.profile(run, variant, case))
        if not both[-1]:
            raise NoDiff(
                f"{run.folder}: counters of {variant} on {case} were expected, found them on "
                f"{', '.join(tables.profiled_cases(run)) or 'no case'}: choose CASE from these, or profile it with "
                f"`make ncu VARIANT={variant} CASE={case}`"
            )
    return both


def _changes(of_a: dict[str, float], of_b: dict[str, float]) -> pd.DataFrame:
    both = [name for name in of_a if name in of_b]
    moved = sorted((name for name in STALLS if name in both), key=lambda name: -abs(of_b[name] - of_a[name]))
    rows = [
        (group, name, of_a[name], of_b[name], of_b[name] / of_a[name] if of_a[name] else math.nan)
        for group, names in {**GROUPS, WAITS: tuple(moved[:MOST])}.items()
        for name in names
        if name in both
    ]
    return pd.DataFrame(rows, columns=["group", "metric", "a", "b", "change"])


def _moved_most(change: pd.Series) -> int:
    """The position of the row that changed by the largest factor, up or down."""
    factors = [abs(math.log(ratio)) if ratio > 0 else 0.0 for ratio in change]
    return factors.index(max(factors))


def _moved(of_a: dict, of_b: dict, a: str, b: str, case: str) -> str:
    minimum = work.core(CASES[case]).bytes

    def shares(of: dict) -> str:
        dram = (of.get("dram_read", math.nan) + of.get("dram_write", math.nan)) / minimum
        return f"{times(dram)} in device memory, {times(of.get('l2_sectors', math.nan) * SECTOR / minimum)} in L2"

    return (
        f"The core can't move less than {digits(minimum / 1e6, 3)} MB (kernels/work.py). Of that, {a} moves "
        f"{shares(of_a)}; {b} moves {shares(of_b)}. Less than 1× means that a part of the output was still in L2."
    )


def _conflicts(of_a: dict, of_b: dict, a: str, b: str) -> str:
    def share(of: dict) -> str:
        if not of.get("shared_wavefronts"):
            return NONE
        return percent(of.get("bank_conflicts", math.nan) / of["shared_wavefronts"])

    return f"Of the cycles that shared memory serves, bank conflicts are {share(of_a)} in {a}, {share(of_b)} in {b}."


def _limit(of: dict, name: str) -> str:
    limit = occupancy_limit(of)
    if limit is None:
        return f"What limits {name} was not recorded."
    return f"An SM has room for {limit[0]} of {name}, limited by {limit[1]}."


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--a", help="the rung to start from; the last but one if left out")
    parser.add_argument("--b", help="the rung to compare it with; the last one if left out")
    parser.add_argument("--case", default="wide_gva_state", choices=CASES, metavar="CASE")
    parser.add_argument("--run", type=Path, default=DEFAULT, help="a run folder; the recorded H200 run if left out")
    options = parser.parse_args()
    run = load(options.run)
    a, b = options.a or run.variants[-2:][0], options.b or run.variants[-1]
    printed = explain(run, a, b, options.case)
    print(f"{headline(run, a, b, options.case)}\n\n{present.markdown(*printed)}\n\n{present.origin(run)}")


if __name__ == "__main__":
    main()
