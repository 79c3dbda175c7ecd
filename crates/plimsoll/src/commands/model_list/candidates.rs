//! The models that are planned: presets, the models in folders, and those in the cache of Hugging Face. Folders are only
//! read.

use plimsoll_core::Failure;
use plimsoll_program::models::preset_names;
use plimsoll_train::config::{RunConfig, model_setting, setting};
use plimsoll_train::hub::cache_folder;
use plimsoll_train::resolve::Model;
use plimsoll_watch::model_list::ModelOrigin;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Most entries of a folder that are looked at.
const MAX_ENTRIES: usize = 10_000;
/// Most models of folders, and of the cache of Hugging Face, that are planned.
const MAX_MODELS: usize = 100;

/// A model to be planned.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Name of the preset, or path of the folder.
    pub name: String,
    /// Name for tables and questions: `ORG/NAME` for a model in the cache of Hugging Face, else `name`.
    pub label: String,
    /// Whether the model has weights here.
    pub has_weights: bool,
    /// Origin of the model.
    pub origin: ModelOrigin,
    /// Number of parameters.
    pub parameters: u64,
    /// Most tokens of a sequence.
    pub max_positions: u64,
    /// The setting that names the model.
    pub setting: String,
}

/// Models to be planned, and folders that are not models which Plimsoll trains.
#[derive(Debug, Default)]
pub struct Candidates {
    /// The models, the smallest first.
    pub models: Vec<Candidate>,
    /// Folders that are not listed, each with the reason.
    pub notes: Vec<String>,
}

impl Candidates {
    /// Finds presets, the models in `folders`, and those in the cache of Hugging Face. `settings` are those of the run.
    ///
    /// # Errors
    /// A folder that cannot be read, or a setting that is invalid.
    pub fn find(folders: &[PathBuf], settings: &[String]) -> Result<Candidates, Failure> {
        let mut found = Candidates::default();
        for name in preset_names() {
            found.add(name, ModelOrigin::Preset, setting("model.preset", name), settings)?;
        }
        let mut paths = Vec::new();
        for folder in folders {
            let models = models_in(folder)?;
            if models.is_empty() {
                let message = format!("--dir {}: no model is in it", folder.display());
                return Err(
                    Failure::input(message).hint("name a folder with a config.json, or one that holds such folders")
                );
            }
            paths.extend(models.into_iter().map(|path| (path, ModelOrigin::Folder)));
        }
        let cached = cache_folder().map(|cache| models_in_cache(&cache)).unwrap_or_default();
        paths.extend(cached.into_iter().map(|path| (path, ModelOrigin::HuggingFaceCache)));
        let mut known = HashSet::new();
        paths.retain(|(path, _)| known.insert(path.canonicalize().unwrap_or_else(|_| path.clone())));
        if paths.len() > MAX_MODELS {
            found.notes.push(format!("{} further models in folders are not listed", paths.len() - MAX_MODELS));
            paths.truncate(MAX_MODELS);
        }
        for (path, origin) in paths {
            let name = path.to_string_lossy();
            if let Err(failure) = found.add(&name, origin, setting("model.path", &name), settings) {
                found.notes.push(format!("{name}: {}", failure.message));
            }
        }
        found.models.sort_by_key(|model| model.parameters);
        Ok(found)
    }

    /// Adds a model after reading its shape.
    ///
    /// # Errors
    /// An invalid setting, or a model that Plimsoll does not support.
    fn add(&mut self, name: &str, origin: ModelOrigin, set: String, settings: &[String]) -> Result<(), Failure> {
        let config = RunConfig::from_settings(&[std::slice::from_ref(&set), settings].concat())?;
        let model = Model::open(&config)?;
        let cached = cached_name(Path::new(name)).filter(|_| origin == ModelOrigin::HuggingFaceCache);
        self.models.push(Candidate {
            name: name.to_owned(),
            label: cached.unwrap_or_else(|| name.to_owned()),
            has_weights: model.weights(&config).is_some(),
            origin,
            parameters: model.config.parameters(),
            max_positions: model.config.max_positions,
            setting: set,
        });
        Ok(())
    }
}

