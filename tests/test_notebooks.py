import re

import nbformat
import pytest
import synthetic

from analysis import notebooks
from kernels.errors import UserError

NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))
TIMES = {"naive": {"chain_equal": 4e-4}, "fused": {"chain_equal": 1e-4}}

per_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@per_notebook
def test_notebooks_tell_and_compute_nothing(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert len(cells) < 15
    assert "GDN_RUN" in cells[0].source
    for cell in code:
        assert not cell.outputs
        assert cell.execution_count is None
        assert not re.search(r"^\s*(def|class|for|while)\b|lambda", cell.source, re.MULTILINE)
    imported = re.findall(r"^(?:from|import) (\w+)", "\n".join(cell.source for cell in code), re.MULTILINE)
    assert set(imported) <= {"os", "IPython", "analysis"}


@per_notebook
def test_notebooks_run(path, tmp_path):
    run = synthetic.write_run(tmp_path / "run", TIMES, profiled=("chain_equal",))
    executed, page = notebooks.execute(path, run, tmp_path / "out")
    assert (executed.name, page.name) == (path.name, f"{path.stem}.html")
    text = executed.read_text(encoding="utf-8")
    assert synthetic.RUN in text
    assert str(tmp_path) not in text  # nothing says where the run lay
    assert "<img" in page.read_text(encoding="utf-8")


def test_a_cell_that_raises_is_reported(tmp_path):
    path = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), path)
    with pytest.raises(
        UserError,
        match=r"broken\.ipynb: every cell was expected to run on .*, found ZeroDivisionError: division by zero",
    ):
        notebooks.execute(path, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_executes_all(tmp_path, monkeypatch, capsys):
    run = synthetic.write_run(tmp_path / "run", TIMES)
    monkeypatch.setattr("sys.argv", ["notebooks", "--run", str(run), "--out", str(tmp_path / "out")])
    notebooks.main()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{path.stem}{suffix}" for path in NOTEBOOKS for suffix in (".ipynb", ".html")
    }
    assert str(tmp_path / "out") in capsys.readouterr().out
