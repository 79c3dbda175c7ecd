//! The run file that `plimsoll init` writes: checks of its path, and the write itself.

use plimsoll_core::Failure;
use plimsoll_train::config::{RunConfig, model_setting};
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf, absolute};

/// Files of a run that its run file must not replace.
#[derive(Clone, Debug, Default)]
pub struct Protected {
    /// The run folder; `None` if it is not known yet. `plimsoll train` writes a `run.toml` of its own there.
    pub run_dir: Option<String>,
    /// The model as the user names it; `None` if it is not known yet.
    pub model: Option<String>,
    /// The files of the training data.
    pub data: Vec<PathBuf>,
}

impl Protected {
    /// Checks that the run file `out` replaces none of these files.
    ///
    /// # Errors
    /// `out` is a data file, lies in the model's folder, or is the `run.toml` of the run folder.
    pub fn check(&self, out: &Path) -> Result<(), Failure> {
        let name = out.display();
        let refuse = |reason: &str| {
            let failure = Failure::input(format!("--out {name}: {reason}"));
            Err(failure.hint("name another file with --out, such as my-run.toml"))
        };
        let real = resolved(out);
        if self.run_dir.as_ref().is_some_and(|folder| resolved(&Path::new(folder).join("run.toml")) == real) {
            return refuse("plimsoll train writes its own run.toml to this run folder, and would replace the file");
        }
        if self.data.iter().any(|file| resolved(file) == real) {
            return refuse("this file has training data");
        }
        let model = self.model.as_deref().map(model_path).transpose()?.flatten();
        if model.is_some_and(|model| is_of_model(out, &resolved(Path::new(&model)))) {
            return refuse("the run file must not lie among the files of the model");
        }
        Ok(())
    }
}

/// Returns the path of a model; `None` for a preset.
///
/// # Errors
/// An invalid name.
fn model_path(model: &str) -> Result<Option<String>, Failure> {
    Ok(RunConfig::from_settings(&[model_setting(model)])?.model.path)
}

/// Returns whether a file lies in the folder `model`, or is the file `model`. A link counts where it lies and where it
/// leads.
fn is_of_model(file: &Path, model: &Path) -> bool {
    let real = resolved(file);
    let around = absolute(file).ok().and_then(|file| Some(resolved(file.parent()?)));
    real == model || real.parent() == Some(model) || around.as_deref() == Some(model) && model.is_dir()
}

/// Returns an absolute path without links. The part of it that does not exist stays as it is.
fn resolved(path: &Path) -> PathBuf {
    let path = absolute(path).unwrap_or_else(|_| path.to_owned());
    for folder in path.ancestors() {
        if let (Ok(real), Ok(rest)) = (folder.canonicalize(), path.strip_prefix(folder)) {
            return real.join(rest);
        }
    }
    path
}

/// Checks that the run file may be written.
///
/// # Errors
/// A file that exists, unless `force`; a folder or another path that is no file.
pub fn check(out: &Path, force: bool) -> Result<(), Failure> {
    if out.symlink_metadata().is_err() {
        return Ok(());
    }
    match out.metadata() {
        Ok(found) if found.is_file() && force => Ok(()),
        Ok(found) if found.is_file() => Err(exists(out)),
        found => {
            let kind = if found.is_ok_and(|found| found.is_dir()) { "is a folder" } else { "is no regular file" };
            Err(Failure::input(format!("{} {kind}", out.display())).hint("name a file with --out, such as run.toml"))
        }
    }
}

/// Writes the run file at once. A new file has the permissions that the system gives to new files. With `force`, the
/// content of an existing file is replaced: its permissions stay, and a link continues to lead to it.
///
/// # Errors
/// A file that exists by now, unless `force`, or that cannot be written.
pub fn write(out: &Path, text: &str, force: bool) -> Result<(), Failure> {
    let written = match create(out, text) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && force => replace(out, text),
        other => other,
    };
    written.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => exists(out),
        _ => {
            let message = format!("cannot write {}: {error}", out.display());
            Failure::input(message).hint("name another file with --out")
        }
    })
}

fn exists(out: &Path) -> Failure {
    Failure::input(format!("{} exists", out.display())).hint("name another file with --out, or replace it with --force")
}

/// Writes a new file, and creates its folder if needed.
fn create(out: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = out.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(out)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.inspect_err(|_| remove(out))
}

/// Replaces the file to which `out` leads by way of a temporary file beside it.
fn replace(out: &Path, text: &str) -> io::Result<()> {
    let real = out.canonicalize()?;
    let permissions = fs::metadata(&real)?.permissions();
    let mut name = OsString::from(".");
    name.push(real.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = real.with_file_name(name);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| file.set_permissions(permissions))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&temporary, &real));
    written.inspect_err(|_| remove(&temporary))
}

/// Removes a file that is not complete.
fn remove(file: &Path) {
    // The error of the write is reported; this one would hide it.
    let _ = fs::remove_file(file);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn replaced_file_keeps_mode_and_link() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link] = ["file.toml", "link.toml"].map(|name| folder.path().join(name));
        write(&file, "one", false).unwrap();
        assert_ne!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0);
        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        assert!(write(&link, "two", false).unwrap_err().message.ends_with("link.toml exists"));
        write(&link, "two", true).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "two");
        assert!(link.is_symlink());
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn files_of_the_run_are_protected() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let text = |name: &str| Some(path(name).to_string_lossy().into_owned());
        fs::create_dir(path("model")).unwrap();
        fs::write(path("data.jsonl"), "").unwrap();
        symlink(path("data.jsonl"), path("model/link")).unwrap();
        symlink(path("data.jsonl"), path("other.toml")).unwrap();
        let data = vec![path("data.jsonl")];
        let protected = Protected { run_dir: text("runs/a"), model: text("model"), data };
        for name in ["runs/a/run.toml", "data.jsonl", "other.toml", "model/config.json", "model/link"] {
            let failure = protected.check(&path(name)).unwrap_err();
            assert!(failure.message.starts_with("--out ") && failure.hints.len() == 1, "{name}: {failure}");
        }
        for name in ["runs/a.toml", "runs/b/run.toml", "run.toml", "new/run.toml"] {
            assert!(protected.check(&path(name)).is_ok(), "{name}");
        }
    }
}
