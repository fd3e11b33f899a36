"""Executes the notebooks on one run, as files to read: an executed .ipynb and an .html page of each.

    python -m analysis.notebooks [--run FOLDER] [--out build/notebooks]

A notebook finds its run in the environment variable GDN_RUN.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from traitlets.config import Config

from analysis.load import DEFAULT, load
from kernels.errors import UserError, command
from profiling.run import ROOT

FOLDER = ROOT / "notebooks"


class NotebookFailed(UserError):
    """A cell raised."""


def execute(notebook: Path, run: Path, out: Path) -> list[Path]:
    """Execute `notebook` on the run folder `run`; write both files into `out` and return their paths.

    Raises:
        NotebookFailed: a cell raised; says which and what.
    """
    content = nbformat.read(notebook, as_version=4)
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as sockets:
        client = NotebookClient(
            content,
            record_timing=False,  # the same data give the same file
            resources={"metadata": {"path": str(notebook.parent)}},
            # Sockets in a private folder, not TCP ports, which everybody on a shared machine can reach.
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
        )
        try:
            client.execute(env={**os.environ, "GDN_RUN": str(run.resolve()), "PYTHONPATH": search})
        except CellExecutionError as error:
            raise NotebookFailed(
                f"{notebook}: every cell was expected to run on {run}, found {error.ename}: {error.evalue}: "
                f"open it with GDN_RUN={run.resolve()} to see the cell, and correct it or the run"
            ) from None
    page, _ = HTMLExporter().from_notebook_node(content)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / notebook.name, out / f"{notebook.stem}.html"]
    nbformat.write(content, paths[0])
    paths[1].write_text(page, encoding="utf-8")
    return paths


@command
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Execute every notebook on a run.")
    parser.add_argument("--run", type=Path, default=DEFAULT, help="a run folder; the recorded H200 run if left out")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "notebooks")
    options = parser.parse_args()
    load(options.run)  # refused here rather than inside a cell
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        for path in execute(notebook, options.run, options.out):
            print(path)


if __name__ == "__main__":
    main()
