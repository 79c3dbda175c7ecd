"""What two machines are worth together over a network of 1 Gbit/s: adapters, and the whole model, trained by each of two unequal
simulated devices on its own host, and by both over Ray.

    python tests/worth.py

prints the table of docs/measured/ray.md. A measurement: it needs root, iproute2, and half a core that nobody else wants.
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

#: Together they have this share of what both do alone, at least, where adapters are trained.
LEAST = 0.9
#: What is trained, and the settings that say so.
METHODS = {"adapters": ["train.method=lora"], "the whole model": ["train.method=full"]}
#: Bytes a second that a link lets through.
LINK = 125e6
#: The first steps of a run are not counted: a team meets in them.
FIRST_STEPS = 2
#: One run takes no longer; one that hangs ends the measurement with the place where it does.
WATCHDOG_SECONDS = 300
#: The load line of each device: nothing has to be computed again, and nothing waits.
MIB = 500


@dataclass
class Measured:
    """What was found of a method."""

    tokens: int
    #: Seconds of steps by who did them, in all rounds.
    steps: dict[str, list[float]] = field(default_factory=dict)
    #: The last plan of each, and what was said of the link.
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    link: str = ""

    def rate(self, who: str) -> float:
        """Tokens a second, by the median of all steps."""
        return self.tokens / statistics.median(self.steps[who])

    @property
    def share(self) -> float:
        """What both do of what each does alone, added up."""
        return self.rate("both") / (self.rate("a") + self.rate("b"))

    def row(self, method: str) -> list[str]:
        """The row of the table."""
        rates = {who: plan["predicted"]["tokens_per_second"] for who, plan in self.plans.items()}
        return [
            method,
            *(f"{self.rate(who):.0f}" for who in ("a", "b", "both")),
            f"{self.share:.1%}",
            f"{rates['both'] / (rates['a'] + rates['b']):.1%}",
            self.plans["both"]["sharing"],
            f"{statistics.median(self.steps['both']):.3f} s",
            f"{self.plans['both']['link_seconds']:.3f} s",
            self.link,
        ]


def write_model(folder: Path, args: argparse.Namespace) -> int:
    """A Llama of 14 million parameters on tokens drawn at random: what is learned does not matter. How many numbers its adapters
    have."""
    hidden, layers, heads, of_values = 384, 8, 12, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": of_values,
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
    # All is set by words: of the built-in example nothing.
    (folder / "run.toml").write_text("")
    values = hidden // heads * of_values
    # In and out of q and o, k and v, and of the three of the feed-forward part.
    ends = 2 * (hidden + hidden) + 2 * (hidden + values) + 3 * (hidden + 3 * hidden)
    rank: int = args.rank
    return layers * rank * ends


def run(host: Host, folder: Path, devices: str, method: str, args: argparse.Namespace) -> tuple[list[float], dict[str, Any], str]:
    """A run, to its end: the seconds of its steps, its plan, and what it said."""
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
        "run.team=all",
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
    parser = argparse.ArgumentParser(description="Two unequal devices on two hosts, alone and together, over 1 Gbit/s.")
    parser.add_argument("--paces", default="0.3,0.171", help="parts of a core that the devices play [default: %(default)s]")
    parser.add_argument("--rounds", type=int, default=2, help="each is measured so often, in turn [default: %(default)s]")
    parser.add_argument("--steps", type=int, default=6, help="of each run [default: %(default)s]")
    parser.add_argument("--sequences", type=int, default=40, help="of a step [default: %(default)s]")
    parser.add_argument("--sequence", type=int, default=8, help="tokens of one [default: %(default)s]")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters [default: %(default)s]")
    parser.add_argument("--method", choices=list(METHODS), help="only this is trained [default: all]")
    args = parser.parse_args()
    hosts.ready_for_script()
    words = [f"virtual:{name}={MIB}MiB@{pace}" for name, pace in zip("ab", args.paces.split(","), strict=True)]
    found = {method: Measured(args.sequences * args.sequence) for method in METHODS if args.method in (None, method)}
    with hosts.cluster(words) as there, tempfile.TemporaryDirectory(prefix="plimsoll-worth-") as tmp:
        adapters = write_model(Path(tmp), args)
        both = ",".join(f"ray:{host.name}/{word}" for host, word in zip(there, words))
        # Each alone is on its own host, without Ray.
        ways = {"a": (there[0], words[0]), "b": (there[1], words[1]), "both": (there[0], both)}
        for number in range(args.rounds):
            for method, measured in found.items():
                for who, (host, devices) in ways.items():
                    folder = Path(tmp) / f"{method}-{who}-{number}".replace(" ", "-")
                    seconds, measured.plans[who], said = run(host, folder, devices, method, args)
                    measured.steps.setdefault(who, []).extend(seconds)
                    median, predicted = statistics.median(seconds), measured.plans[who]["predicted"]["step_seconds"]
                    print(f"{method}, {who}: {median:.3f} s a step, predicted {predicted:.3f} s", flush=True)
                measured.link = said.partition("the slowest link between them: ")[2].partition(" each way")[0]
    print(f"\ngradients of the adapters: {4 * adapters / 1e6:.2f} MB, {4e3 * adapters / LINK:.1f} ms at 1 Gbit/s\n")
    heads = ["trained", "a alone", "b alone", "together", "of the sum", "predicted", "shared", "a step", "of links", "link"]
    print(columns([heads, *(measured.row(method) for method, measured in found.items())]))
    return 0 if "adapters" not in found or found["adapters"].share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
