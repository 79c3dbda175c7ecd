"""``plimsoll verify``: a test of every device and every link of a cluster.

A prober process on each node takes its share of the device's memory, checks that more is refused, and computes. Then each pair
of nodes measures its link. The results are judged in this process.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, TypedDict

from plimsoll import _native
from plimsoll.errors import DoesNotFit, InputError
from plimsoll.ray import ports
from plimsoll.ray.cluster import (
    Facts,
    Node,
    alive_nodes,
    budget_bytes,
    columns,
    facts,
    nodes,
    options_for_node,
    unreserved_bytes,
    unreserved_resources,
)
from plimsoll.ray.devices import format_bytes, parse_devices
from plimsoll.ray.failures import describe
from plimsoll.run_file import settings

if TYPE_CHECKING:
    from typing_extensions import NotRequired

#: Seconds that a node has for each request.
ANSWER_TIMEOUT_SECONDS = 60.0
#: Seconds that a node has to take memory, for each GiB, in addition to those for a request. A busy machine fills it slowly.
TAKE_SECONDS_PER_GIB = 15.0
#: Seconds that a node has to measure its rate. The first measurement of a GPU compiles kernels.
MEASUREMENT_TIMEOUT_SECONDS = 240.0
#: Seconds to wait for memory that a run has just freed before a device counts as busy, and the interval.
BUSY_TIMEOUT_SECONDS, POLL_SECONDS = 3.0, 0.5
#: Largest difference between the clocks of nodes for which no warning is given.
CLOCK_SECONDS_MAX = 1.0
#: Lowest share of the speed of the fastest device of the same model for which no warning is given.
SLOW_SHARE = 0.5


class DeviceResult(TypedDict):
    """The measured results of a device."""

    name: str
    model: str
    simulated: bool
    #: The requested share of the device's memory.
    requested_bytes: int
    #: The memory that the prober then held; ``None`` if it failed or was not started.
    held_bytes: int | None
    #: Whether one byte beyond the share was refused.
    refused_beyond: bool
    tflops: float | None
    #: Whether the device was not tested because runs have reserved its memory.
    busy: bool
    #: ``ok``, or the failure; for a busy device, ``busy`` with its free memory.
    verdict: str
    facts: NotRequired[Facts]


class LinkResult(TypedDict):
    """One direction between two nodes, measured over the connections that runs use."""

    source: str
    target: str
    gigabytes_per_second: float | None
    #: Half of the round-trip time of a message.
    latency_seconds: float | None
    #: The reason if the link was not measured.
    reason: NotRequired[str]


class Report(TypedDict):
    """The results of all devices and links."""

    #: Whether every device and every link works.
    passed: bool
    devices: list[DeviceResult]
    links: list[LinkResult]
    warnings: list[str]


class Prober:
    """The process on a node that tests its device. It runs as an actor of Ray."""

    def __init__(self) -> None:
        import ray

        #: The device in the notation of ``run.devices``; the CPU if the node was not joined with ``plimsoll join``.
        self.device = os.environ.get("PLIMSOLL_RAY_DEVICE", "cpu")
        self.hold: _native.MemoryHold | None = None
        self.server = _native.DeviceServer(ray.util.get_node_ip_address(), ports.wire_ports())

    def facts(self) -> Facts:
        """Returns versions and hardware of the node."""
        return facts()

    def take(self, share_bytes: int) -> tuple[int, bool]:
        """Takes the share of memory. Returns the bytes held, and whether one more byte is refused."""
        self.hold = _native.MemoryHold(share_bytes, 0 if self.device.startswith("cuda") else None)
        self.hold.take(share_bytes)
        held = self.hold.held_bytes()
        try:
            self.hold.take(1)
        except DoesNotFit:
            return held, True
        return held, False

    def compute(self, seconds: float) -> float:
        """Returns floating-point operations per second of f32 matrix products.

        For a GPU this is the rate that the planner uses. Otherwise one thread is measured; a simulated device has a part of it.
        """
        if self.device.startswith("cuda"):
            (spec,) = json.loads(_native.resolve_devices(settings({"run": {"devices": self.device}})))
            return float(spec["rates"]["f32_flops"])
        (attributes,) = parse_devices(self.device)
        return _native.measure_product_flops(1, seconds) * min(attributes["pace"] or 1.0, 1.0)

    def ping(self) -> None:
        """Answers as soon as the process has started."""

    def address(self) -> str:
        """Returns the address at which other probers connect."""
        return self.server.address()

    def measure_link(self, rank: int, addresses: list[str], secret: str) -> tuple[float, float, float] | None:
        """Measures the link to the other prober, which does the same.

        Rank 0 returns bytes per second in both directions and the latency in seconds, rank 1 returns ``None``.
        """
        return self.server.measure_links(rank, addresses, secret)[1 - rank]


def verify(*, share: float, seconds: float) -> Report:
    """Tests all devices at the same time, then the links one after another. Devices with too little free memory are skipped.

    ``share`` is the share of each device's load line to hold, and ``seconds`` the time for which each CPU computes.
    """
    import ray

    listed = nodes()
    alive = alive_nodes(listed)
    if not alive:
        raise InputError("the cluster has no nodes to verify")
    busy = _busy_nodes(alive, share)
    tested = [node for node in alive if node["name"] not in busy]
    prober = ray.remote(max_restarts=0)(Prober)
    suffix = f"{os.getpid()}-{secrets.token_hex(3)}"
    probers = [
        prober.options(name=f"plimsoll verify ({index}-{suffix})", **_actor_options(node, share)).remote()
        for index, node in enumerate(tested)
    ]
    try:
        # All probers are running before clocks are compared and rates measured.
        _responses([one.ping.remote() for one in probers])
        all_facts = _responses([one.facts.remote() for one in probers])
        shares = [_share_bytes(node, share) for node in tested]
        take_seconds = ANSWER_TIMEOUT_SECONDS + TAKE_SECONDS_PER_GIB * max(shares, default=0) / (1 << 30)
        taken = _responses([one.take.remote(own) for one, own in zip(probers, shares)], take_seconds)
        flops = _responses([one.compute.remote(seconds) for one in probers], MEASUREMENT_TIMEOUT_SECONDS)
        judged = {
            node["name"]: _judge(node, _share_bytes(node, share), *responses)
            for node, *responses in zip(tested, all_facts, taken, flops)
        }
        devices = [
            judged.get(node["name"]) or _device_result(node, _share_bytes(node, share), busy[node["name"]], busy=True)
            for node in alive
        ]
        answering = [(node, one) for node, one, fact in zip(tested, probers, all_facts) if not isinstance(fact, Exception)]
        links = [link for one, other in itertools.combinations(answering, 2) for link in _measure_link(one, other)]
    finally:
        for one in probers:
            ray.kill(one)
    passed = all(device["verdict"] == "ok" for device in devices) and not any("reason" in link for link in links)
    return Report(passed=passed, devices=devices, links=links, warnings=warnings(listed, devices))


def _share_bytes(node: Node, share: float) -> int:
    """Returns the share of a device's load line in bytes, rounded down to 2 MiB, the unit of GPU memory."""
    return int(budget_bytes(node) * share) >> 21 << 21


