//! The model that a run file names: its configuration, the location of its files, and whether a run can start from its weights.

use super::example::model_is_example;
use crate::config::{HUB_PREFIX, Init, Objective, RunConfig};
use crate::data::{addition_example, read_end_token};
use crate::files::{AdapterConfig, AdapterConfigError, AdapterDir, ModelDir, ModelWeights, ModuleNames, read_config};
use crate::gguf::open_directory_or_file;
use plimsoll_core::Failure;
use plimsoll_program::models::decoder::WeightSource;
use plimsoll_program::models::{ModelConfig, Target, closest_preset, preset, preset_names};
use std::path::{Path, PathBuf};

/// Returns the projections of a list without paths; `None` for a regular expression and for lists with paths.
fn named_targets(targets: &ModuleNames) -> Option<Vec<Target>> {
    match targets {
        ModuleNames::List(names) => names.iter().map(|name| Target::named(name)).collect(),
        ModuleNames::Pattern(_) => None,
    }
}

/// The model that a run file names.
#[derive(Debug)]
pub struct Model {
    /// Shapes and options of the model.
    pub config: ModelConfig,
    /// Directory of the model; `None` for a preset, a single `config.json`, or an example that is not written yet.
    pub dir: Option<ModelDir>,
    /// Stored adapters of the model, which `model.adapter` names; `None` if the run starts without adapters or with new
    /// ones.
    pub adapter: Option<AdapterDir>,
}

impl Model {
    /// Opens the model that `[model]` names, with its adapters.
    ///
    /// # Errors
    /// There is no such model, or Plimsoll does not support it.
    pub fn open(config: &RunConfig) -> Result<Model, Failure> {
        let mut model = Model::without_adapter(config)?;
        let path = config.model.adapter.as_deref().map(Path::new);
        let adapter = path.map(|path| AdapterDir::open(path, &model.config)).transpose()?;
        if let Some(end_tokens) = adapter.as_ref().and_then(|adapter| adapter.end_tokens.clone()) {
            model.config.eos = end_tokens;
        }
        Ok(Model { adapter, ..model })
    }

    /// Returns the token that ends each document of text; `None` if the model has none.
    ///
    /// # Errors
    /// A file beside the tokenizer that cannot be read.
    pub fn document_end_token(&self) -> Result<Option<u32>, Failure> {
        Ok(self.folder().map(read_end_token).transpose()?.flatten())
    }

    /// Adds the token that ends documents to the tokens at which generation stops. A model that is trained on text
    /// would otherwise never stop where its documents end.
    ///
    /// # Errors
    /// A file beside the tokenizer that cannot be read.
    pub fn stop_at_document_end(&mut self) -> Result<(), Failure> {
        if let Some(end_token) = self.document_end_token()?.map(i64::from)
            && !self.config.eos.contains(&end_token)
        {
            self.config.eos.insert(0, end_token);
        }
        Ok(())
    }

    /// Adds `tokens`, with which turns of the assistant end, to those at which generation stops. A base model that is trained
    /// on conversations would otherwise never stop.
    pub(crate) fn stop_at(&mut self, tokens: &[u32]) {
        for token in tokens.iter().map(|&token| i64::from(token)) {
            if !self.config.eos.contains(&token) {
                self.config.eos.push(token);
            }
        }
    }

    /// Checks that the model supports the sequence length of the run.
    ///
    /// # Errors
    /// Sequences that are too long for the model.
    pub fn check_sequence_length(&self, config: &RunConfig) -> Result<(), Failure> {
        let (sequence, limit) = (u64::from(config.data.sequence), self.config.max_positions);
        if sequence > limit {
            let name = config.model_name();
            if config.train.objective == Objective::Grpo {
                let message = format!(
                    "a prompt with its completion takes up to {sequence} tokens, but {name} takes no more than {limit}"
                );
                let hint =
                    format!("lower grpo.max_prompt_length and grpo.max_completion_length to {limit} in all, or less");
                return Err(Failure::input(message).hint(hint));
            }
            let message = format!("data.sequence is {sequence}, but {name} takes no more than {limit}");
            return Err(Failure::input(message).hint(format!("set data.sequence to {limit} or less")));
        }
        Ok(())
    }

    /// Returns the settings of the adapters that the run trains, or would train if the planner chose LoRA. Existing
    /// adapters of the model determine them, else the run file.
    pub(crate) fn adapter_config(&self, run: &RunConfig) -> AdapterConfig {
        let lora = &run.lora;
        if let Some(adapter) = &self.adapter {
            return AdapterConfig { dropout: lora.dropout, ..adapter.config.clone() };
        }
        // A list of projections without paths may name the parts of fused ones.
        let targets = match named_targets(&lora.targets) {
            Some(named) => self.config.own_targets(&named).iter().map(|target| target.name().to_owned()).collect(),
            None => vec![],
        };
        let ranks = lora.rank_pattern.iter().map(|(pattern, rank)| (pattern.clone(), u64::from(*rank)));
        AdapterConfig {
            rank: u64::from(lora.rank),
            alpha: lora.alpha,
            rank_stabilized: lora.rslora,
            dropout: lora.dropout,
            targets: if targets.is_empty() { lora.targets.clone() } else { ModuleNames::List(targets) },
            excluded: ModuleNames::NONE,
            layers: lora.layers.clone(),
            layers_pattern: vec![],
            rank_pattern: ranks.collect(),
            alpha_pattern: lora.alpha_pattern.clone().into_iter().collect(),
        }
    }

