"""The state of the cluster for ``plimsoll doctor`` and ``plimsoll watch``, which start this module as a process of its own.

``python -m plimsoll.ray.inspection check`` prints one JSON object: versions, clocks and ports of all nodes. ``watch SECONDS``
prints one object per period, with the figures of each device, until its standard input is closed. The command line is the other
end (``crates/plimsoll/src/commands/cluster.rs``). A process on each node reads its figures. It ends with this process and changes
nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn, TypedDict

from plimsoll import _native
from plimsoll.errors import Bug, InputError, PlimsollError
from plimsoll.ray import ports
from plimsoll.ray.cluster import (
    INSPECTION_OWNER,
    Facts,
    Node,
    alive_nodes,
    connected,
    facts,
    nodes,
    options_for_node,
    unreserved_bytes,
    unreserved_resources,
)
from plimsoll.ray.failures import describe

#: Seconds that all nodes have to answer, which includes the start of their processes.
ANSWER_TIMEOUT_SECONDS = 30.0
#: Seconds that a whole check may take. Without a head, calls to Ray may never return.
CHECK_TIMEOUT_SECONDS = 120.0
#: Seconds that the nodes have at first, when their processes start, to answer a command that watches them.
START_TIMEOUT_SECONDS = 15.0
#: Number of readings of a clock, of which the one with the shortest round trip counts.
CLOCK_READINGS = 8
#: Seconds that a port has to accept or refuse a connection, and the most connections tried at the same time.
PORT_TIMEOUT_SECONDS, PORTS_AT_ONCE = 1.5, 32
#: Seconds after which figures of a node that no longer answers count as unknown.
FIGURES_LIFETIME_SECONDS = 10.0


class Clock(TypedDict):
    """The clock of a machine, compared with that of this machine."""

    #: Seconds by which it is ahead of the clock of this machine; negative if it is behind.
    offset_seconds: float
    #: Most seconds by which that figure may be wrong: half of the round trip of the question.
    error_seconds: float


class CheckedNode(Node):
    """A node with the answers of its process."""

    #: ``None`` if the node did not answer.
    facts: Facts | None
    #: ``None`` if the node did not answer, or is on this machine.
    clock: Clock | None
    #: Ports for connections between workers; empty if they are not fixed.
    wire_ports: list[int]
    #: Those of them on which a program of its machine accepts connections.
    wire_ports_taken: list[int]


class Route(TypedDict):
    """The ports of a machine, as another machine of the cluster reaches them."""

    #: Name of a node on the machine that connects.
    source: str
    #: Name of the node to which the ports belong, and the address of its machine.
    target: str
    ip: str
    #: Ports that neither accept nor refuse a connection.
    silent_ports: list[int]
    #: Ports of Ray that refuse connections, although Ray listens on them.
    refused_ports: list[int]


class Check(TypedDict):
    """The state of a cluster for ``plimsoll doctor``."""

    address: str
    nodes: list[CheckedNode]
    routes: list[Route]


class WatchedNode(Node):
    """A node with the figures of its device."""

    #: The device as in ``devices`` of ``plimsoll watch --json``; ``None`` if they are unknown, and for a simulated device.
    figures: dict[str, Any] | None
    #: Memory of the device that no run has reserved; ``None`` for a lost node.
    unreserved_bytes: int | None


class Watched(TypedDict):
    """The state of a cluster for ``plimsoll watch``."""

    address: str
    #: Address of this machine, whose own devices need no cluster.
    own_ip: str
    nodes: list[WatchedNode]


class Observer:
    """The process on a node that reads its figures. It runs as an actor of Ray and reserves nothing."""

    def __init__(self) -> None:
        self.machine = _native.MachineWatch()

    def facts(self) -> Facts:
        """Returns versions and hardware of the node."""
        return facts()

    def clock(self) -> float:
        """Returns the time in seconds since 1970 on the clock of the node."""
        return time.time()

    def wire_ports(self) -> tuple[list[int], list[int]]:
        """Returns the ports for connections between workers, and those of them on which a program listens."""
        fixed = [port for port in ports.wire_ports() if port]
        listening = listening_ports()
        return fixed, [port for port in fixed if port in listening]

    def connect(self, targets: list[tuple[str, int]]) -> list[str]:
        """Tries to connect to each address. Returns ``open``, ``refused`` or ``silent`` for each."""
        return try_ports(targets)

    def figures(self) -> dict[str, Any] | None:
        """Returns the figures of the node's device; ``None`` for a simulated one. A process sees only the GPU of its raylet."""
        snapshot: dict[str, Any] = json.loads(self.machine.snapshot())
        name = os.environ.get("PLIMSOLL_RAY_DEVICE", "cpu").partition("=")[0]
        return next((device for device in snapshot["devices"] if device["name"] == name), None)


def listening_ports(root: Path = Path("/proc/net")) -> set[int]:
    """Returns the TCP ports on which programs of this machine accept connections."""
    listening = set[int]()
    for name in ("tcp", "tcp6"):
        try:
            rows = (root / name).read_text().splitlines()[1:]
        except OSError:
            continue
        # The second field is ADDRESS:PORT in hexadecimal, the fourth the state; 0A is LISTEN.
        fields = [row.split() for row in rows]
        listening |= {int(field[1].rpartition(":")[2], 16) for field in fields if len(field) > 3 and field[3] == "0A"}
    return listening


