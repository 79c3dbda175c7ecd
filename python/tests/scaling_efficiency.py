"""Measures the scaling efficiency of two unequal simulated devices on two hosts with a link of 1 Gbit/s.

Adapters and the whole model are trained by each device alone on its own host, and by both over Ray.

    python tests/scaling_efficiency.py

prints the table of docs/measured/ray.md. It needs root, iproute2, and half a core that no other program uses.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hosts
from hosts import Host
from plimsoll.ray.cluster import columns
from runs import events

#: Smallest scaling efficiency for adapters: throughput of both together divided by the sum of the separate throughputs.
EFFICIENCY_MIN = 0.9
#: Settings of each training method.
METHODS = {"adapters": ["train.method=lora"], "the whole model": ["train.method=full"]}
#: Rate of the link.
LINK_BYTES_PER_SECOND = 125e6
#: First steps of a run, which are not counted because the team connects in them.
FIRST_STEPS = 2
#: Longest time of a run. A run that hangs ends the script with a traceback.
WATCHDOG_SECONDS = 300
#: The load line of each device, enough to run without recompute and offload.
BUDGET_MIB = 500


@dataclass
class Measured:
    """The measurements of a method."""

    #: Tokens of an optimizer step.
    tokens: int
    #: Step times in seconds of all rounds, by team: ``a``, ``b``, ``both``.
    steps: dict[str, list[float]] = field(default_factory=dict)
    #: The last plan of each team, and the printed rate of the link.
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    link: str = ""

    def rate(self, team: str) -> float:
        """Returns tokens per second, from the median step time."""
        return self.tokens / statistics.median(self.steps[team])

    @property
    def efficiency(self) -> float:
        """Throughput of both devices together, divided by the sum of their separate throughputs."""
        return self.rate("both") / (self.rate("a") + self.rate("b"))

    def row(self, method: str) -> list[str]:
        """Returns the row of the table."""
        rates = {team: plan["predicted"]["tokens_per_second"] for team, plan in self.plans.items()}
        return [
            method,
            *(f"{self.rate(team):.0f}" for team in ("a", "b", "both")),
            f"{self.efficiency:.1%}",
            f"{rates['both'] / (rates['a'] + rates['b']):.1%}",
            self.plans["both"]["parallelism"],
            f"{statistics.median(self.steps['both']):.3f} s",
            f"{self.plans['both']['link_seconds']:.3f} s",
            self.link,
        ]


def write_model(folder: Path, args: argparse.Namespace) -> int:
    """Writes a Llama of 14 million parameters and random tokens. Returns the number of parameters of its adapters."""
    hidden, layers, heads, kv_heads = 384, 8, 12, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": 1024,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = random.Random(1)
    rows = ([draw.randrange(1000) for _ in range(args.sequence + 1)] for _ in range(4 * args.sequences))
    (folder / "train.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    # An empty run file: all values are settings, instead of those of the built-in example.
    (folder / "run.toml").write_text("")
    kv_size = hidden // heads * kv_heads
    # Inputs and outputs of q and o, of k and v, and of the three feed-forward matrices.
    sizes = 2 * (hidden + hidden) + 2 * (hidden + kv_size) + 3 * (hidden + 3 * hidden)
    rank: int = args.rank
    return layers * rank * sizes


def run(host: Host, folder: Path, devices: str, method: str, args: argparse.Namespace) -> tuple[list[float], dict[str, Any], str]:
    """Trains to the end. Returns the step times in seconds, the plan, and the printed output."""
    settings = [
        f"model.path={folder.parent / 'config.json'}",
        "model.init=random",
        f"data.train={folder.parent / 'train.jsonl'}",
        "data.format=tokens",
        f"data.sequence={args.sequence}",
        f"train.steps={FIRST_STEPS + args.steps}",
        f"train.batch_tokens={args.sequences * args.sequence}",
        *METHODS[method],
        f"lora.rank={args.rank}",
        "run.threads=1",
        "run.parallelism=all",
        f"run.dir={folder}",
        f"run.devices={devices},host=1MiB",
    ]
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    words = [word for setting in settings for word in ("--set", setting)]
    trained = host.plimsoll("train", str(folder.parent / "run.toml"), "--no-save", *words)
    faulthandler.cancel_dump_traceback_later()
    assert trained.returncode == 0, trained.stdout + trained.stderr
    seconds = [event["seconds"] for event in events(folder) if event["event"] == "step"]
    return seconds[FIRST_STEPS:], json.loads((folder / "plan.json").read_text()), " ".join(trained.stdout.split())


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures two unequal devices on two hosts, alone and together, over 1 Gbit/s.")
    parser.add_argument("--paces", default="0.3,0.171", help="paces of the devices in CPU cores [default: %(default)s]")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each team, in turn [default: %(default)s]")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each run [default: %(default)s]")
    parser.add_argument("--sequences", type=int, default=40, help="sequences per step [default: %(default)s]")
    parser.add_argument("--sequence", type=int, default=8, help="tokens per sequence [default: %(default)s]")
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapters [default: %(default)s]")
    parser.add_argument("--method", choices=list(METHODS), help="train only this [default: all]")
    args = parser.parse_args()
    hosts.prepare_script()
    words = [f"virtual:{name}={BUDGET_MIB}MiB@{pace}" for name, pace in zip("ab", args.paces.split(","), strict=True)]
    found = {method: Measured(args.sequences * args.sequence) for method in METHODS if args.method in (None, method)}
    with hosts.cluster(words) as there, tempfile.TemporaryDirectory(prefix="plimsoll-scaling-") as tmp:
        adapters = write_model(Path(tmp), args)
        both = ",".join(f"ray:{host.name}/{word}" for host, word in zip(there, words))
        # A single device trains on its own host, without Ray.
        teams = {"a": (there[0], words[0]), "b": (there[1], words[1]), "both": (there[0], both)}
        for number in range(args.rounds):
            for method, measured in found.items():
                for team, (host, devices) in teams.items():
                    folder = Path(tmp) / f"{method}-{team}-{number}".replace(" ", "-")
                    seconds, measured.plans[team], said = run(host, folder, devices, method, args)
                    measured.steps.setdefault(team, []).extend(seconds)
                    median, predicted = statistics.median(seconds), measured.plans[team]["predicted"]["step_seconds"]
                    print(f"{method}, {team}: {median:.3f} s a step, predicted {predicted:.3f} s", flush=True)
                measured.link = said.partition("slowest link: ")[2].partition(" each way")[0]
    print(f"\ngradients of the adapters: {4 * adapters / 1e6:.2f} MB, {4e3 * adapters / LINK_BYTES_PER_SECOND:.1f} ms at 1 Gbit/s\n")
    titles = ["trained", "a alone", "b alone", "together", "efficiency", "predicted", "parallelism", "step", "links", "link"]
    print(columns([titles, *(measured.row(method) for method, measured in found.items())]))
    return 0 if "adapters" not in found or found["adapters"].efficiency >= EFFICIENCY_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
