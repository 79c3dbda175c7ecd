//! The answers from which a run file is written, with their defaults and checks.

use super::super::hub::with_hub_files;
use super::super::model_list::candidates::cached_name;
use super::out_file::Protected;
use crate::args::InitArgs;
use plimsoll_core::printable::printable_line;
use plimsoll_core::{Failure, Rung, format_count};
use plimsoll_program::models::preset_name;
use plimsoll_train::config::{HUB_PREFIX, Init, Method, RunConfig, list_setting, model_setting, setting};
use plimsoll_train::data::{DataSummary, RecordFormat, inspect};
use plimsoll_train::resolve::{HubNeed, Model};
use plimsoll_train::session::start::check_new_run;
use std::path::{Path, PathBuf};

/// Most tokens of a sequence that are proposed.
const DEFAULT_SEQUENCE: u64 = 1024;
/// The run file that is written if no other is named.
pub const DEFAULT_OUT: &str = "run.toml";

/// Everything that a run file says.
#[derive(Clone, Debug)]
pub struct Answers {
    /// The model as the user names it.
    pub model: String,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Source of the first weights.
    pub init: Init,
    /// Paths and globs of the training data.
    pub data: Vec<String>,
    /// Format and size of the training data.
    pub summary: DataSummary,
    /// Devices, in the notation of `--devices`.
    pub devices: String,
    /// Load line of each device; `None` for the default.
    pub budget: Option<String>,
    /// Load line of the host; `None` for the default.
    pub host: Option<String>,
    /// Rungs that the planner may take.
    pub allow: Vec<Rung>,
    /// The parameters that are trained.
    pub method: Method,
    /// T: tokens of a sequence.
    pub sequence: u64,
    /// Tokens of an optimizer step; `None` for the default.
    pub batch_tokens: Option<u64>,
    /// Optimizer steps; `None` for one pass over the data.
    pub steps: Option<u32>,
    /// The run folder.
    pub run_dir: String,
    /// The run file to write.
    pub out: PathBuf,
    /// Whether an existing run file is replaced.
    pub force: bool,
}

impl Answers {
    /// Takes all answers from flags, and the defaults for the others.
    ///
    /// # Errors
    /// No model or data, or an invalid answer.
    pub fn from_flags(args: &InitArgs) -> Result<Answers, Failure> {
        let missing = |flag: &str| Failure::input(format!("{flag} is missing")).hint("see plimsoll init --help");
        let model = args.model.as_deref().ok_or_else(|| missing("--model"))?;
        if args.data.is_empty() {
            return Err(missing("--data"));
        }
        let opened = open_model(model)?;
        let vocab = opened.config.vocab;
        let summary = inspect_data(&args.data, Some(vocab))?;
        check_tokenizer(&opened, model, &summary)?;
        let method = match args.method.as_deref() {
            Some("lora") => Method::Lora,
            _ => Method::Full,
        };
        Ok(Answers {
            model: model.to_owned(),
            parameters: opened.config.parameters(),
            init: init_of(model)?,
            data: args.data.clone(),
            summary,
            devices: args.devices.clone().unwrap_or_else(|| "auto".to_owned()),
            budget: args.budget.clone(),
            host: args.host.clone(),
            allow: parse_rungs(args.allow.as_deref().unwrap_or_default())?,
            method,
            sequence: args.sequence.map_or(DEFAULT_SEQUENCE.min(opened.config.max_positions), u64::from),
            batch_tokens: args.batch_tokens,
            steps: args.steps,
            run_dir: args.run_dir.clone().unwrap_or_else(|| default_run_dir(model)),
            out: args.out.clone().unwrap_or_else(|| DEFAULT_OUT.into()),
            force: args.force,
        })
    }

    /// Returns the files that the run file must not replace.
    pub fn protected(&self) -> Protected {
        let (run_dir, model) = (Some(self.run_dir.clone()), Some(self.model.clone()));
        Protected { run_dir, model, data: self.summary.files.clone() }
    }

    /// Returns the words of the command that gives the same answers without a question.
    pub fn command(&self) -> Vec<String> {
        let mut words = ["plimsoll", "init", "--yes", "--model", &self.model].map(str::to_owned).to_vec();
        let mut add = |flag: &str, value: String| words.extend([flag.to_owned(), value]);
        self.data.iter().for_each(|data| add("--data", data.clone()));
        add("--devices", self.devices.clone());
        self.budget.iter().for_each(|budget| add("--budget", budget.clone()));
        self.host.iter().for_each(|host| add("--host", host.clone()));
        if !self.allow.is_empty() {
            add("--allow", self.allow.iter().map(ToString::to_string).collect::<Vec<_>>().join(","));
        }
        if self.method == Method::Lora {
            add("--method", "lora".to_owned());
        }
        add("--sequence", self.sequence.to_string());
        self.batch_tokens.iter().for_each(|tokens| add("--batch-tokens", tokens.to_string()));
        self.steps.iter().for_each(|steps| add("--steps", steps.to_string()));
        add("--run-dir", self.run_dir.clone());
        add("--out", self.out.display().to_string());
        words.extend(self.force.then(|| "--force".to_owned()));
        words
    }
}

/// Opens the model that the user names, without its weights.
///
/// # Errors
/// There is no such model, or Plimsoll does not support it.
pub fn open_model(model: &str) -> Result<Model, Failure> {
    let request = RunConfig::from_settings(&[model_setting(model)])?.into();
    Model::open(&*with_hub_files(request, HubNeed::Data, false)?)
}

