//! Tests of the run file: one clear message for each mistake, and an equal struct after writing and reading.

use super::*;
use plimsoll_core::{Bytes, Failure};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// The smallest file that loads.
const MODEL: &str = "[model]\npath = \"m\"\n";

fn parse(text: &str, settings: &[&str]) -> Result<RunConfig, RunConfigError> {
    let settings: Vec<String> = settings.iter().map(|setting| (*setting).to_owned()).collect();
    RunConfig::parse("run.toml", text, &settings)
}

/// Returns the message of the expected failure, with its hints.
fn refusal(text: &str, settings: &[&str]) -> String {
    let failure = Failure::from(parse(text, settings).expect_err("this is refused"));
    assert_eq!(failure.exit as i32, 2);
    failure.to_string()
}

#[test]
fn key_list_matches_structs() {
    let mut file = RunConfig::default();
    file.model.path = Some("m".into());
    file.model.preset = Some("p".into());
    (file.train.steps, file.train.epochs, file.train.hours) = (Some(1), Some(1.0), Some(1.0));
    file.data.template = Some("chatml".into());
    (file.recipe.micro_batch, file.recipe.slots) = (Some(1), Some(1));
    file.grpo.epsilon_high = Some(0.28);
    (file.model.adapter, file.train.rungs) = (Some("a".into()), Some(vec![]));
    file.lora.layers = vec![0];
    file.lora.rank_pattern = BTreeMap::from([("q_proj".into(), 2)]);
    file.lora.alpha_pattern = BTreeMap::from([("q_proj".into(), 2.0)]);
    file.run.max_temperature = Some(80.0);
    file.run.deterministic = Some(true);
    file.watch.webhook = Some("http://localhost".into());
    file.memory.budget = Some(Budget::DEVICE);
    (file.memory.file, file.memory.file_dir) = (Some(Budget::HOST), Some("d".into()));
    let format = Some(Format::Text);
    file.data.source = vec![DataSource { path: vec![], weight: Some(1.0), format, split: Some(Split::Test) }];
    let table: toml::Table = file.to_toml().parse().unwrap();
    let written: BTreeSet<String> = table
        .iter()
        .flat_map(|(section, keys)| keys.as_table().unwrap().keys().map(move |key| format!("{section}.{key}")))
        .collect();
    let source = table["data"]["source"][0].as_table().unwrap();
    let in_source: BTreeSet<String> = source.keys().map(|key| format!("data.source.{key}")).collect();
    assert_eq!(in_source, keys::SOURCE_KEYS.iter().map(|(key, _)| (*key).to_owned()).collect());
    let listed: BTreeSet<String> = keys::KEYS.iter().map(|(key, _)| (*key).to_owned()).collect();
    assert_eq!(written, listed);
}

#[test]
fn documentation_lists_every_key_and_default() {
    let book = include_str!("../../../../docs/run-file.md");
    let rows: Vec<Vec<&str>> =
        book.lines().filter(|line| line.starts_with("| `")).map(|line| line.split(" | ").collect()).collect();
    let defaults: toml::Table = RunConfig::default().to_toml().parse().unwrap();
    for (key, expected) in keys::KEYS.iter().chain(keys::SOURCE_KEYS) {
        let row = rows.iter().find(|row| row[0] == format!("| `{key}`"));
        let row = row.unwrap_or_else(|| panic!("{key} is not documented in docs/run-file.md"));
        assert_eq!(row[1], *expected, "{key}");
        let (section, name) = keys::split(key);
        match defaults[section].get(name) {
            None => assert_eq!(row[2], "–", "{key}"),
            Some(default) => {
                let written: toml::Table = format!("value = {}", row[2].trim_matches('`')).parse().unwrap();
                assert_eq!(written["value"], *default, "{key}");
            }
        }
    }
    assert_eq!(rows.len(), keys::KEYS.len() + keys::SOURCE_KEYS.len(), "docs/run-file.md documents unknown keys");
}

#[test]
fn example_is_trainable() {
    let example = RunConfig::load(None, &[]).unwrap();
    example.check_trainable().unwrap();
    assert_eq!(example.data.train, ["example:sums"]);
    assert!(std::path::Path::new(&example.run.dir).is_absolute());
}

