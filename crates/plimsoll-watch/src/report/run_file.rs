//! The stored run file of a run, `run.toml`, as far as reports and lists of runs show it.
//!
//! `plimsoll-train` writes every key into it. Keys that this module does not know, and missing ones, do no harm.

use plimsoll_core::Failure;
use plimsoll_device::regular_file;
use plimsoll_plan::device_request::DevicesRequest;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

/// Largest run file that is read. Those of Plimsoll have a few KiB.
const MAX_BYTES: u64 = 1 << 20;
/// Name of the folder in a run folder that holds the model of the built-in example.
const EXAMPLE_FOLDER: &str = "example";

/// The settings of a run, from its stored run file.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunSettings {
    /// Name of the model: the preset, the name of its folder, or `built-in example`.
    pub model: String,
    /// The preset or the path of the model.
    pub model_source: String,
    /// Source of the first weights: `pretrained` or `random`.
    pub init: String,
    /// Trained parameters: `full` or `lora`.
    pub method: String,
    /// Lossy memory savings (rungs) that the run uses; empty if there are none.
    pub rungs: Vec<String>,
    /// Precision of the computation, such as `bf16`.
    pub precision: String,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Tokens of an optimizer step, including padding.
    pub batch_tokens: u64,
    /// The optimizer.
    pub optimizer: String,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Course of the learning rate after the warm-up.
    pub schedule: String,
    /// Length of the run, such as `600 steps`.
    pub length: String,
    /// The seed.
    pub seed: u64,
    /// Paths of the training data.
    pub train_data: Vec<String>,
    /// Paths of the evaluation data.
    pub eval_data: Vec<String>,
    /// The devices as the user named them.
    pub requested_devices: String,
    /// The whole run file, without the URL of the webhook.
    pub text: String,
}

impl RunSettings {
    /// Reads `run.toml` of a run folder; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read, or is no run file.
    pub fn read(folder: &Path) -> Result<Option<RunSettings>, Failure> {
        let path = folder.join("run.toml");
        let text = match read_text(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::input(format!("{}: {error}", path.display()))),
        };
        let parsed = RunSettings::parse(&text);
        parsed.map(Some).map_err(|error| Failure::input(format!("{}: {error}", path.display())))
    }

    /// Parses the text of a run file.
    ///
    /// # Errors
    /// The text is no TOML, or a key that is shown has another type.
    fn parse(text: &str) -> Result<RunSettings, String> {
        let file: StoredFile = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        let StoredFile { model, mut data, train, run } = file;
        Ok(RunSettings {
            model: model.name(&run.dir),
            model_source: model.preset.or(model.path).unwrap_or_default(),
            init: model.init,
            method: train.method,
            rungs: train.rungs,
            precision: train.precision,
            sequence: data.sequence,
            batch_tokens: train.batch_tokens,
            optimizer: train.optimizer,
            learning_rate: train.learning_rate,
            schedule: train.schedule,
            length: length(train.steps, train.epochs, train.hours),
            seed: train.seed,
            train_data: data.training_paths(),
            eval_data: data.eval.into_vec(),
            requested_devices: run.devices,
            text: without_webhook(text),
        })
    }

    /// Returns a device as the user requested it, such as `virtual:a=600MiB@0.5`; `None` if the request does not name it.
    pub fn request_of(&self, device: &str) -> Option<String> {
        let request: DevicesRequest = self.requested_devices.parse().ok()?;
        let found = request.devices.iter().find(|requested| requested.name() == device);
        found.map(ToString::to_string)
    }
}

/// Reads a small file as text.
fn read_text(path: &Path) -> io::Result<String> {
    if std::fs::metadata(path)?.len() > MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it is larger than 1 MiB, so it is no run file"));
    }
    regular_file::read_text(path)
}

/// Returns the text of a stored run file without the URL of the webhook, which may hold a secret.
fn without_webhook(text: &str) -> String {
    let is_webhook = |line: &str| line.split_once('=').is_some_and(|(key, _)| key.trim() == "webhook");
    let shown = |line: &str| match is_webhook(line) {
        true => "# webhook: not shown\n".to_owned(),
        false => line.to_owned(),
    };
    text.split_inclusive('\n').map(shown).collect()
}

