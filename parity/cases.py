"""The small models that are compared, and their directories.

This module holds shapes, config.json in both spellings, random weights and random samples, all as functions of a case and
its seed. Computations with them are in reference.py.
"""

import json
import random
from dataclasses import dataclass, field

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from reference import IGNORED, Sample

ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3",
                 "smollm3": "SmolLM3", "granite": "Granite", "olmo2": "Olmo2", "olmo3": "Olmo3", "gemma2": "Gemma2",
                 "gemma3_text": "Gemma3", "ministral3": "Ministral3"}

END = 2  # the end token; samples hold tokens from 3 on

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Case:
    """A model: the content of its config.json and its files. Sizes are odd, so that no vector width divides them."""

    name: str
    about: str
    model_type: str
    seed: int
    hidden: int = 20
    layers: int = 2
    heads: int = 5
    kv_heads: int = 5
    head_dim: int | None = None  # None: hidden / heads, and no key in the config
    ffn: int = 27
    vocab: int = 53
    tied: bool = False
    theta: float = 10000.0
    scaling: dict | None = None  # in the old spelling, "type" or "rope_type"
    local_theta: float | None = None  # of layers with a window, whose frequencies are not scaled; None: the default
    eps: float = 1e-5
    max_positions: int = 256
    sequence: int = 24  # longest sample
    stored: str = "float32"  # dtype of the files
    spelling: str = "old"  # "old": rope_theta, rope_scaling, torch_dtype · "new": rope_parameters, dtype
    shards: int = 1
    biases: bool = False  # attention_bias and mlp_bias of a llama
    keys: dict = field(default_factory=dict)  # more keys of config.json, in the old spelling