#[test]
fn dependent_defaults_follow_other_keys() {
    let file = parse("[model]\npreset = \"llama-3.2-1b\"\n[data]\nsequence = 1000\n", &[]).unwrap();
    assert_eq!(file.model.init, Init::Random);
    assert_eq!(file.train.batch_tokens, 65000);
    assert_eq!(parse(MODEL, &[]).unwrap().model.init, Init::Pretrained);
    assert_eq!(parse(MODEL, &["data.sequence=100000"]).unwrap().train.batch_tokens, 100_000);
}

#[test]
fn settings_override_the_file() {
    let text = "[model]\npath = \"m\"\n[train]\nsteps = 5 # few\n";
    let settings = [
        "train.steps=20",
        "data.train=a.jsonl",
        "run.devices=cpu=6GiB",
        "memory.allow=16,8,4",
        "memory.budget = 600MiB",
        "recipe.recompute=block",
        "train.betas=[0.8, 0.9]",
    ];
    let file = parse(text, &settings).unwrap();
    assert_eq!(file.length(), Some(Length::Steps(20)));
    assert_eq!(file.data.train, ["a.jsonl"]);
    assert_eq!(file.run.devices, "cpu=6GiB");
    assert_eq!(file.memory.allow, [Rung::Bf16, Rung::Int8, Rung::Nf4]);
    assert_eq!(file.memory.budget, Some(Budget::Amount(Bytes::mib(600))));
    assert_eq!(file.recipe.recompute, [RecomputeLevel::Block]);
    assert_eq!(file.train.betas, [0.8, 0.9]);
    assert_eq!(parse("train = { steps = 5 }", &["model.path=m", "train.steps=6"]).unwrap().train.steps, Some(6));
}

#[test]
fn unknown_key_names_line_and_nearest_key() {
    let text = "[model]\npath = \"m\"\n\n[train]\nstepz = 5\n";
    assert_eq!(refusal(text, &[]), "run.toml, line 5: unknown key `train.stepz`\n  hint: did you mean `train.steps`?");
    let text = "[model]\npath = \"m\"\n[train]\nsequence = 5\n";
    assert!(refusal(text, &[]).ends_with("did you mean `data.sequence`?"));
    assert_eq!(
        refusal("[trian]\nsteps = 5\n", &[]),
        "run.toml, line 1: unknown key `trian`\n  hint: did you mean `train`?"
    );
    assert!(refusal("steps = 5\n", &[]).ends_with("did you mean `train.steps`?"));
    assert_eq!(refusal(MODEL, &["stepz=5"]), "command line: unknown key `stepz`\n  hint: did you mean `train.steps`?");
    assert_eq!(
        refusal("[recipe]\nxylophone = 1\n", &[]),
        "run.toml, line 2: unknown key `recipe.xylophone`\n  hint: [recipe] has micro_batch, slots, recompute"
    );
}

#[test]
fn wrong_value_names_found_and_expected() {
    for (text, message) in [
        ("[train]\nsteps = \"many\"", "run.toml, line 2: train.steps is \"many\", expected a whole number, 1 or more"),
        ("[train]\nsteps = 0", "run.toml, line 2: train.steps is 0, expected a whole number, 1 or more"),
        ("[train]\nsteps = -1", "run.toml, line 2: train.steps is -1, expected a whole number, 1 or more"),
        (
            "[train]\nbetas = [0.9, 1.0]",
            "run.toml, line 2: train.betas is [0.9, 1.0], expected two numbers, each at least 0 and below 1",
        ),
        ("[train]\nlearning_rate = nan", "run.toml, line 2: train.learning_rate is nan, expected a number above 0"),
        (
            "[train]\noptimizer = \"lion\"",
            "run.toml, line 2: train.optimizer is \"lion\", expected \"adamw\" or \"sgd\"",
        ),
        (
            "[run]\nthreads = \"all\"",
            "run.toml, line 2: run.threads is \"all\", expected \"auto\" or a whole number from 1 to 1024",
        ),
        (
            "[run]\nthreads = 0",
            "run.toml, line 2: run.threads is 0, expected \"auto\" or a whole number from 1 to 1024",
        ),
        (
            "[data]\ntrain = [1]",
            "run.toml, line 2: data.train is [1], expected files, globs such as \"data/*.jsonl\", or hub ids such as \"hub:OWNER/NAME\"",
        ),
        ("train = 3", "run.toml, line 1: train is 3, expected a section, [train]"),
        ("[[train]]", "run.toml, line 1: train is a list, [[train]], expected a section, [train]"),
        (
            "[train]\nbatch_tokens = 4611686018427387904",
            "run.toml, line 2: train.batch_tokens is 4611686018427387904, expected a whole number of tokens up to 2147483648, a multiple of data.sequence",
        ),
        (
            "[memory]\nbudget = \"lots\"",
            "run.toml, line 2: memory.budget is \"lots\", expected a share of what is free, such as \"90%\", or an amount, such as \"6GiB\"",
        ),
        (
            "[memory]\nallow = [\"fp8\"]",
            "run.toml, line 2: memory.allow is [\"fp8\"], expected a list of \"bf16\", \"adam8bit\", \"lora\", \"int8\", \"nf4\", or \"16,8,4\" for bf16, int8 and nf4",
        ),
    ] {
        assert_eq!(refusal(text, &["model.path=m"]), message);
    }
    assert_eq!(
        refusal(MODEL, &["train.steps=lots"]),
        "command line: train.steps is \"lots\", expected a whole number, 1 or more"
    );
}

