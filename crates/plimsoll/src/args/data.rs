//! Arguments of `data`, which shows the training data of a run.

use super::KeyArgs;
use clap::Args;
use plimsoll_core::Failure;
use plimsoll_train::config::{RunConfig, model_setting};
use plimsoll_train::resolve::RunRequest;
use std::path::PathBuf;

/// Sample documents that are shown to people.
const DEFAULT_SAMPLES: usize = 2;

/// Arguments of `plimsoll data`, which shows what a model will see of the data of a run.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll data run.toml
  plimsoll data run.toml --show 5 --set data.template=chatml
  plimsoll data run.toml --json --show 1 | jq .samples[0].labels

The data are read and tokenized, and the tokens are cached for the run. No device
is opened and no weights are read. If a run would refuse the data, the command
prints the reason after the figures and ends with exit code 2.")]
pub struct DataArgs {
    /// Run file [default: the built-in example]
    #[arg(value_name = "RUN.toml")]
    run_file: Option<PathBuf>,
    /// Model, for its tokenizer: a Hugging Face directory, a GGUF file, or a hub id such as hub:OWNER/NAME
    #[arg(long, value_name = "DIR|FILE|HUB_ID")]
    model: Option<String>,
    #[command(flatten)]
    keys: KeyArgs,
    /// Tokens per sequence
    #[arg(long, value_name = "TOKENS")]
    sequence: Option<u32>,
    /// Number of sample documents to show, from the first on [default: 2, with --json 0]
    #[arg(long, value_name = "COUNT", help_heading = "Output")]
    show: Option<usize>,
    /// Print the figures, samples and warnings as JSON
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

impl DataArgs {
    /// Returns the number of sample documents.
    pub fn samples(&self) -> usize {
        self.show.unwrap_or(if self.json { 0 } else { DEFAULT_SAMPLES })
    }

    /// Builds the request whose data are shown, from the run file and the flags. With `--model` and no run file, all
    /// other keys have their defaults.
    ///
    /// # Errors
    /// An invalid run file or setting.
    pub fn build_request(&self) -> Result<RunRequest, Failure> {
        let mut settings: Vec<String> = self.model.as_deref().map(model_setting).into_iter().collect();
        settings.extend(self.sequence.map(|sequence| format!("data.sequence={sequence}")));
        settings.extend(self.keys.settings());
        let config = match (&self.run_file, &self.model) {
            (None, Some(_)) => RunConfig::from_settings(&settings)?,
            (run_file, _) => RunConfig::load(run_file.as_deref(), &settings)?,
        };
        Ok(config.into())
    }
}
