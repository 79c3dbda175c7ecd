#!/usr/bin/env python3
"""Writes parity/fixtures/, which `cargo test` reads, and compares the committed references with torch.

    parity/run make            # rewrites all cases
    parity/run check           # recomputes the references from the committed models and samples

Each case is a directory; README.md describes its files. References are computed in float64 from the files alone and stored in
float32. reference.json holds the distances of torch's own float32 and of the usual mistakes from the reference. Each tolerance
must lie between the two, which this script asserts.
"""

import argparse
import json
import math
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file

import cases
import reference
from reference import largest, normwise, relative, worst

FIXTURES = Path(__file__).resolve().parent / "fixtures"
FORMAT = 1
TRAINING = reference.Training()
STATED = ("steps", "rows_per_step", "micro_batch", "learning_rate", "betas", "eps", "weight_decay", "clip_norm")

# Largest distance of Plimsoll's f32 from the reference, and its measure.
TOLERANCES = {
    "logits": {"limit": 1e-5, "measure": "worst"},
    "loss": {"limit": 1e-5, "measure": "relative"},
    "norm": {"limit": 1e-4, "measure": "relative"},
    "gradient": {"limit": 1e-4, "measure": "normwise"},
    "after": {"limit": 1e-4, "measure": "normwise"},
}
MARGIN_OF_FLOAT32 = 4.0  # torch's own float32 must be below a tolerance by this factor
MARGIN_OF_MISTAKES = 5.0  # every mistake must be above the tolerance by this factor
# AdamW divides by the size of the gradient: at the first step, an element with only rounding as its gradient moves by the full
# learning rate in either direction. Seeds are chosen so that no gradient element is that close to zero: with noise on every
# element (reference.GRADIENT_NOISE), `after` must stay within its margin.
NOISE_DRAWS = 6
# Keys of `cases.Case.keys` with the values at which they change nothing.
WITHOUT = {
    "sliding_window": 256,  # longer than any sample
    "no_rope_layers": [1] * 8,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "llama_4_scaling_beta": 0.0,
}
CLEAR_LEAD = 2e-2  # smallest lead of a greedy token over the second best, which float32 cannot change


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def training_rows(directory):
    """Returns train.jsonl with one sample per row."""
    return [[sample] for sample in reference.read_samples(directory / "train.jsonl")]


def choose_prompt(directory, count=12):
    """Returns the four-token prefix of a sample with the most different tokens in its clear continuation."""
    model = reference.load(directory)
    samples = reference.read_samples(directory / "train.jsonl")
    found = []
    for prompt in (sample.tokens[:4] for sample in samples):
        tokens, lead = reference.greedy(model, prompt, count)
        if lead > CLEAR_LEAD and cases.END not in tokens:
            found.append((len(set(tokens)), prompt))
    return max(found)[1]


def compute(directory, dtype, prompt):
    """Computes all tensors and numbers of a case from its files in one dtype."""
    batch = reference.read_samples(directory / "batch.jsonl")
    training = reference.read_samples(directory / "train.jsonl")
    model = reference.load(directory, dtype)
    numbers = {"train_file": reference.evaluate(model, training)}
    with torch.no_grad():
        logits = [reference.logits_of(model, sample.tokens) for sample in batch]
        nll = [reference.nll_sum(model, sample).item() for sample in batch]
        packed = reference.packed_logits(model, [sample.tokens for sample in batch[:2]])
    tokens, lead = reference.greedy(model, prompt, 12)
    labelled = [sample.labelled for sample in batch]
    loss, gradient = reference.gradients(model, batch)
    steps = reference.train(model, training_rows(directory), TRAINING)
    numbers |= {
        "batch": {"loss": loss, "tokens": sum(labelled), "nll": nll, "labelled": labelled},
        "packed": {"samples": [0, 1], "differs_from_alone": worst(packed, torch.cat(logits[:2]))},
        "greedy": {"prompt": prompt, "tokens": tokens, "smallest_lead": lead},
        "steps": steps,
        "batch_after": reference.evaluate(model, batch),
    }
    return {"logits": dict(enumerate(logits)), "grad": gradient, "after": weights_of(model)}, numbers


