#!/usr/bin/env python3
"""Times a training step of Plimsoll and of a peer in turn, and prints medians and their ratio.

    parity/run speed --peer ../shared/peers/torch_step.py [--rounds 5] [-- options of both]

Options after `--` go to both programs (`--layers 12`, `--checkpoint`, `--method lora --base nf4`, ...). The peer also runs
with --compile. Adapters are compared with peft (lora_step.py); --base nf4 needs bitsandbytes in the venv.
Figures from a busy machine are unreliable: each round prints how many other processes used the cores.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def measure(command):
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    return json.loads(output.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="default: torch_step.py, and lora_step.py where --method lora goes to both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("rest", nargs="*")
    a = parser.parse_args()
    adapters = "lora" in a.rest
    peer = a.peer or str(ROOT / "parity/lora_step.py" if adapters else ROOT.parent / "shared/peers/torch_step.py")
    ours = os.environ.get("PLIMSOLL", str(ROOT / "target/release/plimsoll"))
    programs = {
        "plimsoll": [ours, "bench", "step", *a.rest],
        "torch": [sys.executable, peer, *a.rest],
        "torch --compile": [sys.executable, peer, "--compile", *a.rest],
    }
    found = {name: [] for name in programs}
    for number in range(a.rounds):
        for name, command in programs.items():
            report = measure(command)
            found[name].append(report)
            print(f"round {number + 1}  {name:16} {report['tokens_per_second']:8.0f} tokens/s"
                  f"  {report['growth_mib']:7.0f} MiB  load {os.getloadavg()[0]:.1f}", flush=True)
    median = lambda name, key: statistics.median(report[key] for report in found[name])
    print()
    for name in programs:
        speed, growth = median(name, "tokens_per_second"), median(name, "growth_mib")
        print(f"{name:16} {speed:8.0f} tokens/s  {growth:7.0f} MiB")
    best = max(median(name, "tokens_per_second") for name in programs if name != "plimsoll")
    print(f"ours ÷ the better peer: {median('plimsoll', 'tokens_per_second') / best:.2f} × in tokens/s")
    print(f"ours ÷ eager: {median('plimsoll', 'growth_mib') / median('torch', 'growth_mib'):.2f} × in growth of memory")
    last = found["plimsoll"][-1]
    print(f"\nwhere a step of ours goes (last round, timed op by op; limit {last['limit_step_seconds'] * 1e3:.0f} ms):")
    for op, seconds in sorted(last["seconds_by_op"].items(), key=lambda item: -item[1]):
        if seconds > 5e-4:
            print(f"  {op:16} {seconds * 1e3:8.1f} ms")


if __name__ == "__main__":
    main()
