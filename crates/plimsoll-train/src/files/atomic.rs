//! Files and directories that are whole or not there: written aside, synced, renamed. After a power
//! cut or `kill -9` at any moment the old one or the new one is found under its name.

use super::error::FilesError;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Writes a small file in place of what may be there.
///
/// # Errors
/// What the system says; the old file is then still there.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), FilesError> {
    let partial = partial_of(path)?;
    let result = (|| {
        let failed = |e| FilesError::io(path, "write", e);
        let mut file = File::create(&partial).map_err(failed)?;
        file.write_all(bytes).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        fs::rename(&partial, path).map_err(failed)?;
        sync_parent(path)
    })();
    if result.is_err() {
        let _ = fs::remove_file(&partial);
    }
    result
}

/// Writes a directory in place of what may be there: `fill` fills one that lies beside it, under
/// the name `.NAME.partial`, where one left by a killed process is overwritten.
///
/// # Errors
/// What `fill` or the system says; the old directory is then still there, and the new one gone.
pub fn write_dir<T, E: From<FilesError>>(path: &Path, fill: impl FnOnce(&Path) -> Result<T, E>) -> Result<T, E> {
    let partial = partial_of(path)?;
    remove(&partial)?;
    let result = (|| {
        fs::create_dir_all(&partial).map_err(|e| FilesError::io(&partial, "create", e))?;
        let value = fill(&partial)?;
        sync_tree(&partial)?;
        put_in_place(&partial, path)?;
        Ok(value)
    })();
    if result.is_err() {
        let _ = remove(&partial);
    }
    result
}

/// Renames `partial` to `path`; what was there is removed afterwards.
fn put_in_place(partial: &Path, path: &Path) -> Result<(), FilesError> {
    let failed = |e| FilesError::io(path, "write", e);
    if path.symlink_metadata().is_err() {
        fs::rename(partial, path).map_err(failed)?;
        return sync_parent(path);
    }
    // Exchanging the two leaves no moment without a directory under the name.
    match renameat_with(CWD, partial, CWD, path, RenameFlags::EXCHANGE) {
        Ok(()) => {
            sync_parent(path)?;
            remove(partial)
        }
        // A file system that cannot exchange: the name is free for a moment between the renames,
        // and the old directory is then found beside it.
        Err(_) => {
            let previous = sibling(path, "previous")?;
            remove(&previous)?;
            fs::rename(path, &previous).map_err(failed)?;
            fs::rename(partial, path).map_err(failed)?;
            sync_parent(path)?;
            remove(&previous)
        }
    }
}

fn partial_of(path: &Path) -> Result<PathBuf, FilesError> {
    sibling(path, "partial")
}

/// Directories in `folder` that writes of directories left aside when they were killed.
pub fn left_aside(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().filter_map(|found| Some(found.ok()?.path()));
    let left = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with('.') && (name.ends_with(".partial") || name.ends_with(".previous")) && path.is_dir()
    };
    paths.filter(left).collect()
}

/// `.NAME.ENDING` beside `path`.
fn sibling(path: &Path, ending: &str) -> Result<PathBuf, FilesError> {
    let no_name = || FilesError::NoFile { path: path.to_owned(), problem: "not a name that can be written" };
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or_else(no_name)?);
    name.push(".");
    name.push(ending);
    Ok(path.with_file_name(name))
}

fn remove(path: &Path) -> Result<(), FilesError> {
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

/// Syncs every file and directory below `dir`, and `dir`.
fn sync_tree(dir: &Path) -> Result<(), FilesError> {
    let failed = |e| FilesError::io(dir, "sync", e);
    for found in fs::read_dir(dir).map_err(failed)? {
        let found = found.map_err(failed)?;
        if found.file_type().map_err(failed)?.is_dir() {
            sync_tree(&found.path())?;
        } else {
            sync(&found.path())?;
        }
    }
    sync(dir)
}

fn sync(path: &Path) -> Result<(), FilesError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|e| FilesError::io(path, "sync", e))
}

/// Makes a rename last: the directory holds the names.
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
    fn a_new_directory_takes_the_place_of_the_old_one_whole() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("deep/model");
        write_dir(&path, |dir| {
            fs::write(dir.join("only-in-old"), "").unwrap();
            fill_with("old")(dir)
        })
        .unwrap();
        // Left by a process that was killed.
        fs::create_dir(temp.path().join("deep/.model.partial")).unwrap();
        fs::write(temp.path().join("deep/.model.partial/half"), "").unwrap();
        write_dir(&path, fill_with("new")).unwrap();
        assert_eq!(names(&path), ["weights"]);
        assert_eq!(fs::read_to_string(path.join("weights")).unwrap(), "new");
        assert_eq!(names(path.parent().unwrap()), ["model"]);
    }

    #[test]
    fn a_failed_write_leaves_the_old_one_and_nothing_else() {
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