def distances(directory, tensors, numbers):
    """Returns the distances of torch's float32 from the float64 reference, in the measures of the tolerances."""
    tensors32, numbers32 = compute(directory, torch.float32, numbers["greedy"]["prompt"])
    losses = [relative(a["loss"], b["loss"]) for a, b in zip(numbers32["steps"], numbers["steps"])]
    losses.append(relative(numbers32["batch"]["loss"], numbers["batch"]["loss"]))
    norms = [relative(a["norm"], b["norm"]) for a, b in zip(numbers32["steps"], numbers["steps"])]
    assert numbers32["greedy"]["tokens"] == numbers["greedy"]["tokens"]
    noisy = reference.trained_with_noise(directory, training_rows(directory), TRAINING, NOISE_DRAWS)
    with_noise = [largest(normwise, weights_of(model), tensors["after"]) for model in noisy]
    return {
        "logits": largest(worst, tensors32["logits"], tensors["logits"]),
        "loss": max(losses),
        "norm": max(norms),
        "gradient": largest(normwise, tensors32["grad"], tensors["grad"]),
        "after": largest(normwise, tensors32["after"], tensors["after"]),
        "after_with_gradient_noise": max(with_noise),
    }


def mistakes(directory, case, tensors, numbers):
    """Returns the distances of the usual mistakes from the reference."""
    found = {"logits": {}, "loss": {}, "after": {}}

    changes = {"rope theta doubled": {"rope_theta": 2 * case.theta}}
    if case.scaling:
        changes["rope scaling left out"] = {"rope_scaling": None}
    if case.eps >= 1e-3:
        changes["norm epsilon 1e-5"] = {"rms_norm_eps": 1e-5}
    if case.local_theta is not None:
        changes["one rotary base"] = cases.local_rotation(rope_type="default", rope_theta=case.theta)
        changes["rope scaling in all layers"] = cases.local_rotation(**case.scaling, rope_theta=case.local_theta)
    for key, value in WITHOUT.items():
        if case.keys.get(key) is not None:
            changes[f"{key} left out"] = {key: value}
    if case.model_type == "qwen2" and not case.keys:
        changes["window not switched off"] = {"use_sliding_window": True, "max_window_layers": 0}
    batch = reference.read_samples(directory / "batch.jsonl")
    for name, changed in changes.items():
        with tempfile.TemporaryDirectory() as wrong:
            wrong = Path(wrong)
            for file in directory.glob("model*"):
                shutil.copy(file, wrong)
            cases.write_config(wrong, case, **changed)
            model = reference.load(wrong)
            with torch.no_grad():
                logits = {i: reference.logits_of(model, sample.tokens) for i, sample in enumerate(batch)}
            found["logits"][name] = largest(worst, logits, tensors["logits"])

    loss, nll, labelled = (numbers["batch"][key] for key in ("loss", "nll", "labelled"))
    means = sum(n / count for n, count in zip(nll, labelled)) / len(nll)
    found["loss"]["mean of the samples' means"] = relative(means, loss)
    unshifted = sum(sum(label != reference.IGNORED for label in sample.labels) for sample in batch)
    found["loss"]["label of position 0 counted"] = relative(sum(nll) / unshifted, loss)

    wrong_trainings = {
        "means of micro-batches averaged": replace(TRAINING, average="means of micro-batches"),
        "not clipped": replace(TRAINING, clip_norm=math.inf),
        "norms and biases decayed": replace(TRAINING, decays=lambda name, p: True),
        "embedding not decayed": replace(TRAINING, decays=lambda name, p: p.ndim == 2 and "embed" not in name),
        "nothing decayed": replace(TRAINING, decays=lambda name, p: False),
        "second beta 0.999": replace(TRAINING, betas=(0.9, 0.999)),
        "samples in another order": replace(TRAINING, micro_batch=4, rows_per_step=5, steps=4),
    }
    for name, wrong in wrong_trainings.items():
        model = reference.load(directory)
        reference.train(model, training_rows(directory), wrong)
        found["after"][name] = largest(normwise, weights_of(model), tensors["after"])
    return found


