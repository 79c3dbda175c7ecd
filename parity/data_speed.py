"""Times the tokenizing of conversations by `plimsoll data` and by `datasets.map` with transformers, in turn.

    parity/run data [--mib 30] [--rounds 3] [--folder DIR]

The conversations are made from source files of the installed packages, which hold prose and code: each turn is a part
of a file. The tokenizer is a byte-level BPE of 32,000 tokens, trained on them, with the word pattern of Llama 3. Both
programs use all cores, start with empty caches, and have to find the same number of tokens and labels.

Prints a line of JSON with medians: seconds, seconds of the processors, MiB of the largest process.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

VOCABULARY = 32_000
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY + 2,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "eos_token_id": VOCABULARY + 1,
}  # fmt: skip
RUN = """\
[model]
path = "model"
init = "random"
[data]
train = "chat.jsonl"
sequence = 1024
[train]
steps = 1
batch_tokens = 1024
[run]
dir = "out"
"""


def read_parts(seed: int):
    """Yields parts of source files of installed packages, of 20 to 1,500 characters, for ever."""
    import transformers

    files = sorted(Path(transformers.__file__).parent.rglob("*.py"))
    choose = random.Random(seed)
    while True:
        text = choose.choice(files).read_text(encoding="utf-8")
        at = 0
        while at < len(text):
            length = choose.choice([20, 60, 200, 600, 1500])
            if part := text[at : at + length].strip():
                yield part
            at += length * choose.randint(1, 4)


def write_conversations(path: Path, size: int) -> None:
    """Writes conversations of one to three turns until the file has `size` bytes."""
    parts, choose = read_parts(7), random.Random(11)
    with path.open("w", encoding="utf-8") as out:
        while out.tell() < size:
            messages = [{"role": "system", "content": next(parts)}] if choose.random() < 0.3 else []
            for _ in range(choose.randint(1, 3)):
                messages.append({"role": "user", "content": next(parts)})
                messages.append({"role": "assistant", "content": next(parts) + "\n" + next(parts)})
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def write_model(folder: Path) -> None:
    """Writes a model without weights: its configuration, tokenizer and chat template."""
    from itertools import islice

    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    steps = [
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(islice(read_parts(3), 40_000), trainer)
    markers = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    CONFIG["vocab_size"] = tokenizer.get_vocab_size()
    CONFIG["eos_token_id"] = tokenizer.token_to_id("<|im_end|>")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def tokenize_with_peer(folder: Path) -> None:
    """Tokenizes the conversations with `datasets.map`, and prints the numbers of tokens and of trained ones."""
    import pyarrow.compute as compute
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def encode(batch):
        encoded = tokenizer.apply_chat_template(
            batch["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        return {name: encoded[name] for name in ("input_ids", "assistant_masks")}

    cache = str(folder / "peer-cache")
    data = load_dataset("json", data_files=str(folder / "chat.jsonl"), split="train", cache_dir=cache)
    data = data.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=data.column_names)
    columns = (data.data.column(name) for name in ("input_ids", "assistant_masks"))
    ids, masks = (compute.list_flatten(column) for column in columns)
    print(json.dumps({"tokens": len(ids), "labelled_tokens": compute.sum(masks).as_py()}))


def measure(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[dict, dict]:
    """Runs a command. Returns its JSON and its figures: seconds, seconds of the processors, MiB of its largest process."""
    # The figures of children are those of all that have ended, so each command has a process of its own around it.
    code = (
        "import json, resource, subprocess, sys, time; began = time.monotonic(); "
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE); seconds = time.monotonic() - began; "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(json.dumps([done.returncode, done.stdout.decode(), seconds, used.ru_utime + used.ru_stime, used.ru_maxrss]))"
    )
    around = [sys.executable, "-c", code, *command]
    done = subprocess.run(around, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
    status, output, seconds, processor, peak = json.loads(done.stdout)
    if status != 0:
        sys.exit(f"{command[0]} ended with {status}: {output}")
    figures = {"seconds": seconds, "processor_seconds": processor, "largest_process_mib": peak / 1024}
    return json.loads(output), figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=30, help="size of the file of conversations")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each program")
    parser.add_argument("--folder", type=Path, default=Path("target/data-speed"), help="for data and caches")
    parser.add_argument("--ours-only", action="store_true", help="leave out the peer")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        return tokenize_with_peer(arguments.peer)
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    program = str(Path(os.environ.get("PLIMSOLL", "target/release/plimsoll")).resolve())
    write_model(folder / "model")
    write_conversations(folder / "chat.jsonl", arguments.mib << 20)
    (folder / "run.toml").write_text(RUN)

    caches = [folder / "cache", folder / "peer-cache"]
    environment = {**os.environ, "PLIMSOLL_CACHE": str(caches[0]), "HF_HUB_OFFLINE": "1"}
    ours, peer = [], []
    for _ in range(arguments.rounds):
        for cache in caches:
            shutil.rmtree(cache, ignore_errors=True)
        found, figures = measure([program, "data", "run.toml", "--json"], folder, environment)
        ours.append(figures)
        if arguments.ours_only:
            continue
        command = [sys.executable, str(Path(__file__).resolve()), "--peer", str(folder)]
        expected, figures = measure(command, folder, environment)
        peer.append(figures)
        if any(found[key] != expected[key] for key in expected):
            sys.exit(f"ours found {found}, the peer {expected}")
    result = {"mib": arguments.mib, "rounds": arguments.rounds, "tokens": found["tokens"]}
    for name, measured in [("ours", ours), ("peer", peer)]:
        if measured:
            result[name] = {key: round(statistics.median(each[key] for each in measured), 1) for key in measured[0]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
