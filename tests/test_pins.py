"""pyproject.toml, constraints.txt, environment.yml and the Makefile agree on what is installed."""

import shlex
import tomllib
from importlib import metadata

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.training import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    """Of the package and all of its extras, but for the package itself (`shardlab[hf]` within an extra)."""
    extras = PROJECT["optional-dependencies"].values()
    found = [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def pins() -> list[tuple[str, Version]]:
    """Names and versions in constraints.txt; raises where a line is anything but `name==version`."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    found = []
    for requirement in map(Requirement, filter(None, lines)):
        (specifier,) = requirement.specifier
        assert specifier.operator == "=="
        found.append((canonicalize_name(requirement.name), Version(specifier.version)))
    return found


def test_every_requirement_is_pinned_once_and_nothing_else():
    names = [name for name, _ in pins()]
    assert sorted(names) == sorted({canonicalize_name(requirement.name) for requirement in requirements()})


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_pins_lie_in_the_ranges_of_pyproject(requirement):
    version = dict(pins())[canonicalize_name(requirement.name)]
    assert version in requirement.specifier
    assert not version.is_prerelease


def test_the_range_of_torch():
    (torch,) = [requirement for requirement in requirements() if requirement.name == "torch"]
    assert torch.specifier == SpecifierSet(">=2.11,<2.16")
    assert dict(pins())["torch"] == Version("2.13.0")


@pytest.mark.parametrize(("name", "version"), pins())
def test_what_is_tested_is_what_is_pinned(name, version):
    installed = Version(metadata.version(name))
    assert installed.public == version.public  # without the +cpu or +cu130 of torch's builds


def test_conda_installs_the_same():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert "pip" in conda  # else conda uses one of its own choice, and warns
    # Conda writes these lines to a requirements file beside environment.yml and runs pip there (its
    # env/installers/pip.py), so that both paths are relative to the root of the project.
    options = [shlex.split(line) for line in pip["pip"]]
    assert options == [["--constraint", "constraints.txt"], ["--editable", ".[dev]"]]
    assert (ROOT / "constraints.txt").is_file()
    assert "dev" in PROJECT["optional-dependencies"]
    (python,) = [line.removeprefix("python=") for line in conda if line.startswith("python=")]
    assert Version(python) in SpecifierSet(PROJECT["requires-python"])


def test_make_installs_from_the_constraints_alone():
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert installs
    for line in installs:
        words = shlex.split(line)
        assert words[words.index("--constraint") + 1] == "constraints.txt"
