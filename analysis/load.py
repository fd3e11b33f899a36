"""Reads a run folder: run.json and measurements.csv as one object, refused unless both tell the same story."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import pandas as pd

from kernels.problem import CASES
from kernels.work import Ceilings
from profiling import schema
from profiling.run import RECORDED, BadRun, read_info

DEFAULT = RECORDED / "h200"  # the run that README.md quotes


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

    @cached_property
    def cases(self) -> list[str]:
        """Every case with a row or a skip, in the order of kernels.problem."""
        named = set(self.frame["case"]) | {skip["case"] for skip in self.info.get("skipped", [])}
        return [case for case in CASES if case in named]

    @property
    def peers(self) -> dict[str, str]:
        """Every public library that was measured too, and what tables call it."""
        return self.info.get("peers", {})

    @property
    def ladder_cases(self) -> list[str]:
        """The cases whose core every rung was to run, in the order of kernels.problem."""
        whole = {plan["case"] for plan in self._planned("core") if set(self.variants) <= set(plan["variants"])}
        return [case for case in CASES if case in whole]

    @property
    def skipped(self) -> dict[tuple[str, str], str]:
        """The reason by (variant, case), for the core."""
        return self.skipped_in("core")

    def skipped_in(self, phase: str) -> dict[tuple[str, str], str]:
        """Who was not timed in a phase: the reason by (variant, case)."""
        return {
            (skip["variant"], skip["case"]): skip["reason"]
            for skip in self.info.get("skipped", [])
            if skip["phase"] == phase
        }

    def _planned(self, phase: str) -> list[dict]:
        return [plan for plan in self.info["planned"] if plan["phase"] == phase]

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
    run = Run(folder, read_info(folder), schema.read(schema.stored(folder)))
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
    present, named = set(run.frame["variant"]), {*run.variants, *run.peers}
    if present - named:
        raise BadRun(
            f"{schema.stored(run.folder)}: variants named in run.json ({', '.join([*run.variants, *run.peers])}) were "
            f"expected, found rows of {', '.join(sorted(present - named))}: measure all that is compared in one run"
        )
    silent = set(run.variants) - present - {skip["variant"] for skip in run.info.get("skipped", [])}
    if silent:
        raise BadRun(
            f"{run.folder / 'run.json'}: rows or a skip of every variant were expected, found neither of "
            f"{', '.join(sorted(silent))}: the run was cut short; measure again"
        )


def _check_bench(run: Run) -> None:
    bench = run.rows("bench")
    if bench.empty:
        return
    measured = set(zip(bench["variant"], bench["case"], bench["phase"], bench["metric"], strict=True))
    for plan in run.info["planned"]:
        case, phase = plan["case"], plan["phase"]
        for variant, metric in product(plan["variants"], schema.required(phase)):
            if (variant, case) in run.skipped_in(phase) or (variant, case, phase, metric) in measured:
                continue
            raise BadRun(
                f"{schema.stored(run.folder)}: {metric} of {variant} on {case} ({phase}) was expected, or a skip in "
                "run.json, found neither: the run was cut short; measure again"
            )
    _ = run.ceilings  # every share of speed of light needs them