#[test]
fn malformed_settings_are_rejected() {
    let hint = "\n  hint: write --set section.key=value, such as --set train.steps=20";
    assert_eq!(refusal(MODEL, &["train.steps"]), format!("--set train.steps: no `=` between key and value{hint}"));
    assert_eq!(
        refusal(MODEL, &["train.steps="]),
        format!("--set train.steps=: no value for train.steps can be read from ``{hint}")
    );
    assert_eq!(
        refusal(MODEL, &["train.betas=[1, 2"]),
        format!("--set train.betas=[1, 2: no value for train.betas can be read from `[1, 2`{hint}")
    );
    assert!(refusal(MODEL, &["=5"]).starts_with("command line: unknown key ``"));
}

#[test]
fn conflicting_keys_are_rejected() {
    assert_eq!(refusal("", &[]), "run.toml: model.path: no model is named\n  hint: set model.path or model.preset");
    assert_eq!(
        refusal("[model]\npath = \"m\"\npreset = \"p\"", &[]),
        "run.toml, line 3: model.preset: model.path and model.preset are both set\n  hint: set one of them"
    );
    assert_eq!(
        refusal(MODEL, &["train.steps=1", "train.hours=1"]),
        "command line: train.hours: more than one of train.steps, train.epochs and train.hours is set\n  hint: set one of them"
    );
    assert_eq!(
        refusal(MODEL, &["data.sequence=1000", "train.batch_tokens=2500"]),
        "command line: train.batch_tokens: 2500 tokens in a step are not whole sequences of 1000\n  hint: the nearest that are: 2000 or 3000"
    );
    assert_eq!(
        refusal(MODEL, &["data.sequence=1024", "train.batch_tokens=2048", "recipe.micro_batch=3"]),
        "command line: recipe.micro_batch: a step has no more than 2 sequences\n  hint: a smaller micro-batch, or more train.batch_tokens"
    );
}

#[test]
fn setting_replaces_alternatives_in_the_file() {
    let text = "[model]\npreset = \"p\"\ninit = \"random\"\n[train]\nhours = 8\n";
    let file = parse(text, &["model.path=m", "train.steps=2"]).unwrap();
    assert_eq!(
        (file.model.path.as_deref(), file.model.preset.as_deref(), file.model.init),
        (Some("m"), None, Init::Pretrained)
    );
    assert_eq!(file.length(), Some(Length::Steps(2)));
    let file = parse(text, &["model.init=random", "model.path=m"]).unwrap();
    assert_eq!(file.model.init, Init::Random);
    assert_eq!(model_setting("llama-3.2-1b"), "model.preset=\"llama-3.2-1b\"");
    assert_eq!(model_setting("a/b"), "model.path=\"a/b\"");
}

#[test]
fn text_settings_keep_any_text() {
    let odd = "a \"b\" 'c'\n#=]\\ 12".to_owned();
    let file =
        parse(MODEL, &[&setting("run.dir", &odd), &list_setting("data.train", &[odd.clone(), "12".into()])]).unwrap();
    assert_eq!(file.run.dir, odd);
    assert_eq!(file.data.train, [odd, "12".into()]);
}

/// A run file with two sources. The first begins at line 4.
const SOURCES: &str = "[model]\npath = \"m\"\n\n[[data.source]]\npath = \"a.jsonl\"\nweight = 3\n[[data.source]]\npath = [\"b.jsonl\", \"hub:a/b\"]\nweight = 0.5\n";

