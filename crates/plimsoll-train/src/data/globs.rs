//! Expansion of the paths and globs of training and evaluation data into files, and the choice of a split among them.

use super::containers::{Container, file_type};
use super::error::DataError;
use crate::config::{Format, Split};
use glob::Pattern;
use plimsoll_device::regular_file;
use std::collections::{BTreeSet, HashSet};
use std::fs::{self, DirEntry};
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

/// Most files, or folders on the way to them, that a glob may match.
const MATCHES_MAX: usize = 1_000_000;

/// Expands paths and globs into files, each file once, even if several links lead to it. Files come in the order of
/// `patterns`, those of one glob in alphabetical order. With a `split`, only the files are taken whose name or folder
/// names it.
///
/// # Errors
/// An invalid pattern, a pattern without files or with too many, a file that is not of `format` or not regular, or no
/// file of the split.
pub(crate) fn list_files(patterns: &[String], format: Format, split: Option<Split>) -> Result<Vec<PathBuf>, DataError> {
    let (mut files, mut others, mut known) = (Vec::new(), Vec::new(), HashSet::new());
    for pattern in patterns {
        // An existing file may have brackets in its name, so it is not expanded as a glob.
        let exists = Path::new(pattern).exists();
        let matches = if exists { [PathBuf::from(pattern)].into() } else { expand(pattern, MATCHES_MAX)? };
        if matches.is_empty() {
            return Err(DataError::NoFiles { pattern: pattern.clone() });
        }
        for file in matches {
            if split.is_some_and(|split| split_of(&file) != Some(split)) {
                others.push(file);
                continue;
            }
            let container = file_type(&file)?.container;
            if container == Container::PlainText && !matches!(format, Format::Auto | Format::Text) {
                let expected = "a file with records; a .txt file is text";
                return Err(DataError::UnsupportedFile { file, expected });
            }
            regular_file::check(&file).map_err(DataError::io("read", &file))?;
            if known.insert(file.canonicalize().map_err(DataError::io("read", &file))?) {
                files.push(file);
            }
        }
    }
    match split {
        _ if !files.is_empty() => Ok(files),
        Some(split) if !others.is_empty() => Err(DataError::NoSplit { split, files: others }),
        _ => Err(DataError::NoPatterns),
    }
}

/// Returns the split that the name of a file tells, or else the name of its folder.
fn split_of(file: &Path) -> Option<Split> {
    let folder = file.parent().and_then(Path::file_name);
    [file.file_name(), folder].into_iter().flatten().find_map(|name| Split::in_path(&name.to_string_lossy()))
}

/// Returns the paths that match a glob, at most `limit`. Component after component is expanded. `**` enters no linked
/// folder, so a ring of links is no endless path.
fn expand(pattern: &str, limit: usize) -> Result<BTreeSet<PathBuf>, DataError> {
    let invalid = |reason: &str| DataError::InvalidPattern { pattern: pattern.to_owned(), reason: reason.to_owned() };
    Pattern::new(pattern).map_err(|error| invalid(error.msg))?;
    let mut paths = BTreeSet::from([PathBuf::new()]);
    for component in Path::new(pattern).components() {
        let text = component.as_os_str().to_string_lossy();
        let is_plain = !matches!(component, Component::Normal(_)) || !text.contains(['*', '?', '[']);
        let name = Pattern::new(&text).map_err(|error| invalid(error.msg))?;
        let mut next = BTreeSet::new();
        for path in paths {
            if is_plain {
                let path = path.join(component);
                next.extend(path.symlink_metadata().is_ok().then_some(path));
            } else if text == "**" {
                add_folders(path, &mut next, limit)?;
            } else {
                let names = entries(&path)?.into_iter().map(|entry| entry.file_name());
                let matching = names.filter(|entry| name.matches(&entry.to_string_lossy()));
                next.extend(matching.map(|entry| path.join(entry)));
            }
            if next.len() > limit {
                return Err(DataError::TooManyFiles { pattern: pattern.to_owned(), limit });
            }
        }
        paths = next;
    }
    Ok(paths)
}

/// Adds a folder and all folders below it to `found`, until it has more than `limit`.
fn add_folders(folder: PathBuf, found: &mut BTreeSet<PathBuf>, limit: usize) -> Result<(), DataError> {
    let mut open = if folder.as_os_str().is_empty() || folder.is_dir() { vec![folder] } else { vec![] };
    while let Some(folder) = open.pop().filter(|_| found.len() <= limit) {
        let is_folder = |entry: &DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        open.extend(entries(&folder)?.into_iter().filter(is_folder).map(|entry| folder.join(entry.file_name())));
        found.insert(folder);
    }
    Ok(())
}

