"""Cold start, with stand-ins for the processes that compile."""

import json

import pytest

from kernels import peers, problem
from profiling import coldstart, schema

CASE = problem.CASES["wide_gva_state"]
INFO = {"run": "r", "gpu": {"name": "g"}, "protocol": {}}
OURS = coldstart.variants.LADDER[-1]


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A program that compiles as `body` says, in shell, instead of `python -m profiling.coldstart ... NAME`."""
    library = {"full": problem.Implementation("a library", None, tuple)}
    monkeypatch.setattr(peers, "find", lambda: ({"fla": library, "token_loop": library}, {}))
    monkeypatch.setattr(coldstart.run, "write_info", lambda *_: None)

    def says(body: str):
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\nfor name; do :; done\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setattr(coldstart.sys, "executable", str(program))

    return says


def test_seconds_and_kernels_of_the_last_rung_and_each_library_become_rows(compiler, tmp_path):
    compiler(
        "test -e $TRITON_CACHE_DIR/x && { echo '{\"seconds\": 0.5}'; exit; }\n"  # it has been here before
        'test -z "$(ls -A $TRITON_CACHE_DIR $TILELANG_CACHE_DIR $CUTE_DSL_DUMP_DIR | grep -v :)" || exit 3\n'
        "mkdir -p $TRITON_CACHE_DIR/x $TILELANG_CACHE_DIR/v/p/kernels/k\n"
        "test $name = fla && touch $TRITON_CACHE_DIR/x/a.cubin $TRITON_CACHE_DIR/x/b.cubin $TRITON_CACHE_DIR/x/b.ptx\n"
        "touch $TILELANG_CACHE_DIR/v/p/kernels/k/device_kernel.cu $TILELANG_CACHE_DIR/v/p/kernels/k/host_kernel.cu\n"
        "echo some log; echo '{\"seconds\": 2.5}'"
    )
    rows = coldstart.measure(CASE, tmp_path, json.loads(json.dumps(INFO)))
    found = {(row["variant"], row["metric"]): row["value"] for row in rows}
    assert found == {
        (OURS, "cold_start"): 2.5,
        (OURS, "cached_start"): 0.5,
        (OURS, "kernels_compiled"): 1,
        ("fla", "cold_start"): 2.5,
        ("fla", "cached_start"): 0.5,
        ("fla", "kernels_compiled"): 3,
    }
    assert len(schema.read(tmp_path / "measurements.csv")) == 6


def test_a_library_that_fails_is_left_out_and_the_rung_is_not(compiler, tmp_path, capsys):
    compiler("test $name = fla && { echo no such GPU; exit 1; }\necho '{\"seconds\": 1}'")
    rows = coldstart.measure(CASE, tmp_path, json.loads(json.dumps(INFO)))
    assert {row["variant"] for row in rows} == {OURS}
    assert "fla is left out: no such GPU" in capsys.readouterr().out
    compiler("echo nvcc is missing; exit 1")
    with pytest.raises(coldstart.ColdStartFailed, match=f"first call of {OURS} was expected to succeed, and said nvcc"):
        coldstart.measure(CASE, tmp_path, json.loads(json.dumps(INFO)))


def test_a_suite_is_no_case(monkeypatch):
    monkeypatch.setattr("sys.argv", ["coldstart", "--case", "lab"])
    with pytest.raises(SystemExit, match="one case was expected, found 8 in 'lab'"):
        coldstart.main()