def assert_tolerances_separate(name, float32, wrong, numbers):
    """Asserts that each tolerance is above the distance of torch's float32 and below that of every mistake."""
    for what, noise in float32.items():
        limit = TOLERANCES[what.removesuffix("_with_gradient_noise")]["limit"]
        assert noise * MARGIN_OF_FLOAT32 <= limit, f"{name}: float32 {what} differs by {noise:.1e}"
    for what, by_mistake in wrong.items():
        for mistake, distance in by_mistake.items():
            assert distance >= MARGIN_OF_MISTAKES * TOLERANCES[what]["limit"], f"{name}: {mistake} shows only {distance:.1e}"
    assert all(step["norm"] > 1.2 * TRAINING.clip_norm for step in numbers["steps"]), f"{name}: clipping does not bind"
    assert numbers["packed"]["differs_from_alone"] < 1e-12
    assert len(set(numbers["greedy"]["tokens"])) >= 5, f"{name}: greedy repeats itself"


def rounded(value):
    """Rounds distances to two digits."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return float(f"{value:.1e}")


def make(case, directory):
    shutil.rmtree(directory, ignore_errors=True)
    cases.write_case(directory, case)
    tensors, numbers = compute(directory, torch.float64, choose_prompt(directory))
    float32 = distances(directory, tensors, numbers)
    wrong = mistakes(directory, case, tensors, numbers)
    assert_tolerances_separate(case.name, float32, wrong, numbers)

    stored = {f"{kind}.{name}": t.float().contiguous() for kind, named in tensors.items() for name, t in named.items()}
    save_file(stored, directory / "reference.safetensors")
    training = {key: value for key, value in asdict(TRAINING).items() if key in STATED}
    report = {
        "format": FORMAT,
        "made_by": {
            "command": "parity/run make",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        },
        "case": case.name,
        "about": case.about,
        "seed": case.seed,
        "sequence": case.sequence,
        **numbers,
        "training": training | {
            "optimizer": "adamw",
            "schedule": "constant",
            "warmup_steps": 0,
            "decayed": "parameters with two dimensions: the embedding and the head are among them, norms and biases are not",
        },
        "tolerances": TOLERANCES,
        "float32_distance": rounded(float32),
        "mistake_distance": rounded(wrong),
    }
    (directory / "reference.json").write_text(json.dumps(report, indent=1) + "\n")
    size = sum(file.stat().st_size for file in directory.iterdir())
    noise = " ".join(f"{key} {value:.0e}" for key, value in float32.items())
    print(f"{case.name:28} {size / 1024:4.0f} KiB  float32: {noise}", flush=True)
    return size


def check(directory):
    """Returns the largest distance of the committed references from recomputed ones."""
    committed = json.loads((directory / "reference.json").read_text())
    tensors, numbers = compute(directory, torch.float64, committed["greedy"]["prompt"])
    stored = load_file(directory / "reference.safetensors")
    recomputed = {f"{kind}.{name}": t for kind, named in tensors.items() for name, t in named.items()}
    distance = largest(worst, recomputed, stored)
    distance = max(distance, *(relative(a["loss"], b["loss"]) for a, b in zip(numbers["steps"], committed["steps"])))
    distance = max(distance, relative(numbers["batch"]["loss"], committed["batch"]["loss"]))
    distance = max(distance, relative(numbers["train_file"]["loss"], committed["train_file"]["loss"]))
    same = numbers["greedy"]["tokens"] == committed["greedy"]["tokens"]
    return distance if same else math.inf


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the committed files with torch, write nothing")
    parser.add_argument("--case", help="only this case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [case for case in cases.CASES if arguments.case in (None, case.name)]
    if not arguments.check:
        total = sum(make(case, FIXTURES / case.name) for case in chosen)
        print(f"{total / 1024:.0f} KiB in {len(chosen)} cases")
        return 0
    failed = 0
    for case in chosen:
        distance = check(FIXTURES / case.name)
        good = distance < 1e-6  # rounding to float32 costs 6e-8
        failed += not good
        print(f"{'ok' if good else 'FAIL'} fixture {case.name} {distance:.1e}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
