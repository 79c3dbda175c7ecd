"""The ports of a cluster. All are fixed, so that a firewall can allow them between the cluster's machines."""

from __future__ import annotations

import os
from dataclasses import dataclass

#: Default of the base port, which is the port of the head. Ports of raylets lie above it.
BASE = 7300
#: Ports of each raylet for connections between workers.
WIRE_COUNT = 20
#: Offset of the first raylet's ports from the base port, and distance between the ports of two raylets.
FIRST, STRIDE = 10, 110


@dataclass(frozen=True)
class Ports:
    """The ports of one raylet."""

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
    def required(self) -> list[int]:
        """Ports that must be free when the raylet starts. Workers choose free ones among theirs."""
        agents = [self.runtime_env_agent, self.metrics_export, self.dashboard_agent, self.dashboard_agent_grpc]
        return [self.node_manager, self.object_manager, *agents]

    @property
    def wires(self) -> str:
        """Ports for connections between workers, as in ``PLIMSOLL_RAY_WIRES``: ``7400-7419``."""
        return f"{self.wires_first}-{self.wires_last}"


def raylet_ports(base_port: int, index: int) -> Ports:
    """Returns the ports of one raylet of a machine; ``index`` counts the raylets of the machine from 0."""
    first = base_port + FIRST + STRIDE * index
    last = first + STRIDE - 1
    return Ports(
        node_manager=first,
        object_manager=first + 1,
        runtime_env_agent=first + 2,
        metrics_export=first + 3,
        dashboard_agent=first + 4,
        dashboard_agent_grpc=first + 5,
        worker_first=first + 10,
        worker_last=last - WIRE_COUNT,
        wires_first=last - WIRE_COUNT + 1,
        wires_last=last,
    )


def wire_ports() -> list[int]:
    """Returns the ports on which this worker accepts other workers; only 0, for any port, if none are set."""
    first, dash, last = os.environ.get("PLIMSOLL_RAY_WIRES", "").partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [0]