/// Returns the length of a run in words.
fn length(steps: Option<u64>, epochs: Option<f64>, hours: Option<f64>) -> String {
    match (steps, epochs, hours) {
        (Some(steps), ..) => plimsoll_core::format_count(steps, "step"),
        (_, Some(epochs), _) => format!("{epochs} epochs"),
        (_, _, Some(hours)) => format!("{hours} hours"),
        (None, None, None) => "not set".to_owned(),
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StoredFile {
    model: ModelKeys,
    data: DataKeys,
    train: TrainKeys,
    run: RunKeys,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ModelKeys {
    path: Option<String>,
    preset: Option<String>,
    init: String,
}

impl ModelKeys {
    /// Returns the name of the model. `run_dir` is the run folder at the start of the run.
    fn name(&self, run_dir: &str) -> String {
        if let Some(preset) = &self.preset {
            return preset.clone();
        }
        let Some(path) = self.path.as_deref().map(Path::new) else { return "unknown model".to_owned() };
        if path == Path::new(run_dir).join(EXAMPLE_FOLDER) {
            return "built-in example".to_owned();
        }
        let is_config = path.extension().is_some_and(|extension| extension == "json");
        let folder = if is_config { path.parent().unwrap_or(path) } else { path };
        folder.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct DataKeys {
    train: OneOrMany,
    source: Vec<SourceKeys>,
    eval: OneOrMany,
    sequence: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SourceKeys {
    path: OneOrMany,
}

impl DataKeys {
    /// Returns the paths of the training data: those of `data.train`, and those of all sources.
    fn training_paths(&mut self) -> Vec<String> {
        let sources = std::mem::take(&mut self.source).into_iter().flat_map(|source| source.path.into_vec());
        std::mem::take(&mut self.train).into_vec().into_iter().chain(sources).collect()
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TrainKeys {
    steps: Option<u64>,
    epochs: Option<f64>,
    hours: Option<f64>,
    batch_tokens: u64,
    optimizer: String,
    learning_rate: f64,
    schedule: String,
    precision: String,
    method: String,
    rungs: Vec<String>,
    seed: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RunKeys {
    dir: String,
    devices: String,
}

/// A text, or a list of texts.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl Default for OneOrMany {
    fn default() -> OneOrMany {
        OneOrMany::Many(Vec::new())
    }
}

impl OneOrMany {
    fn into_vec(self) -> Vec<String> {
        match self {
            OneOrMany::One(text) => vec![text],
            OneOrMany::Many(texts) => texts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_name_model_and_devices() {
        let text = "[model]\npath = \"/r/sums/example\"\ninit = \"random\"\nlater = 3\n\
                    [data]\ntrain = \"a.jsonl\"\nsequence = 12\n\
                    [train]\nsteps = 1\nmethod = \"full\"\n\
                    [run]\ndir = \"/r/sums\"\ndevices = \"virtual:a=48MiB@0.8,cpu=1GiB\"\n";
        let settings = RunSettings::parse(text).unwrap();
        assert_eq!((&*settings.model, &*settings.length, settings.sequence), ("built-in example", "1 step", 12));
        assert_eq!(settings.train_data, ["a.jsonl"]);
        let sources = "[data]\nsequence = 1\n[[data.source]]\npath = [\"a\", \"b\"]\n[[data.source]]\npath = \"c\"\n";
        assert_eq!(RunSettings::parse(sources).unwrap().train_data, ["a", "b", "c"]);
        assert_eq!(settings.request_of("virtual:a").as_deref(), Some("virtual:a=48MiB@0.8"));
        assert_eq!(settings.request_of("cuda:0"), None);
    }

    #[test]
    fn webhook_is_not_shown() {
        let text = "[run]\ndir = \"r\"\n[watch]\nwebhook = \"http://a/secret\"\ntensorboard = true\n";
        let shown = RunSettings::parse(text).unwrap().text;
        assert_eq!(shown, "[run]\ndir = \"r\"\n[watch]\n# webhook: not shown\ntensorboard = true\n");
    }

    #[test]
    fn model_is_named_by_its_folder() {
        let name = |text: &str| RunSettings::parse(text).map(|settings| settings.model);
        assert_eq!(name("[model]\npath = \"/m/llama/config.json\"").unwrap(), "llama");
        assert_eq!(name("[model]\npath = \"/m/<script>\"").unwrap(), "<script>");
        assert_eq!(name("[model]\npreset = \"qwen3-4b\"").unwrap(), "qwen3-4b");
        assert_eq!(name("").unwrap(), "unknown model");
        assert!(name("[model]\npath = 3").is_err() && name("[model").is_err());
    }

    #[test]
    fn unreadable_run_files_are_refused_by_path() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(RunSettings::read(folder.path()), Ok(None));
        let path = folder.path().join("run.toml");
        std::fs::write(&path, "x".repeat(MAX_BYTES as usize + 1)).unwrap();
        let refused = RunSettings::read(folder.path()).unwrap_err();
        assert!(refused.message.contains("run.toml: it is larger than 1 MiB"), "{refused}");
    }
}
