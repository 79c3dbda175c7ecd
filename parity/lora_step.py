#!/usr/bin/env python3
"""Times a training step of adapters on a frozen model in torch and peft.

    parity/run speed -- --method lora [--base nf4] [--dtype bf16] ...

Model, options and figures are those of torch_step.py. peft adds adapters of rank --rank (alpha twice that, no dropout) to
every projection. --base nf4 stores the frozen projections as bitsandbytes' Linear4bit does (blocks of 64,
scales quantized once more, arithmetic in --dtype). Prints one JSON line.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
import time

TORCH_STEP = pathlib.Path(__file__).resolve().parent.parent.parent / "shared/peers/torch_step.py"


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-step", default=str(TORCH_STEP))
    parser.add_argument("--method", choices=["lora"], default="lora")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--base", choices=["plain", "nf4"], default="plain")
    return parser.parse_known_args()


def in_four_bits(torch, model, dtype):
    """Puts Linear4bit where the blocks have Linear."""
    import bitsandbytes as bnb

    for block in model.blocks:
        for name, linear in list(block.named_children()):
            if not isinstance(linear, torch.nn.Linear):
                continue
            coarse = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, compress_statistics=True,
                quant_type="nf4", quant_storage=torch.uint8,
            )
            coarse.weight = bnb.nn.Params4bit(
                linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4",
            )
            setattr(block, name, coarse.to("cpu"))


def main():
    own, rest = parse()
    sys.argv[1:] = rest
    spec = importlib.util.spec_from_file_location("torch_step", own.torch_step)
    torch_step = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(torch_step)
    import torch
    from peft import LoraConfig, get_peft_model

    imported = torch_step.peak_rss_mib()
    a = torch_step.parse()
    torch.manual_seed(0)
    torch.set_num_threads(a.threads)
    dtype = torch.bfloat16 if a.dtype == "bf16" else torch.float32
    model = torch_step.Model(a)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # Frozen weights are stored in the compute dtype only, without a copy in f32, as in Plimsoll.
    model.to(dtype)
    if own.base == "nf4":
        in_four_bits(torch, model, dtype)
    targets = ["q", "k", "v", "o", "gate", "up", "down"]
    model = get_peft_model(model, LoraConfig(r=own.rank, lora_alpha=2 * own.rank, target_modules=targets))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
    step_fn = torch.compile(model) if a.compile else model
    shape = (a.batch, a.sequence)
    data = [[torch.randint(0, a.vocab, shape) for _ in range(2)] for _ in range(a.accumulate)]
    seconds = []
    for _ in range(a.warmup + a.steps):
        start = time.perf_counter()
        for tokens, labels in data:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
                loss = step_fn(tokens, labels) / a.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    timed = seconds[a.warmup:]
    tokens = a.batch * a.sequence * a.accumulate
    peak = torch_step.peak_rss_mib()
    print(json.dumps(dict(
        peer="torch " + torch.__version__ + ", peft", device="cpu", dtype=a.dtype, compile=a.compile,
        checkpoint=a.checkpoint, method="lora", base=own.base, parameters=sum(p.numel() for p in trained),
        tokens_per_step=tokens, step_seconds_median=statistics.median(timed),
        tokens_per_second=tokens / statistics.median(timed),
        peak_rss_mib=peak, import_rss_mib=imported, growth_mib=peak - imported,
    )))


if __name__ == "__main__":
    main()
