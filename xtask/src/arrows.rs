//! `cargo xtask arrows`: checks the structure of the workspace. It also runs as a test.
//!
//! - Crates only depend on the crates that [`ARROWS`] allows.
//! - Every external dependency has a reason in `docs/ARCHITECTURE.md`.
//! - Only one crate contains `unsafe` code.

use anyhow::{Context, bail};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Each crate of the workspace, with the other crates of the workspace that it may depend on, also in tests. A crate
/// that is not listed is not permitted.
const ARROWS: &[(&str, &[&str])] = &[
    ("plimsoll-core", &[]),
    ("plimsoll-program", &["plimsoll-core"]),
    ("plimsoll-plan", &["plimsoll-core", "plimsoll-program"]),
    ("plimsoll-device", &["plimsoll-core", "plimsoll-program"]),
    ("plimsoll-train", &["plimsoll-core", "plimsoll-program", "plimsoll-plan", "plimsoll-device"]),
    ("plimsoll-watch", &["plimsoll-core", "plimsoll-plan", "plimsoll-device"]),
    ("plimsoll-serve", &["plimsoll-core", "plimsoll-watch"]),
    ("plimsoll", LIBRARIES),
    ("plimsoll-python", LIBRARIES),
    ("xtask", LIBRARIES),
];

const LIBRARIES: &[&str] = &[
    "plimsoll-core",
    "plimsoll-program",
    "plimsoll-plan",
    "plimsoll-device",
    "plimsoll-train",
    "plimsoll-watch",
    "plimsoll-serve",
];

/// The only crate that may contain unsafe code.
const UNSAFE_CRATE: &str = "plimsoll-device";

/// File with a table of all external dependencies and their reasons.
const REASONS: &str = "docs/ARCHITECTURE.md";

/// Attribute at the root of every crate other than [`UNSAFE_CRATE`]. With it, the compiler forbids unsafe code as well.
const FORBID: &str = "#![forbid(unsafe_code)]";

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
    src_path: PathBuf,
}

/// Checks dependencies and unsafe code of the workspace, and prints the result. Fails if a rule is broken.
pub fn run() -> anyhow::Result<()> {
    let packages = packages()?;
    let reasons = read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(REASONS))?;
    let wrong: Vec<String> = disallowed_dependencies(&packages, ARROWS)
        .into_iter()
        .chain(without_reason(&packages, &reasons))
        .chain(unsafe_code(&packages)?)
        .collect();
    if !wrong.is_empty() {
        bail!("the workspace breaks its rules:\n  {}", wrong.join("\n  "));
    }
    println!(
        "arrows: {} crates only have allowed dependencies, and only {UNSAFE_CRATE} has unsafe code",
        packages.len()
    );
    Ok(())
}

/// Reads the crates of the workspace from `cargo metadata`.
fn packages() -> anyhow::Result<Vec<Package>> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .context("cannot start cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(serde_json::from_slice::<Metadata>(&output.stdout).context("cannot read what cargo metadata printed")?.packages)
}

/// Returns a message for every dependency between crates of the workspace that `arrows` does not permit. Crates that
/// `arrows` does not list, and listed crates that do not exist, get a message too.
fn disallowed_dependencies(packages: &[Package], arrows: &[(&str, &[&str])]) -> Vec<String> {
    let allowed: BTreeMap<&str, &[&str]> = arrows.iter().copied().collect();
    let mut wrong = Vec::new();
    for package in packages {
        let Some(arrows) = allowed.get(package.name.as_str()) else {
            wrong.push(format!("{} is not in the list of crates (ARROWS)", package.name));
            continue;
        };
        for dependency in &package.dependencies {
            let inside = packages.iter().any(|other| other.name == dependency.name);
            if inside && !arrows.contains(&dependency.name.as_str()) {
                wrong.push(format!("{} may not depend on {}", package.name, dependency.name));
            }
        }
    }
    for name in allowed.keys() {
        if !packages.iter().any(|package| package.name == *name) {
            wrong.push(format!("{name} is not in the workspace"));
        }
    }
    wrong
}