#[test]
fn sources_take_the_place_of_training_data() {
    let file = parse(SOURCES, &[]).unwrap();
    let sources = file.data.training_sources();
    assert_eq!((sources.len(), &sources[0].path[..], sources[0].weight), (2, &["a.jsonl".to_owned()][..], Some(3.0)));
    assert_eq!((&sources[1].path[1], sources[1].weight, sources[1].split), (&"hub:a/b".to_owned(), Some(0.5), None));
    assert!(file.data.has_training_data());
    assert_eq!(parse(&file.to_toml(), &[]).unwrap(), file);
    let inline =
        parse(MODEL, &["data.source=[{path=\"a.jsonl\", format=\"text\", split=\"dev\"}]"]).unwrap().data.source;
    assert_eq!((inline[0].format, inline[0].split), (Some(Format::Text), Some(Split::Validation)));
    // A setting replaces the data of the file, in either notation.
    let train = parse(SOURCES, &["data.train=c.jsonl"]).unwrap().data;
    assert_eq!((train.source.len(), train.training_sources()[0].path[0].as_str()), (0, "c.jsonl"));
    let train = format!("{MODEL}[data]\ntrain = \"c.jsonl\"\n");
    assert_eq!(parse(&train, &["data.source=[{path=\"a\"}]"]).unwrap().data.train, Vec::<String>::new());
    assert!(!parse(MODEL, &[]).unwrap().data.has_training_data());
}

#[test]
fn paths_of_sources_become_absolute() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    std::fs::write(&path, SOURCES).unwrap();
    let sources = RunConfig::load(Some(&path), &[]).unwrap().data.source;
    assert!(std::path::Path::new(&sources[0].path[0]).is_absolute(), "{sources:?}");
    assert_eq!(sources[1].path[1], "hub:a/b");
}

#[test]
fn mistakes_in_sources_name_file_line_and_key() {
    let with = |line: &str| format!("{SOURCES}{line}\n");
    let unweighted = SOURCES.replace("weight = 0.5\n", "");
    let both = SOURCES.replace("[[data.source]]\npath = \"a", "[data]\ntrain = \"t\"\n[[data.source]]\npath = \"a");
    for (text, message) in [
        (
            with("wieght = 1"),
            "run.toml, line 10: unknown key `data.source[2].wieght`\n  hint: did you mean `data.source.weight`?",
        ),
        (
            with("sequence = 8"),
            "run.toml, line 10: unknown key `data.source[2].sequence`\n  hint: did you mean `data.sequence`?",
        ),
        (
            with("xylophone = 8"),
            "run.toml, line 10: unknown key `data.source[2].xylophone`\n  hint: [[data.source]] has path, weight, format, split",
        ),
        (
            with("split = \"all\""),
            "run.toml, line 10: data.source[2].split is \"all\", expected \"train\", \"validation\" or \"test\"",
        ),
        (with("format = 3"), "run.toml, line 10: data.source[2].format is 3, expected a format, as in data.format"),
        (
            with("split = \"train\""),
            "run.toml, line 8: data.source[2].path: a source with a split has hub ids or files, not both\n  hint: write two sources",
        ),
        (SOURCES.replace("0.5", "0"), "run.toml, line 9: data.source[2].weight is 0, expected a number above 0"),
        (SOURCES.replace("= 3", "= -3"), "run.toml, line 6: data.source[1].weight is -3, expected a number above 0"),
        (SOURCES.replace("0.5", "nan"), "run.toml, line 9: data.source[2].weight is nan, expected a number above 0"),
        (SOURCES.replace("0.5", "inf"), "run.toml, line 9: data.source[2].weight is inf, expected a number above 0"),
        (
            SOURCES.replace("0.5", "\"x\""),
            "run.toml, line 9: data.source[2].weight is \"x\", expected a number above 0",
        ),
        (
            unweighted,
            "run.toml, line 7: data.source[2].weight: the source has no weight, but another one has\n  hint: give a weight to each source, or to none",
        ),
        (
            SOURCES.replace("path = \"a.jsonl\"\n", ""),
            "run.toml, line 4: data.source[1].path: the source names no file\n  hint: set path to a file, a glob or a hub id",
        ),
        (
            SOURCES.replace("\"a.jsonl\"", "[]"),
            "run.toml, line 5: data.source[1].path: the source names no file\n  hint: set path to a file, a glob or a hub id",
        ),
        (
            SOURCES.replace("\"a.jsonl\"", "5"),
            "run.toml, line 5: data.source[1].path is 5, expected files, globs such as \"data/*.jsonl\", or hub ids such as \"hub:OWNER/NAME\"",
        ),
        (both, "run.toml, line 6: data.source: data.train and data.source are both set\n  hint: set one of them"),
        (
            format!("{MODEL}[data]\nsource = []\n"),
            "run.toml, line 4: data.source is [], expected one or more tables [[data.source]]",
        ),
        (
            format!("{MODEL}[data]\nsource = \"a\"\n"),
            "run.toml, line 4: data.source is \"a\", expected one or more tables [[data.source]]",
        ),
    ] {
        assert_eq!(refusal(&text, &[]), message, "{text}");
    }
    assert_eq!(
        refusal(&format!("{MODEL}[data.source]\npath = \"a\"\n"), &[]),
        "run.toml, line 3: data.source is a table, [data.source], expected one or more tables [[data.source]]"
    );
    assert!(
        refusal(&format!("{MODEL}[[data.source]]\n"), &[])
            .starts_with("run.toml, line 3: data.source[1].path: the source")
    );
    let source = "{path=\"a\"}, ".repeat(257);
    assert!(
        refusal(MODEL, &[&format!("data.source=[{source}]")])
            .starts_with("command line: data.source: 257 sources, but a run takes at most 256")
    );
    let setting = |table: &str| refusal(MODEL, &[&format!("data.source=[{{{table}}}]")]);
    assert!(setting("pth=\"a\"").starts_with("command line: unknown key `data.source[1].pth`"));
    assert!(setting("path=\"a\", weight=0").starts_with("command line: data.source[1].weight is 0, expected"));
    assert!(refusal(MODEL, &["data.source.path=a"]).starts_with("command line: unknown key `data.source.path`"));
}

