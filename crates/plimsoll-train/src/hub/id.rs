//! The text of a hub id, `hub:OWNER/NAME[@REVISION][:FILES]`, and its check.

use crate::config::HUB_PREFIX;
use std::fmt;
use std::str::FromStr;

/// The longest name of a repository, as on the hub.
const NAME_MAX: usize = 96;
/// Number of digits of a commit.
const COMMIT_DIGITS: usize = 40;

/// The kind of a repository on the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepositoryKind {
    /// A model.
    Model,
    /// A dataset.
    Dataset,
}

impl RepositoryKind {
    /// Returns the word of this kind in the paths of the hub's API and in the cache: `models` or `datasets`.
    pub fn plural(self) -> &'static str {
        match self {
            RepositoryKind::Model => "models",
            RepositoryKind::Dataset => "datasets",
        }
    }

    /// Returns the part of an address before the name of a repository: empty, or `datasets/`.
    pub(super) fn address_prefix(self) -> &'static str {
        match self {
            RepositoryKind::Model => "",
            RepositoryKind::Dataset => "datasets/",
        }
    }
}

impl fmt::Display for RepositoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RepositoryKind::Model => "model",
            RepositoryKind::Dataset => "dataset",
        })
    }
}

/// A text that is no id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{id}`: {problem}")]
pub struct MalformedHubId {
    /// The text.
    pub id: String,
    /// The expected form of the part that is wrong.
    pub problem: &'static str,
}

/// A repository of the hub, with a revision and a choice of files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubId {
    /// Name of the repository: `OWNER/NAME`, or `NAME` for some old ones.
    pub repository: String,
    /// A branch, a tag or a commit; `None` for the branch `main`.
    pub revision: Option<String>,
    /// A glob over the paths of files in the repository; `None` for the usual files.
    pub files: Option<String>,
}

impl HubId {
    /// Returns the revision that is asked for.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Returns the id of the same files in one commit.
    pub fn at_commit(&self, commit: &str) -> HubId {
        HubId { revision: Some(commit.to_owned()), ..self.clone() }
    }
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{HUB_PREFIX}{}", self.repository)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))?;
        self.files.iter().try_for_each(|files| write!(f, ":{files}"))
    }
}

impl FromStr for HubId {
    type Err = MalformedHubId;

    /// Parses an id.
    ///
    /// # Errors
    /// A text without a valid name, revision or glob.
    fn from_str(text: &str) -> Result<HubId, MalformedHubId> {
        let invalid = |problem: &'static str| MalformedHubId { id: text.to_owned(), problem };
        let rest = text.strip_prefix(HUB_PREFIX).ok_or_else(|| invalid("it does not begin with `hub:`"))?;
        let (place, files) = split(rest, ':');
        let (repository, revision) = split(place, '@');
        if !is_repository_name(repository) {
            return Err(invalid("the name of a repository is OWNER/NAME, of letters, digits, `-`, `_` and `.`"));
        }
        if revision.is_some_and(|revision| !is_revision(revision)) {
            return Err(invalid("after `@` a branch, a tag or a commit is expected"));
        }
        if files.is_some_and(|files| glob::Pattern::new(files).is_err() || !is_inside(files)) {
            return Err(invalid("after `:` a file or a glob is expected, such as data/*.jsonl"));
        }
        let owned = |text: Option<&str>| text.map(str::to_owned);
        Ok(HubId { repository: repository.to_owned(), revision: owned(revision), files: owned(files) })
    }
}

fn split(text: &str, separator: char) -> (&str, Option<&str>) {
    text.split_once(separator).map_or((text, None), |(before, after)| (before, Some(after)))
}

/// Returns whether the hub takes `name` as the name of a repository.
fn is_repository_name(name: &str) -> bool {
    let is_letter = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    let is_part = |part: &str| {
        !part.is_empty() && part.chars().all(is_letter) && !part.starts_with(['-', '.']) && !part.ends_with(['-', '.'])
    };
    let is_plain = name.len() <= NAME_MAX && !name.contains("--") && !name.contains("..");
    is_plain && name.split('/').count() <= 2 && name.split('/').all(is_part)
}

/// Returns whether `text` can name a revision. It becomes the path of a file in the cache.
fn is_revision(text: &str) -> bool {
    is_inside(text) && !text.contains(|letter: char| letter.is_control() || " ~^?*[\\".contains(letter))
}

/// Returns whether `path` is relative and stays in its folder.
pub(super) fn is_inside(path: &str) -> bool {
    let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
    path.split('/').all(is_plain) && !path.contains(['\\', '\0'])
}

/// Returns whether `text` is the name of a commit.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit() && !byte.is_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_name_revision_and_files() {
        for (text, repository, revision, files) in [
            ("hub:a/b", "a/b", "main", None),
            ("hub:gpt2@v1.0", "gpt2", "v1.0", None),
            ("hub:a/b:data/*.jsonl", "a/b", "main", Some("data/*.jsonl")),
            ("hub:a/b-c_d.e@refs/pr/1:x@y.jsonl", "a/b-c_d.e", "refs/pr/1", Some("x@y.jsonl")),
        ] {
            let id: HubId = text.parse().unwrap();
            assert_eq!((&*id.repository, id.revision(), id.files.as_deref()), (repository, revision, files), "{text}");
            assert_eq!(id.to_string(), text);
        }
    }

    #[test]
    fn ids_out_of_the_cache_are_refused() {
        for text in [
            "a/b",
            "hub:",
            "hub:/b",
            "hub:a/",
            "hub:a/b/c",
            "hub:../b",
            "hub:a/..",
            "hub:a--b/c",
            "hub:a b/c",
            "hub:-a/b",
            "hub:a/b@",
            "hub:a/b@../../x",
            "hub:a/b@/x",
            "hub:a/b:",
            "hub:a/b:../x",
            "hub:a/b:/etc/passwd",
            "hub:a/b:[",
        ] {
            assert!(text.parse::<HubId>().is_err(), "{text}");
        }
    }
}
