//! The models that are planned: presets, the models in folders, and those in the cache of Hugging Face. Folders are only
//! read.

use plimsoll_core::Failure;
use plimsoll_program::models::preset_names;
use plimsoll_train::config::{RunConfig, setting};
use plimsoll_train::resolve::Model;
use plimsoll_watch::model_list::ModelOrigin;
use std::collections::HashSet;
use std::env::var_os;
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
        let shape = Model::open(&RunConfig::from_settings(&[std::slice::from_ref(&set), settings].concat())?)?.config;
        let (parameters, max_positions) = (shape.parameters(), shape.max_positions);
        self.models.push(Candidate { name: name.to_owned(), origin, parameters, max_positions, setting: set });
        Ok(())
    }
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

/// Returns the folder in which Hugging Face's libraries keep downloaded models; `None` if the home folder is unknown.
fn cache_folder() -> Option<PathBuf> {
    let named = |name: &str| var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || named("HF_HOME").or_else(|| Some(named("HOME")?.join(".cache/huggingface")));
    named("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")))
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
