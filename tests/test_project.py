"""The repository itself: requirements agree, README's commands exist, nothing private is tracked."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
README = (ROOT / "README.md").read_text()


def tracked():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_environment_yml_has_the_requirements_of_pyproject():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    extras = PROJECT["optional-dependencies"]
    pip = next(entry["pip"] for entry in conda if isinstance(entry, dict))
    assert sorted(pip) == sorted(
        PROJECT["dependencies"] + extras["notebooks"] + extras["gpu"] + extras["reports"] + extras["dev"]
    )
    assert f"python{PROJECT['requires-python']}" in conda


def test_the_lock_pins_every_requirement_exactly():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    pinned = {re.split(r"==", line)[0] for line in lines}
    assert all(re.match(r"^[a-z0-9._-]+==[^ ]+( ; .+)?$", line) for line in lines)
    wanted = sum(PROJECT["optional-dependencies"].values(), list(PROJECT["dependencies"]))
    names = {re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower() for requirement in wanted}
    assert names <= pinned


def test_make_help_lists_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = re.findall(r"^  make (\S+)\s+\S", done.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(targets)


def test_readme_s_commands_are_targets():
    targets = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
    used = set(re.findall(r"^(?:\$ )?make ([a-z-]+)|`make ([a-z-]+)", README, re.MULTILINE))
    assert {first or second for first, second in used} <= targets
    fresh = re.search(r"```sh\n(.*?)```", README, re.DOTALL)[1].strip().splitlines()
    assert [line.split("#")[0].strip() for line in fresh] == ["make report", "make test"]


def test_with_a_given_interpreter_nothing_is_installed():
    done = subprocess.run(
        ["make", "-n", "test", "report", "bench", "PYTHON=/opt/python"], cwd=ROOT, capture_output=True, text=True
    )
    assert "/opt/python -m pytest" in done.stdout
    assert "pip" not in done.stdout


def test_inside_conda_its_interpreter_is_used():
    done = subprocess.run(
        ["make", "-n", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "CONDA_PREFIX": "/c"},
    )
    assert done.stdout.startswith("python -m pytest")


def test_analysis_needs_neither_torch_nor_tilelang():
    for path in [*(ROOT / "analysis").glob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]:
        assert not re.search(r"\b(import|from) (torch|tilelang)\b", path.read_text()), path


def test_the_repository_is_small():
    sizes = {path: path.stat().st_size for path in tracked()}
    assert sum(sizes.values()) < 6e6
    assert max(sizes.values()) < 1.5e6


def test_no_tracked_text_names_a_machine_s_paths():
    for path in tracked():
        if path.suffix in (".gz", ".png", ".pdf") or path.name == "test_project.py":
            continue
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/home/\w|/Users/\w|/root/\w", text), path
