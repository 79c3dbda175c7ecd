//! The tests that run the CUDA kernels on the CPU, and the record of the sources with which they last passed:
//! `docs/measured/cuda-cpu-tests.json`.
//!
//! They take eight minutes of a core, and depend on no source outside [`CRATES`]. Where these are unchanged, only a few
//! tests run, drawn by the day.

use super::record::{day, hexadecimal};
use crate::stand_in::succeed;
use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

/// File with the record.
const RECORD: &str = "docs/measured/cuda-cpu-tests.json";
/// Crates with the tests, and with everything of the workspace that these call.
const CRATES: [&str; 3] = ["plimsoll-core", "plimsoll-program", "plimsoll-device"];
/// Test programs, and the options of each.
const PROGRAMS: [(&str, &[&str]); 5] = [
    ("cuda_kernels", &[]),
    ("cuda_tensor", &[]),
    // One test at a time: tests of a process share the contexts of the stand-in, and a test that synchronizes a context
    // must not wait for ranks of another test.
    ("cuda_executor", &["--test-threads=1"]),
    ("cuda_adopt", &["--test-threads=1"]),
    ("device", &["--test-threads=1"]),
];
/// Number of recorded tests that run again to test the record.
const SAMPLE: usize = 6;

/// Test programs and the names of their tests.
type Tests = BTreeMap<String, Vec<String>>;

/// Tests that passed, with the sources and tools with which they did.
#[derive(Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// SHA-256 of the sources in [`CRATES`] without comments, of the workspace's manifest and lock file, and of the versions
    /// of the compilers, in hexadecimal digits. Only the device's crate counts with its tests.
    sha256: String,
    tests: Tests,
}

/// Runs a sample of the tests if the record matches the present sources and tests, else all of them; writes the record.
///
/// # Errors
/// Fails if a test fails, or the record cannot be read or written.
pub fn run(root: &Path) -> anyhow::Result<()> {
    let path = root.join(RECORD);
    let before = match std::fs::read_to_string(&path) {
        Ok(text) => serde_json::from_str(&text).with_context(|| format!("{RECORD} is no record"))?,
        Err(error) if error.kind() == ErrorKind::NotFound => Record::default(),
        Err(error) => return Err(error).with_context(|| format!("reading {RECORD}")),
    };
    let now = Record { sha256: digest(root)?, tests: tests(root)? };
    let all: usize = now.tests.values().map(Vec::len).sum();
    let selected = if before == now { sample(&now.tests, day()) } else { now.tests.clone() };
    for (program, options) in PROGRAMS {
        let Some(names) = selected.get(program) else { continue };
        let mut command = command(root, program);
        command.args(options).arg("--exact").args(names);
        let passed = succeed(command.env("PLIMSOLL_STAND_IN_MEMORY", "8GiB,8GiB,1GiB"));
        if passed.is_err() {
            // The sample of another day might pass.
            let _ = std::fs::remove_file(&path);
        }
        passed?;
    }
    let ran: usize = selected.values().map(Vec::len).sum();
    println!("{all} tests of kernels on the CPU: {ran} of them now, the others recorded for these sources: {RECORD}");
    std::fs::write(&path, serde_json::to_string_pretty(&now)? + "\n").with_context(|| format!("writing {RECORD}"))
}

/// Returns the command that runs the ignored tests of a test program.
fn command(root: &Path, program: &str) -> Command {
    let mut command = Command::new("cargo");
    command
        .args(["test", "--quiet", "--release", "--workspace", "--test", program, "--", "--ignored"])
        .current_dir(root);
    command
}

/// Lists the ignored tests of all test programs.
fn tests(root: &Path) -> anyhow::Result<Tests> {
    PROGRAMS.iter().map(|(program, _)| Ok(((*program).to_owned(), tests_of(root, program)?))).collect()
}

/// Lists the ignored tests of a test program.
fn tests_of(root: &Path, program: &str) -> anyhow::Result<Vec<String>> {
    let output = command(root, program).args(["--list", "--format", "terse"]).output().context("running cargo")?;
    ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    let names: Vec<String> = text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect();
    ensure!(!names.is_empty(), "{program} has no test that is left out");
    Ok(names)
}