impl Candidate {
    /// Returns the value of `--model` that names this model. The name of a preset may also be that of a folder, which
    /// `--model` would take. Names of presets may have capitals, so such a preset is written with capitals.
    pub fn argument(&self) -> String {
        let capitals = self.name.to_uppercase();
        let is_this = |argument: &String| model_setting(argument) == self.setting;
        let argument = [self.name.clone(), capitals].into_iter().find(is_this);
        argument.unwrap_or_else(|| self.name.clone())
    }
}

/// Returns the name of a model in a cache of Hugging Face, `ORG/NAME` or `NAME`, if `path` is one of its snapshots:
/// `models--ORG--NAME/snapshots/REVISION`.
pub fn cached_name(path: &Path) -> Option<String> {
    let snapshots = path.parent().filter(|folder| folder.ends_with("snapshots"))?;
    let folder = snapshots.parent()?.file_name()?.to_string_lossy();
    Some(folder.strip_prefix("models--")?.replacen("--", "/", 1))
}

/// Returns the models in a folder: the folder itself if it has a `config.json`, and each folder in it that has one.
///
/// # Errors
/// The folder cannot be read.
fn models_in(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |error: std::io::Error| {
        Failure::input(format!("--dir {}: cannot be read: {error}", folder.display())).hint("name a folder with models")
    };
    let mut inside = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)?.take(MAX_ENTRIES) {
        inside.push(entry.map_err(failed)?.path());
    }
    inside.sort();
    let all = std::iter::once(folder.to_owned()).chain(inside);
    Ok(all.filter(|path| path.join("config.json").is_file()).collect())
}

/// Returns the snapshot of each model in a cache of Hugging Face (`models--ORG--NAME/snapshots/REVISION`) to which the
/// main branch refers. Folders that cannot be read are left out.
fn models_in_cache(cache: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cache).into_iter().flatten().flatten().take(MAX_ENTRIES);
    let is_model = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("models--"));
    let mut snapshots: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(is_model).filter_map(|model| main_snapshot(&model)).collect();
    snapshots.sort();
    snapshots
}

/// Returns the snapshot of a cached model to which its main branch refers; `None` if it has no `config.json`.
fn main_snapshot(model: &Path) -> Option<PathBuf> {
    let revision = plimsoll_device::regular_file::read_text(&model.join("refs/main")).ok()?;
    let revision = revision.trim();
    // A revision is a hash; anything else could lead out of the cache.
    let is_hash = !revision.is_empty() && revision.chars().all(|letter| letter.is_ascii_hexdigit());
    let snapshot = model.join("snapshots").join(revision);
    (is_hash && snapshot.join("config.json").is_file()).then_some(snapshot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_models_are_those_of_the_main_branch() {
        let cache = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = cache.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("models--a--b/refs/main", "00ff\n");
        write("models--a--b/snapshots/00ff/config.json", "{}");
        write("models--a--b/snapshots/0100/config.json", "{}");
        write("models--a--escape/refs/main", "../../../models--a--b/snapshots/00ff");
        write("models--a--gone/refs/main", "aa");
        write("datasets--a--b/refs/main", "00ff");
        assert_eq!(models_in_cache(cache.path()), [cache.path().join("models--a--b/snapshots/00ff")]);
        assert!(models_in_cache(&cache.path().join("missing")).is_empty());
    }

    #[test]
    fn cached_models_have_their_published_name() {
        let name = |path: &str| cached_name(Path::new(path));
        assert_eq!(name("/hub/models--Qwen--Qwen3-8B/snapshots/0a").as_deref(), Some("Qwen/Qwen3-8B"));
        assert_eq!(name("hub/models--gpt2/snapshots/0a/").as_deref(), Some("gpt2"));
        for other in ["models--a--b", "models--a--b/snapshots", "a/snapshots/0a", "models--a--b/refs/0a"] {
            assert_eq!(name(other), None, "{other}");
        }
    }

    #[test]
    fn folders_with_a_config_are_models() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["one", "two", "empty"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("one/config.json"), "{}").unwrap();
        fs::write(dir.path().join("two/config.json"), "{}").unwrap();
        assert_eq!(models_in(dir.path()).unwrap(), [dir.path().join("one"), dir.path().join("two")]);
        assert_eq!(models_in(&dir.path().join("one")).unwrap(), [dir.path().join("one")]);
        assert!(models_in(&dir.path().join("missing")).unwrap_err().message.contains("cannot be read"));
    }
}
