//! All keys of a run file with their expected values, as error messages state them; and the search for the known key
//! that is most similar to an unknown one.

use plimsoll_core::rung_names;

/// Each `section.key` with a description of its valid values, for messages. Tests compare this list with the structs
/// and with `docs/run-file.md`.
pub(super) const KEYS: &[(&str, &str)] = &[
    ("model.path", "a Hugging Face directory, a config.json, a GGUF file, or a hub id such as \"hub:OWNER/NAME\""),
    ("model.preset", "the name of a known shape, such as \"llama-3.2-1b\""),
    ("model.init", "\"pretrained\" or \"random\""),
    ("model.adapter", "a PEFT directory, or a hub id"),
    ("model.ignore_config_keys", "a list of keys of config.json"),
    ("data.train", "files, globs such as \"data/*.jsonl\", or hub ids such as \"hub:OWNER/NAME\""),
    ("data.eval", "files, globs such as \"data/*.jsonl\", or hub ids such as \"hub:OWNER/NAME\""),
    (
        "data.format",
        "\"auto\", \"text\", \"tokens\", \"messages\", \"sharegpt\", \"alpaca\", \"prompt_completion\", \"preference\", \"prompt\" or \"rollouts\"",
    ),
    ("data.template", "a file, or the name of a built-in chat template, such as \"chatml\""),
    ("data.train_on", "\"assistant\", \"last\", \"all\" or \"completion\""),
    ("data.train_on_end", "\"turn\", \"last\" or \"none\""),
    ("data.not_prefix", "\"split\" or \"refuse\""),
    ("data.sequence", "a whole number of tokens, from 1 to 16777216"),
    ("data.pack", "true or false"),
    ("data.long", "\"split\" or \"refuse\""),
    ("data.shuffle", "true or false"),
    ("data.source", "one or more tables [[data.source]]"),
    ("train.steps", "a whole number, 1 or more"),
    ("train.epochs", "a number above 0"),
    ("train.hours", "a number above 0"),
    ("train.batch_tokens", "a whole number of tokens up to 2147483648, a multiple of data.sequence"),
    ("train.objective", "\"supervised\", \"dpo\" or \"grpo\""),
    ("train.optimizer", "\"adamw\" or \"sgd\""),
    ("train.learning_rate", "a number above 0"),
    ("train.schedule", "\"constant\", \"linear\" or \"cosine\""),
    ("train.warmup_steps", "a whole number, 0 or more"),
    ("train.weight_decay", "a number, 0 or more"),
    ("train.betas", "two numbers, each at least 0 and below 1"),
    ("train.eps", "a number above 0"),
    ("train.clip_norm", "a number, 0 or more (0 clips nothing)"),
    ("train.precision", "\"auto\", \"f32\", \"bf16\" or \"f64\""),
    ("train.method", "\"full\" or \"lora\""),
    ("train.rungs", concat!("a list of ", rung_names!(quoted))),
    ("train.seed", "a whole number, 0 or more"),
    ("train.eval_every", "a whole number of steps, 0 or more"),
    ("train.save_every", "a whole number of steps, 0 or more"),
    ("train.save_every_minutes", "a number, 0 or more"),
    ("train.keep", "a whole number, 1 or more"),
    ("lora.rank", "a whole number from 1 to 262144"),
    ("lora.alpha", "a number above 0"),
    ("lora.rslora", "true or false"),
    ("lora.dropout", "a number, at least 0 and below 1"),
    (
        "lora.targets",
        "\"all-linear\", a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or a regular expression",
    ),
    ("lora.layers", "a list of layers, counted from 0"),
    ("lora.rank_pattern", "regular expressions with ranks, such as { q_proj = 8 }"),
    ("lora.alpha_pattern", "regular expressions with numbers above 0, such as { q_proj = 16 }"),
    ("dpo.beta", "a number above 0"),
    ("dpo.loss_type", "\"sigmoid\", \"hinge\" or \"ipo\""),
    ("dpo.label_smoothing", "a number, at least 0 and below 0.5"),
    ("dpo.reference_free", "true or false"),
    ("grpo.num_generations", "a whole number from 2 to 16777216"),
    ("grpo.prompts_per_step", "a whole number from 1 to 16777216"),
    ("grpo.max_prompt_length", "a whole number of tokens, from 1 to 8388608"),
    ("grpo.max_completion_length", "a whole number of tokens, from 1 to 8388608"),
    ("grpo.temperature", "a number above 0"),
    ("grpo.top_p", "a number above 0, up to 1"),
    ("grpo.top_k", "a whole number, 0 or more (0 for all)"),
    ("grpo.min_p", "a number from 0 to 1"),
    ("grpo.repetition_penalty", "a number above 0"),
    ("grpo.beta", "a number, 0 or more"),
    ("grpo.use_bias_correction_kl", "true or false"),
    ("grpo.epsilon", "a number above 0 and below 1"),
    ("grpo.epsilon_high", "a number above 0"),
    ("grpo.num_iterations", "a whole number from 1 to 16777216"),
    ("grpo.loss_type", "\"grpo\", \"bnpo\", \"dr_grpo\" or \"dapo\""),
    ("grpo.scale_rewards", "\"group\", \"batch\" or \"none\""),
    ("grpo.importance_sampling_level", "\"token\" or \"sequence\""),
    ("grpo.mask_truncated_completions", "true or false"),
    ("grpo.rewards", "a list of rewards, such as [\"exact_match\"] or [\"python:rewards.py:accuracy\"]"),
    ("grpo.reward_weights", "a list of numbers, one for each reward"),
    ("grpo.reward_timeout_seconds", "seconds, from 1 to 86400"),
    ("memory.budget", "a share of what is free, such as \"90%\", or an amount, such as \"6GiB\""),
    ("memory.host", "a share of what is free, such as \"80%\", or an amount, such as \"6GiB\""),
    ("memory.file", "a share of what is free on the disk, such as \"50%\", or an amount, such as \"40GiB\""),
    ("memory.file_dir", "a folder, such as \"/scratch\""),
    ("memory.allow", concat!("a list of ", rung_names!(quoted), ", or \"16,8,4\" for bf16, int8 and nf4")),
    ("recipe.micro_batch", "\"auto\" or a whole number of sequences, from 1 to those of one step"),
    ("recipe.slots", "\"auto\" or a whole number of completions, from 1 to 4096"),
    (
        "recipe.recompute",
        "\"nothing\", \"norms\", \"feed_forward\", \"attention\" or \"block\": one for all layers, or a list with one a layer",
    ),
    ("run.dir", "the path of a folder"),
    ("run.devices", "\"auto\", or devices such as \"cpu=6GiB\" or \"virtual:a=600MiB@1.0,virtual:b=200MiB@0.5\""),
    ("run.max_temperature", "degrees Celsius, from 30 to 120"),
    ("run.heartbeat_seconds", "seconds, from 1 to 3600"),
    ("run.threads", "\"auto\" or a whole number from 1 to 1024"),
    ("run.fallback", "\"cpu\" or \"none\""),
    ("run.parallelism", "\"auto\", \"data\", \"sharded\", \"pipeline\" or \"all\""),
    ("run.nccl", "true or false"),
    ("run.deterministic", "true or false"),
    ("watch.tensorboard", "true or false"),
    ("watch.webhook", "a URL such as \"http://127.0.0.1:8080/plimsoll\""),
];

