//! Sources of training data (`[[data.source]]`), and the splits of their files.

use super::{DataSection, Format, keys, read};
use serde::{Deserialize, Serialize};

/// A source of training data: a table `[[data.source]]` of a run file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSource {
    /// Files, globs or hub ids; or `example:sums`. Absolute after [`RunConfig::load`](super::RunConfig::load).
    #[serde(deserialize_with = "read::one_or_many")]
    pub path: Vec<String>,
    /// Weight of the source among the others. `None` for all sources if each row comes once per epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Format of the records; `None` stands for that of the section.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// The split whose files are taken; `None` for all files, and for the training files of a hub id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<Split>,
}

/// A part of a dataset that names of files tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&str")]
pub enum Split {
    /// `train` or `training`.
    Train,
    /// `validation`, `valid`, `val`, `dev` or `eval`.
    Validation,
    /// `test`.
    Test,
}

impl Split {
    /// Returns the split that a word names, in lower case; `None` for other words.
    pub fn named(word: &str) -> Option<Split> {
        match word {
            "train" | "training" => Some(Split::Train),
            "validation" | "valid" | "val" | "dev" | "eval" => Some(Split::Validation),
            "test" => Some(Split::Test),
            _ => None,
        }
    }

    /// Returns the split that a path names; `None` if no word of it names one. The last such word counts.
    pub fn in_path(path: &str) -> Option<Split> {
        path.to_lowercase().rsplit(|letter: char| !letter.is_ascii_alphanumeric()).find_map(Split::named)
    }

    /// Returns the usual word for the split.
    pub fn name(self) -> &'static str {
        match self {
            Split::Train => "train",
            Split::Validation => "validation",
            Split::Test => "test",
        }
    }
}

impl TryFrom<String> for Split {
    type Error = String;

    fn try_from(word: String) -> Result<Split, String> {
        Split::named(&word).ok_or_else(|| format!("`{word}` is no split"))
    }
}

impl From<Split> for &'static str {
    fn from(split: Split) -> &'static str {
        split.name()
    }
}

impl DataSection {
    /// Returns whether the run has training data.
    pub fn has_training_data(&self) -> bool {
        !self.train.is_empty() || !self.source.is_empty()
    }

    /// Returns the sources of training data. `data.train` is one source without a weight; without training data there is
    /// none.
    pub fn training_sources(&self) -> Vec<DataSource> {
        match &self.source[..] {
            [] if self.train.is_empty() => Vec::new(),
            [] => vec![DataSource { path: self.train.clone(), ..DataSource::default() }],
            sources => sources.to_vec(),
        }
    }

    /// Returns the paths, globs and ids of all training data.
    pub fn training_paths(&self) -> impl Iterator<Item = &String> {
        self.train.iter().chain(self.source.iter().flat_map(|source| &source.path))
    }

    /// Returns the paths, globs and ids of all training data, to be replaced.
    pub fn training_paths_mut(&mut self) -> impl Iterator<Item = &mut String> {
        self.train.iter_mut().chain(self.source.iter_mut().flat_map(|source| &mut source.path))
    }

    /// Returns the key of the source with the index `index` of [`training_sources`](Self::training_sources), for
    /// messages.
    pub fn source_key(&self, index: usize) -> String {
        if self.source.is_empty() { "data.train".to_owned() } else { keys::source_key(index) }
    }
}
