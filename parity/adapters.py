#!/usr/bin/env python3
"""Writes parity/fixtures/adapters/, which `cargo test` reads: adapters written by peft, with references computed by peft.

    parity/run make            # writes them, after the models
    parity/run check           # recomputes the references from the committed adapters

Each adapts the model of a committed case; README.md describes the files. This module lists the adapters and computes their
references. Loading and arithmetic are in reference.py.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import peft
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import reference
from make_fixtures import FIXTURES, MARGIN_OF_FLOAT32, TOLERANCES, TRAINING, training_rows
from reference import largest, normwise, relative

ADAPTERS = FIXTURES / "adapters"
BASE = "llama-gqa-tied"  # two heads share a key head: K and V are narrower than Q
RANK, ALPHA = 4, 8
CONFIGS = {
    "all": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
    "q-v": {"target_modules": ["q_proj", "v_proj"]},
    "k-o-up-down": {"target_modules": ["k_proj", "o_proj", "up_proj", "down_proj"]},
    # A regular expression with a look-ahead, which chooses other modules in each layer.
    "pattern": {"target_modules": r"model\.layers\.\d+\.(?!mlp\.gate)(self_attn|mlp)\..*_proj(?<!1\.mlp\.up_proj)"},
    "excluded": {"target_modules": ["self_attn.q_proj", "v_proj", "up_proj"], "exclude_modules": ["0.self_attn.v_proj"]},
    "layer": {"target_modules": ["k_proj", "down_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "ranks": {
        "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"],
        "rank_pattern": {r"0\.self_attn\..*": 2, "v_proj": 6, "1.mlp.gate_proj": 1},
        "alpha_pattern": {"q_proj": 3, r"layers\.1\.mlp\..*": 5},
    },
}


def write_adapter(directory, base, config, seed):
    """Saves adapters with peft. B is not zero; otherwise half of the gradients would be zero."""
    model = reference.load(base, torch.float32)
    config = LoraConfig(**{"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"} | config)
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = (0.5 * noise / parameter.shape[1] ** 0.5).float()
    model.save_pretrained(directory)
    for file in directory.iterdir():
        if not file.name.startswith("adapter_"):
            file.unlink()
    saved = directory / "adapter_config.json"
    keys = json.loads(saved.read_text())
    keys["base_model_name_or_path"] = Path(base).name  # no path of the machine that made it
    saved.write_text(json.dumps(keys, indent=2, sort_keys=True))


def compute(base, adapter, dtype):
    """Computes the tensors and numbers of adapters on a model."""
    batch = reference.read_samples(base / "batch.jsonl")
    model = reference.load_adapter(base, adapter, dtype)
    loss, gradient = reference.gradients(model, batch)
    # A second copy of the model, because merging changes its weights.
    merged = reference.evaluate(reference.load_adapter(base, adapter, dtype).merge_and_unload(), batch)
    steps = reference.train(model, training_rows(base), TRAINING)
    numbers = {"batch": {"loss": loss}, "merged": merged, "steps": steps, "batch_after": reference.evaluate(model, batch)}
    return {"grad": gradient, "after": reference.adapter_weights(model)}, numbers


def make(name, config):
    base, directory = FIXTURES / BASE, ADAPTERS / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    write_adapter(directory, base, config, 500 + len(config["target_modules"]))
    tensors, numbers = compute(base, directory, torch.float64)
    tensors32, numbers32 = compute(base, directory, torch.float32)
    float32 = {
        "loss": max(relative(a["loss"], b["loss"]) for a, b in zip(numbers32["steps"], numbers["steps"])),
        "norm": max(relative(a["norm"], b["norm"]) for a, b in zip(numbers32["steps"], numbers["steps"])),
        "gradient": largest(normwise, tensors32["grad"], tensors["grad"]),
        "after": largest(normwise, tensors32["after"], tensors["after"]),
    }
    for key, distance in float32.items():
        assert distance * MARGIN_OF_FLOAT32 <= TOLERANCES[key]["limit"], (name, key, distance)
    stored = {f"{kind}.{key}": t.float().contiguous() for kind, named in tensors.items() for key, t in named.items()}
    save_file(stored, directory / "reference.safetensors")
    report = {"format": 1, "made_by": {"command": "parity/run make", "peft": peft.__version__, "torch": torch.__version__},
              "base": BASE, **numbers, "float32_distance": {key: float(f"{d:.1e}") for key, d in float32.items()}}
    (directory / "reference.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"adapters/{name:18} float32: {' '.join(f'{key} {d:.0e}' for key, d in float32.items())}", flush=True)


def check(name):
    """Returns the largest distance of the committed references from recomputed ones."""
    directory = ADAPTERS / name
    committed, stored = json.loads((directory / "reference.json").read_text()), load_file(directory / "reference.safetensors")
    tensors, numbers = compute(FIXTURES / committed["base"], directory, torch.float64)
    recomputed = {f"{kind}.{key}": t for kind, named in tensors.items() for key, t in named.items()}
    losses = [relative(numbers["merged"]["loss"], committed["merged"]["loss"])]
    losses += [relative(a["loss"], b["loss"]) for a, b in zip(numbers["steps"], committed["steps"])]
    return max(largest(normwise, recomputed, stored), *losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the committed files with peft, write nothing")
    parser.add_argument("--only", action="append", metavar="NAME", help="only these adapters")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count = failed = 0
    for name, config in CONFIGS.items():
        if arguments.only and name not in arguments.only:
            continue
        count += 1
        if not arguments.check:
            make(name, config)
            continue
        distance = check(name)
        good = distance < 1e-6
        failed += not good
        print(f"{'ok' if good else 'FAIL'} fixture adapters/{name} {distance:.1e}", flush=True)
    if arguments.check:
        print(f"{count - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