def _busy_nodes(alive: list[Node], share: float) -> dict[str, str]:
    """Returns the verdict, by node name, for each node with too little unreserved memory. Ray would wait until it is freed."""
    deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        unreserved = unreserved_resources()
        lacking = [node for node in alive if unreserved_bytes(node, unreserved) < _share_bytes(node, share)]
        if not lacking or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    busy = dict[str, str]()
    for node in lacking:
        owners = [f"for {reservation['owner']}" for reservation in node["reservations"]]
        verdict = f"busy: {format_bytes(unreserved_bytes(node, unreserved))} of {format_bytes(budget_bytes(node))} are free"
        busy[node["name"]] = f"{verdict}, the rest is reserved {', '.join(owners)}" if owners else verdict
    return busy


def _device_result(
    node: Node,
    requested: int,
    verdict: str,
    held: int | None = None,
    refused: bool = False,
    tflops: float | None = None,
    busy: bool = False,
) -> DeviceResult:
    """Builds the result of a node's device. A device that was not tested has only a verdict."""
    return DeviceResult(
        name=node["name"],
        model=node["model"],
        simulated=node["simulated"],
        requested_bytes=requested,
        held_bytes=held,
        refused_beyond=refused,
        tflops=tflops,
        busy=busy,
        verdict=verdict,
    )


def _actor_options(node: Node, share: float) -> dict[str, Any]:
    """Returns the Ray options of a prober: its node, and a reservation of its share of memory."""
    share_bytes = _share_bytes(node, share)
    memory: dict[str, Any] = (
        {"memory": share_bytes} if node["vram_mib"] is None else {"resources": {"vram_mib": share_bytes >> 20}}
    )
    return {**options_for_node(node), **memory}


def _responses(requests: list[Any], timeout_seconds: float = ANSWER_TIMEOUT_SECONDS) -> list[Any]:
    """Waits for the responses to all requests, and returns them in order. A failed request yields its exception."""
    import ray

    deadline = time.monotonic() + timeout_seconds
    responses: list[Any] = []
    for request in requests:
        try:
            responses.append(ray.get(request, timeout=max(deadline - time.monotonic(), 0.1)))
        except Exception as error:  # It becomes the verdict of the device.
            responses.append(error)
    return responses


def _judge(node: Node, requested: int, node_facts: Any, taken: Any, flops: Any) -> DeviceResult:
    failed = [response for response in (node_facts, taken, flops) if isinstance(response, Exception)]
    held, refused = (None, False) if isinstance(taken, Exception) else taken
    if failed:
        verdict = describe(failed[0])
    elif held != requested:
        verdict = "does not hold its share"
    elif not refused:
        verdict = "takes more than its share"
    else:
        verdict = "ok"
    device = _device_result(node, requested, verdict, held, refused, None if isinstance(flops, Exception) else flops / 1e12)
    if not isinstance(node_facts, Exception):
        device["facts"] = node_facts
    return device


