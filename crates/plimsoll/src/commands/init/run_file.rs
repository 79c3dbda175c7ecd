//! The text of a run file with a comment on each key.

use super::answers::{Answers, describe_data, toml_list, toml_text};
use plimsoll_train::config::{Init, Method, model_setting};
use plimsoll_train::data::RecordFormat;
use plimsoll_watch::text::count;
use std::fmt::Write;

/// Returns the run file that the answers describe. Each key has its meaning and the alternatives as a comment. Keys with
/// a default that few runs change are left out.
pub fn text(answers: &Answers) -> String {
    let mut text = String::from(
        "# Run file of Plimsoll, written by `plimsoll init`. All keys: docs/run-file.md.\n\
         # Any key can also be set by a flag: plimsoll train run.toml --set train.steps=20\n",
    );
    for section in [model, data, train, memory, run] {
        text.push('\n');
        text += &section(answers);
    }
    text
}

fn model(answers: &Answers) -> String {
    let set = model_setting(&answers.model);
    let (key, value) = set.split_once('=').expect("a setting has a value");
    let parameters = count(answers.parameters as f64);
    let (init, meaning) = match answers.init {
        Init::Pretrained => ("pretrained", "the files of the model; \"random\": random weights from train.seed"),
        Init::Random => ("random", "random weights from train.seed; the model has no weights here"),
    };
    format!(
        "[model]\n# {parameters} parameters. `path` names a Hugging Face directory, `preset` a shape without weights.\n\
         {} = {value}\n# First weights: {meaning}.\ninit = \"{init}\"\n",
        key.trim_start_matches("model.")
    )
}

fn data(answers: &Answers) -> String {
    // Files of several formats are recognized one by one.
    let format = match answers.summary.formats[..] {
        [format] => format.name(),
        _ => "auto",
    };
    let packed = if has_pairs(answers) {
        "A sequence takes as many pairs of answers as fit. false: one pair."
    } else {
        "Documents are packed back to back. false: each begins a sequence of its own."
    };
    format!(
        "[data]\n# Files or globs. Found: {}.\ntrain = {}\n\
         # Evaluation data, in the same format. Uncomment to evaluate at the end and every train.eval_every steps.\n\
         # eval = [\"eval.jsonl\"]\n\
         # Format of the records. \"auto\": recognized in each file.\nformat = \"{format}\"\n\
         # Tokens of a sequence. Longer ones need more memory.\nsequence = {}\n\
         # {packed}\npack = true\n",
        describe_data(&answers.summary),
        toml_list(&answers.data),
        answers.sequence,
    )
}

/// Returns whether the data are pairs of answers.
fn has_pairs(answers: &Answers) -> bool {
    answers.summary.formats.contains(&RecordFormat::Preference)
}

fn train(answers: &Answers) -> String {
    let length = match answers.steps {
        Some(steps) => {
            format!("# Length of the run. Instead: epochs (passes over the data) or hours.\nsteps = {steps}\n")
        }
        None => "# Length of the run in passes over the data. Instead: steps or hours.\nepochs = 1\n".to_owned(),
    };
    let batch = match answers.batch_tokens {
        Some(tokens) => format!("batch_tokens = {tokens}\n"),
        None => "# batch_tokens = 65536\n".to_owned(),
    };
    let (method, rate) = match (answers.method, has_pairs(answers)) {
        (Method::Full, false) => ("full", "3e-4"),
        (Method::Lora, false) => ("lora", "2e-4"),
        (Method::Full, true) => ("full", "1e-6"),
        (Method::Lora, true) => ("lora", "1e-5"),
    };
    let objective = if has_pairs(answers) {
        "# Chosen answers are made more likely than rejected ones, with settings in [dpo]. \"supervised\": other data.\n\
         objective = \"dpo\"\n"
    } else {
        ""
    };
    format!(
        "[train]\n{objective}{length}# Tokens of an optimizer step, a multiple of data.sequence. Default: the largest up to 65536.\n{batch}\
         # Highest learning rate, reached after warmup_steps.\nlearning_rate = {rate}\n\
         # Decay to zero: \"cosine\" or \"linear\"; \"constant\": none.\nschedule = \"cosine\"\nwarmup_steps = 10\n\
         # \"full\": all parameters. \"lora\": adapters beside the frozen model, with settings in [lora].\nmethod = \"{method}\"\n\
         # \"auto\": bf16 on GPUs, f32 on CPUs.\nprecision = \"auto\"\n\
         # Steps between evaluations; 0: at the end only.\neval_every = 0\n\
         # Minutes between checkpoints.\nsave_every_minutes = 10\n"
    )
}

