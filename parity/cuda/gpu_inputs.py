"""Generated models, data and run files of gpu_check.py."""

import json
import random


def write_config(folder, model, sequence):
    """Writes a config.json of the llama family."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": model["hidden"],
        "num_hidden_layers": model["layers"], "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"], "head_dim": model["hidden"] // model["heads"],
        "intermediate_size": model["ffn"], "vocab_size": model["vocab"], "hidden_act": "silu",
        "max_position_embeddings": max(2048, sequence), "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "initializer_range": 0.02,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def samples(vocab, length, count, seed):
    """Returns random walks through a graph with few successors per token, which a model learns quickly."""
    draw = random.Random(seed)
    followers = [[draw.randrange(3, vocab) for _ in range(3)] for _ in range(vocab)]
    rows = []
    for _ in range(count):
        token = draw.randrange(3, vocab)
        row = [token]
        while len(row) < length:
            token = followers[token][min(2, int(draw.expovariate(1.2)))]
            row.append(token)
        rows.append(row)
    return rows


def write_samples(path, rows):
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))


def settings(values):
    """Returns a --set option for each key. JSON values are valid TOML for all values used here."""
    return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def run_file(folder):
    """Writes an empty run file; without one, plimsoll would train its built-in example."""
    path = folder / "run.toml"
    path.write_text("")
    return path
