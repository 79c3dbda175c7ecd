"""The ports of a cluster, all pinned: what a firewall has to let through between its machines."""

from __future__ import annotations

import os
from dataclasses import dataclass

#: The head's, unless somebody says otherwise; a raylet's lie above it.
BASE = 7300
#: Of a raylet's ports so many are for what its workers say to each other.
WIRES = 20
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
    wires_first: int
    wires_last: int

    @property
    def pinned(self) -> list[int]:
        """Those of its processes that must be free when it starts: workers choose among theirs."""
        agents = [self.runtime_env_agent, self.metrics_export, self.dashboard_agent, self.dashboard_agent_grpc]
        return [self.node_manager, self.object_manager, *agents]

    @property
    def wires(self) -> str:
        """Where workers meet each other, as they are told."""
        return f"{self.wires_first}-{self.wires_last}"


def of_raylet(base: int, number: int) -> Ports:
    """The ports of a machine's raylet, counted from 0."""
    first = base + FIRST + STRIDE * number
    last = first + STRIDE - 1
    return Ports(first, first + 1, first + 2, first + 3, first + 4, first + 5, first + 10, last - WIRES, last - WIRES + 1, last)


def of_wires() -> list[int]:
    """Where a worker meets others: the ports of its raylet, or any where nobody has pinned them."""
    first, dash, last = os.environ.get("PLIMSOLL_RAY_WIRES", "").partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [0]