def try_ports(targets: Iterable[tuple[str, int]], timeout_seconds: float = PORT_TIMEOUT_SECONDS) -> list[str]:
    """Tries to connect to addresses, several at a time, and sends nothing. Returns the state of each: ``open``, ``refused`` or
    ``silent``.
    """

    def state(target: tuple[str, int]) -> str:
        try:
            socket.create_connection(target, timeout=timeout_seconds).close()
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "silent"
        return "open"

    with ThreadPoolExecutor(max_workers=PORTS_AT_ONCE) as threads:
        return list(threads.map(state, targets))


def compare_clock(read: Callable[[], float]) -> Clock:
    """Compares a clock, which ``read`` asks, with that of this machine. The reading with the shortest round trip counts."""
    best = Clock(offset_seconds=0.0, error_seconds=float("inf"))
    for _ in range(CLOCK_READINGS):
        asked, began = time.time(), time.monotonic()
        theirs = read()
        error = (time.monotonic() - began) / 2
        if error < best["error_seconds"]:
            best = Clock(offset_seconds=theirs - (asked + error), error_seconds=error)
    return best


def check() -> Check:
    """Asks all nodes for their versions, clocks and ports. Ends the processes that it starts."""
    import ray

    with connected() as address:
        own_ip = ray.util.get_node_ip_address()
        listed = nodes()
        observers = {node["id"]: _start_observer(node) for node in alive_nodes(listed)}
        try:
            checked = _checked_nodes(listed, observers, own_ip)
            return Check(address=address, nodes=checked, routes=_routes(checked, observers))
        finally:
            for observer in observers.values():
                ray.kill(observer)


def _start_observer(node: Node) -> Any:
    import ray

    # Ray needs unique names.
    name = f"{INSPECTION_OWNER} ({os.getpid()}-{secrets.token_hex(3)})"
    return ray.remote(max_restarts=0)(Observer).options(name=name, **options_for_node(node)).remote()


def _answers(requests: dict[str, Any]) -> dict[str, Any]:
    """Waits for the answers of all nodes, by node id. The answer of a node that fails is its exception."""
    import ray

    deadline, answers = time.monotonic() + ANSWER_TIMEOUT_SECONDS, dict[str, Any]()
    for key, request in requests.items():
        try:
            answers[key] = ray.get(request, timeout=max(deadline - time.monotonic(), 0.1))
        except Exception as error:  # The failure of one node must not hide the others.
            answers[key] = error
    return answers


def _checked_nodes(listed: list[Node], observers: dict[str, Any], own_ip: str) -> list[CheckedNode]:
    """Returns all nodes with the answers of their processes. Machines with several nodes have one clock."""
    import ray

    all_facts = _answers({node_id: observer.facts.remote() for node_id, observer in observers.items()})
    answering = {node_id: observers[node_id] for node_id, found in all_facts.items() if not isinstance(found, Exception)}
    wires = _answers({node_id: observer.wire_ports.remote() for node_id, observer in answering.items()})
    checked, clocks = list[CheckedNode](), dict[str, Clock | None]()
    for node in listed:
        found, fixed = all_facts.get(node["id"]), wires.get(node["id"])
        answers = node["id"] in answering
        if isinstance(found, Exception):
            node["no_answer_reason"] = describe(found)
        if answers and node["ip"] != own_ip and node["ip"] not in clocks:
            clock = observers[node["id"]].clock
            try:
                clocks[node["ip"]] = compare_clock(lambda: ray.get(clock.remote(), timeout=ANSWER_TIMEOUT_SECONDS))  # noqa: B023
            except Exception:
                clocks[node["ip"]] = None
        wire_ports, taken = fixed if isinstance(fixed, (tuple, list)) else ([], [])
        checked.append(
            CheckedNode(
                **node,
                facts=found if answers else None,
                clock=clocks.get(node["ip"]) if answers else None,
                wire_ports=wire_ports,
                wire_ports_taken=taken,
            )
        )
    return checked


def _routes(checked: list[CheckedNode], observers: dict[str, Any]) -> list[Route]:
    """Tries all ports of each node from each other machine. One node of a machine connects for all of its nodes."""
    import ray

    of_ray = {
        entry["NodeID"]: [entry["NodeManagerPort"], entry["ObjectManagerPort"]] for entry in ray.nodes() if entry["Alive"]
    }
    answering = [node for node in checked if node["facts"] is not None]
    sources = {node["ip"]: node for node in reversed(answering)}.values()
    pairs = [(source, target) for source in sources for target in answering if source["ip"] != target["ip"]]
    requests = {
        f"{source['id']} {target['id']}": observers[source["id"]].connect.remote(
            [(target["ip"], port) for port in [*of_ray.get(target["id"], []), *target["wire_ports"]]]
        )
        for source, target in pairs
    }
    answers, routes = _answers(requests), list[Route]()
    for source, target in pairs:
        states = answers[f"{source['id']} {target['id']}"]
        if isinstance(states, Exception):
            continue
        ray_ports = of_ray.get(target["id"], [])
        by_port = dict(zip([*ray_ports, *target["wire_ports"]], states))
        routes.append(
            Route(
                source=source["name"],
                target=target["name"],
                ip=target["ip"],
                silent_ports=[port for port, state in by_port.items() if state == "silent"],
                refused_ports=[port for port in ray_ports if by_port[port] == "refused"],
            )
        )
    return routes


