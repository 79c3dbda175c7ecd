//! The files of a repository that a model or data need.

use super::error::HubError;
use super::id::MalformedHubId;
use super::listing::RemoteFile;
use super::repository::{HubEvent, Repository};
use crate::config::Split;
use crate::data::is_data_file;
use crate::files::SIDE_FILES;
use glob::{MatchOptions, Pattern};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Index of weights in several files.
const INDEX: &str = "model.safetensors.index.json";
/// Weights in a single file.
const SINGLE: &str = "model.safetensors";
/// Files in JSON that describe a dataset and hold no records.
const NO_DATA: [&str; 3] = ["dataset_infos.json", "dataset_dict.json", "state.json"];

/// The part of a model that is fetched. Each includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelPart {
    /// The configuration.
    Config,
    /// Tokenizer and chat templates.
    Tokenizer,
    /// The weights.
    Weights,
}

/// The use of data, by which their files are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataUse {
    /// Training: the split `train`, or the files whose names tell no split.
    Training,
    /// Evaluation: the split `validation`, or else `test`.
    Evaluation,
    /// A split that the run file names, also among the files that the id names.
    Split(Split),
}

impl DataUse {
    /// Returns the splits that serve the use, the best first. `None` stands for files whose names tell no split.
    fn splits(self) -> Vec<Option<Split>> {
        match self {
            DataUse::Training => vec![Some(Split::Train), None],
            DataUse::Evaluation => vec![Some(Split::Validation), Some(Split::Test)],
            DataUse::Split(split) => vec![Some(split)],
        }
    }

    /// Returns the use in words.
    fn describe(self) -> String {
        match self {
            DataUse::Training => "data for training".to_owned(),
            DataUse::Evaluation => "data for evaluation".to_owned(),
            DataUse::Split(split) => format!("the split \"{}\"", split.name()),
        }
    }
}

/// The index of weights in several files.
#[derive(Deserialize)]
struct WeightIndex {
    weight_map: BTreeMap<String, String>,
}