#[test]
fn unknown_devices_are_named() {
    let message = refusal(MODEL, &["run.devices=warp"]);
    assert!(
        message.starts_with("command line: run.devices: `warp` is not a known device\n  hint: known devices: "),
        "{message}"
    );
}

#[test]
fn resume_keeps_the_experiment() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let failure = RunConfig::resume(dir, &[]).unwrap_err();
    assert!(failure.message.ends_with("is no run folder: it has no run.toml"), "{failure}");
    let first = parse(MODEL, &["data.train=/a.txt", "train.steps=9", "run.dir=/elsewhere"]).unwrap();
    std::fs::write(dir.join("run.toml"), first.to_toml()).unwrap();
    let resumed = RunConfig::resume(dir, &["memory.budget=1GiB".into(), "train.keep=5".into()]).unwrap();
    assert_eq!(resumed.run.dir, dir.to_str().unwrap());
    assert_eq!(resumed.train, TrainSection { keep: 5, ..first.train });
    let longer = RunConfig::resume(dir, &["train.epochs=2.5".into()]).unwrap();
    assert_eq!((longer.length(), longer.train.steps), (Some(Length::Epochs(2.5)), None));
    let failure = RunConfig::resume(dir, &["train.learning_rate=1".into()]).unwrap_err();
    assert!(failure.message.starts_with("train.learning_rate belongs to the experiment"), "{failure}");
}