CASES = [
    Case("llama", "as many key and value heads as heads, own output head", "llama", 300),
    Case("llama-gqa-tied", "two heads share a key head, embedding is the head, a norm epsilon that shows", "llama", 202,
         hidden=24, heads=4, kv_heads=2, ffn=35, tied=True, theta=500.0, eps=1e-2),
    Case("llama-one-kv-head", "one key head for all, head size is not hidden / heads", "llama", 203,
         hidden=18, heads=3, kv_heads=1, head_dim=10, ffn=29, vocab=61),
    Case("llama-rope-llama3", "rope scaling llama3: one frequency kept, one blended, two divided", "llama", 104,
         hidden=16, heads=2, kv_heads=1, ffn=25, vocab=47, theta=100.0, scaling={"rope_type": "llama3", **LLAMA3}),
    Case("llama-rope-llama3-new-keys", "the same model, config.json as transformers 5 writes it", "llama", 104,
         hidden=16, heads=2, kv_heads=1, ffn=25, vocab=47, theta=100.0, scaling={"rope_type": "llama3", **LLAMA3},
         spelling="new"),
    Case("llama-rope-linear", "rope scaling linear, spelled with the older key \"type\"", "llama", 105,
         hidden=16, heads=2, kv_heads=2, ffn=21, vocab=59, theta=100.0, scaling={"type": "linear", "factor": 4.0}),
    Case("llama-bf16", "files in bfloat16, arithmetic in float32", "llama", 106,
         hidden=20, heads=5, kv_heads=1, stored="bfloat16"),
    Case("mistral", "grouped heads, no sliding window", "mistral", 107,
         hidden=24, heads=4, kv_heads=2, ffn=33, theta=1e6),
    Case("qwen2", "biases on q, k, v; grouped heads; keys of a window that is switched off", "qwen2", 108,
         hidden=24, heads=6, kv_heads=2, ffn=31, vocab=51, theta=1e6, eps=1e-6),
    Case("qwen2-tied-f16", "files in float16, biases, tied", "qwen2", 414,
         hidden=18, heads=3, kv_heads=3, ffn=37, vocab=57, tied=True, eps=1e-6, stored="float16"),
    Case("qwen3", "norms of each query and key head, head size is not hidden / heads", "qwen3", 110,
         hidden=20, heads=5, kv_heads=1, head_dim=6, ffn=23, theta=1e6, eps=1e-3),
    Case("qwen3-shards-new-keys", "two files with an index, tied, config.json as transformers 5 writes it", "qwen3", 111,
         hidden=16, heads=4, kv_heads=2, head_dim=8, ffn=26, vocab=55, tied=True, theta=1e5, eps=1e-6, spelling="new",
         shards=2),
    Case("llama-rope-yarn", "rope scaling yarn: frequencies kept, blended and divided, and a factor of attention", "llama", 112,
         hidden=16, heads=2, kv_heads=1, ffn=25, vocab=47, theta=100.0,
         scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0}),
    Case("mistral-window", "a sliding window of five keys in all layers", "mistral", 113,
         hidden=24, heads=4, kv_heads=2, ffn=33, keys={"sliding_window": 5}),
    Case("qwen2-window-new-keys", "a sliding window in the second layer only, config.json as transformers 5 writes it", "qwen2",
         214, hidden=24, heads=4, kv_heads=2, ffn=31, vocab=51, eps=1e-6, spelling="new",
         keys={"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}),
    Case("phi3", "fused projections, and a sliding window", "phi3", 115,
         hidden=24, heads=4, kv_heads=2, ffn=33, vocab=59, keys={"sliding_window": 7}),
    Case("smollm3", "rotary positions in the first layer only, tied", "smollm3", 316,
         hidden=24, heads=4, kv_heads=2, ffn=27, vocab=49, theta=1e3, tied=True, keys={"no_rope_layers": [1, 0]}),
    Case("granite", "multipliers of embedding, residuals, attention scores and logits", "granite", 117,
         hidden=20, heads=5, kv_heads=1, ffn=29, vocab=57,
         keys={"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 1.5}),
    Case("olmo2", "norms of outputs, and of all query heads and all key heads together; grouped heads", "olmo2", 118,
         hidden=20, heads=6, kv_heads=3, head_dim=6, ffn=27, vocab=57, theta=1e3, eps=1e-3),
    Case("gemma2", "norms of inputs and outputs around zero, GeGLU, caps of scores and logits, a window in the first layer",
         "gemma2", 219, hidden=20, heads=4, kv_heads=2, head_dim=6, ffn=27, vocab=57, tied=True,
         keys={"sliding_window": 6, "query_pre_attn_scalar": 3, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 4.0}),
    Case("gemma3", "norms of heads around zero, another rotary base in the first layer, which has a window; linear scaling",
         "gemma3_text", 520, hidden=20, heads=4, kv_heads=2, head_dim=6, ffn=27, vocab=57, theta=500.0,
         scaling={"rope_type": "linear", "factor": 4.0}, local_theta=50.0,
         keys={"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 3}),
    Case("olmo3-new-keys", "scaling yarn in the first layer only, another rotary base in the second, which has a window; "
         "config.json as transformers 5 writes it", "olmo3", 321, hidden=20, heads=4, kv_heads=2, head_dim=6, ffn=27, vocab=57,
         theta=100.0, scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0},
         local_theta=40.0, eps=1e-3, spelling="new",
         keys={"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}),
    Case("ministral3", "scaling yarn, and queries that grow at positions 8 and 16", "ministral3", 222,
         hidden=20, heads=4, kv_heads=2, head_dim=6, ffn=27, vocab=57, theta=100.0,
         scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0, "mscale": 1.0,
                  "mscale_all_dim": 1.0}, keys={"llama_4_scaling_beta": 0.5}),
]


# ---------------------------------------------------------------------------------------------------
# config.json
# ---------------------------------------------------------------------------------------------------


def config_of(case):
    """Returns the config.json that is usual for the model type, including keys without effect."""
    config = {
        "architectures": [ARCHITECTURES[case.model_type] + "ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": END,
        "hidden_act": "silu",
        "hidden_size": case.hidden,
        "initializer_range": 0.02,
        "intermediate_size": case.ffn,
        "max_position_embeddings": case.max_positions,
        "model_type": case.model_type,
        "num_attention_heads": case.heads,
        "num_hidden_layers": case.layers,
        "num_key_value_heads": case.kv_heads,
        "rms_norm_eps": case.eps,
        "rope_scaling": case.scaling,
        "rope_theta": case.theta,
        "tie_word_embeddings": case.tied,
        "torch_dtype": case.stored,
        "transformers_version": "4.46.0",
        "use_cache": True,
        "vocab_size": case.vocab,
    }
    if case.head_dim is not None:
        config["head_dim"] = case.head_dim
    config |= {
        "llama": {"attention_bias": case.biases, "mlp_bias": case.biases, "pretraining_tp": 1},
        "mistral": {"sliding_window": None},
        "qwen2": {"max_window_layers": case.layers, "sliding_window": 4, "use_sliding_window": False},
        "qwen3": {"attention_bias": False, "max_window_layers": case.layers, "sliding_window": None,
                  "use_sliding_window": False},
        # The default token for padding is beyond a small vocabulary.
        "phi3": {"embd_pdrop": 0.0, "original_max_position_embeddings": case.max_positions, "pad_token_id": None,
                 "resid_pdrop": 0.0},
        "smollm3": {"attention_bias": case.biases, "mlp_bias": case.biases, "no_rope_layer_interval": 4,
                    "pad_token_id": None, "use_sliding_window": False},
        "granite": {"attention_bias": False, "mlp_bias": False},
        "olmo2": {"attention_bias": False, "pad_token_id": None},
        "gemma2": {"attention_bias": False, "cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh",
                   "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": None},
        "gemma3_text": {"attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": None,
                        "use_bidirectional_attention": False},
        "olmo3": {"attention_bias": False, "pad_token_id": None},
        "ministral3": {"pad_token_id": None, "sliding_window": None},
    }[case.model_type]
    if case.local_theta is not None:
        config |= (
            {"rope_local_base_freq": case.local_theta}
            if case.model_type == "gemma3_text"
            else local_rotation(rope_type="default", rope_theta=case.local_theta)
        )
    return config | case.keys


def local_rotation(**settings):
    """Returns the key of config.json with the rotary settings of layers with a window. The flat keys are those of others."""
    return {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": settings}}


def in_rope_parameters(config, original):
    """Returns the config.json of a ministral3 from one with flat keys, which transformers does not read in this type."""
    scaling = config.pop("rope_scaling") or {"rope_type": "default", "original_max_position_embeddings": original}
    flat = {key: config.pop(key) for key in ("rope_theta", "llama_4_scaling_beta")}
    return config | {"rope_parameters": scaling | flat}


def write_config(directory, case, **changed):
    """Writes config.json in the case's spelling, with some keys changed (old spelling)."""
    config = config_of(case) | changed
    if case.model_type == "ministral3":
        config = in_rope_parameters(config, case.scaling["original_max_position_embeddings"])
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if case.spelling == "new":
        AutoConfig.from_pretrained(directory).save_pretrained(directory)


# ---------------------------------------------------------------------------------------------------
# Weights and samples
# ---------------------------------------------------------------------------------------------------


def random_weights(model, seed, tied):
    """Returns weights that reveal mistakes: logits spread over several units, norms not near 1, biases not near 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            # Norms of Gemma models add 1 to their weights.
            noise = (0.0 if model.config.model_type.startswith("gemma") else 1.0) + 0.3 * noise
        elif name.endswith("bias"):
            noise = 0.5 * noise
        elif name.endswith("embed_tokens.weight"):
            noise = noise * (0.3 if tied else 1.0)
        else:  # twice the scale for the head: peaked predictions without a layer that amplifies rounding
            noise = noise * (2.0 if name.startswith("lm_head") else 1.0) / parameter.shape[1] ** 0.5
        weights[name] = noise.float()
    return weights


def random_samples(count, vocab, longest, rng):
    """Returns samples of different length and labels: all tokens, a masked prompt, some tokens, a single token."""
    samples = []
    for index in range(count):
        tokens = [rng.randrange(3, vocab) for _ in range(longest if index == 1 else rng.randrange(4, longest + 1))]
        labels = list(tokens)
        match index % 4:
            case 1:  # a masked prompt
                prompt = rng.randrange(2, len(tokens) - 1)
                labels[:prompt] = [IGNORED] * prompt
            case 2:  # masked tokens; the label of position 0 stays and has no effect
                for position in range(1, len(tokens)):
                    if rng.random() < 0.5 and position > 1:
                        labels[position] = IGNORED
            case 3:  # one label, which differs from the input token
                labels = [IGNORED] * len(tokens)
                labels[rng.randrange(1, len(tokens))] = rng.randrange(3, vocab)
        samples.append(Sample(tokens, labels))
    return samples


def write_samples(path, samples):
    """Writes samples in the tokens format, without labels that equal the tokens."""
    lines = []
    for sample in samples:
        record = {"input_ids": sample.tokens}
        if sample.labels != sample.tokens:
            record["labels"] = sample.labels
        lines.append(json.dumps(record, separators=(",", ":")) + "\n")
    path.write_text("".join(lines))


def write_model(directory, case):
    """Writes config.json and random safetensors files. As in transformers, files do not contain a tied head."""
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, case)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    stored = getattr(torch, case.stored)
    weights = {name: w.to(stored) for name, w in random_weights(model, case.seed, case.tied).items()}
    if case.shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map, names = {}, sorted(weights)
    for shard in range(case.shards):
        file = f"model-{shard + 1:05}-of-{case.shards:05}.safetensors"
        shard_names = names[shard::case.shards]  # neighbours are in different files
        save_file({name: weights[name] for name in shard_names}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard_names, file)
    size = sum(w.numel() * w.element_size() for w in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def vision_config_of(model_type):
    """Returns the smallest image encoder that a model of this type takes."""
    sizes = {"hidden_size": 16, "image_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
             "patch_size": 4}
    kinds = {"gemma3": "siglip_vision_model", "llava": "clip_vision_model", "mistral3": "pixtral"}
    return {"model_type": kinds[model_type], **sizes}


def write_whole_model(directory, case, text, model_type, prefix):
    """Writes a model that takes images, with the text part in directory `text`. Names of its tensors get `prefix`, and
    config.json leaves out defaults, as transformers 4 wrote both. Without a prefix, transformers 5 writes the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": model_type, "text_config": json.loads((text / "config.json").read_text()),
              "vision_config": vision_config_of(model_type), "tie_word_embeddings": case.tied}
    if model_type == "gemma3":
        config["mm_tokens_per_image"] = 4
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = dict(AutoModelForCausalLM.from_pretrained(text).state_dict())
    whole = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory))
    in_whole = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    _, unexpected = whole.load_state_dict(in_whole, strict=False)
    assert not unexpected, unexpected
    if prefix is None:
        whole.save_pretrained(directory)
        return
    others = {name.removeprefix("model."): w for name, w in whole.state_dict().items() if name not in in_whole}
    kept = {name: w for name, w in weights.items() if not (case.tied and name.startswith("lm_head"))}
    save_file({prefix + name: w.contiguous() for name, w in kept.items()} | others, directory / "model.safetensors",
              metadata={"format": "pt"})


def write_case(directory, case, batch=4, training=20):
    """Writes the input of a case: the model, batch.jsonl and train.jsonl."""
    write_model(directory, case)
    rng = random.Random(case.seed)
    write_samples(directory / "batch.jsonl", random_samples(batch, case.vocab, case.sequence, rng))
    write_samples(directory / "train.jsonl", random_samples(training, case.vocab, case.sequence, rng))
