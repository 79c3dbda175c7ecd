#!/usr/bin/env python3
"""Compares `plimsoll export` with llama.cpp and with the Python package `gguf`.

    parity/run gguf

The binary is $PLIMSOLL, or target/release/plimsoll. Prints one line per check: ok or FAIL, its name, the distance found and its
limit. Exit code 1 if any failed. llama.cpp is that of the package xllamacpp. Its server runs in this process, with f32 for the
cache of keys and values.

The name of this file is not gguf.py, which would hide the package `gguf`.

The fixtures get a small tokenizer of letters. A wider model with random weights checks the block formats, and trained
tokenizers of each kind check the ids of texts.
"""

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import gguf
import numpy
import safetensors.numpy
import tokenizers
import xllamacpp
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FIXTURES = HERE / "fixtures"
ADAPTED = "llama-gqa-tied"
GREEDY_TOKENS = 64
LOG_PROBABILITY_LIMIT = 1e-4  # largest difference of a log probability, in nats
# Error of our blocks relative to that of llama.cpp, each the root of the mean square of all elements.
ERROR_RATIO_LIMIT = 1.05

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

TEXTS = [
    "Hello world", " leading space", "two  spaces   three", "It's what we're doing; they'll see I'D LIKE", "123456 7.89 1,000",
    "line\nbreak\r\n\n  indented\ttab ", "naïve café Ωμέγα Привет", "日本語のテキスト 中文", "emoji 🙂👩‍👩‍👧 end", "x = f(a[0]) != {1: 'b'}; // ok",
    "", "a", "... --- !!!", "العربية हिन्दी ไทย",
]


# ---------------------------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------------------------


