"""A user's own variant, added as README.md says: from the ladder to every table and figure of the report."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CASE = "wide_gva_state"

# What the commands do up to the GPU, and from its results on, in a copy of the repository.
JOURNEY = f"""
import inspect
import sys
from pathlib import Path
sys.path.append({str(ROOT / "tests")!r})

import synthetic, test_ncu
import variants
from analysis import load, report
from kernels import build
from kernels.problem import CASES
from profiling import bench, ncu, ncu_export, run, tools

case, labels = {CASE!r}, {{name: variants.label(name) for name in variants.LADDER}}
assert variants.LADDER[-1] == "mine"
assert labels["mine"] == labels["ws"]
own = variants.load("mine").gdn_prefill_forward
(source,) = build.kernels_of(own, (CASES[case],))
kernel = source.name + "_kernel"

# make bench
run.require_gpu = lambda: None
run.describe = lambda names: synthetic.info({{name: {{case: 1e-3}} for name in names}}, []) | {{"variants": names}}
timed = {{}}
bench.bench = lambda names, *_: timed.update(bench.implementations(names)["core"])
sys.argv = ["bench", "--variant", "ws,mine", "--case", case, "--out", "bench"]
bench.main()
assert inspect.unwrap(timed["mine"].forward) is own

# make ncu VARIANT=mine
ncu.preflight = lambda: "ncu"
tools.version = lambda _: "2025.3"
tools.profile = lambda command, *_: Path(command[-1]).touch()
ncu_export.imported = lambda *_: test_ncu.export((kernel, f"mine/{{case}}/core"))
sys.argv = ["ncu", "--variant", "mine", "--out", "profile"]
ncu.main()
assert set(load.load("profile").rows("ncu")["kernel"]) == {{kernel}}

# make report of a run with the whole ladder
times = {{name: {{case: 1e-3 / (i + 1)}} for i, name in enumerate(variants.LADDER)}}
times["mine"][case] = 4e-4  # neither the first nor the fastest
recorded = load.load(synthetic.write_run(Path("run"), times, profiled=(case,)))
stage = report.content(recorded, report.parts(recorded))["stages"][-1]
assert (stage["name"], bool(stage["docstring"])) == ("mine", True)
report.write(recorded, Path("out"))
from matplotlib.text import Text
for name, figure in report.figures(recorded).items():
    words = " ".join(text.get_text() for text in figure.findobj(Text)).split()
    print(name, "mine" in words)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the code in which README's lines were run that add the variant."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("kernels", "variants", "profiling", "analysis"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("recorded", "__pycache__"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"### A variant of your own\n.*?```sh\n(.*?)```", readme, re.DOTALL)[1].splitlines()
    assert len(block) <= 10
    edits = [line for line in block if not line.startswith("make ")]
    subprocess.run(["bash", "-euc", "\n".join(edits)], cwd=tree, check=True)
    return tree


def test_it_goes_from_the_ladder_to_every_table_and_figure(tree):
    done = subprocess.run([sys.executable, "-c", JOURNEY], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = dict(line.split() for line in done.stdout.splitlines() if re.fullmatch(r"\w+ (True|False)", line))
    assert shown.pop("dag") == "False"  # of the algorithm, not of a rung
    assert set(shown.values()) == {"True"}, shown
    assert len(shown) == 8
    for name in ("rungs", "ladder", "counters", "changes", "timeline", "preprocessing"):
        for kind in ("md", "csv", "tex"):
            assert re.search(r"\bmine\b", (tree / "out" / "tables" / f"{name}.{kind}").read_text(encoding="utf-8"))
    assert (tree / "out" / "report.pdf").stat().st_size > 50_000
