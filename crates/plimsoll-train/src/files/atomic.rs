//! Atomic writes and removals of files and directories: write under a temporary name, sync, rename. After a power
//! failure or `kill -9` at any moment, the name refers to the complete old or the complete new version.

use super::error::FilesError;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Writes a small file and replaces an existing one.
///
/// # Errors
/// A failed file operation. An existing file is then kept.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), FilesError> {
    fill_file(path, |mut file| file.write_all(bytes).map_err(|e| FilesError::io(path, "write", e)))
}

/// Writes a file of any size and replaces an existing one. `fill` writes into the temporary file `.NAME.partial` beside it.
///
/// # Errors
/// A failure of `fill` or of a file operation. An existing file is then kept, and the temporary one is removed.
pub fn fill_file<T, E: From<FilesError>>(path: &Path, fill: impl FnOnce(&File) -> Result<T, E>) -> Result<T, E> {
    let partial = partial_path(path)?;
    let result = (|| {
        let failed = |e| FilesError::io(path, "write", e);
        if partial.symlink_metadata().is_ok() {
            fs::remove_file(&partial).map_err(failed)?;
        }
        let file = File::create_new(&partial).map_err(failed)?;
        let value = fill(&file)?;
        file.sync_all().map_err(failed)?;
        fs::rename(&partial, path).map_err(failed)?;
        sync_parent(path)?;
        Ok(value)
    })();
    if result.is_err() {
        let _ = fs::remove_file(&partial);
    }
    result
}

/// Writes a directory and replaces an existing one. `fill` writes into the temporary directory `.NAME.partial` beside
/// it; a leftover of a killed process under that name is removed first.
///
/// # Errors
/// A failure of `fill` or of a file operation. An existing directory is then kept, and the temporary one is removed.
pub fn write_dir<T, E: From<FilesError>>(path: &Path, fill: impl FnOnce(&Path) -> Result<T, E>) -> Result<T, E> {
    let partial = partial_path(path)?;
    remove_if_present(&partial)?;
    let result = (|| {
        let around = partial.parent().unwrap_or(Path::new(""));
        let created = fs::create_dir_all(around).and_then(|()| fs::create_dir(&partial));
        created.map_err(|e| FilesError::io(&partial, "create", e))?;
        let value = fill(&partial)?;
        sync_tree(&partial)?;
        replace(&partial, path)?;
        Ok(value)
    })();
    if result.is_err() {
        let _ = remove_if_present(&partial);
    }
    result
}

/// Renames the directory `partial` to `path`. A directory that had this name before is removed after that.
fn replace(partial: &Path, path: &Path) -> Result<(), FilesError> {
    let failed = |e| FilesError::io(path, "write", e);
    if path.symlink_metadata().is_err() {
        fs::rename(partial, path).map_err(failed)?;
        return sync_parent(path);
    }
    // An exchange never leaves the name without a directory.
    match renameat_with(CWD, partial, CWD, path, RenameFlags::EXCHANGE) {
        Ok(()) => {
            sync_parent(path)?;
            remove_if_present(partial)
        }
        // The file system cannot exchange. Between the two renames the name is unused, and the old directory is
        // `.NAME.previous`.
        Err(_) => {
            let previous = sibling(path, "previous")?;
            remove_if_present(&previous)?;
            fs::rename(path, &previous).map_err(failed)?;
            fs::rename(partial, path).map_err(failed)?;
            sync_parent(path)?;
            remove_if_present(&previous)
        }
    }
}

/// Removes a directory. It is renamed to `.NAME.removed` first, so its name never stands for a part of it.
///
/// # Errors
/// A failed file operation.
pub fn remove_dir(path: &Path) -> Result<(), FilesError> {
    let removed = sibling(path, "removed")?;
    remove_if_present(&removed)?;
    fs::rename(path, &removed).map_err(|e| FilesError::io(path, "remove", e))?;
    sync_parent(path)?;
    remove_if_present(&removed)
}

fn partial_path(path: &Path) -> Result<PathBuf, FilesError> {
    sibling(path, "partial")
}

/// Removes the temporary directories in `folder` that a killed process left behind while it wrote or removed one.
///
/// # Errors
/// A directory that cannot be removed.
pub fn remove_unfinished(folder: &Path) -> Result<(), FilesError> {
    unfinished_directories(folder).iter().try_for_each(|path| remove_if_present(path))
}

/// Returns the temporary directories in `folder`.
fn unfinished_directories(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let is_unfinished = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ending = [".partial", ".previous", ".removed"].iter().any(|ending| name.ends_with(ending));
        name.starts_with('.') && ending && path.is_dir()
    };
    paths.filter(is_unfinished).collect()
}

/// Returns the path `.NAME.ENDING` in the folder of `path`, with NAME being the last component of `path`.
fn sibling(path: &Path, ending: &str) -> Result<PathBuf, FilesError> {
    let no_name = || FilesError::BadPath { path: path.to_owned(), problem: "not a valid file name" };
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or_else(no_name)?);
    name.push(".");
    name.push(ending);
    Ok(path.with_file_name(name))
}

fn remove_if_present(path: &Path) -> Result<(), FilesError> {
    let removed = match path.symlink_metadata() {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(FilesError::io(path, "remove", e)),
        _ => Ok(()),
    }
}

/// Syncs `dir` and every file and directory below it.
fn sync_tree(dir: &Path) -> Result<(), FilesError> {
    let failed = |e| FilesError::io(dir, "sync", e);
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            sync_tree(&entry.path())?;
        } else {
            sync(&entry.path())?;
        }
    }
    sync(dir)
}

fn sync(path: &Path) -> Result<(), FilesError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|e| FilesError::io(path, "sync", e))
}

/// Makes a rename durable by syncing the parent directory, which holds the names.
fn sync_parent(path: &Path) -> Result<(), FilesError> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => sync(Path::new(".")),
        Some(parent) => sync(parent),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn fill_with(text: &'static str) -> impl Fn(&Path) -> Result<(), FilesError> {
        move |dir| fs::write(dir.join("weights"), text).map_err(|e| FilesError::io(dir, "write", e))
    }

    #[test]
    fn new_directory_replaces_old_one_completely() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("deep/model");
        write_dir(&path, |dir| {
            fs::write(dir.join("only-in-old"), "").unwrap();
            fill_with("old")(dir)
        })
        .unwrap();
        // A leftover of a killed process.
        fs::create_dir(temp.path().join("deep/.model.partial")).unwrap();
        fs::write(temp.path().join("deep/.model.partial/half"), "").unwrap();
        write_dir(&path, fill_with("new")).unwrap();
        assert_eq!(names(&path), ["weights"]);
        assert_eq!(fs::read_to_string(path.join("weights")).unwrap(), "new");
        assert_eq!(names(path.parent().unwrap()), ["model"]);
    }

    #[test]
    fn failed_write_keeps_only_the_old_version() {
        let temp = tempfile::tempdir().unwrap();
        let (dir, file) = (temp.path().join("model"), temp.path().join("plan.json"));
        write_dir(&dir, fill_with("old")).unwrap();
        write_file(&file, b"old").unwrap();
        let full = write_dir(&dir, |partial| {
            fill_with("half")(partial)?;
            Err::<(), _>(FilesError::io(partial, "write", ErrorKind::StorageFull.into()))
        });
        assert!(matches!(full, Err(FilesError::DiskFull { .. })));
        assert_eq!(fs::read_to_string(dir.join("weights")).unwrap(), "old");
        assert!(write_file(&file.join("below-a-file"), b"new").is_err());
        write_file(&file, b"new").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(names(temp.path()), ["model", "plan.json"]);
    }
}
