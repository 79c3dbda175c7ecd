"""The wheel: package, types and command line in one file, for the systems of its platform tag."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import plimsoll

WHEEL = metadata.distribution("plimsoll-train")


def test_command_line_has_version_of_wheel(command: Path) -> None:
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    assert said == f"plimsoll {plimsoll.__version__}\n"
    assert WHEEL.version == plimsoll.__version__


def test_wheel_contains_package_files_only() -> None:
    names = {str(path) for path in WHEEL.files or []}
    assert {"plimsoll/py.typed", "plimsoll/_native.pyi", "plimsoll/ray/__main__.py"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_binaries_need_no_newer_glibc_than_tagged(command: Path) -> None:
    tag = re.search(r"^Tag: cp310-abi3-manylinux_2_(\d+)_", WHEEL.read_text("WHEEL") or "", re.MULTILINE)
    assert tag, WHEEL.read_text("WHEEL")
    native = Path(str(plimsoll._native.__file__))
    for file in (command, native):
        needs = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", file.read_bytes())]
        assert max(needs) <= int(tag[1]), f"{file.name} needs glibc 2.{max(needs)}"