/// Returns the source of the first weights of a model: its files, or random numbers if it has none.
fn init_of(model: &str) -> Result<Init, Failure> {
    let config = RunConfig::from_settings(&[model_setting(model)])?;
    // A model of the hub has weights, or its run is refused.
    let is_on_hub = config.model.path.as_ref().is_some_and(|path| path.starts_with(HUB_PREFIX));
    let has_weights = is_on_hub || Model::open(&config)?.weights(&config).is_some();
    Ok(if has_weights { Init::Pretrained } else { Init::Random })
}

/// Recognizes the format of data files and counts their documents. Fetches the files of hub ids.
///
/// # Errors
/// Data that cannot be fetched or read, or have nothing to predict.
pub fn inspect_data(data: &[String], vocab: Option<u64>) -> Result<DataSummary, Failure> {
    let downloaded = if data.iter().any(|data| data.starts_with(HUB_PREFIX)) {
        let settings = ["model.preset=1b".to_owned(), list_setting("data.train", data)];
        Some(with_hub_files(RunConfig::from_settings(&settings)?.into(), HubNeed::Data, false)?)
    } else {
        None
    };
    let files = downloaded.as_ref().map_or(data, |request| &request.config.data.train[..]);
    let summary = inspect(files, vocab)?;
    let is_for_rounds = |format: &RecordFormat| matches!(format, RecordFormat::Prompt | RecordFormat::Rollouts);
    if let Some(format) = summary.formats.iter().find(|format| is_for_rounds(format)) {
        return Err(Failure::input(format!("the data have the format {format}, for which init writes no run file"))
            .hint("write one with train.objective = \"grpo\", as docs/grpo.md shows"));
    }
    if summary.documents == 0 && summary.is_complete {
        return Err(Failure::input("the data have no document with something to predict")
            .hint("a document has two tokens or more"));
    }
    Ok(summary)
}

/// Checks that a model which is trained on text has a tokenizer.
///
/// # Errors
/// Text, and a model without a tokenizer.
pub fn check_tokenizer(opened: &Model, model: &str, summary: &DataSummary) -> Result<(), Failure> {
    let needs_tokenizer = summary.formats.iter().any(|format| format.needs_tokenizer());
    if !needs_tokenizer || opened.tokenizer().is_some() {
        return Ok(());
    }
    Err(Failure::input(format!("the data are text, and {model} has no tokenizer"))
        .hint("name a model folder with tokenizer.json")
        .hint("or data of token ids, with input_ids in each record"))
}

/// Parses rungs that are separated by commas.
///
/// # Errors
/// An unknown rung.
pub fn parse_rungs(text: &str) -> Result<Vec<Rung>, Failure> {
    let settings = ["model.preset=1b".to_owned(), setting("memory.allow", text)];
    Ok(RunConfig::from_settings(&settings)?.memory.allow)
}

/// Checks devices and load lines as far as the run file can.
///
/// # Errors
/// An invalid value.
pub fn check_value(key: &str, text: &str) -> Result<(), Failure> {
    RunConfig::from_settings(&["model.preset=1b".to_owned(), setting(key, text)]).map(drop)
}

/// Proposes a run folder: `runs/` and the last part of the model's name.
pub fn default_run_dir(model: &str) -> String {
    let cached = cached_name(Path::new(model));
    let is_preset = model_setting(model).starts_with("model.preset=");
    let preset = preset_name(model).filter(|_| is_preset);
    let model = cached.as_deref().or(preset).unwrap_or(model);
    let name = Path::new(model).components().rev().find_map(|part| match part {
        std::path::Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
        _ => None,
    });
    format!("runs/{}", name.as_deref().map_or("run", |name| name.strip_suffix(".json").unwrap_or(name)))
}

/// Checks that a run folder holds no run.
///
/// # Errors
/// A run is under way in the folder, or it holds the results of one.
pub fn check_run_dir(folder: &str) -> Result<(), Failure> {
    // The built-in example needs no other answer.
    let request = RunConfig::load(None, &[setting("run.dir", folder)])?.into();
    check_new_run(&request).into_iter().next().map_or(Ok(()), Err)
}

/// Describes data in one line: format, number of documents, files and bytes.
pub fn describe_data(summary: &DataSummary) -> String {
    let format = match &summary.formats[..] {
        [] => "no records".to_owned(),
        formats => formats.iter().map(|format| format.name()).collect::<Vec<_>>().join(" and "),
    };
    let least = if summary.is_complete { "" } else { "at least " };
    let files = format_count(summary.files.len() as u64, "file");
    let documents = format_count(summary.documents, "document");
    printable_line(&format!("{format}, {least}{documents}, {files}, {}", summary.bytes))
}

/// Returns a text as a value of TOML.
pub fn toml_text(text: &str) -> String {
    setting("", text).split_off(1)
}

/// Returns texts as a list of TOML.
pub fn toml_list(texts: &[String]) -> String {
    list_setting("", texts).split_off(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_folder_has_the_name_of_the_model() {
        for (model, folder) in [
            ("smollm2-135m", "runs/smollm2-135m"),
            ("SMOLLM2-135M", "runs/smollm2-135m"),
            ("./my-model/", "runs/my-model"),
            ("shapes/tiny.json", "runs/tiny"),
            ("/hub/models--Qwen--Qwen3-8B/snapshots/0a", "runs/Qwen3-8B"),
            ("..", "runs/run"),
        ] {
            assert_eq!(default_run_dir(model), folder);
        }
    }
}
