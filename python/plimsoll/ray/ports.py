"""The ports of a cluster, all pinned: what a firewall has to let through between its machines."""

from __future__ import annotations

from dataclasses import dataclass

#: The head's, unless somebody says otherwise; a raylet's lie above it.
BASE = 7300
#: Where a machine's first raylet's ports begin, from the base on, and how far apart raylets are.
FIRST, STRIDE = 10, 110


@dataclass(frozen=True)
class Ports:
    """Those of one raylet."""

    node_manager: int
    object_manager: int
    runtime_env_agent: int
    metrics_export: int
    dashboard_agent: int
    dashboard_agent_grpc: int
    worker_first: int
    worker_last: int


def of_raylet(base: int, number: int) -> Ports:
    """The ports of a machine's raylet, counted from 0."""
    first = base + FIRST + STRIDE * number
    return Ports(first, first + 1, first + 2, first + 3, first + 4, first + 5, first + 10, first + STRIDE - 1)
