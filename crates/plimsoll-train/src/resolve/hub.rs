//! Ids of the Hugging Face Hub in a run file. Their files are fetched here, and local paths put in their place, before
//! a model or data are opened. All later stages see paths only.

use crate::config::{DataSection, DataSource, HUB_PREFIX, HubSources, Init, RunConfig};
use crate::hub::{
    DataUse, HubError, HubEvent, HubId, HubSettings, MalformedHubId, ModelPart, Repository, RepositoryKind,
};
use plimsoll_core::Failure;
use std::path::{Path, PathBuf};

/// The use of the files, which decides what is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubNeed {
    /// A plan: the configuration of the model, and its tokenizer if there are evaluation data. No data.
    Plan,
    /// Reading of data: the tokenizer and the data.
    Data,
    /// A run: the model with its weights, unless they are random, and the data.
    Run,
}

impl HubNeed {
    /// Returns the part of the model that is needed.
    fn model_part(self, config: &RunConfig) -> ModelPart {
        match self {
            HubNeed::Run if config.model.init == Init::Pretrained => ModelPart::Weights,
            HubNeed::Plan if config.data.eval.is_empty() => ModelPart::Config,
            _ => ModelPart::Tokenizer,
        }
    }
}

/// Fetches the files of all hub ids in a configuration, as far as `need` tells, and puts their local paths in place of
/// the ids. The ids are kept for the run file of the run, with the commit of their files, so that a resumed run has the
/// same files. Does nothing without an id. `observe` is told about downloads.
///
/// # Errors
/// An invalid id, and the errors of the hub, each with the key that names the id.
pub fn fetch_hub_files(
    config: &mut RunConfig,
    need: HubNeed,
    observe: &mut dyn FnMut(HubEvent<'_>),
) -> Result<(), Failure> {
    let model = config.model.path.iter().chain(&config.model.adapter);
    if !model.chain(config.data.training_paths()).chain(&config.data.eval).any(|text| is_hub_id(text)) {
        return Ok(());
    }
    let mut fetcher = Fetcher { settings: HubSettings::from_environment()?, observe };
    let part = need.model_part(config);
    let mut sources = HubSources::default();
    if let Some(path) = config.model.path.as_mut().filter(|path| is_hub_id(path)) {
        let typed = path.clone();
        sources.model = Some(fetcher.model("model.path", path, part)?);
        sources.model_name = Some(typed);
    }
    if let Some(path) = config.model.adapter.as_mut().filter(|path| is_hub_id(path)) {
        sources.adapter = Some(fetcher.adapter(path)?);
    }
    if need != HubNeed::Plan {
        sources.train = fetcher.data("data.train", &mut config.data.train, DataUse::Training)?;
        sources.source = fetcher.sources(&mut config.data)?;
        sources.eval = fetcher.data("data.eval", &mut config.data.eval, DataUse::Evaluation)?;
    }
    config.hub = sources;
    Ok(())
}

/// Fetches a model with its weights, if `path` is a hub id. Returns the path of its directory, or `path` itself.
///
/// # Errors
/// As [`fetch_hub_files`].
pub fn fetch_hub_model(path: &Path, observe: &mut dyn FnMut(HubEvent<'_>)) -> Result<PathBuf, Failure> {
    let mut text = path.to_string_lossy().into_owned();
    if !is_hub_id(&text) {
        return Ok(path.to_owned());
    }
    let mut fetcher = Fetcher { settings: HubSettings::from_environment()?, observe };
    fetcher.model("model", &mut text, ModelPart::Weights)?;
    Ok(text.into())
}

fn is_hub_id(text: &str) -> bool {
    text.starts_with(HUB_PREFIX)
}

/// Fetches files and puts their paths in place of ids. Returns the ids with their commits.
struct Fetcher<'a> {
    settings: HubSettings,
    observe: &'a mut dyn FnMut(HubEvent<'_>),
}