class Plimsoll:
    """The binary with its commands."""

    def __init__(self, binary):
        self.binary = binary

    def run(self, *arguments):
        done = subprocess.run([str(self.binary), *map(str, arguments)], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"{arguments[0]}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def export(self, model, file, file_type, *more):
        return json.loads(self.run("export", model, "--gguf", file, "--type", file_type, "--json", "--quiet", *more))

    def generate(self, model, prompt, count):
        output = self.run("generate", model, "--prompt", prompt, "--max-tokens", count, "--json", "--devices", "cpu")
        return json.loads(output)["tokens"]


class LlamaCpp:
    """A model in llama.cpp."""

    def __init__(self, file):
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_gpu_layers, params.n_ctx, params.n_parallel = 0, 256, 1
        params.warmup, params.verbosity, params.fit_params = False, -1, False
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        # Flash attention computes in f16.
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = 1
        self.server = xllamacpp.Server(params)

    def post(self, path, body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server.listening_address + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def tokenize(self, text):
        return self.post("/tokenize", {"content": text, "add_special": True, "parse_special": False})["tokens"]

    def complete(self, prompt, count, **more):
        settings = {"temperature": 0, "samplers": ["top_k"], "top_k": 1, "return_tokens": True, "cache_prompt": False}
        return self.post("/completion", {"prompt": prompt, "n_predict": count, **settings, **more})

    def log_probabilities(self, prompt, vocab, bias=()):
        """Returns the log probability of each token after a prompt. A bias changes the chosen token, not the probabilities.

        llama.cpp returns no probabilities if the chosen token is a part of a character.
        """
        answer = self.complete(prompt, 1, n_probs=vocab, post_sampling_probs=False, logit_bias=list(bias))
        found = numpy.full(vocab, numpy.nan)
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found


class Checks:
    """Prints checks and counts those that failed."""

    def __init__(self):
        self.failed = 0

    def at_most(self, name, found, limit):
        passed = bool(found <= limit)
        self.failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {found:.3g} (limit {limit:.3g})", flush=True)

    def equal(self, name, found, expected):
        passed = found == expected
        self.failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {name}" + ("" if passed else f": {found!r}, expected {expected!r}"), flush=True)


# ---------------------------------------------------------------------------------------------------
# Models and tokenizers
# ---------------------------------------------------------------------------------------------------


def read_weights(directory):
    """Reads all tensors of a model directory as float32, with their types."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        if file.name == "reference.safetensors":
            continue
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            data = raw[begin:end]
            if entry["dtype"] == "BF16":
                values = (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
            else:
                values = numpy.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]]).astype("<f4")
            tensors[name] = values.reshape(entry["shape"])
    return tensors


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "post_feedforward_layernorm": "post_ffw_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
# Families whose queries and keys rotate neighbours in llama.cpp.
NEIGHBOURS = ("llama", "mistral", "ministral3", "smollm3", "granite")
# In families that norm the output of attention.
OUTPUT_NORMS = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}


def in_gguf(config, weights):
    """Returns the tensors as llama.cpp expects them."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    expected = {}
    for name, values in weights.items():
        module, kind = name.rsplit(".", 1)
        prefix = ""
        if module.startswith("model.layers."):
            layer, module = module.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        if config["model_type"] in NEIGHBOURS and module in ("self_attn.q_proj", "self_attn.k_proj"):
            halves = values.reshape(-1, 2, head // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        family = config["model_type"]
        if family.startswith("gemma") and module.endswith("norm"):
            values = values + numpy.float32(1)
        names = {**NAMES, **OUTPUT_NORMS} if family.startswith(("gemma", "olmo")) else NAMES
        expected[f"{prefix}{names[module]}.{kind}"] = values
    return expected


def write_letters(directory, vocab):
    """Writes a tokenizer with some letters, in which `<s>` is 1 and `<end>` is 2. Nothing precedes a text."""
    letters = [chr(code) for code in range(ord("!"), 127)] + ["Ġ"]
    tokens = ["<pad>", "<s>", "<end>"] + letters[33:58] + ["Ġ"]
    tokens = tokens[: vocab - 1]
    model = models.BPE({token: id for id, token in enumerate(tokens)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def training_text():
    files = sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("crates/plimsoll-train/src/*.rs"))
    return [file.read_text() for file in files] + TEXTS * 20


def train_tokenizer(kind):
    """Trains a tokenizer like that of a published model, with 900 tokens or a few more."""
    special = ["<unk>", "<s>", "<end>"]
    if kind == "llama":
        return train_sentencepiece(special)
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    split = {"llama-bpe": LLAMA3, "smaug-bpe": LLAMA3, "qwen2": QWEN2}.get(kind)
    if split:
        steps = [pre_tokenizers.Split(tokenizers.Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    else:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if kind == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(training_text(), trainer)
    if kind == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def train_sentencepiece(special):
    """Trains a BPE on characters, in which every split of a token into two tokens is a merge, as in published files."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(training_text(), trainers.BpeTrainer(vocab_size=640, special_tokens=special, show_progress=False))
    learned = sorted(trained.get_vocab().items(), key=lambda entry: entry[1])[len(special) :]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + [token for token, _ in learned]
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = []
    for token, _ in learned:
        merges += [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in vocab and token[at:] in vocab]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(special)
    return tokenizer


ABSENT = object()
GEMMA_KEYS = {
    "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "tie_word_embeddings": True, "hidden_act": ABSENT,
    "hidden_activation": "gelu_pytorch_tanh",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# Keys of the families that have some of their own. Texts are longer than windows and original contexts.
FAMILY_KEYS = {
    "gemma2": GEMMA_KEYS | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    "gemma3_text": GEMMA_KEYS | {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "olmo3": {"sliding_window": 16, "rope_theta": 5e5, "rope_scaling": YARN},
    "ministral3": {
        "head_dim": 16, "rope_theta": ABSENT, "rope_parameters": YARN | {
            "rope_theta": 1e4, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
}


def write_model(directory, tokenizer, model_type, hidden, ffn, seed, vocab=None):
    """Writes a model with random weights. The vocabulary may be larger than that of the tokenizer."""
    directory.mkdir()
    generator = numpy.random.default_rng(seed)
    vocab = vocab or tokenizer.get_vocab_size()
    config = {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if model_type == "smollm3":
        config["no_rope_layers"] = [1, 1, 1, 0] * 2
    if model_type == "phi3":
        config["sliding_window"] = 256
    config |= FAMILY_KEYS.get(model_type, {})
    for key in [key for key, value in config.items() if value is ABSENT]:
        del config[key]
    head = hidden // 4
    shapes = {"model.embed_tokens": (vocab, hidden)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        rows = {"self_attn.q_proj": 4, "self_attn.k_proj": 2, "self_attn.v_proj": 2}
        shapes |= {f"model.layers.{layer}.{name}": (count * head, hidden) for name, count in rows.items()}
        shapes[f"model.layers.{layer}.self_attn.o_proj"] = (hidden, 4 * head)
        shapes |= {f"model.layers.{layer}.mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
        shapes[f"model.layers.{layer}.mlp.down_proj"] = (hidden, ffn)
    weights = {f"{name}.weight": generator.normal(0, shape[1] ** -0.5, shape).astype("f4") for name, shape in shapes.items()}
    if model_type == "phi3":
        for at in range(8):
            for fused, parts in {"self_attn.qkv": ("q", "k", "v"), "mlp.gate_up": ("gate", "up")}.items():
                part, name = fused.split(".")[0], f"model.layers.{at}.{fused}_proj.weight"
                weights[name] = numpy.concatenate([weights.pop(f"model.layers.{at}.{part}.{of}_proj.weight") for of in parts])
    is_gemma, is_olmo = model_type.startswith("gemma"), model_type.startswith("olmo")
    of_layer = ["post_feedforward_layernorm" if is_olmo else "input_layernorm", "post_attention_layernorm"]
    if is_gemma:
        of_layer += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms = {"model.norm": hidden} | {f"model.layers.{at}.{name}": hidden for at in range(8) for name in of_layer}
    if is_olmo or model_type == "gemma3_text":
        heads = {"q": 4, "k": 2} if is_olmo else {"q": 1, "k": 1}
        norms |= {f"model.layers.{at}.self_attn.{name}_norm": heads[name] * head for at in range(8) for name in heads}
    centre = 0 if is_gemma else 1
    weights |= {f"{name}.weight": generator.uniform(centre - 0.5, centre + 0.5, size).astype("f4") for name, size in norms.items()}
    if model_type == "qwen2":
        sizes = {"q": 4 * head, "k": 2 * head, "v": 2 * head}
        weights |= {
            f"model.layers.{at}.self_attn.{name}_proj.bias": generator.normal(0, 0.1, size).astype("f4")
            for at in range(8) for name, size in sizes.items()
        }
    (directory / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(weights, directory / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    return config


# ---------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------


def check_tensors(checks, name, file, config, weights, exact):
    """Checks that the package `gguf` reads the file, and that each tensor equals its source in the type of the file."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    expected = in_gguf(config, weights)
    extra = {"rope_freqs.weight"} & tensors.keys()
    checks.equal(f"{name}: names", sorted(tensors), sorted(expected.keys() | extra))
    wrong = []
    for key, values in expected.items():
        tensor = tensors[key]
        if exact and tensor.tensor_type.name in ("Q4_K", "Q5_K", "Q6_K"):
            continue
        stored = numpy.asarray(tensor.data)
        wanted = gguf.quants.quantize(numpy.ascontiguousarray(values), tensor.tensor_type)
        if stored.tobytes() != wanted.tobytes() or [int(size) for size in tensor.shape] != list(values.shape[::-1]):
            wrong.append(f"{key} ({tensor.tensor_type.name})")
    checks.equal(f"{name}: {len(expected)} tensors have the bits of gguf", wrong, [])


def check_fixture(checks, plimsoll, fixture, temp, adapter=None):
    name = f"{fixture.name}/{adapter.name}" if adapter else fixture.name
    model = temp / name.replace("/", "-")
    shutil.copytree(fixture, model, ignore=shutil.ignore_patterns("reference.*", "*.jsonl"))
    config = json.loads((model / "config.json").read_text())
    tokenizer = write_letters(model, config["vocab_size"])
    source, more = model, []
    if adapter:
        source, more = temp / f"{model.name}-merged", ["--adapter", adapter]
        plimsoll.run("export", model, "--adapter", adapter, "--merged", source)
    weights = read_weights(source)
    weights = {key: values for key, values in weights.items() if not (config["tie_word_embeddings"] and key == "lm_head.weight")}
    for file_type in ("f32", "bf16", "f16", "q8_0"):
        file = temp / f"{model.name}-{file_type}.gguf"
        plimsoll.export(model, file, file_type, *more)
        check_tensors(checks, f"{name} {file_type}", file, config, weights, True)
    llama = LlamaCpp(temp / f"{model.name}-f32.gguf")
    prompt = "CABLE FADES"
    ids = tokenizer.encode(prompt).ids
    checks.equal(f"{name}: ids of the prompt", llama.tokenize(prompt), ids)
    ours = plimsoll.generate(source, prompt, GREEDY_TOKENS)
    theirs = llama.complete(ids, GREEDY_TOKENS)["tokens"]
    # llama.cpp leaves out the end token, or keeps it, depending on its version.
    strip = lambda tokens: tokens[:-1] if tokens and tokens[-1] == 2 else tokens
    checks.equal(f"{name}: {len(ours)} greedy tokens", strip(theirs), strip(ours))
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) == "llama3":
        # The fixture scales a shorter context than published models do.
        check_refusal(checks, plimsoll, name, temp / f"{model.name}-f32.gguf", "the divisors in `rope_freqs.weight` are not those")
    else:
        for file_type in ("f32", "bf16", "f16", "q8_0"):
            check_read_back(checks, plimsoll, name, temp / f"{model.name}-{file_type}.gguf", prompt, ours)
    if not adapter:
        check_logits(checks, name, fixture, llama, config["vocab_size"])


def check_refusal(checks, plimsoll, name, file, reason):
    """Checks that a file is not read as a model, and that the reason is named."""
    try:
        plimsoll.generate(file, "A", 1)
        found = "no refusal"
    except RuntimeError as error:
        found = reason if reason in str(error) else str(error)
    checks.equal(f"{name}: refused as a model", found, reason)


def check_read_back(checks, plimsoll, name, file, prompt, ours):
    """Checks that a file is read as a model: the same greedy tokens in f32, and the values of gguf in each type."""
    if file.stem.endswith("f32") and ours:
        checks.equal(f"{name}: greedy tokens of the file", plimsoll.generate(file, prompt, GREEDY_TOKENS), ours)
    back = file.with_suffix(".read")
    shutil.rmtree(back, ignore_errors=True)
    plimsoll.run("export", file, "--merged", back, "--type", "f32", "--quiet")
    config = json.loads((back / "config.json").read_text())
    expected = in_gguf(config, read_weights(back))
    wrong = []
    for tensor in gguf.GGUFReader(file).tensors:
        stored = gguf.quants.dequantize(numpy.asarray(tensor.data), tensor.tensor_type)
        if tensor.name != "rope_freqs.weight" and not numpy.array_equal(stored, expected[tensor.name]):
            wrong.append(f"{tensor.name} ({tensor.tensor_type.name})")
    checks.equal(f"{file.stem}: read values are those of gguf", wrong, [])


def check_logits(checks, name, fixture, llama, vocab):
    """Compares log probabilities at the end of each sample with those of transformers in float64."""
    reference = safetensors.numpy.load_file(fixture / "reference.safetensors")
    worst = 0.0
    for index, line in enumerate((fixture / "batch.jsonl").read_text().splitlines()):
        logits = reference[f"logits.{index}"][-1].astype("f8")
        expected = logits - numpy.log(numpy.exp(logits - logits.max()).sum()) - logits.max()
        found = llama.log_probabilities(json.loads(line)["input_ids"], vocab)
        worst = max(worst, float(numpy.abs(found - expected).max()))
    checks.at_most(f"{name}: log probabilities of llama.cpp", worst, LOG_PROBABILITY_LIMIT)


def check_tokenizer(checks, plimsoll, kind, temp):
    """Checks the ids of texts, with a vocabulary that is larger than that of the tokenizer."""
    tokenizer = train_tokenizer(kind)
    model = temp / f"tokenizer-{kind}"
    write_model(model, tokenizer, "qwen2" if kind == "qwen2" else "llama", 64, 96, 3, tokenizer.get_vocab_size() + 5)
    file = temp / f"tokenizer-{kind}.gguf"
    exported = plimsoll.export(model, file, "f32")
    checks.equal(f"{kind}: name of the pre-tokenizer", exported["pre_tokenizer"], "default" if kind == "llama" else kind)
    llama = LlamaCpp(file)
    differing = [text for text in TEXTS if llama.tokenize(text) != tokenizer.encode(text).ids]
    checks.equal(f"{kind}: ids of {len(TEXTS)} texts", differing, [])
    text = "Plimsoll trains"
    ours = plimsoll.generate(model, text, GREEDY_TOKENS)
    theirs = llama.complete(text, GREEDY_TOKENS)["tokens"]
    checks.equal(f"{kind}: greedy tokens", theirs, ours)
    back = temp / f"tokenizer-{kind}-read"
    plimsoll.run("export", file, "--merged", back, "--quiet")
    read = tokenizers.Tokenizer.from_file(str(back / "tokenizer.json"))
    differing = [text for text in TEXTS if read.encode(text).ids != tokenizer.encode(text).ids]
    checks.equal(f"{kind}: ids of {len(TEXTS)} texts, read from the file", differing, [])
    # Published tokenizers of the kind llama leave out the space that they put before a text.
    decoded = lambda text: tokenizer.decode(tokenizer.encode(text).ids).removeprefix(" " if kind == "llama" else "")
    differing = [text for text in TEXTS if read.decode(read.encode(text).ids) != decoded(text)]
    checks.equal(f"{kind}: texts of ids, read from the file", differing, [])


def check_family(checks, plimsoll, model_type, temp):
    """Checks tensors and greedy tokens of a family whose fixture has no form in GGUF."""
    tokenizer = train_tokenizer("gpt-2")
    # llama.cpp expects some tokens in each model whose name contains phi3.
    model = temp / f"family-{model_type.replace('phi3', 'phi')}"
    config = write_model(model, tokenizer, model_type, 64, 96, 5)
    weights = read_weights(model)
    for file_type in ("f32", "q4_k_m"):
        file = temp / f"{model.name}-{file_type}.gguf"
        plimsoll.export(model, file, file_type)
        check_tensors(checks, f"{model_type} {file_type}", file, config, weights, True)
    llama = LlamaCpp(temp / f"{model.name}-f32.gguf")
    for text in ("The planner computes", "Plimsoll trains"):
        ours = plimsoll.generate(model, text, GREEDY_TOKENS)
        theirs = llama.complete(text, GREEDY_TOKENS)["tokens"]
        checks.equal(f"{model_type}: {len(ours)} greedy tokens", theirs, ours)
        check_read_back(checks, plimsoll, model_type, temp / f"{model.name}-f32.gguf", text, ours)


def ggml_quantize(values, tensor_type):
    """Quantizes with llama.cpp."""
    library = ctypes.CDLL(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")))
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    values = numpy.ascontiguousarray(values, "<f4")
    out = numpy.zeros(gguf.quant_shape_to_byte_shape(values.shape, tensor_type), numpy.uint8)
    quantize(int(tensor_type), values.ctypes.data, out.ctypes.data, 0, *values.shape, None)
    return out


def check_blocks(checks, plimsoll, temp):
    """Checks block formats on a wide model: bits where gguf defines them, errors relative to llama.cpp elsewhere."""
    tokenizer = train_tokenizer("gpt-2")
    mixes = {"q4_0": "Q6_K", "q4_k_m": "Q6_K", "q5_k_m": "Q6_K", "q6_k": "Q6_K", "q8_0": "Q8_0"}
    # Rows of 96 columns have smaller blocks, and rows of 72 columns are f16.
    for hidden, ffn in ((256, 512), (96, 160), (72, 88)):
        model = temp / f"wide-{hidden}"
        config = write_model(model, tokenizer, "llama", hidden, ffn, hidden)
        weights = read_weights(model)
        expected = in_gguf(config, weights)
        prompt = tokenizer.encode("The planner computes").ids
        bias = [[tokenizer.token_to_id("a"), 1e6]]
        exact = temp / f"wide-{hidden}-f32.gguf"
        plimsoll.export(model, exact, "f32")
        base = LlamaCpp(exact).log_probabilities(prompt, config["vocab_size"], bias)
        for file_type, head in mixes.items():
            name, file = f"{hidden} columns, {file_type}", temp / f"wide-{hidden}-{file_type}.gguf"
            plimsoll.export(model, file, file_type)
            check_tensors(checks, name, file, config, weights, True)
            check_read_back(checks, plimsoll, name, file, "", [])
            tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
            if hidden == 256:
                checks.equal(f"{name}: type of the head", tensors["output.weight"].tensor_type.name, head)
            check_errors(checks, name, tensors, expected)
            found = LlamaCpp(file).log_probabilities(prompt, config["vocab_size"], bias)
            divergence = float((numpy.exp(base) * (base - found)).sum())
            checks.at_most(f"{name}: divergence of llama.cpp from f32, nats", divergence, 0.2)


def check_errors(checks, name, tensors, expected):
    """Compares the errors of blocks with those that llama.cpp makes of the same values."""
    squares = {}
    for key, values in expected.items():
        tensor_type = tensors[key].tensor_type
        if tensor_type.name not in ("Q4_K", "Q5_K", "Q6_K"):
            continue
        ours = gguf.quants.dequantize(numpy.asarray(tensors[key].data), tensor_type)
        theirs = gguf.quants.dequantize(ggml_quantize(values, tensor_type), tensor_type)
        sums = squares.setdefault(tensor_type.name, numpy.zeros(3))
        sums += [((back - values).astype("f8") ** 2).sum() for back in (ours, theirs)] + [(values.astype("f8") ** 2).sum()]
    for type_name, (ours, theirs, all_) in squares.items():
        shown = f"{(ours / all_) ** 0.5:.4%} of the values"
        checks.at_most(f"{name}: error of {type_name}, {shown}, ÷ that of llama.cpp", (ours / theirs) ** 0.5, ERROR_RATIO_LIMIT)


def is_exported(fixture):
    """Returns whether a fixture has a form in GGUF; the export refuses all others by name."""
    config = json.loads((fixture / "config.json").read_text())
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    slides = config.get("use_sliding_window", True) and config.get("sliding_window")
    # llama.cpp does not rotate every fourth layer, and these fixtures have two layers.
    rotated = config["model_type"] != "smollm3"
    # Heads that are as wide as the model in all, as llama.cpp expects them of olmo2.
    plain = config["model_type"] != "olmo2"
    # llama.cpp reads the bounds of YaRN's interpolation for this family only.
    bounded = "beta_fast" in scaling and config["model_type"] != "ministral3"
    return rotated and plain and not slides and not bounded and scaling.get("rope_type", scaling.get("type")) != "dynamic"


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    plimsoll = Plimsoll(Path(os.environ.get("PLIMSOLL", ROOT / "target/release/plimsoll")).resolve())
    checks = Checks()
    with tempfile.TemporaryDirectory() as folder:
        temp = Path(folder)
        for fixture in sorted(path.parent for path in FIXTURES.glob("*/config.json")):
            if is_exported(fixture):
                check_fixture(checks, plimsoll, fixture, temp)
        for adapter in sorted(path.parent for path in (FIXTURES / "adapters").glob("*/adapter_config.json")):
            check_fixture(checks, plimsoll, FIXTURES / ADAPTED, temp, adapter)
        for kind in ("gpt-2", "llama-bpe", "smaug-bpe", "qwen2", "smollm", "llama"):
            check_tokenizer(checks, plimsoll, kind, temp)
        for model_type in ("phi3", "smollm3", "olmo2", *FAMILY_KEYS):
            check_family(checks, plimsoll, model_type, temp)
        check_blocks(checks, plimsoll, temp)
    print(f"{checks.failed} checks failed")
    sys.exit(checks.failed > 0)


if __name__ == "__main__":
    main()