impl Repository<'_> {
    /// Fetches a part of a model. Returns its directory.
    ///
    /// # Errors
    /// A file that the repository lacks, or the errors of a download.
    pub fn fetch_model(&self, part: ModelPart, observe: &mut dyn FnMut(HubEvent<'_>)) -> Result<PathBuf, HubError> {
        let folder = self.model_folder()?;
        let mut files = vec![self.required(&format!("{folder}config.json"))?];
        for name in SIDE_FILES.iter().filter(|name| part >= ModelPart::Tokenizer || **name == "generation_config.json")
        {
            let (path, below) = (format!("{folder}{name}"), format!("{folder}{name}/"));
            files.extend(
                self.listing.files.iter().filter(|file| file.name == path || file.name.starts_with(&below)).cloned(),
            );
        }
        if part == ModelPart::Weights {
            files.extend(self.weights(&folder, observe)?);
        }
        self.fetch(&files, observe)?;
        Ok(self.folder().join(folder))
    }

    /// Fetches PEFT adapters. Returns their directory.
    ///
    /// # Errors
    /// As [`fetch_model`](Self::fetch_model).
    pub fn fetch_adapter(&self, observe: &mut dyn FnMut(HubEvent<'_>)) -> Result<PathBuf, HubError> {
        let folder = self.model_folder()?;
        let named = |name: &str| format!("{folder}{name}");
        let mut files = vec![self.required(&named("adapter_config.json"))?];
        files.push(self.required(&named("adapter_model.safetensors"))?);
        files.extend(self.listing.file(&named("generation_config.json")).cloned());
        self.fetch(&files, observe)?;
        Ok(self.folder().join(folder))
    }

    /// Fetches data files. Returns their paths.
    ///
    /// # Errors
    /// No file matches, the repository has several sets of data and the id names none, or a download fails.
    pub fn fetch_data(&self, usage: DataUse, observe: &mut dyn FnMut(HubEvent<'_>)) -> Result<Vec<PathBuf>, HubError> {
        let files = match &self.id.files {
            Some(glob) => self.named_data(glob, usage)?,
            None => self.usual_data(usage)?,
        };
        self.fetch(&files, observe)?;
        Ok(files.iter().map(|file| self.path(file)).collect())
    }

    /// Returns the folder of a model in the repository: that of the files which the id names. It has a slash at its end
    /// unless it is the uppermost.
    fn model_folder(&self) -> Result<String, HubError> {
        let Some((folder, _)) = self.id.files.as_deref().and_then(|files| files.rsplit_once('/')) else {
            return Ok(String::new());
        };
        if folder.contains(['*', '?', '[']) {
            let problem = "a model lies in one folder, so only the name of a file may have `*`, `?` and `[`";
            return Err(MalformedHubId { id: self.id.to_string(), problem }.into());
        }
        Ok(format!("{folder}/"))
    }

    fn required(&self, name: &str) -> Result<RemoteFile, HubError> {
        self.listing.file(name).cloned().ok_or_else(|| self.no_file(name))
    }

    /// Returns the files that match a glob, in alphabetical order.
    fn matching(&self, glob: &str) -> Vec<RemoteFile> {
        let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
        let pattern = Pattern::new(glob).ok();
        let matches = |name: &str| pattern.as_ref().is_some_and(|pattern| pattern.matches_with(name, options));
        let mut files: Vec<RemoteFile> =
            self.listing.files.iter().filter(|file| file.name == glob || matches(&file.name)).cloned().collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        files
    }

    /// Returns the weight files of a model: one file, or those of the index, or all in its folder.
    fn weights(&self, folder: &str, observe: &mut dyn FnMut(HubEvent<'_>)) -> Result<Vec<RemoteFile>, HubError> {
        let glob = match &self.id.files {
            Some(files) => files.clone(),
            None => "*".to_owned(),
        };
        let chosen = self.matching(&glob);
        let single = format!("{folder}{SINGLE}");
        if let Some(file) = chosen.iter().find(|file| file.name == single) {
            return Ok(vec![file.clone()]);
        }
        let index = format!("{folder}{INDEX}");
        if let Some(index) = chosen.iter().find(|file| file.name == index) {
            let text = self.read(index, observe)?;
            let invalid = |error: serde_json::Error| HubError::BadReply {
                url: format!("{}: {}", self.id, index.name),
                problem: format!("the index cannot be read: {error}"),
            };
            let WeightIndex { weight_map } = serde_json::from_slice(&text).map_err(invalid)?;
            let shards: BTreeSet<String> = weight_map.into_values().collect();
            let shards = shards.iter().map(|shard| self.required(&format!("{folder}{shard}")));
            return [Ok(index.clone())].into_iter().chain(shards).collect();
        }
        let is_weights = |file: &&RemoteFile| file.name.ends_with(".safetensors");
        let files: Vec<RemoteFile> = chosen.iter().filter(is_weights).cloned().collect();
        if files.is_empty() { Err(self.no_file(&format!("{folder}*.safetensors"))) } else { Ok(files) }
    }

    /// Returns the files that match a glob. Of a named split, only its files are taken.
    fn named_data(&self, glob: &str, usage: DataUse) -> Result<Vec<RemoteFile>, HubError> {
        let mut files = self.matching(glob);
        if files.is_empty() {
            return Err(self.no_file(glob));
        }
        if let DataUse::Split(split) = usage {
            let of_split = |file: &&RemoteFile| Split::in_path(&file.name) == Some(split);
            let chosen: Vec<RemoteFile> = files.iter().filter(of_split).cloned().collect();
            if chosen.is_empty() {
                return Err(self.ambiguous(no_name(usage), files));
            }
            files = chosen;
        }
        Ok(files)
    }

    fn ambiguous(&self, problem: String, files: Vec<RemoteFile>) -> HubError {
        HubError::Ambiguous { id: self.id.clone(), problem, known: files.into_iter().map(|file| file.name).collect() }
    }

    /// Returns the data files of a use. Their names tell it, as those of the hub's datasets do.
    fn usual_data(&self, usage: DataUse) -> Result<Vec<RemoteFile>, HubError> {
        let files = self.listing.files.iter().filter(|file| is_data(&file.name));
        let mut by_split: BTreeMap<Option<Split>, Vec<RemoteFile>> = BTreeMap::new();
        for file in files {
            by_split.entry(Split::in_path(&file.name)).or_default().push(file.clone());
        }
        let chosen = usage.splits().iter().find_map(|split| by_split.remove(split)).unwrap_or_default();
        let count = |part: fn(&Path) -> Option<&std::ffi::OsStr>| {
            chosen.iter().map(|file| part(Path::new(&file.name))).collect::<BTreeSet<_>>().len()
        };
        if chosen.is_empty() {
            return Err(self.ambiguous(no_name(usage), by_split.into_values().flatten().collect()));
        }
        if count(|path| path.parent().map(Path::as_os_str)) > 1 || count(Path::extension) > 1 {
            return Err(self.ambiguous("the dataset has several sets of files".to_owned(), chosen));
        }
        Ok(chosen)
    }
}

/// Describes that no file is chosen for a use.
fn no_name(usage: DataUse) -> String {
    format!("no name tells that a file has {}", usage.describe())
}

/// Returns whether a file of a dataset holds records.
fn is_data(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name);
    // Texts of a repository are mostly about it, not data.
    !file.starts_with('.') && !NO_DATA.contains(&file) && !file.ends_with(".txt") && is_data_file(Path::new(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_data_files_tell_their_use() {
        for (name, expected) in [
            ("data/train-00000-of-00001.parquet", Some(Split::Train)),
            ("validation.jsonl", Some(Split::Validation)),
            ("test/part_0.json.gz", Some(Split::Test)),
            ("my-train/dev.jsonl", Some(Split::Validation)),
            ("training_data.jsonl", Some(Split::Train)),
            ("trained.jsonl", None),
        ] {
            assert_eq!(Split::in_path(name), expected, "{name}");
            assert!(is_data(name), "{name}");
        }
        for name in ["README.md", ".gitattributes", "dataset_infos.json", "LICENSE.txt"] {
            assert!(!is_data(name), "{name}");
        }
    }
}
