"""Reads a run folder: run.json and measurements.csv as one object, refused unless both tell the same story."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd

from kernels.problem import CASES
from kernels.work import Ceilings
from profiling import schema
from profiling.run import RECORDED, BadRun, read_info

DEFAULT = RECORDED / "h200"  # the run that README.md quotes
PEERS = ("flashqla", "flashqla_nocp", "fla", "flashinfer", "flashinfer_nocp")  # libraries: no rungs


@dataclass(frozen=True)
class Run:
    """One run: where it lies, its run.json, and its tidy table (see profiling.schema)."""

    folder: Path
    info: dict
    frame: pd.DataFrame

    @property
    def variants(self) -> list[str]:
        """Every variant, in ladder order."""
        return list(self.info["variants"])

    @property
    def rungs(self) -> list[str]:
        """The variants that are stages of the ladder, a user's own included; libraries are not."""
        return [name for name in self.variants if name not in PEERS]

    @property
    def cases(self) -> list[str]:
        """Every case with a row or a skip, in the order of kernels.problem."""
        named = set(self.frame["case"]) | {case for _, case in self.skipped}
        return [case for case in CASES if case in named]

    @property
    def skipped(self) -> dict[tuple[str, str], str]:
        """The reason by (variant, case)."""
        return {(skip["variant"], skip["case"]): skip["reason"] for skip in self.info.get("skipped", [])}

    @property
    def ceilings(self) -> Ceilings:
        """What the device sustained in this run.

        Raises:
            BadRun: the run did not measure it.
        """
        found = self.info.get("ceilings", {})
        if set(found) != set(Ceilings.__dataclass_fields__):
            raise BadRun(
                f"{self.folder / 'run.json'}: ceilings with {' and '.join(Ceilings.__dataclass_fields__)} were "
                f"expected, found {found}: measure again with `make bench`"
            )
        return Ceilings(**found)

    def rows(self, tool: str, phase: str | None = None) -> pd.DataFrame:
        """The rows of one tool, of one phase or of all."""
        wanted = self.frame["tool"] == tool
        return self.frame[wanted if phase is None else wanted & (self.frame["phase"] == phase)]


def load(folder: str | Path) -> Run:
    """Read and validate a run folder.

    Raises:
        BadRun: run.json is missing or incomplete, or does not describe the rows.
        BadTable: measurements.csv is missing or refused by profiling.schema.
    """
    folder = Path(folder)
    run = Run(folder, read_info(folder), schema.read(folder / "measurements.csv"))
    _check_identity(run)
    _check_variants(run)
    _check_bench(run)
    return run


def _check_identity(run: Run) -> None:
    table = run.folder / "measurements.csv"
    first = run.frame.iloc[0]  # profiling.schema allows one run and one GPU in a table
    for what, expected in (("run", run.info["run"]), ("gpu", run.info["gpu"]["name"])):
        if first[what] != expected:
            raise BadRun(
                f"{table}: rows of {what} {expected} were expected, as run.json says, found {first[what]}: "
                "put each run's two files back together in one folder, or measure again"
            )
    unknown = sorted(set(run.frame["case"]) - set(CASES))
    if unknown:
        raise BadRun(
            f"{table}: cases of kernels/problem.py were expected, found {', '.join(unknown)}: "
            "add them there, or read the run with the commit that made it"
        )


def _check_variants(run: Run) -> None:
    present, named = set(run.frame["variant"]), set(run.variants)
    if present - named:
        raise BadRun(
            f"{run.folder / 'measurements.csv'}: variants named in run.json ({', '.join(run.variants)}) were expected, "
            f"found rows of {', '.join(sorted(present - named))}: measure all that is compared in one run"
        )
    silent = named - present - {variant for variant, _ in run.skipped}
    if silent:
        raise BadRun(
            f"{run.folder / 'run.json'}: rows or a skip of every variant were expected, found neither of "
            f"{', '.join(sorted(silent))}: the run was cut short; measure again"
        )


def _check_bench(run: Run) -> None:
    bench = run.rows("bench", "core")
    if bench.empty:
        return
    measured = set(zip(bench["variant"], bench["case"], bench["metric"], strict=True))
    for variant, case, metric in product(run.rungs, bench["case"].unique(), schema.BENCH_METRICS):
        if (variant, case) not in run.skipped and (variant, case, metric) not in measured:
            raise BadRun(
                f"{run.folder / 'measurements.csv'}: {metric} of {variant} on {case} was expected, or a skip in "
                "run.json, found neither: the run was cut short; measure again"
            )
    _ = run.ceilings  # every share of speed of light needs them