impl Fetcher<'_> {
    fn model(&mut self, key: &str, path: &mut String, part: ModelPart) -> Result<String, Failure> {
        let Fetcher { settings, observe } = self;
        let text = path.clone();
        let failed = |error| of_key(key, &text, error);
        let id: HubId = path.parse().map_err(|error: MalformedHubId| failed(error.into()))?;
        let repository = Repository::open(settings, RepositoryKind::Model, &id, observe);
        let repository = repository.map_err(failed)?;
        let folder = repository.fetch_model(part, observe).map_err(failed)?;
        *path = local_path(folder);
        Ok(repository.exact_id().to_string())
    }

    fn adapter(&mut self, path: &mut String) -> Result<String, Failure> {
        let Fetcher { settings, observe } = self;
        let text = path.clone();
        let failed = |error| of_key("model.adapter", &text, error);
        let id: HubId = path.parse().map_err(|error: MalformedHubId| failed(error.into()))?;
        let repository = Repository::open(settings, RepositoryKind::Model, &id, observe).map_err(failed)?;
        *path = local_path(repository.fetch_adapter(observe).map_err(failed)?);
        Ok(repository.exact_id().to_string())
    }

    /// Fetches the files of `data.source`. Returns the sources as the run file names them, with commits; `None` if none
    /// names an id.
    fn sources(&mut self, data: &mut DataSection) -> Result<Option<Vec<DataSource>>, Failure> {
        let mut named = data.source.clone();
        let mut has_ids = false;
        for (index, source) in named.iter_mut().enumerate() {
            let key = format!("{}.path", data.source_key(index));
            let local = &mut data.source[index];
            let usage = local.split.map_or(DataUse::Training, DataUse::Split);
            if let Some(ids) = self.data(&key, &mut local.path, usage)? {
                // The files are those of the split.
                (source.path, local.split, has_ids) = (ids, None, true);
            }
        }
        Ok(has_ids.then_some(named))
    }

    /// Returns `None` if no source is an id.
    fn data(&mut self, key: &str, sources: &mut Vec<String>, usage: DataUse) -> Result<Option<Vec<String>>, Failure> {
        let Fetcher { settings, observe } = self;
        let (mut named, mut local) = (Vec::new(), Vec::new());
        for source in sources.iter() {
            if !is_hub_id(source) {
                named.push(source.clone());
                local.push(source.clone());
                continue;
            }
            let failed = |error| of_key(key, source, error);
            let id: HubId = source.parse().map_err(|error: MalformedHubId| failed(error.into()))?;
            let repository = Repository::open(settings, RepositoryKind::Dataset, &id, observe).map_err(failed)?;
            let files = repository.fetch_data(usage, observe).map_err(failed)?;
            local.extend(files.into_iter().map(local_path));
            named.push(repository.exact_id().to_string());
        }
        let has_ids = named != local;
        *sources = local;
        Ok(has_ids.then_some(named))
    }
}

fn local_path(path: PathBuf) -> String {
    path.to_string_lossy().into_owned()
}

/// Returns the failure of the key that names an id. Its message has the id.
fn of_key(key: &str, id: &str, error: HubError) -> Failure {
    let failure = Failure::from(error);
    let id =
        if failure.message.contains(id.trim_start_matches(HUB_PREFIX)) { String::new() } else { format!("{id}: ") };
    Failure { message: format!("{key}: {id}{}", failure.message), ..failure }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::tests::run_request;

    #[test]
    fn parts_follow_the_use() {
        let part = |need: HubNeed, settings: &[&str]| need.model_part(&run_request(settings));
        let model = "model.path=hub:a/b";
        assert_eq!(part(HubNeed::Plan, &[model]), ModelPart::Config);
        assert_eq!(part(HubNeed::Plan, &[model, "data.eval=e.jsonl"]), ModelPart::Tokenizer);
        assert_eq!(part(HubNeed::Data, &[model]), ModelPart::Tokenizer);
        assert_eq!(part(HubNeed::Run, &[model]), ModelPart::Weights);
        assert_eq!(part(HubNeed::Run, &[model, "model.init=random"]), ModelPart::Tokenizer);
    }

    #[test]
    fn invalid_ids_are_refused_with_their_key() {
        let mut run = run_request(&["model.path=hub:a/../b"]);
        let failure = fetch_hub_files(&mut run, HubNeed::Plan, &mut |_| ()).unwrap_err();
        assert!(failure.message.starts_with("model.path: `hub:a/../b`: the name of a repository is OWNER/NAME"));
        assert_eq!(failure.exit as i32, 2);
    }

    #[test]
    fn run_files_keep_ids() {
        let mut run = run_request(&["model.path=/cache/x", "data.train=[\"/cache/a.jsonl\", \"/cache/b.jsonl\"]"]);
        run.config.hub = HubSources {
            model_name: Some("hub:a/b".into()),
            model: Some("hub:a/b@0f".into()),
            train: Some(vec!["hub:a/c@1f:*.jsonl".into()]),
            ..HubSources::default()
        };
        let stored = RunConfig::parse("run.toml", &run.to_toml(), &[]).unwrap();
        assert_eq!(stored.model.path.as_deref(), Some("hub:a/b@0f"));
        assert_eq!(stored.data.train, ["hub:a/c@1f:*.jsonl"]);
        let source = DataSource { path: vec!["hub:a/d@2f".into()], weight: Some(2.0), ..DataSource::default() };
        (run.config.hub.train, run.config.data.train) = (None, vec![]);
        run.config.data.source = vec![DataSource { path: vec!["/cache/d.jsonl".into()], ..source.clone() }];
        run.config.hub.source = Some(vec![source.clone()]);
        assert_eq!(RunConfig::parse("run.toml", &run.to_toml(), &[]).unwrap().data.source, [source]);
        assert_eq!(run.model_name(), "hub:a/b");
    }
}