/// Returns a message for every external dependency without a row in the table of reasons. `reasons` is the text of
/// [`REASONS`].
fn without_reason(packages: &[Package], reasons: &str) -> BTreeSet<String> {
    let first_cells = reasons.lines().filter_map(|line| line.strip_prefix("| ")?.split(" |").next());
    let named: BTreeSet<&str> = first_cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    let all = packages.iter().flat_map(|package| &package.dependencies).map(|dependency| dependency.name.as_str());
    all.filter(|name| !packages.iter().any(|package| package.name == *name) && !named.contains(name))
        .map(|name| format!("{name} has no line in {REASONS}"))
        .collect()
}

/// Returns a message for every crate root that does not forbid unsafe code, and for every line with unsafe code,
/// outside of [`UNSAFE_CRATE`]. Tests and examples are checked as well, because the attribute of a crate root does not
/// cover them.
fn unsafe_code(packages: &[Package]) -> anyhow::Result<Vec<String>> {
    let mut wrong = Vec::new();
    for package in packages.iter().filter(|package| package.name != UNSAFE_CRATE) {
        let roots =
            package.targets.iter().filter(|target| target.kind.iter().any(|kind| kind == "lib" || kind == "bin"));
        for root in roots {
            if !read(&root.src_path)?.lines().any(|line| line.trim() == FORBID) {
                wrong.push(format!("{} does not say {FORBID}", root.src_path.display()));
            }
        }
        let folder = package.manifest_path.parent().context("the manifest has no folder")?;
        let mut files = Vec::new();
        rust_files(folder, &mut files)?;
        for file in files {
            let text = read(&file)?;
            let lines = (1..).zip(text.lines()).filter(|(_, line)| is_unsafe(line));
            wrong.extend(lines.map(|(number, _)| format!("{}:{number}: unsafe code", file.display())));
        }
    }
    Ok(wrong)
}

/// Returns whether a line contains the keyword `unsafe`. The word in comments, strings and lint names does not count.
fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    code.match_indices("unsafe").any(|(start, word)| {
        let after = &code[start + word.len()..];
        let whole_word = !code[..start].ends_with(|letter: char| letter.is_alphanumeric() || letter == '_');
        let opens = ["{", "(", "fn ", "impl ", "impl<", "trait ", "extern "];
        whole_word && (after.trim().is_empty() || opens.iter().any(|next| after.trim_start().starts_with(next)))
    })
}

fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in folder.read_dir().with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            rust_files(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspace_follows_its_rules() {
        run().unwrap();
    }

    fn package(name: &str, dependencies: &[&str]) -> Package {
        Package {
            name: name.to_owned(),
            manifest_path: PathBuf::new(),
            dependencies: dependencies.iter().map(|name| Dependency { name: (*name).to_owned() }).collect(),
            targets: Vec::new(),
        }
    }

    #[test]
    fn dependency_without_reason_is_found() {
        let packages = [package("low", &["serde", "half"]), package("high", &["low", "half"])];
        let reasons = "`half` is nice.\n| crate | why |\n| `serde` (`derive`), `toml` | `half` |\n";
        assert_eq!(Vec::from_iter(without_reason(&packages, reasons)), ["half has no line in docs/ARCHITECTURE.md"]);
    }

    #[test]
    fn forbidden_unlisted_and_missing_crates_are_found() {
        let packages = [package("low", &["serde"]), package("high", &["low", "side"]), package("side", &[])];
        let arrows: &[(&str, &[&str])] = &[("low", &[]), ("high", &["low"]), ("gone", &[])];
        let wrong = disallowed_dependencies(&packages, arrows);
        assert_eq!(
            wrong,
            [
                "high may not depend on side",
                "side is not in the list of crates (ARROWS)",
                "gone is not in the workspace"
            ]
        );
        assert!(disallowed_dependencies(&packages[..1], &arrows[..1]).is_empty());
    }

    #[test]
    fn only_unsafe_code_counts_not_the_word() {
        // Written in capitals, so that this file passes its own check.
        for code in
            ["    UNSAFE { *p }", "pub UNSAFE fn f() {", "UNSAFE impl Send for A {}", "x = UNSAFE", "#[UNSAFE(a)]"]
        {
            assert!(is_unsafe(&code.to_lowercase()), "{code}");
        }
        for word in ["#![forbid(UNSAFE_CODE)]", "// UNSAFE { }", "\"UNSAFE\"", "/// UNSAFE fn", "not_UNSAFE {"] {
            assert!(!is_unsafe(&word.to_lowercase()), "{word}");
        }
    }
}