#[test]
fn trained_parameters_match_quantization() {
    let train = "data.train=a.jsonl";
    let rungs = |rungs: &str| format!("train.rungs=\"{rungs}\"");
    assert_eq!(
        refusal(MODEL, &[train, &rungs("nf4")]),
        "command line: train.rungs: matrices that are trained are not quantized\n  hint: train adapters: train.method = \"lora\""
    );
    assert_eq!(
        refusal(MODEL, &[train, &rungs("lora,int8,nf4")]),
        "command line: train.rungs: matrices are stored in 8 bit or in 4\n  hint: name int8 or nf4"
    );
    let message = refusal(MODEL, &[train, "model.adapter=runs/a/adapter"]);
    assert!(message.starts_with("command line: model.adapter: adapters are given, but all parameters are trained"));
    let message = refusal(MODEL, &["lora.targets=[\"lm_head\"]"]);
    assert!(message.contains("expected \"all-linear\", a list of q_proj, k_proj"), "{message}");
    let message = refusal(MODEL, &["lora.targets=.*q_proj", "lora.layers=[1]"]);
    assert!(message.contains("lora.layers: lora.targets is a regular expression"), "{message}");
    let patterns = ["lora.targets=.*q_proj", "lora.rank_pattern={q_proj = 2}", "lora.alpha_pattern={q_proj = 4.5}"];
    let patterns = parse(MODEL, &patterns).unwrap();
    assert_eq!(parse(&patterns.to_toml(), &[]).unwrap().lora, patterns.lora);
    assert_eq!(patterns.lora.rank_pattern["q_proj"], 2);
    let message = refusal(MODEL, &["lora.rank_pattern={q_proj = 0}"]);
    assert!(message.contains("expected regular expressions with ranks"), "{message}");
    let all = parse(MODEL, &[train, "lora.targets=all-linear"]).unwrap().lora.targets;
    assert_eq!(all, LoraSection::default().targets);
    let mut file = parse(MODEL, &[train, "train.method=lora", &rungs("nf4")]).unwrap();
    assert_eq!(file.train.rungs.as_deref(), Some(&[Rung::Nf4][..]));
    // Decided rungs are stored, even if there are none.
    file.decide_rungs(&[]);
    assert_eq!(parse(&file.to_toml(), &[]).unwrap().train.rungs, Some(vec![]));
    let mut file = parse(MODEL, &[]).unwrap();
    file.decide_rungs(&[Rung::Bf16, Rung::Lora]);
    assert_eq!((file.train.precision, file.train.method), (Precision::Bf16, Method::Lora));
}

#[test]
fn invalid_toml_names_its_line() {
    let message = refusal("[model]\npath = \n", &[]);
    assert!(message.starts_with("run.toml, line 2: "), "{message}");
}

#[test]
fn training_needs_data_and_length() {
    let plan_only = parse(MODEL, &[]).unwrap();
    assert_eq!(plan_only.check_trainable().unwrap_err().to_string(), "data.train is not set");
    let endless = parse(MODEL, &["data.train=a.txt"]).unwrap();
    assert_eq!(endless.check_trainable().unwrap_err().to_string(), "train.steps is not set");
    parse(MODEL, &["data.train=a.txt", "train.epochs=2"]).unwrap().check_trainable().unwrap();
}

#[test]
fn missing_file_is_named() {
    let failure = RunConfig::load(Some(std::path::Path::new("no/such/run.toml")), &[]).unwrap_err();
    assert!(failure.message.starts_with("cannot read no/such/run.toml: "), "{failure}");
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("run.toml"), b"\xff").unwrap();
    let hint = |name: &str| RunConfig::load(Some(&folder.path().join(name)), &[]).unwrap_err().hints.concat();
    assert!(hint("rnu.toml").ends_with("/run.toml`?"), "{}", hint("rnu.toml"));
    assert!(hint("").contains("--resume") && hint("other").contains("such as run.toml"), "{}", hint(""));
    assert!(hint("run.toml").contains("UTF-8"), "{}", hint("run.toml"));
}

#[test]
fn webhook_takes_plain_http_only() {
    for url in ["http://localhost", "http://127.0.0.1:8080/a?b=c", "http://[::1]:9/", "http://relay.example/x"] {
        let file = parse(MODEL, &[&format!("watch.webhook={url}")]).unwrap();
        assert_eq!(file.watch.webhook.as_deref(), Some(url));
    }
    let refused = refusal(MODEL, &["watch.webhook=https://hooks.example/x"]);
    assert!(refused.contains("watch.webhook: https is not supported"), "{refused}");
    assert!(refused.contains("hint: post to a relay on this machine"), "{refused}");
    let long = format!("http://a/{}", "x".repeat(3000));
    let bad =
        ["", "a", "ftp://a", "http://", "http:///x", "http://:80", "http://u:p@a/", "http://a/#b", "http://a b", &long];
    for url in bad {
        let refused = refusal(MODEL, &[&format!("watch.webhook={url:?}")]);
        assert!(refused.contains("expected a URL such as"), "{refused}");
    }
    assert_eq!(parse(MODEL, &[]).unwrap().watch, WatchSection::default());
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z/]{1,12}", "\\PC{1,12}", Just("it's \"so\"\n\\ ✓".to_owned())]
        .prop_map(|text| if text.trim().is_empty() { "x".to_owned() } else { text })
}

