//! The commands that meet damaged files, and the files that each of them reads.

/// The results of a command that accepts a damaged file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oracle {
    /// The file is an input, so the result may be any.
    Any,
    /// The file decides how the run is executed, so the loss stays the same but for the order of sums.
    Near,
    /// The file is a copy of something that the program can check, so every bit stays the same.
    Same,
}

/// A command, and the files that it reads and that may be damaged.
///
/// In its texts, `MODEL` stands for the folder of one of the models, and `POOL` for the folder of the undamaged files.
pub struct Scenario {
    /// Kind of input in the report.
    pub kind: &'static str,
    /// How often the scenario is drawn, relative to the others.
    pub weight: u64,
    /// Arguments of the command, separated by blanks.
    pub command: &'static str,
    /// Files that may be damaged. A `*` stands for any part of a name.
    pub targets: &'static [&'static str],
    /// Whether the command reads each target in any case, and so has to refuse one that is unreadable.
    pub required: bool,
    /// The results that the command may have.
    pub oracle: Oracle,
    /// Run folder of the command; empty without one.
    pub output: &'static str,
}

const TRAIN: &str = "train run.toml --json --set model.path=MODEL";
const EVAL: &str = "eval MODEL --data data/eval.jsonl --threads 1 --budget 64MiB --devices cpu --json";
const GENERATE: &str = "generate MODEL --prompt sea --max-tokens 3 --threads 1 --budget 64MiB --devices cpu --json";
const WEIGHTS: &[&str] = &["MODEL/*.safetensors", "MODEL/*.safetensors", "MODEL/*.safetensors", "MODEL/*index.json"];

/// Returns a scenario whose files are inputs.
const fn input(
    kind: &'static str,
    weight: u64,
    command: &'static str,
    targets: &'static [&'static str],
    output: &'static str,
) -> Scenario {
    Scenario { kind, weight, command, targets, required: true, oracle: Oracle::Any, output }
}

/// Returns a scenario that resumes a run or reads a cache, so that damage must not change the result.
const fn copy(
    kind: &'static str,
    weight: u64,
    command: &'static str,
    targets: &'static [&'static str],
    oracle: Oracle,
    output: &'static str,
) -> Scenario {
    Scenario { kind, weight, command, targets, required: false, oracle, output }
}

const RESUME: &str = "train --resume run --json --set train.steps=3";
const CACHED: &str =
    "train run.toml --json --set data.train=POOL/data/train.jsonl --set data.eval=POOL/data/eval.jsonl";
const ADAPTER: &[&str] = &["adapter/adapter_config.json", "adapter/adapter_model.safetensors"];

/// All scenarios.
pub const SCENARIOS: &[Scenario] = &[
    input("config", 60, "plan --model MODEL --devices cpu --budget 64MiB --json", &["MODEL/config.json"], ""),
    input("config", 40, TRAIN, &["MODEL/config.json"], "out"),
    input("config", 30, EVAL, &["MODEL/config.json"], ""),
    input("config", 20, TRAIN, &["MODEL/tokenizer_config.json", "MODEL/generation_config.json"], "out"),
    input("config", 15, GENERATE, &["MODEL/generation_config.json"], ""),
    copy("config", 10, TRAIN, &["MODEL/special_tokens_map.json"], Oracle::Any, "out"),
    input("weights", 60, TRAIN, WEIGHTS, "out"),
    input("weights", 30, EVAL, WEIGHTS, ""),
    input("weights", 30, GENERATE, WEIGHTS, ""),
    input("tokenizer", 100, TRAIN, &["MODEL/tokenizer.json"], "out"),
    input("tokenizer", 50, EVAL, &["MODEL/tokenizer.json"], ""),
    input("tokenizer", 50, GENERATE, &["MODEL/tokenizer.json"], ""),
    input("run file", 80, "train run.toml --json", &["run.toml"], "out"),
    input("run file", 80, "train full.toml --json", &["full.toml"], "out"),
    input("run file", 60, "plan full.toml --json", &["full.toml"], ""),
    copy("plan", 60, "train run.toml --json --plan plan.json", &["plan.json"], Oracle::Near, "out"),
    copy(
        "plan",
        60,
        "train run.toml --json --plan team-plan.json --devices virtual:a=64MiB@0.4,virtual:b=48MiB@0.3 --set run.parallelism=all",
        &["team-plan.json"],
        Oracle::Near,
        "out",
    ),
    copy("checkpoint", 140, RESUME, &["run/checkpoints/step-*/*"], Oracle::Same, "run"),
    copy(
        "checkpoint",
        40,
        RESUME,
        &[
            "run/events.jsonl",
            "run/plan.json",
            "run/result.json",
            "run/load-lines.json",
            "run/control.sock",
            "run/model",
        ],
        Oracle::Same,
        "run",
    ),
    copy("checkpoint", 30, RESUME, &["run/run.toml"], Oracle::Any, "run"),
    copy("checkpoint", 15, "train --resume run --json", &["run/*", "run/checkpoints/step-*"], Oracle::Any, "run"),
    input("adapter", 30, "export llama --adapter adapter --merged merged --type f32", ADAPTER, ""),
    input(
        "adapter",
        30,
        "eval llama --adapter adapter --data data/eval.jsonl --threads 1 --budget 64MiB --devices cpu --json",
        ADAPTER,
        "",
    ),
    input("adapter", 30, "train run.toml --json --set train.method=lora --set model.adapter=adapter", ADAPTER, "out"),
    copy("cache", 70, CACHED, &["cache/tokens/*"], Oracle::Same, "out"),
    copy(
        "cache",
        40,
        CACHED,
        &["cache/devices.json", "cache/disks.json", "cache/shortfalls.json"],
        Oracle::Near,
        "out",
    ),
    copy("cache", 10, CACHED, &["cache", "cache/tokens", "cache/tokens/lock"], Oracle::Near, "out"),
    input("data", 50, "train run.toml --json", &["data/train.jsonl", "data/eval.jsonl"], "out"),
    input(
        "data",
        60,
        "train run.toml --json --set data.format=tokens --set data.train=data/tokens.jsonl --set data.eval=data/tokens.jsonl",
        &["data/tokens.jsonl"],
        "out",
    ),
    input("data", 30, "eval MODEL --data data/story.txt --threads 1 --budget 64MiB --json", &["data/story.txt"], ""),
    input(
        "data",
        30,
        "eval MODEL --data data/tokens.jsonl --format tokens --threads 1 --budget 64MiB --json",
        &["data/tokens.jsonl"],
        "",
    ),
    input(
        "sweep",
        12,
        "sweep run.toml --dir swept --set train.seed=1,2 --retries 0 --devices cpu=128MiB --quiet",
        &["run.toml"],
        "swept",
    ),
    copy("sweep", 18, "sweep --resume sweep --quiet", &["sweep/sweep.json", "sweep/*"], Oracle::Any, "sweep"),
    copy(
        "budget",
        20,
        "budget run 64MiB --json",
        &["run/run.toml", "run/control.sock", "run/plan.json"],
        Oracle::Any,
        "",
    ),
];