class Watch:
    """The processes on all nodes that read figures, and the newest figures of each."""

    def __init__(self, address: str, own_ip: str) -> None:
        self.address, self.own_ip = address, own_ip
        self.observers = dict[str, Any]()
        #: Unanswered requests, and the newest figures with the time of their arrival, by node id.
        self.asked = dict[str, Any]()
        self.figures = dict[str, tuple[float, dict[str, Any] | None]]()

    def state(self, timeout_seconds: float) -> Watched:
        """Asks each node for its figures, and waits at most ``timeout_seconds`` for them. A node that has not answered the
        last request is not asked again.
        """
        import ray

        listed, unreserved = nodes(), unreserved_resources()
        # A simulated device has no figures of its own, and this machine reads its own devices.
        asked = [node for node in alive_nodes(listed) if not node["simulated"] and node["ip"] != self.own_ip]
        for node in asked:
            observer = self.observers.get(node["id"]) or self.observers.setdefault(node["id"], _start_observer(node))
            if node["id"] not in self.asked:
                self.asked[node["id"]] = observer.figures.remote()
        if self.asked:
            ray.wait(list(self.asked.values()), num_returns=len(self.asked), timeout=timeout_seconds)
        for node_id, request in list(self.asked.items()):
            if ray.wait([request], timeout=0)[0]:
                self._receive(node_id, self.asked.pop(node_id))
        return Watched(
            address=self.address,
            own_ip=self.own_ip,
            nodes=[
                WatchedNode(
                    **node,
                    figures=self._fresh_figures(node["id"]),
                    unreserved_bytes=unreserved_bytes(node, unreserved) if node["alive"] else None,
                )
                for node in listed
            ],
        )

    def _receive(self, node_id: str, request: Any) -> None:
        import ray

        try:
            self.figures[node_id] = (time.monotonic(), ray.get(request))
        except Exception:  # Its process has ended: it is started again at the next request.
            self.observers.pop(node_id, None)

    def _fresh_figures(self, node_id: str) -> dict[str, Any] | None:
        """Returns the figures of a node; ``None`` if it has not answered for some time."""
        arrived, figures = self.figures.get(node_id, (0.0, None))
        return figures if time.monotonic() - arrived < FIGURES_LIFETIME_SECONDS else None

    def end(self) -> None:
        """Ends the processes on the nodes."""
        import ray

        for observer in self.observers.values():
            ray.kill(observer)


def watch(period_seconds: float, output: IO[str], ended: threading.Event) -> None:
    """Prints the state of the cluster as one line per period, until ``ended`` is set."""
    import ray

    with connected() as address:
        watched = Watch(address, ray.util.get_node_ip_address())
        try:
            _print(output, watched.state(START_TIMEOUT_SECONDS))
            while not ended.wait(period_seconds):
                _print(output, watched.state(period_seconds))
        finally:
            watched.end()


def _print(output: IO[str], value: object) -> None:
    output.write(json.dumps(value) + "\n")
    output.flush()


def _wait_for_end(ended: threading.Event) -> None:
    """Waits until the command that started this process closes its end of the pipe, and then ends this process."""
    sys.stdin.buffer.read()
    ended.set()
    # Without a head, calls to Ray never return.
    time.sleep(ANSWER_TIMEOUT_SECONDS)
    os._exit(0)


def main() -> None:
    """Serves one command over standard input and output. A failure is one line, too."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # All other output of this process goes to standard error.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=[ended], daemon=True).start()
    try:
        if sys.argv[1] == "check":
            timer = threading.Timer(CHECK_TIMEOUT_SECONDS, _give_up, [output])
            timer.daemon = True
            timer.start()
            _print(output, check())
        else:
            watch(float(sys.argv[2]), output, ended)
    except BrokenPipeError:
        return
    except PlimsollError as error:
        failure = error
    except Exception as error:
        failure = Bug(describe(error), traceback.format_exc().splitlines()[-3:])
    else:
        os._exit(0)
    _fail(output, failure)


def _give_up(output: IO[str]) -> None:
    """Ends this process with a message that the cluster takes too long."""
    hints = ["to see its state: plimsoll cluster"]
    _fail(output, InputError(f"the cluster does not answer within {CHECK_TIMEOUT_SECONDS:.0f} s", hints))


def _fail(output: IO[str], failure: PlimsollError) -> NoReturn:
    """Prints a failure, and ends this process with its exit code."""
    _print(output, {"error": {"exit": failure.exit_code, "message": failure.message, "hints": failure.hints}})
    os._exit(failure.exit_code)


if __name__ == "__main__":
    main()