fn memory(answers: &Answers) -> String {
    let line = |key: &str, given: &Option<String>, default: &str| match given {
        Some(value) => format!("{key} = {}\n", toml_text(value)),
        None => format!("# {key} = \"{default}\"\n"),
    };
    let rungs: Vec<String> = answers.allow.iter().map(ToString::to_string).collect();
    format!(
        "[memory]\n# Most that each device may hold: an amount (\"6GiB\"), or a share of the free memory.\n{}\
         # Most host memory for offloaded tensors: an amount or a share of the free memory. \"1B\" allows none.\n{}\
         # Lossy rungs that the planner may take if nothing else fits: \"bf16\", \"adam8bit\", \"lora\", \"int8\", \"nf4\".\nallow = {}\n",
        line("budget", &answers.budget, "90%"),
        line("host", &answers.host, "80%"),
        toml_list(&rungs),
    )
}

fn run(answers: &Answers) -> String {
    let mut text = String::from("[run]\n# Folder of checkpoints, events, plan and the trained model.\n");
    let _ = write!(
        text,
        "dir = {}\n# \"auto\": the GPUs of this machine, else its processor. Or a list, such as \"cuda:0,cuda:1\" or \"cpu=6GiB\".\n\
         devices = {}\n",
        toml_text(&answers.run_dir),
        toml_text(&answers.devices)
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{Bytes, Rung};
    use plimsoll_train::config::Format;
    use plimsoll_train::config::RunConfig;
    use plimsoll_train::data::{DataSummary, RecordFormat};

    fn answers() -> Answers {
        Answers {
            model: "smollm2-135m".to_owned(),
            parameters: 134_515_008,
            init: Init::Random,
            data: vec!["data/*.jsonl".to_owned(), "more.jsonl".to_owned()],
            summary: DataSummary {
                files: ["a", "b", "c"].map(Into::into).to_vec(),
                bytes: Bytes::mib(2),
                formats: vec![RecordFormat::Tokens],
                documents: 4711,
                is_complete: true,
            },
            devices: "cpu=6GiB".to_owned(),
            budget: None,
            host: Some("2GiB".to_owned()),
            allow: vec![Rung::Lora, Rung::Nf4],
            method: Method::Full,
            sequence: 512,
            batch_tokens: None,
            steps: None,
            run_dir: "runs/smollm2-135m".to_owned(),
            out: "run.toml".into(),
            force: false,
        }
    }

    #[test]
    fn run_file_explains_each_key() {
        insta::assert_snapshot!(text(&answers()));
    }

    #[test]
    fn run_file_has_the_answers() {
        let config = RunConfig::parse("run.toml", &text(&answers()), &[]).unwrap();
        assert_eq!(config.model.preset.as_deref(), Some("smollm2-135m"));
        assert_eq!((config.model.init, config.data.format, config.data.sequence), (Init::Random, Format::Tokens, 512));
        assert_eq!(config.data.train, ["data/*.jsonl", "more.jsonl"]);
        assert_eq!((config.train.epochs, config.train.batch_tokens), (Some(1.0), 65536));
        assert_eq!(config.memory.allow, [Rung::Lora, Rung::Nf4]);
        assert_eq!((config.memory.budget, &*config.memory.host.to_string()), (None, "2GiB"));
        assert_eq!((&*config.run.dir, &*config.run.devices), ("runs/smollm2-135m", "cpu=6GiB"));
    }

    #[test]
    fn names_cannot_add_keys() {
        let name = "x\"\n[run]\ndevices = \"cpu\"\u{1b}]0;t\u{7}\\";
        let hostile = Answers {
            model: format!("./{name}"),
            data: vec![format!("{name}.jsonl")],
            run_dir: name.to_owned(),
            steps: Some(3),
            batch_tokens: Some(1024),
            method: Method::Lora,
            ..answers()
        };
        let text = text(&hostile);
        let config = RunConfig::parse("run.toml", &text, &[]).unwrap();
        assert_eq!(config.model.path.as_deref(), Some(&*format!("./{name}")));
        assert_eq!((config.data.train, config.run.dir), (vec![format!("{name}.jsonl")], name.to_owned()));
        assert_eq!((config.train.steps, config.train.method), (Some(3), Method::Lora));
        assert!(!text.contains(['\u{1b}', '\u{7}']), "{text:?}");
    }
}
