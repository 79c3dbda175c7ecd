//! `cargo xtask style`: measures how readable the project is, and fails where a limit is passed. The same checks run as
//! tests.
//!
//! `prose` looks at comments and documents, `code` at files, functions, closures and identifiers, `modules` at imports
//! between modules. A figure is printed for each limit, then the places that pass it. `cargo xtask style --list` prints
//! all places, also those that a limit tolerates.

mod code;
mod modules;
mod prose;

use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A figure about readability with its limit, and the places in the project that it counts.
pub struct Finding {
    /// Name of the figure, for the printed line.
    name: &'static str,
    /// Number of things that were checked, such as doc comments. 0 if the figure is a count, not a share.
    of: usize,
    /// Places that count, most as `file:line: text`.
    places: Vec<String>,
    /// Largest tolerated share of `of` (0.015 is 1.5 %). If `of` is 0, the largest tolerated number of places.
    limit: f64,
}

impl Finding {
    /// Returns whether the figure is within its limit.
    fn holds(&self) -> bool {
        let count = self.places.len() as f64;
        let figure = if self.of == 0 { count } else { count / self.of as f64 };
        figure <= self.limit
    }

    /// Formats the figure as one line:
    /// `ok  doc comments that open with a bare clause: 12 of 6098 (0.20 %, at most 1.5 %)`.
    fn line(&self) -> String {
        let (word, count) = (if self.holds() { "ok " } else { "BAD" }, self.places.len());
        match self.of {
            0 => format!("{word} {}: {count} (at most {})", self.name, self.limit),
            of => {
                let share = 100.0 * count as f64 / of as f64;
                format!("{word} {}: {count} of {of} ({share:.2} %, at most {:.1} %)", self.name, 100.0 * self.limit)
            }
        }
    }
}

/// Prints all figures, and the places of those above their limits. With `--list`, prints the places of all figures.
///
/// # Errors
/// Fails if a file cannot be read or parsed, or if a figure is above its limit.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    let list = match arguments {
        [] => false,
        [flag] if flag == "--list" => true,
        _ => bail!("usage: cargo xtask style [--list]"),
    };
    let findings = findings(&root())?;
    for finding in &findings {
        println!("{}", finding.line());
        if list || !finding.holds() {
            finding.places.iter().for_each(|place| println!("      {place}"));
        }
    }
    let failed = findings.iter().filter(|finding| !finding.holds()).count();
    if failed > 0 {
        bail!("{failed} of {} limits of style are passed", findings.len());
    }
    Ok(())
}

/// Returns all figures about the project in the folder `root`.
fn findings(root: &Path) -> anyhow::Result<Vec<Finding>> {
    let sources = sources(root)?;
    let mut findings = prose::comments(&sources);
    findings.extend(prose::documents(&sources));
    findings.extend(code::findings(&sources)?);
    findings.push(modules::files_of_tests(&sources));
    for name in ["plimsoll-plan", "plimsoll-train", "plimsoll-device"] {
        findings.push(modules::cycles(name, &root.join("crates").join(name).join("src"))?);
    }
    Ok(findings)
}

/// Returns the root folder of the project.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A text file of the project.
pub struct Source {
    /// Path from the root of the project, with `/` between folders.
    path: String,
    /// Contents of the file.
    text: String,
}

impl Source {
    /// Returns whether the file has one of these extensions, given without a dot.
    fn has_extension(&self, extensions: &[&str]) -> bool {
        self.path.rsplit_once('.').is_some_and(|(_, extension)| extensions.contains(&extension))
    }
}

/// Reads all source and document files of the project that git tracks or would track, that is, does not ignore.
fn sources(root: &Path) -> anyhow::Result<Vec<Source>> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("cannot start git")?;
    if !output.status.success() {
        bail!("git ls-files failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let listed = String::from_utf8(output.stdout).context("git lists a path that is not UTF-8")?;
    let mut sources = Vec::new();
    for path in listed.lines() {
        let known = ["rs", "py", "cu", "cuh", "cpp", "h", "md", "toml"];
        if !path.rsplit_once('.').is_some_and(|(_, extension)| known.contains(&extension)) {
            continue;
        }
        // A file that was removed and not yet committed is still listed.
        if let Ok(text) = std::fs::read_to_string(root.join(path)) {
            sources.push(Source { path: path.to_owned(), text });
        }
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn project_is_within_all_limits() {
        let failed: Vec<String> = findings(&root()).unwrap().iter().filter(|f| !f.holds()).map(Finding::line).collect();
        assert!(failed.is_empty(), "see cargo xtask style\n{}", failed.join("\n"));
    }

    #[test]
    fn share_above_limit_fails() {
        let of_100 = |count: usize| Finding { name: "x", of: 100, places: vec![String::new(); count], limit: 0.015 };
        assert!(of_100(1).holds() && !of_100(2).holds());
        let plain = Finding { name: "x", of: 0, places: vec![String::new()], limit: 0.0 };
        assert!(!plain.holds());
    }
}
