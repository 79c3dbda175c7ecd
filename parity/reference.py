"""The reference arithmetic: transformers' own models and torch's own AdamW, in float64 and float32.

This module loads model directories, reads the tokens format, and computes loss, gradients, training, packing and greedy
decoding. The models are in cases.py, the fixtures in make_fixtures.py, and all use of Plimsoll in live.py.

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
logging.set_verbosity_error()  # tensors that do not load are an error here

IGNORED = -100  # a label without effect on the loss


# ---------------------------------------------------------------------------------------------------
# Full float64
# ---------------------------------------------------------------------------------------------------


class Widened(TorchFunctionMode):
    """Replaces every explicit float32 in the code that runs inside by float64.

    `model.double()` alone is not a float64 reference: transformers computes the norms, the attention
    softmax, the rotary angles and the loss in float32 for weights of any dtype, so its error
    stays near 1e-7. Inside this mode, the unchanged code computes in float64 throughout. test_reference.py verifies this by
    finite differences.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = lambda value: torch.float64 if value is torch.float32 else value
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def arithmetic(dtype):
    """Returns the mode in which models of this dtype are loaded and run."""
    return Widened() if dtype is torch.float64 else contextlib.nullcontext()


def load(directory, dtype=torch.float64):
    """Loads the model of a Hugging Face directory. Refuses missing, superfluous and misshapen tensors."""
    if not Path(directory).is_dir():
        raise ValueError("no such directory")  # transformers would otherwise look for it on the hub
    with arithmetic(dtype):
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    faults = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if faults:
        raise ValueError(f"{directory}: {faults}")
    return model.eval()  # no dropout


def load_adapter(directory, adapter, dtype=torch.float64):
    """Loads the model with the trainable adapters of a PEFT directory. Refuses adapters that do not match the model."""
    model = PeftModel.from_pretrained(load(directory, dtype), adapter, is_trainable=True, autocast_adapter_dtype=False)
    model = model.to(dtype)  # the file's float32, widened exactly
    written = load_file(Path(adapter) / "adapter_model.safetensors")
    read = adapter_weights(model)
    if {name: t.shape for name, t in written.items()} != {name: t.shape for name, t in read.items()}:
        raise ValueError(f"{adapter}: {sorted(written.keys() ^ read.keys())}")  # peft only warns
    return model.eval()  # no dropout


def trained(model):
    """Returns the trained parameters by their names in files."""
    return [(name.replace(".default.", "."), p) for name, p in model.named_parameters() if p.requires_grad]


def adapter_weights(model):
    """Returns the trained weights of a model with adapters."""
    return {name: p.detach().clone() for name, p in trained(model)}


# ---------------------------------------------------------------------------------------------------
# Samples
# ---------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A line of the tokens format. `labels` are not shifted; the loss does that."""

    tokens: list[int]
    labels: list[int]

    @property
    def labelled(self):
        """Returns the number of predictions that count. No token predicts position 0, so its label never counts."""
        return sum(label != IGNORED for label in self.labels[1:])


def read_samples(path):
    """Reads the samples of a tokens-format .jsonl. Without "labels", every token is its own label."""
    samples = []
    for line in Path(path).read_text().splitlines():
        if line.strip():
            record = json.loads(line)
            sample = Sample(record["input_ids"], record.get("labels", record["input_ids"]))
            assert len(sample.tokens) == len(sample.labels) > 0, line
            samples.append(sample)
    return samples


def rows_of(documents, sequence, pack):
    """Returns rows of `sequence` positions, each a list of samples without attention between them.

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
    """Returns the logits [T, V] of one row of tokens."""
    with arithmetic(model.dtype):
        return model(input_ids=torch.tensor([tokens]), use_cache=False, **inputs).logits[0]


def nll_sum(model, sample):
    """Returns the sum of −log p over the labelled tokens of a sample, a scalar tensor with its graph."""
    logits = logits_of(model, sample.tokens)
    targets = torch.tensor(sample.labels)
    return F.cross_entropy(logits[:-1], targets[1:], ignore_index=IGNORED, reduction="sum")


def evaluate(model, samples):
    """Returns the values of `plimsoll eval --json`: means over all labelled tokens of all samples."""
    with torch.no_grad():
        nll = math.fsum(nll_sum(model, sample).item() for sample in samples)
    tokens = sum(sample.labelled for sample in samples)
    return {"loss": nll / tokens, "perplexity": math.exp(nll / tokens), "tokens": tokens}


def packed_logits(model, documents):
    """Returns the logits [sum of T, V] of documents packed in one row, each with its own attention and positions."""
    lengths = [len(document) for document in documents]
    same = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
    seen = same & torch.ones_like(same).tril()
    window = getattr(model.config, "sliding_window", None)
    near = seen & torch.ones_like(same).triu(1 - (window or len(same)))

    def mask(visible):
        hidden = torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
        return hidden[None, None]

    masks = mask(near)
    if window is not None and getattr(model.config, "layer_types", None):
        masks = {"full_attention": mask(seen), "sliding_attention": masks}
    positions = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        return logits_of(model, sum(documents, []), attention_mask=masks, position_ids=positions[None])


def greedy(model, prompt, count):
    """Decodes `count` tokens greedily. Returns them with the smallest lead of a chosen token over the second best."""
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
    """Returns the loss of a batch and the gradient of every parameter by Hugging Face name."""
    model.zero_grad(set_to_none=True)
    count, total = sum(sample.labelled for sample in samples), 0.0
    for sample in samples:
        loss = nll_sum(model, sample) / count
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in trained(model)}


def matrices_only(name, parameter):
    """Returns whether a parameter decays: matrices including embedding and head do, norms and biases do not."""
    return parameter.ndim == 2


# Relative size of the noise that imitates rounding: normwise the largest error of torch's float32 gradients.
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
    average: str = "tokens of the step"  # or, as a mistake, "means of micro-batches"
    gradient_noise: float = 0.0
    noise_seed: int = 0


def train(model, rows, training=Training()):
    """Trains in place on rows of samples in order. Returns loss, norm before clipping and labelled tokens of each step.

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
    """Yields models trained in float64 with noise on every gradient, as a correct trainer in float32 may produce."""
    for seed in range(draws):
        model = load(directory)
        train(model, rows, replace(training, gradient_noise=GRADIENT_NOISE, noise_seed=seed))
        yield model


# ---------------------------------------------------------------------------------------------------
# Distances of the tolerances
# ---------------------------------------------------------------------------------------------------


def relative(value, reference):
    """Returns |value − reference| / |reference| of two numbers."""
    return abs(value - reference) / abs(reference)


def worst(value, reference):
    """Returns the largest difference of an element divided by the largest element, so that no outlier is averaged out."""
    value, reference = value.double(), reference.double()
    return ((value - reference).abs().max() / reference.abs().max()).item()


def normwise(value, reference):
    """Returns ‖value − reference‖₂ / ‖reference‖₂."""
    value, reference = value.double(), reference.double()
    return ((value - reference).norm() / reference.norm()).item()


def largest(distance, values, references):
    """Returns the largest distance over tensors of equal names."""
    assert values.keys() == references.keys()
    return max(distance(values[name], references[name]) for name in references)
