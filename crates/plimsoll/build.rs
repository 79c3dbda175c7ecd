//! Names the Git commit of the build in the environment variable `PLIMSOLL_COMMIT` of the compiler, unless it is set.
//! Outside a repository it stays unset.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-env-changed=PLIMSOLL_COMMIT");
    if env::var_os("PLIMSOLL_COMMIT").is_some() {
        return;
    }
    // A package that lies unpacked in another project's repository has no commit.
    if git(&["ls-files", "--error-unmatch", "Cargo.toml"]).is_none() {
        return;
    }
    let Some(folder) = git(&["rev-parse", "--absolute-git-dir"]) else { return };
    // HEAD names the branch, and its newest commit is in the last line of the log.
    for name in ["HEAD", "logs/HEAD"] {
        let file = Path::new(&folder).join(name);
        if fs::exists(&file).unwrap_or(false) {
            println!("cargo:rerun-if-changed={}", file.display());
        }
    }
    if let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) {
        println!("cargo:rustc-env=PLIMSOLL_COMMIT={commit}");
    }
}

/// Returns what Git prints, without its line break; `None` if it fails or is not installed.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}
