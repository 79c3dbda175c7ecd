"""``plimsoll join``, ``leave``, ``cluster`` and ``verify``: the command line hands these over to Python."""

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
from plimsoll.ray import joining, ours, ports
from plimsoll.ray.devices import Device, Given, readable
from plimsoll.ray.reasons import failure


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command, and says what the program exits with."""
    words = sys.argv[1:] if words is None else list(words)
    try:
        args = _parser().parse_args(words)
        return int(args.run(args))
    except (Exception, KeyboardInterrupt) as error:
        failed = failure(error)
    print(f"error: {failed}", file=sys.stderr)
    if "--json" in words:
        said = {"exit": failed.exit_code, "message": failed.message, "hints": failed.hints}
        _say(json.dumps({"error": said}))
    return failed.exit_code


def _say(text: str) -> None:
    """Prints a line of an answer."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Nobody wants to read on, and there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """One that fails as the other commands do."""

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise errors.InputError(message, [f"what there is: {self.prog} --help"])

    def parse_args(self, words: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """The same; what nobody knows is the command's mistake."""
        args, rest = self.parse_known_args(words)
        if rest:
            unknown = f"`{rest[0]}` is unknown to `plimsoll {words[0]}`"
            raise errors.InputError(unknown, [f"what there is: plimsoll {words[0]} --help"])
        return args


def _parser() -> Parser:
    parser = Parser(prog="plimsoll")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    join = commands.add_parser("join", help="make this machine the head of a cluster, or a part of one")
    join.add_argument("address", nargs="?", help="of the head: 192.168.1.10, or 192.168.1.10:7300")
    join.add_argument("--head", action="store_true", help="start a cluster")
    join.add_argument(
        "--token",
        default=os.environ.get("PLIMSOLL_TOKEN"),
        help="the cluster's [default: PLIMSOLL_TOKEN, which other users do not see]; with --head one is drawn where none is given",
    )
    join.add_argument("--ip", metavar="A", help="this machine's address, where it has several")
    join.add_argument("--name", help="what this machine is called [default: its host name]")
    join.add_argument("--devices", help="what it gives, such as cuda:0, cpu=6GiB or virtual:a=600MiB@0.5 [default: its GPUs, else the processor]")
    join.add_argument("--ports", type=int, default=ports.BASE, metavar="FIRST", help="where the cluster's ports begin [default: %(default)s]")
    join.set_defaults(run=_join)

    leave = commands.add_parser("leave", help="stop what this machine has started, and nothing else")
    leave.set_defaults(run=_leave)

    cluster = commands.add_parser("cluster", help="show the nodes, their devices and free bytes, and what runs where")
    cluster.set_defaults(run=_cluster)

    verify = commands.add_parser("verify", help="try every device and every link of the cluster")
    verify.add_argument("--share", default="25%", metavar="SHARE", help="of each device's memory is held [default: %(default)s]")
    verify.add_argument("--seconds", type=float, default=2.0, help="that each device computes [default: %(default)s]")
    verify.set_defaults(run=_verify)
    for command in (cluster, verify):
        command.add_argument("--address", help="of a cluster that was not joined with `plimsoll join`")
    for command in (join, leave, cluster, verify):
        command.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def _join(args: argparse.Namespace) -> int:
    if args.head and args.address:
        raise errors.InputError("--head starts a cluster of its own", [f"leave out `{args.address}`, or --head"])
    words = ["plimsoll", "join", *(["--head"] if args.head else []), *([args.address] if args.address else [])]
    for flag in ("ip", "name", "devices"):
        if (value := getattr(args, flag)) is not None:
            words += [f"--{flag}", value]
    if args.ports != ports.BASE:
        words += ["--ports", str(args.ports)]
    joined, shares = joining.join(
        head=args.head,
        address=args.address,
        token=args.token,
        ip=args.ip,
        devices=args.devices,
        base=args.ports,
        name=args.name,
        words=shlex.join(words),
    )
    token = ours.token_path().read_text() if joined.head else None
    if args.json:
        _say(json.dumps(_as_json(joined, shares, token), indent=2))
        return 0
    _say(f"{'the head of' if joined.head else 'part of'} the cluster at {joined.address}, as {joined.ip}")
    for (device, given), raylet in zip(shares, joined.raylets):
        simulated = " (simulated)" if device.simulated else ""
        of_which = "" if given.vram_mib is not None else f", {readable(given.store_bytes)} of it for what Ray stores"
        _say(f"  {raylet.name}{simulated}: {device.model}, {readable(device.line_bytes)}{of_which}")
    if token is not None:
        base = "" if joined.base == ports.BASE else f" --ports {joined.base}"
        _say(f"on every other machine: plimsoll join {joined.address} --token {token}{base}")
    _say("see it with: plimsoll cluster; try it with: plimsoll verify")
    return 0


def _as_json(joined: ours.Joined, shares: Sequence[tuple[Device, Given]], token: str | None) -> dict[str, object]:
    """What was joined, for a program. The token is the head's to tell."""
    nodes = [
        {
            "name": raylet.name,
            "model": device.model,
            "simulated": device.simulated,
            "budget_bytes": device.line_bytes,
            "store_bytes": given.store_bytes,
        }
        for (device, given), raylet in zip(shares, joined.raylets)
    ]
    told = {} if token is None else {"token": token}
    return {"address": joined.address, "ip": joined.ip, "head": joined.head, **told, "ports": joined.base, "nodes": nodes}


def _leave(args: argparse.Namespace) -> int:
    if others := joining.others():
        print(
            f"warning: this machine is the head of the cluster, which ends for {', '.join(others)}, too: what runs on it stops, and"
            " goes on from its checkpoint in another one (plimsoll join --head, and join there)",
            file=sys.stderr,
        )
    left = joining.leave()
    if args.json:
        address, ended = (None, 0) if left is None else (left[0].address, left[1])
        _say(json.dumps({"address": address, "processes_ended": ended, "ends_for": others}, indent=2))
        return 0
    if left is None:
        _say("this machine is part of no cluster")
        return 0
    joined, ended = left
    _say(f"left {joined.address}; processes ended: {ended}")
    return 0


def _cluster(args: argparse.Namespace) -> int:
    from plimsoll.ray import cluster

    with _quietly(), cluster.connected(args.address):
        seen = cluster.look()
    _say(json.dumps(seen, indent=2) if args.json else cluster.table(seen))
    joined = None if args.address else ours.known()
    if joined and (ended := ours.ended(joined)):
        gone = " and ".join(joined.raylets[number].name for number in ended)
        print(f"warning: {gone} has ended; it takes part again with: {joined.words}", file=sys.stderr)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from plimsoll.ray import cluster, verifying

    with _quietly(), cluster.connected(args.address):
        report = verifying.verify(share=_share(args.share), seconds=args.seconds)
    _say(json.dumps(report, indent=2) if args.json else verifying.table(report))
    return 0 if report["right"] else errors.InputError.exit_code


def _quietly() -> contextlib.AbstractContextManager[object]:
    """What Ray itself says of its nodes is no part of what a command prints."""
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
