"""The recorded run: what needs no GPU."""

import shutil

import pytest

from profiling import record, run, schema


def test_rows_are_read_again_from_the_exports_of_a_folder(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    shutil.copytree(run.RECORDED / "h200", folder)
    table = schema.stored(folder)
    recorded = schema.read(table)
    # As an older commit left it, which did not read when kernels start.
    schema.write(recorded[~recorded["metric"].isin(["start", "host"])], table)
    monkeypatch.setattr("sys.argv", ["record", "--part", "rows", "--out", str(folder)])
    record.main()
    assert table.read_bytes() == schema.stored(run.RECORDED / "h200").read_bytes()


def test_a_folder_of_ones_own_is_never_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["record", "--replace", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        record.main()
    assert "name a new folder" in capsys.readouterr().err
    assert tmp_path.exists()
