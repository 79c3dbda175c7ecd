"""The reference arithmetic: transformers' own models and torch's own AdamW, in float64 and float32.

Here live: loading a model directory, reading the tokens format, loss, gradients, training, packing
and greedy decoding. Not here: which models are looked at (cases.py), what is stored
(make_fixtures.py), and anything about Plimsoll itself (live.py).

Shapes: T tokens of a sample, V vocabulary.
"""

import contextlib
import json
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()  # what does not load is an error here, with its names

IGNORED = -100  # a label that counts for nothing


# ---------------------------------------------------------------------------------------------------
# Float64 that is float64
# ---------------------------------------------------------------------------------------------------


class Widened(TorchFunctionMode):
    """Every float32 that the code inside asks for by name becomes float64.

    `model.double()` alone is not a float64 reference: transformers computes the norms, the attention
    softmax, the rotary angles and the loss in float32 whatever the weights are, and its error stays
    near 1e-7. Inside this mode the very same code is float64 throughout. test_reference.py shows it
    by finite differences.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = lambda value: torch.float64 if value is torch.float32 else value
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def arithmetic(dtype):
    """The mode in which models of this dtype are loaded and run."""
    return Widened() if dtype is torch.float64 else contextlib.nullcontext()


def load(directory, dtype=torch.float64):
    """The model of a Hugging Face directory; refuses tensors that are missing, left over or misshapen."""
    if not Path(directory).is_dir():
        raise ValueError("no such directory")  # transformers would look for it on the hub
    with arithmetic(dtype):
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    faults = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if faults:
        raise ValueError(f"{directory}: {faults}")
    return model.eval()  # no dropout


def load_adapter(directory, adapter, dtype=torch.float64):
    """The model with the adapters of a PEFT directory, which alone are trained; refuses adapters that do not go with it."""
    model = PeftModel.from_pretrained(load(directory, dtype), adapter, is_trainable=True, autocast_adapter_dtype=False)
    model = model.to(dtype)  # the file's float32, widened exactly
    written = load_file(Path(adapter) / "adapter_model.safetensors")
    read = adapter_weights(model)
    if {name: t.shape for name, t in written.items()} != {name: t.shape for name, t in read.items()}:
        raise ValueError(f"{adapter}: {sorted(written.keys() ^ read.keys())}")  # peft only warns
    return model.eval()  # no dropout


def trained(model):
    """The parameters that are trained, by the names that files give them."""
    return [(name.replace(".default.", "."), p) for name, p in model.named_parameters() if p.requires_grad]


def adapter_weights(model):
    """What is trained of a model with adapters."""
    return {name: p.detach().clone() for name, p in trained(model)}


# ---------------------------------------------------------------------------------------------------
# Samples
# ---------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A line of the tokens format. `labels` are as given: the shift is the loss's business."""

    tokens: list[int]
    labels: list[int]

    @property
    def labelled(self):
        """How many predictions count. Position 0 is predicted by nothing, so its label never does."""
        return sum(label != IGNORED for label in self.labels[1:])


def read_samples(path):
    """The samples of a tokens-format .jsonl; without "labels" every token is its own label."""
    samples = []
    for line in Path(path).read_text().splitlines():
        if line.strip():
            record = json.loads(line)
            sample = Sample(record["input_ids"], record.get("labels", record["input_ids"]))
            assert len(sample.tokens) == len(sample.labels) > 0, line
            samples.append(sample)
    return samples


def rows_of(documents, sequence, pack):
    """Rows of `sequence` positions, each a list of samples that do not see one another.

    Padded: each document begins a row, and goes on in further rows if it is longer. Packed: documents lie back to
    back, and every `sequence` positions are a row. A part that goes on in the next row still predicts the
    token across the edge; the next part starts without sight of the earlier one, at position 0.
    """
    rows, room = [], 0
    for document in documents:
        length, at = len(document.tokens), 0
        if length < 2:
            continue  # nothing to predict
        # The last token is only a target, but between packed documents it has a position, too.
        while at < (length if pack else length - 1):
            if room == 0 or not pack:
                rows.append([])
                room = sequence
            end = min(at + room, length)
            rows[-1].append(Sample(document.tokens[at: end + 1], document.labels[at: end + 1]))
            room -= end - at
            at = end
    return rows


# ---------------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------------


def logits_of(model, tokens, **inputs):
    """Logits [T, V] of one row of tokens."""
    with arithmetic(model.dtype):
        return model(input_ids=torch.tensor([tokens]), use_cache=False, **inputs).logits[0]


def nll_sum(model, sample):
    """Sum of −log p over the labelled tokens of a sample; a scalar tensor with its graph."""
    logits = logits_of(model, sample.tokens)
    targets = torch.tensor(sample.labels)
    return F.cross_entropy(logits[:-1], targets[1:], ignore_index=IGNORED, reduction="sum")


def evaluate(model, samples):
    """What `plimsoll eval --json` prints: the mean over all labelled tokens of all samples."""
    with torch.no_grad():
        nll = math.fsum(nll_sum(model, sample).item() for sample in samples)
    tokens = sum(sample.labelled for sample in samples)
    return {"loss": nll / tokens, "perplexity": math.exp(nll / tokens), "tokens": tokens}


