//! The model that a run file names: what it is, where its files lie, and whether a run can begin with its weights. What is
//! planned for it and on which devices stands beside this.

use super::example::model_is_example;
use crate::config::{Init, RunFile};
use crate::data::sums;
use crate::files::{AdapterDir, ModelDir, ModelWeights, read_config};
use plimsoll_core::Failure;
use plimsoll_program::models::decoder::Source;
use plimsoll_program::models::{ModelConfig, closest_preset, preset, preset_names};
use std::path::{Path, PathBuf};

/// The model that a run file names.
#[derive(Debug)]
pub struct Model {
    /// What it is.
    pub config: ModelConfig,
    /// Its directory; none for a preset, a `config.json` alone, or an example that is not written yet.
    pub dir: Option<ModelDir>,
    /// Adapters that there are already.
    pub adapter: Option<AdapterDir>,
}

impl Model {
    /// Opens what `[model]` names.
    ///
    /// # Errors
    /// No such model, or one that Plimsoll cannot compute.
    pub fn open(file: &RunFile) -> Result<Model, Failure> {
        let model = Model::without_adapter(file)?;
        let path = file.model.adapter.as_deref().map(Path::new);
        let adapter = path.map(|path| AdapterDir::open(path, &model.config)).transpose()?;
        Ok(Model { adapter, ..model })
    }

    /// Whether it takes sequences as long as the run file has them.
    ///
    /// # Errors
    /// It does not.
    pub(crate) fn takes(&self, file: &RunFile) -> Result<(), Failure> {
        let (sequence, most) = (u64::from(file.data.sequence), self.config.max_positions);
        if sequence > most {
            let message = format!("data.sequence is {sequence}, but {} takes no more than {most}", file.model_name());
            return Err(Failure::input(message).hint(format!("set data.sequence to {most} or less")));
        }
        Ok(())
    }

    pub(crate) fn without_adapter(file: &RunFile) -> Result<Model, Failure> {
        let of = |config, dir| Model { config, dir, adapter: None };
        if let Some(name) = &file.model.preset {
            let config = preset(name).ok_or_else(|| unknown_preset(name))?;
            return Ok(of(config, None));
        }
        if model_is_example(file) {
            return Ok(of(sums::model_config(), None));
        }
        let path = Path::new(file.model.path.as_deref().unwrap_or_default());
        if path.is_file() {
            let (config, _) = read_config(path, &file.model.ignore_config_keys)?;
            return Ok(of(config, None));
        }
        let dir = ModelDir::open(path, &file.model.ignore_config_keys)?;
        Ok(of(dir.config.clone(), Some(dir)))
    }

    /// The model's directory, where it has one.
    pub fn folder(&self) -> Option<&Path> {
        self.dir.as_ref().map(|dir| &*dir.path)
    }

    /// `tokenizer.json`, where there is one.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        self.dir.as_ref().and_then(|dir| dir.tokenizer_path.clone())
    }

    /// That a run which begins with trained weights has them.
    ///
    /// # Errors
    /// There are none.
    pub fn check_weights(&self, file: &RunFile) -> Result<(), Failure> {
        if file.model.init == Init::Random {
            return Ok(());
        }
        match &self.dir {
            Some(dir) => dir.need_weights().map(|_| ()).map_err(|error| self.beside_adapter(error.into())),
            None => Err(Failure::input(format!("model.path: {} is no directory with weights", file.model_name()))
                .hint("name a directory with *.safetensors")
                .hint("or start from random weights: --set model.init=random")),
        }
    }

    /// A failure with what the adapters have to do with it, where there are some.
    fn beside_adapter(&self, failure: Failure) -> Failure {
        self.adapter.as_ref().and_then(AdapterDir::of_nothing).into_iter().fold(failure, Failure::hint)
    }

    /// The weights that a run begins with; none where they are drawn.
    pub fn weights(&self, file: &RunFile) -> Option<&ModelWeights> {
        let pretrained = file.model.init == Init::Pretrained;
        self.dir.as_ref().filter(|_| pretrained).and_then(|dir| dir.weights.as_ref())
    }

    /// Where the first weights come from. A model without files is planned as if they were drawn.
    pub(crate) fn source(&self, file: &RunFile) -> Source {
        self.weights(file).map_or(Source::Random { seed: file.train.seed }, ModelWeights::source)
    }
}

fn unknown_preset(name: &str) -> Failure {
    let failure = Failure::input(format!("model.preset: `{name}` is no known shape"));
    match closest_preset(name) {
        Some(near) => failure.hint(format!("did you mean `{near}`?")),
        None => failure
            .hint(format!("known shapes: {}", preset_names().collect::<Vec<_>>().join(", ")))
            .hint("a directory or a config.json is named with its path, such as ./my-llama"),
    }
}