/// Draws the tests of a day.
fn sample(tests: &Tests, day: u64) -> Tests {
    let mut all: Vec<(&String, &String)> =
        tests.iter().flat_map(|(program, names)| names.iter().map(move |name| (program, name))).collect();
    all.sort_by_cached_key(|(program, name)| Sha256::digest(format!("{day} {program} {name}")));
    let mut drawn = Tests::new();
    for (program, name) in all.into_iter().take(SAMPLE) {
        drawn.entry(program.clone()).or_default().push(name.clone());
    }
    drawn
}

/// Returns the SHA-256 of the sources, the manifests and the versions of the compilers.
fn digest(root: &Path) -> anyhow::Result<String> {
    let mut digest = Sha256::new();
    for path in sources(root)? {
        let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
        let bytes = std::fs::read(&path).with_context(|| format!("reading {name}"))?;
        digest.update(format!("\n{name}\n"));
        without_comments(&bytes).for_each(|line| digest.update(line));
    }
    for compiler in ["rustc", "g++"] {
        let output = Command::new(compiler).arg("--version").current_dir(root).output();
        let output = output.with_context(|| format!("{compiler} is needed to run kernels on the CPU"))?;
        digest.update(output.stdout.split(|byte| *byte == b'\n').next().unwrap_or_default());
    }
    Ok(hexadecimal(&digest.finalize()))
}

/// Returns the lines of a file that are more than a comment, with their line breaks.
fn without_comments(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split_inclusive(|byte| *byte == b'\n').filter(|line| !line.trim_ascii_start().starts_with(b"//"))
}

/// Lists the files of [`CRATES`], and the manifest and lock file of the workspace, in order.
fn sources(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = vec![root.join("Cargo.toml"), root.join("Cargo.lock")];
    for name in CRATES {
        let pattern = root.join("crates").join(name).join("**/*");
        for path in glob::glob(pattern.to_str().context("a folder in UTF-8")?)? {
            let path = path?;
            let is_document = path.extension().is_some_and(|ending| ending == "md");
            let tests_other_crate =
                name != "plimsoll-device" && path.starts_with(root.join("crates").join(name).join("tests"));
            if path.is_file() && !is_document && !tests_other_crate {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
    }

    #[test]
    fn tested_crates_depend_on_no_other_crate_of_the_workspace() {
        for name in CRATES {
            let manifest = std::fs::read_to_string(root().join("crates").join(name).join("Cargo.toml")).unwrap();
            for line in manifest.lines().filter(|line| line.starts_with("plimsoll-")) {
                let dependency = line.split(['.', ' ', '=']).next().unwrap();
                assert!(CRATES.contains(&dependency), "{name} depends on {dependency}");
            }
        }
    }

    #[test]
    fn sources_include_kernels_shim_and_ops() {
        let files = sources(root()).unwrap();
        for name in [
            "Cargo.lock",
            "crates/plimsoll-program/src/op/mod.rs",
            "crates/plimsoll-device/src/cuda/kernels/launch.rs",
            "crates/plimsoll-device/tests/cuda_shim/shim.h",
            "crates/plimsoll-device/tests/cuda_stand_in/driver.cpp",
        ] {
            assert!(files.contains(&root().join(name)), "{name}");
        }
        assert!(!files.iter().any(|path| path.starts_with(root().join("crates/plimsoll-program/tests"))));
        assert!(files.iter().any(|path| path.extension().is_some_and(|ending| ending == "cu")));
    }

    #[test]
    fn only_comments_change_nothing() {
        let kept = |text: &'static str| without_comments(text.as_bytes()).collect::<Vec<_>>().concat();
        assert_eq!(kept("a();\n    /// Adds.\n// One\nb(); // Two\n"), kept("a();\nb(); // Two\n"));
        assert_ne!(kept("a();\n"), kept("b();\n"));
    }

    #[test]
    fn sample_changes_with_the_day() {
        let names = |of: &str| (0..20).map(|i| format!("{of}_{i}")).collect::<Vec<_>>();
        let tests = Tests::from([("a".to_owned(), names("a")), ("b".to_owned(), names("b"))]);
        let drawn = sample(&tests, 20_000);
        assert_eq!(drawn.values().map(Vec::len).sum::<usize>(), SAMPLE);
        assert!(drawn.iter().all(|(program, drawn)| drawn.iter().all(|name| tests[program].contains(name))));
        assert!(drawn == sample(&tests, 20_000) && drawn != sample(&tests, 20_001));
    }
}
