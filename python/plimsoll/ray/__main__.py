"""``plimsoll join``, ``leave``, ``cluster`` and ``verify``. The command line passes the arguments of these commands to Python."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from plimsoll import errors
from plimsoll._native import printable_text
from plimsoll.ray import local_state, membership, ports
from plimsoll.ray.devices import Device, RayletResources, format_bytes
from plimsoll.ray.failures import to_plimsoll_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        args = _parser().parse_args(arguments)
        return int(args.run(args))
    except (Exception, KeyboardInterrupt) as error:
        failure = to_plimsoll_error(error)
    print(f"error: {failure}", file=sys.stderr)
    if "--json" in arguments:
        content = {"exit": failure.exit_code, "message": failure.message, "hints": failure.hints}
        _print_unchanged(json.dumps({"error": content}))
    return failure.exit_code


def _print(text: str) -> None:
    """Prints text for people, which may name other machines and their devices."""
    _print_unchanged(printable_text(text))


def _warn(text: str) -> None:
    """Prints a warning to standard error."""
    print(printable_text(f"warning: {text}"), file=sys.stderr)


def _print_unchanged(text: str) -> None:
    """Prints a line, such as JSON, to standard output. A closed pipe is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Redirects all further output, including the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """An argument parser with the error messages of the other commands."""

    def error(self, message: str) -> NoReturn:
        """Raises an :class:`plimsoll.InputError`."""
        raise errors.InputError(message, [f"for all options: {self.prog} --help"])

    def parse_args(self, arguments: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parses the arguments, and reports an unknown one with the name of the command."""
        args, rest = self.parse_known_args(arguments)
        if rest:
            message = f"`plimsoll {arguments[0]}` has no option `{rest[0]}`"
            raise errors.InputError(message, [f"for all options: plimsoll {arguments[0]} --help"])
        return args


def _parser() -> Parser:
    parser = Parser(prog="plimsoll")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    join = commands.add_parser("join", help="start a cluster on this machine, or join one")
    join.add_argument("address", nargs="?", help="address of the head: 192.168.1.10, or 192.168.1.10:7300")
    join.add_argument("--head", action="store_true", help="start a cluster with this machine as its head")
    join.add_argument(
        "--token",
        default=os.environ.get("PLIMSOLL_TOKEN"),
        help="token of the cluster [default: PLIMSOLL_TOKEN, which other users cannot see; with --head a random token]",
    )
    join.add_argument("--ip", metavar="A", help="address of this machine, if it has several")
    join.add_argument("--name", help="name of this machine in the cluster [default: its host name]")
    join.add_argument(
        "--devices",
        help="devices to contribute, such as cuda:0, cpu=6GiB or virtual:a=600MiB@0.5 [default: its GPUs, or else the CPU]",
    )
    join.add_argument("--ports", type=int, default=ports.BASE, metavar="FIRST", help="first port of the cluster [default: %(default)s]")
    join.set_defaults(run=_join)

    leave = commands.add_parser("leave", help="stop the cluster processes of this machine, and no others")
    leave.set_defaults(run=_leave)

    cluster = commands.add_parser("cluster", help="list the nodes with their devices, free memory and runs")
    cluster.set_defaults(run=_cluster)

    verify = commands.add_parser("verify", help="test every device and every link of the cluster")
    verify.add_argument("--share", default="25%", metavar="SHARE", help="share of each device's memory to hold [default: %(default)s]")
    verify.add_argument("--seconds", type=float, default=2.0, help="seconds that each device computes [default: %(default)s]")
    verify.set_defaults(run=_verify)
    for command in (cluster, verify):
        command.add_argument("--address", help="address of a cluster that this machine has not joined")
    for command in (join, leave, cluster, verify):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _join(args: argparse.Namespace) -> int:
    if args.head and args.address:
        raise errors.InputError("--head starts a new cluster and takes no address", [f"omit `{args.address}`, or --head"])
    command = ["plimsoll", "join", *(["--head"] if args.head else []), *([args.address] if args.address else [])]
    for flag in ("ip", "name", "devices"):
        if (value := getattr(args, flag)) is not None:
            command += [f"--{flag}", value]
    if args.ports != ports.BASE:
        command += ["--ports", str(args.ports)]
    joined, shares = membership.join(
        head=args.head,
        address=args.address,
        token=args.token,
        ip=args.ip,
        devices=args.devices,
        base_port=args.ports,
        name=args.name,
        command=shlex.join(command),
    )
    token = local_state.token_path().read_text() if joined.head else None
    if args.json:
        _print_unchanged(json.dumps(_as_json(joined, shares, token), indent=2))
        return 0
    _print(f"{'head' if joined.head else 'member'} of the cluster at {joined.address}, as {joined.ip}")
    for (device, resources), raylet in zip(shares, joined.raylets):
        simulated = " (simulated)" if device.simulated else ""
        store = "" if resources.vram_mib is not None else f", {format_bytes(resources.store_bytes)} of it for Ray's object store"
        _print(f"  {raylet.name}{simulated}: {device.model}, {format_bytes(device.budget_bytes)}{store}")
    if token is not None:
        base_port = "" if joined.base_port == ports.BASE else f" --ports {joined.base_port}"
        _print(f"on every other machine: plimsoll join {joined.address} --token {token}{base_port}")
    _print("to list the cluster: plimsoll cluster; to test it: plimsoll verify")
    return 0


def _as_json(
    joined: local_state.Membership, shares: Sequence[tuple[Device, RayletResources]], token: str | None
) -> dict[str, object]:
    """Returns the membership as plain data. Only the head has a token to tell."""
    nodes = [
        {
            "name": raylet.name,
            "model": device.model,
            "simulated": device.simulated,
            "budget_bytes": device.budget_bytes,
            "store_bytes": resources.store_bytes,
        }
        for (device, resources), raylet in zip(shares, joined.raylets)
    ]
    with_token = {} if token is None else {"token": token}
    return {
        "address": joined.address,
        "ip": joined.ip,
        "head": joined.head,
        **with_token,
        "ports": joined.base_port,
        "nodes": nodes,
    }


def _leave(args: argparse.Namespace) -> int:
    if others := membership.other_machines():
        _warn(
            f"this machine is the head of the cluster, so the cluster ends for {', '.join(others)} too: its runs stop, and"
            " resume from their checkpoints in another cluster (plimsoll join --head here, and join on the others)"
        )
    left = membership.leave()
    if args.json:
        address, ended = (None, 0) if left is None else (left[0].address, left[1])
        _print_unchanged(json.dumps({"address": address, "processes_ended": ended, "ends_for": others}, indent=2))
        return 0
    if left is None:
        _print("this machine has joined no cluster")
        return 0
    joined, ended = left
    _print(f"left {joined.address}; processes ended: {ended}")
    return 0


def _cluster(args: argparse.Namespace) -> int:
    from plimsoll.ray import cluster

    with _stdout_to_stderr(), cluster.connected(args.address):
        state = cluster.query_cluster()
    if args.json:
        _print_unchanged(json.dumps(state, indent=2))
    else:
        _print(cluster.table(state))
    joined = None if args.address else local_state.load_membership()
    if joined and (ended := local_state.ended_raylets(joined)):
        names = " and ".join(joined.raylets[index].name for index in ended)
        _warn(f"the raylet of {names} has ended; to start it again: {joined.command}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from plimsoll.ray import cluster, verification

    with _stdout_to_stderr(), cluster.connected(args.address):
        report = verification.verify(share=_share(args.share), seconds=args.seconds)
    if args.json:
        _print_unchanged(json.dumps(report, indent=2))
    else:
        _print(verification.table(report))
    return 0 if report["passed"] else errors.InputError.exit_code


def _stdout_to_stderr() -> contextlib.AbstractContextManager[object]:
    """Redirects standard output to standard error: Ray prints messages about its nodes there."""
    return contextlib.redirect_stdout(sys.stderr)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 0.9:
        raise errors.InputError(f"--share {text}: expected a share above 0% and at most 90%, such as 25%")
    return share


if __name__ == "__main__":
    sys.exit(main())