def packed_logits(model, documents):
    """Logits [sum of T, V] of documents back to back in one row: each sees only itself and counts its own positions."""
    lengths = [len(document) for document in documents]
    same = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
    seen = same & torch.ones_like(same).tril()
    mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        return logits_of(model, sum(documents, []), attention_mask=mask[None, None], position_ids=positions[None])


def greedy(model, prompt, count):
    """The `count` most likely tokens after a prompt, one by one, and the smallest lead of a winner over its runner-up."""
    tokens, lead = list(prompt), math.inf
    with torch.no_grad():
        for _ in range(count):
            best = logits_of(model, tokens)[-1].topk(2)
            lead = min(lead, (best.values[0] - best.values[1]).item())
            tokens.append(best.indices[0].item())
    return tokens[len(prompt):], lead


# ---------------------------------------------------------------------------------------------------
# Backward and steps
# ---------------------------------------------------------------------------------------------------


def gradients(model, samples):
    """The loss of a batch and its gradient for every parameter, by Hugging Face name."""
    model.zero_grad(set_to_none=True)
    count, total = sum(sample.labelled for sample in samples), 0.0
    for sample in samples:
        loss = nll_sum(model, sample) / count
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in trained(model)}


def matrices_only(name, parameter):
    """The rule of weight decay: matrices, the embedding and the head among them; no norms, no biases."""
    return parameter.ndim == 2


# The noise by which rounding is imitated: normwise the worst that torch's float32 shows of a gradient.
GRADIENT_NOISE = 2e-6


@dataclass(frozen=True)
class Training:
    """A few steps of AdamW (Loshchilov and Hutter: decay apart from the gradient), constant rate, no warm-up.

    `decays` and `average` exist so that a wrong trainer can be imitated (make_fixtures.py: mistakes), and
    `gradient_noise` so that a right one in lower precision can: noise of that size, relative to each
    gradient's root mean square, on every element that is not zero.
    """

    steps: int = 5
    rows_per_step: int = 4
    micro_batch: int = 2  # rows
    learning_rate: float = 1e-2
    betas: tuple = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 0.5
    decays: Callable = field(default=matrices_only, repr=False)
    average: str = "tokens of the step"  # or the well-known mistake, "means of micro-batches"
    gradient_noise: float = 0.0
    noise_seed: int = 0


def train(model, rows, training=Training()):
    """Trains in place on rows of samples, in order; returns loss, norm before clipping and labelled tokens of each step.

    The loss of a step is the mean over all of its labelled tokens, however they fall on its micro-batches.
    """
    named = trained(model)
    decayed = [p for name, p in named if training.decays(name, p)]
    others = [p for name, p in named if not training.decays(name, p)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=training.learning_rate,
        betas=training.betas,
        eps=training.eps,
    )
    generator = torch.Generator().manual_seed(training.noise_seed)
    report = []
    for step in range(training.steps):
        batch = rows[step * training.rows_per_step:][: training.rows_per_step]
        assert len(batch) == training.rows_per_step, "too few rows"
        cuts = range(0, len(batch), training.micro_batch)
        micro_batches = [sum(batch[cut: cut + training.micro_batch], []) for cut in cuts]
        labelled = sum(sample.labelled for samples in micro_batches for sample in samples)
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for micro_batch in micro_batches:
            if training.average == "tokens of the step":
                share = 1.0 / labelled
            else:
                share = 1.0 / (len(micro_batches) * sum(sample.labelled for sample in micro_batch))
            part = sum(nll_sum(model, sample) for sample in micro_batch) * share
            part.backward()
            loss += part.item()
        if training.gradient_noise:
            for _, p in named:
                noise = torch.randn(p.shape, generator=generator, dtype=p.dtype) * (p.grad != 0)
                p.grad += training.gradient_noise * p.grad.square().mean().sqrt() * noise
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm).item()
        optimizer.step()
        report.append({"loss": loss, "norm": norm, "tokens": labelled})
    return report


def trained_with_noise(directory, rows, training, draws):
    """The models that a right trainer in float32 may end with: of float64, with noise on every gradient."""
    for seed in range(draws):
        model = load(directory)
        train(model, rows, replace(training, gradient_noise=GRADIENT_NOISE, noise_seed=seed))
        yield model


# ---------------------------------------------------------------------------------------------------
# Distances, as the tolerances use them
# ---------------------------------------------------------------------------------------------------


def relative(value, reference):
    """|value − reference| / |reference| of two numbers."""
    return abs(value - reference) / abs(reference)


def worst(value, reference):
    """Largest difference of an element over the largest element: nothing can hide in a big tensor."""
    value, reference = value.double(), reference.double()
    return ((value - reference).abs().max() / reference.abs().max()).item()


def normwise(value, reference):
    """‖value − reference‖₂ / ‖reference‖₂."""
    value, reference = value.double(), reference.double()
    return ((value - reference).norm() / reference.norm()).item()


def largest(distance, values, references):
    """The largest distance over tensors of the same names."""
    assert values.keys() == references.keys()
    return max(distance(values[name], references[name]) for name in references)