def _measure_link(one: tuple[Node, Any], other: tuple[Node, Any]) -> list[LinkResult]:
    """Measures the link between two nodes, each given with its prober. Returns one result for each direction.

    After a failure, both results contain the reason.
    """
    import ray

    ends = (one, other)
    directions = [
        LinkResult(source=source["name"], target=target["name"], gigabytes_per_second=None, latency_seconds=None)
        for (source, _), (target, _) in (ends, ends[::-1])
    ]
    try:
        addresses = ray.get([prober.address.remote() for _, prober in ends], timeout=ANSWER_TIMEOUT_SECONDS)
        secret = secrets.token_hex(16)
        requests = [prober.measure_link.remote(rank, addresses, secret) for rank, (_, prober) in enumerate(ends)]
        measured, _ = ray.get(requests, timeout=ANSWER_TIMEOUT_SECONDS)
        for direction, bytes_per_second in zip(directions, measured):
            direction["gigabytes_per_second"], direction["latency_seconds"] = bytes_per_second / 1e9, measured[2]
    except Exception as error:  # The failure of one link must not hide the others.
        for direction in directions:
            direction["reason"] = describe(error)
    return directions


def warnings(listed: list[Node], devices: list[DeviceResult]) -> list[str]:
    """Returns findings that are not failures: lost nodes, different versions, clocks, unused cards and slow devices."""
    found = [f"{node['name']} is lost: {node['lost_reason']}" for node in listed if "lost_reason" in node]
    named_facts = [(device["name"], device["facts"]) for device in devices if "facts" in device]
    for key, title in (("python", "Python"), ("ray", "Ray"), ("plimsoll", "Plimsoll"), ("driver", "NVIDIA drivers")):
        versions = {name: str(value) for name, fact in named_facts if (value := dict(fact)[key]) is not None}
        if len(set(versions.values())) > 1:
            found.append(f"{title} differs: " + ", ".join(f"{name} has {version}" for name, version in versions.items()))
    clocks = [fact["clock"] for _, fact in named_facts]
    if clocks and max(clocks) - min(clocks) > CLOCK_SECONDS_MAX:
        found.append(f"clocks are {max(clocks) - min(clocks):.1f} s apart, or a node is slow to answer")
    cards_used = {node["ip"]: 0.0 for node in alive_nodes(listed)}
    for node in listed:
        cards_used[node["ip"]] = cards_used.get(node["ip"], 0.0) + node["gpus"]
    cards_on_bus = {node["ip"]: fact["cards"] for node in listed for name, fact in named_facts if name == node["name"]}
    for ip, count in cards_on_bus.items():
        if count > cards_used[ip]:
            found.append(f"NVIDIA cards of {ip}: {count} installed, {cards_used[ip]:g} used")
    fastest: dict[str, float] = {}
    for device in devices:
        fastest[device["model"]] = max(fastest.get(device["model"], 0.0), device["tflops"] or 0.0)
    for device in devices:
        # The speed of a simulated device is chosen by the user.
        if device["tflops"] is not None and not device["simulated"] and device["tflops"] < SLOW_SHARE * fastest[device["model"]]:
            other = f"another {device['model']} at {fastest[device['model']]:.3f}"
            found.append(f"{device['name']} computes at {device['tflops']:.3f} TFLOP/s, {other}")
    return found


def table(report: Report) -> str:
    """Formats the report as tables with a conclusion."""
    rows = [["device", "requested", "held", "beyond", "TFLOP/s", "verdict"]]
    for device in report["devices"]:
        held = "-" if device["held_bytes"] is None else format_bytes(device["held_bytes"])
        rows.append(
            [
                device["name"] + (" (simulated)" if device["simulated"] else ""),
                "-" if device["busy"] else format_bytes(device["requested_bytes"]),
                held,
                "-" if device["held_bytes"] is None else "refused" if device["refused_beyond"] else "granted",
                "-" if device["tflops"] is None else f"{device['tflops']:.3f}",
                device["verdict"],
            ]
        )
    text = columns(rows)
    if report["links"]:
        links = [["from", "to", "GB/s", "latency"]]
        for link in report["links"]:
            rate, latency = link["gigabytes_per_second"], link["latency_seconds"]
            rate_text = link.get("reason", "-") if rate is None else f"{rate:.3f}"
            links.append([link["source"], link["target"], rate_text, "-" if latency is None else format_seconds(latency)])
        text += "\n\n" + columns(links)
    text += "".join(f"\nwarning: {warning}" for warning in report["warnings"])
    if report["passed"]:
        return text + ("\nevery available device and link works" if report["warnings"] else "\nevery device and link works")
    only_busy = all(device["verdict"] == "ok" or device["busy"] for device in report["devices"])
    tested_work = only_busy and not any("reason" in link for link in report["links"])
    return text + ("\nevery tested device and link works; busy devices were not tested" if tested_work else "\nsome devices or links fail")


def format_seconds(seconds: float) -> str:
    """Formats a short time in milliseconds or microseconds."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