    /// Checks that the settings of new adapters match the model.
    ///
    /// # Errors
    /// A projection or a layer that the model does not have, or a pattern without effect.
    pub(crate) fn check_new_adapters(&self, run: &RunConfig) -> Result<(), Failure> {
        if self.adapter.is_some() {
            return Ok(());
        }
        if let Some(named) = named_targets(&run.lora.targets) {
            self.check_named_targets(&named)?;
        }
        self.adapter_config(run).check_effects(&self.config).map_err(|AdapterConfigError { key, problem }| {
            let key = match key {
                "target_modules" => "targets",
                "layers_to_transform" => "layers",
                key => key,
            };
            let hint = "docs/run-file.md describes the keys of [lora]; they are those of PEFT's LoraConfig";
            Failure::input(format!("lora.{key} {problem}")).hint(hint)
        })
    }

    /// Checks that the model has each projection of a list. A fused projection counts as named if all its parts are.
    fn check_named_targets(&self, named: &[Target]) -> Result<(), Failure> {
        let own = self.config.own_targets(named);
        let is_unused = |target: &&Target| {
            let others: Vec<Target> = named.iter().copied().filter(|other| other != *target).collect();
            !own.contains(target) && self.config.own_targets(&others) == own
        };
        let Some(unused) = named.iter().find(is_unused) else { return Ok(()) };
        let known = self.config.targets().iter().map(|target| target.name()).collect::<Vec<_>>().join(", ");
        let model_type = self.config.model_type;
        let message = format!("lora.targets names {}, which a {model_type} model does not have", unused.name());
        Err(Failure::input(message).hint(format!("name some of {known}, or all-linear")))
    }

    /// Opens the model that `[model]` names, without adapters.
    ///
    /// # Errors
    /// There is no such model, or Plimsoll does not support it.
    pub(crate) fn without_adapter(config: &RunConfig) -> Result<Model, Failure> {
        let model = |config, dir| Model { config, dir, adapter: None };
        if let Some(name) = &config.model.preset {
            let shape = preset(name).ok_or_else(|| unknown_preset(name))?;
            return Ok(model(shape, None));
        }
        if model_is_example(config) {
            return Ok(model(addition_example::model_config(), None));
        }
        let path = Path::new(config.model.path.as_deref().unwrap_or_default());
        if path.to_string_lossy().starts_with(HUB_PREFIX) {
            return Err(Failure::input(format!("{}: this command takes no hub id", path.display()))
                .hint("download it with plimsoll plan --model, and name its folder in the cache"));
        }
        if path.is_file() && path.extension().is_none_or(|extension| extension != "gguf") {
            let shape = read_config(path, &config.model.ignore_config_keys)?.config;
            return Ok(model(shape, None));
        }
        let dir = open_directory_or_file(path, &config.model.ignore_config_keys)?;
        Ok(model(dir.config.clone(), Some(dir)))
    }

    /// Returns the model's directory; `None` for a preset or a single `config.json`.
    pub fn folder(&self) -> Option<&Path> {
        self.dir.as_ref().map(|dir| &*dir.path)
    }

    /// Returns a note if the run reads the text part of a larger model, and leaves out its other tensors.
    pub fn other_parts_note(&self) -> Option<String> {
        self.dir.as_ref().and_then(ModelDir::other_parts_note)
    }

    /// Returns the path of `tokenizer.json`; `None` if the model has none.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        self.dir.as_ref().and_then(|dir| dir.tokenizer_path.clone())
    }

    /// Checks that a run which starts from pretrained weights finds them.
    ///
    /// # Errors
    /// The model has no weights.
    pub fn check_weights(&self, config: &RunConfig) -> Result<(), Failure> {
        if config.model.init == Init::Random {
            return Ok(());
        }
        match &self.dir {
            Some(dir) => dir.require_weights().map(|_| ()).map_err(|error| self.with_adapter_hint(error.into())),
            None => Err(Failure::input(format!("model.path: {} is no directory with weights", config.model_name()))
                .hint("name a directory with *.safetensors")
                .hint("or start from random weights: --set model.init=random")),
        }
    }

    /// Adds a hint to a failure if the stored adapters do not say to which base model they belong.
    fn with_adapter_hint(&self, failure: Failure) -> Failure {
        self.adapter.as_ref().and_then(AdapterDir::unknown_base_note).into_iter().fold(failure, Failure::hint)
    }

    /// Returns the stored weights that a run starts from; `None` if it starts from random weights or the model has
    /// none.
    pub fn weights(&self, config: &RunConfig) -> Option<&ModelWeights> {
        let pretrained = config.model.init == Init::Pretrained;
        self.dir.as_ref().filter(|_| pretrained).and_then(|dir| dir.weights.as_ref())
    }

    /// Returns the source of the weights that a run starts from: stored weights or random values. A model without
    /// stored weights is planned with random ones.
    pub(crate) fn source(&self, config: &RunConfig) -> WeightSource {
        self.weights(config).map_or(WeightSource::Random { seed: config.train.seed }, ModelWeights::source)
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