/// Each key of a table `[[data.source]]`, with a description of its valid values. `--set` takes whole tables only.
pub(super) const SOURCE_KEYS: &[(&str, &str)] = &[
    ("data.source.path", "files, globs such as \"data/*.jsonl\", or hub ids such as \"hub:OWNER/NAME\""),
    ("data.source.weight", "a number above 0"),
    ("data.source.format", "a format, as in data.format"),
    ("data.source.split", "\"train\", \"validation\" or \"test\""),
];

/// Returns the description of the valid values of `section.key`, and `None` for an unknown key.
pub(super) fn expected(key: &str) -> Option<&'static str> {
    KEYS.iter().find(|(known, _)| *known == key).map(|(_, expected)| *expected)
}

/// Returns the description of the valid values of a key of `[[data.source]]`, and `None` for an unknown name.
pub(super) fn expected_in_source(name: &str) -> Option<&'static str> {
    SOURCE_KEYS.iter().find(|(known, _)| last_name(known) == name).map(|(_, expected)| *expected)
}

/// Returns the key of `[[data.source]]`, or else of `[data]`, that is most similar to `name`; `None` if none is similar
/// enough.
pub(super) fn nearest_source_key(name: &str) -> Option<&'static str> {
    let distances = SOURCE_KEYS.iter().map(|(known, _)| (*known, strsim::osa_distance(name, last_name(known))));
    let near = distances.filter(|(_, distance)| *distance <= tolerance(name)).min_by_key(|(_, distance)| *distance);
    near.map(|(known, _)| known).or_else(|| nearest_key("data", name))
}

/// Returns the part of a key after its last dot.
pub(super) fn last_name(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

/// Returns whether there is a section of this name.
pub(super) fn is_section(name: &str) -> bool {
    KEYS.iter().any(|(known, _)| split(known).0 == name)
}

/// Returns the known section that is most similar to a word, and `None` if none is similar enough.
pub(super) fn nearest_section(word: &str) -> Option<&'static str> {
    let distances =
        KEYS.iter().map(|(known, _)| split(known).0).map(|known| (known, strsim::osa_distance(word, known)));
    let near = distances.filter(|(_, distance)| *distance <= tolerance(word));
    near.min_by_key(|(_, distance)| *distance).map(|(known, _)| known)
}

/// Returns the known key that is most similar to `section.name`, and `None` if none is similar enough. Among equally
/// similar names, a key of the same section comes first.
pub(super) fn nearest_key(section: &str, name: &str) -> Option<&'static str> {
    let distances = KEYS.iter().map(|(known, _)| {
        let (known_section, known_name) = split(known);
        (*known, strsim::osa_distance(name, known_name), known_section != section)
    });
    let near = distances.filter(|(_, distance, _)| *distance <= tolerance(name));
    near.min_by_key(|(_, distance, other_section)| (*distance, *other_section)).map(|(known, ..)| known)
}

/// Returns the word of `known` that is most similar to `word`, and `None` if none is similar enough.
pub(super) fn nearest(word: &str, known: impl Iterator<Item = String>) -> Option<String> {
    let distances = known.map(|known| (strsim::osa_distance(word, &known), known));
    distances.filter(|(distance, _)| *distance <= tolerance(word)).min().map(|(_, known)| known)
}

/// Returns the largest edit distance at which a known word counts as similar; longer words allow more.
fn tolerance(word: &str) -> usize {
    (word.chars().count() / 3).max(1)
}

/// Splits `section.key` into section and key. For a word without a dot, the section is empty.
pub(super) fn split(key: &str) -> (&str, &str) {
    key.split_once('.').unwrap_or(("", key))
}

/// Returns the key of the source with the index `index`. Keys count from 1.
pub(super) fn source_key(index: usize) -> String {
    format!("data.source[{}]", index + 1)
}

/// Splits the key of a value of a source, such as `data.source[2].weight`, into the index of the source and the name.
pub(super) fn split_source_key(key: &str) -> Option<(usize, &str)> {
    let (number, name) = key.strip_prefix("data.source[")?.split_once("].")?;
    Some((number.parse::<usize>().ok()?.checked_sub(1)?, name))
}