/// Returns the entries of a folder; none if it is absent or no folder. The empty path means the working directory.
fn entries(folder: &Path) -> Result<Vec<DirEntry>, DataError> {
    let place = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    match fs::read_dir(place).and_then(Iterator::collect) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(Vec::new()),
        listed => listed.map_err(DataError::io("list", place)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Returns a folder with the given empty files.
    fn folder_of(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files.iter().map(|file| folder.path().join(file)) {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        folder
    }

    /// Returns the files of `pattern` in `folder`, as paths within it.
    fn listed(folder: &Path, pattern: &str) -> Vec<String> {
        let pattern = folder.join(pattern).to_str().unwrap().to_owned();
        let found = list_files(&[pattern.clone(), pattern], Format::Tokens, None).unwrap();
        found.iter().map(|file| file.strip_prefix(folder).unwrap().display().to_string()).collect()
    }

    #[test]
    fn globs_match_in_alphabetical_order() {
        let folder = folder_of(&["b.jsonl", "a.jsonl", "c/a.jsonl", "c/d/.e.jsonl", "c/d/f.txt", "ab/x.jsonl"]);
        for (pattern, files) in [
            ("*.jsonl", &["a.jsonl", "b.jsonl"][..]),
            ("[a-b].jsonl", &["a.jsonl", "b.jsonl"]),
            ("**/*.jsonl", &["a.jsonl", "ab/x.jsonl", "b.jsonl", "c/a.jsonl", "c/d/.e.jsonl"]),
            ("c/**/a.jsonl", &["c/a.jsonl"]),
            ("?*/?.jsonl", &["ab/x.jsonl", "c/a.jsonl"]),
        ] {
            assert_eq!(listed(folder.path(), pattern), files, "{pattern}");
        }
    }

    #[test]
    fn each_file_counts_once_through_links() {
        let folder = folder_of(&["a.jsonl", "c/d.jsonl"]);
        for name in ["x", "c/y", "z"] {
            symlink(folder.path(), folder.path().join(name)).unwrap();
        }
        symlink("a.jsonl", folder.path().join("b.jsonl")).unwrap();
        assert_eq!(listed(folder.path(), "**/*.jsonl"), ["a.jsonl", "c/d.jsonl"]);
        assert_eq!(listed(folder.path(), "*.jsonl"), ["a.jsonl"]);
        // A link that the pattern names is followed.
        assert_eq!(listed(folder.path(), "x/c/*.jsonl"), ["x/c/d.jsonl"]);
    }

    #[test]
    fn splits_are_told_by_file_or_folder() {
        let names = ["train-0.jsonl", "dev.jsonl", "test/a.jsonl", "train/eval_x.jsonl", "Val/b.jsonl", "c.jsonl"];
        let folder = folder_of(&names);
        let pattern = folder.path().join("**/*.jsonl").to_str().unwrap().to_owned();
        let of = |split| list_files(std::slice::from_ref(&pattern), Format::Auto, Some(split));
        let names_of = |split| -> Vec<String> {
            of(split).unwrap().iter().map(|file| file.strip_prefix(&folder).unwrap().display().to_string()).collect()
        };
        assert_eq!(names_of(Split::Train), ["train-0.jsonl"]);
        assert_eq!(names_of(Split::Validation), ["Val/b.jsonl", "dev.jsonl", "train/eval_x.jsonl"]);
        assert_eq!(names_of(Split::Test), ["test/a.jsonl"]);
        fs::remove_dir_all(folder.path().join("test")).unwrap();
        let refusal = of(Split::Test).unwrap_err().to_string();
        assert!(refusal.starts_with("no name tells that a file has the split \"test\"; the files are "), "{refusal}");
        assert!(refusal.ends_with("dev.jsonl and 2 more files"), "{refusal}");
    }

    #[test]
    fn matches_are_bounded() {
        let folder = folder_of(&["a.jsonl", "b.jsonl", "c/d/e.jsonl"]);
        for (pattern, limit) in [("*.jsonl", 1), ("**/e.jsonl", 2)] {
            let pattern = folder.path().join(pattern).to_str().unwrap().to_owned();
            assert!(matches!(expand(&pattern, limit), Err(DataError::TooManyFiles { .. })), "{pattern}");
            assert!(expand(&pattern, limit + 1).is_ok(), "{pattern}");
        }
    }
}
