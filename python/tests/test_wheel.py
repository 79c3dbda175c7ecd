"""The wheel: one file that brings the package, its types and the command line, for the systems that it names."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import plimsoll

WHEEL = metadata.distribution("plimsoll-train")


def test_the_command_line_is_of_the_same_version(command: Path) -> None:
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    assert said == f"plimsoll {plimsoll.__version__}\n"
    assert WHEEL.version == plimsoll.__version__


def test_its_files_are_those_of_the_package() -> None:
    names = {str(path) for path in WHEEL.files or []}
    assert {"plimsoll/py.typed", "plimsoll/_native.pyi", "plimsoll/ray/__main__.py"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_what_is_inside_runs_where_the_name_says(command: Path) -> None:
    tag = re.search(r"^Tag: cp310-abi3-manylinux_2_(\d+)_", WHEEL.read_text("WHEEL") or "", re.MULTILINE)
    assert tag, WHEEL.read_text("WHEEL")
    native = Path(str(plimsoll._native.__file__))
    for file in (command, native):
        needs = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", file.read_bytes())]
        assert max(needs) <= int(tag[1]), f"{file.name} needs glibc 2.{max(needs)}"