fn any_file() -> impl Strategy<Value = RunConfig> {
    let names = (any_text(), any_text(), proptest::collection::vec(any_text(), 0..3));
    let numbers = (1u32..5000, 1u64..300, any::<i64>(), 1e-12f64..1e12, 0.0f64..1.0, 0u64..1000);
    let choices = (any::<[bool; 6]>(), 0usize..3, 1u32..1024, 1u64..10_000_000);
    (names, numbers, choices).prop_map(|((path, dir, sources), numbers, choices)| {
        let (sequence, sequences, seed, number, share, every) = numbers;
        let (flags, length, count, bytes) = choices;
        let mut file = RunConfig::default();
        if flags[0] {
            file.model = ModelSection { preset: Some(path), init: Init::Random, ..ModelSection::default() };
        } else {
            file.model.path = Some(path);
        }
        file.model.ignore_config_keys = sources.clone();
        file.data = DataSection { train: sources, sequence, pack: flags[1], ..DataSection::default() };
        if flags[5] && !file.data.train.is_empty() {
            let split = flags[3].then_some(Split::Validation);
            let source =
                DataSource { path: std::mem::take(&mut file.data.train), weight: Some(number), split, format: None };
            file.data.source = vec![DataSource { path: vec!["x".into()], ..source.clone() }, source];
        }
        match length {
            0 => file.train.steps = Some(every + 1),
            1 => file.train.epochs = Some(number),
            _ => file.train.hours = Some(number),
        }
        file.train.batch_tokens = sequences * u64::from(sequence);
        file.train.seed = seed.unsigned_abs().min(i64::MAX as u64);
        (file.train.learning_rate, file.train.betas, file.train.eval_every) = (number, [share, share / 2.0], every);
        if flags[2] {
            (file.train.optimizer, file.train.schedule) = (Optimizer::Sgd, RateSchedule::Linear);
        }
        file.memory.budget = match (flags[3], flags[1]) {
            (true, _) => Some(Budget::Amount(Bytes(bytes))),
            (false, true) => format!("{count}e-1%").parse().ok(),
            (false, false) => None,
        };
        file.memory.allow = if flags[4] { vec![Rung::Nf4, Rung::Bf16] } else { Vec::new() };
        file.recipe.micro_batch = flags[5].then_some(1);
        file.recipe.recompute = RecomputeLevel::ALL[..length].to_vec();
        let devices = ["auto", "cpu=6GiB", "rtx3090,host=64GiB"][length].to_owned();
        let threads = if flags[1] { Threads::Auto } else { Threads::Count(count) };
        let max_temperature = flags[2].then_some(30.0 + 90.0 * share);
        let parallelism = if flags[1] { ParallelismChoice::All } else { ParallelismChoice::Auto };
        let fallback = if flags[0] { FallbackTarget::Cpu } else { FallbackTarget::None };
        let heartbeat_seconds = 1.0 + share;
        file.run = RunSection {
            dir,
            devices,
            threads,
            max_temperature,
            heartbeat_seconds,
            fallback,
            parallelism,
            nccl: flags[0],
            deterministic: flags[1].then_some(flags[2]),
        };
        let webhook = flags[4].then(|| format!("http://127.0.0.1:{count}/hook?key={bytes}"));
        file.watch = WatchSection { tensorboard: flags[3], webhook };
        file
    })
}

proptest! {
    #[test]
    fn written_run_file_reads_back_equal(file in any_file()) {
        let text = file.to_toml();
        let read = RunConfig::parse("run.toml", &text, &[]).map_err(|error| error.to_string());
        prop_assert_eq!(read, Ok(file), "{}", text);
    }

    #[test]
    fn arbitrary_text_does_not_panic(text in "\\PC{0,80}", setting in "\\PC{0,30}") {
        let _ = parse(&text, &[]);
        let _ = parse(MODEL, &[&setting]);
        for (key, _) in keys::KEYS {
            let _ = parse(MODEL, &[&format!("{key}={setting}")]);
        }
    }

    #[test]
    fn arbitrary_toml_does_not_panic(key in 0..keys::KEYS.len(), section in "(model|train|data|run|x)",
                                      value in "(-?[0-9]{1,20}|[0-9]e[0-9]{1,4}|nan|\\[\\[*[1, ]*\\]*|\"[a-z%0-9]*\"|\\{ *[a-z]=1 *\\}|1979-05-27)") {
        let name = keys::split(keys::KEYS[key].0).1;
        let _ = parse(&format!("[{section}]\n{name} = {value}\n"), &["model.path=m"]);
    }
}
