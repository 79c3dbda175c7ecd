"""What all tests have: a watchdog, and rates that are kept for the session alone."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import hosts
from hosts import Host

#: No test may take longer; one that hangs ends the session with the place where it does.
WATCHDOG_SECONDS = 400


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ.setdefault("PLIMSOLL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def command() -> Path:
    """The command line that the wheel has brought."""
    path = Path(sys.executable).parent / "plimsoll"
    assert path.is_file(), f"{path} is missing: tests are of the installed wheel (cargo xtask wheel, pip install)"
    return path


@pytest.fixture(scope="session")
def pair_of_all() -> Iterator[tuple[Host, Host]]:
    """The one cluster of all tests: they leave it as they found it, but for those at the end that take it apart."""
    pytest.importorskip("ray", reason="no Ray: pip install 'plimsoll-train[ray]'")
    if refused := hosts.refusal():
        pytest.skip(refused)
    with hosts.cluster() as (alpha, beta):
        yield alpha, beta


#: Whether a test has failed.
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Its fixtures know that."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def pair(request: pytest.FixtureRequest, pair_of_all: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    """The hosts of that cluster. A run that a test which failed has left behind ends with it: the next needs its bytes; and whoever
    it has left out is part of the cluster again."""
    yield pair_of_all
    for host in pair_of_all:
        host.end_started()
    if request.node.stash.get(FAILED, False):
        hosts.mend(pair_of_all)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those go last."""
    items.sort(key=lambda item: item.get_closest_marker("takes_apart") is not None)
