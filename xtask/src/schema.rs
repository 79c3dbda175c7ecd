//! `cargo xtask schema`: writes the JSON schemas of `docs/schema` and the Python types of `python/plimsoll/results.py`,
//! both from the Rust types that are written as JSON. A test compares the files with what the chore would write.
//!
//! `schemars` derives the schemas and takes descriptions from doc comments. `published` turns them into what readers of
//! the JSON need, `python` turns the result into Python.

mod published;
mod python;

use crate::style::root;
use anyhow::{Context, bail};
use plimsoll_core::{ModelsBench, Plan, Record, RunResult, SweepReport};
use plimsoll_device::bench::Bench;
use plimsoll_device::machine::Machine;
use plimsoll_train::bench::StepBench;
use plimsoll_train::inference::evaluation::EvaluationLoss;
use plimsoll_train::inference::export::{ExportedDirectory, ExportedFile};
use plimsoll_train::inference::generation::GeneratedText;
use plimsoll_train::session::control::BudgetChange;
use plimsoll_train::session::outcome::Outcome;
use plimsoll_watch::data_report::DataReport;
use plimsoll_watch::logging::message::WebhookMessage;
use plimsoll_watch::model_list::ModelList;
use plimsoll_watch::process::ProcessReading;
use plimsoll_watch::runs::RunList;
use plimsoll_watch::runs::champions::ChampionFile;
use plimsoll_watch::snapshot::Snapshot;
use plimsoll_watch::{doctor, report};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;
use std::fs;

/// Folder of the schemas, from the root of the project.
const FOLDER: &str = "docs/schema";

/// The generated Python module, from the root of the project.
const PYTHON_MODULE: &str = "python/plimsoll/results.py";

/// Writes all generated files and prints the names of those that changed.
///
/// # Errors
/// Fails if a file cannot be written, or if a schema has no Python form.
pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    if !arguments.is_empty() {
        bail!("usage: cargo xtask schema");
    }
    let files = files()?;
    let mut changed = 0;
    for (path, text) in &files {
        let file = root().join(path);
        if fs::read_to_string(&file).ok().as_ref() != Some(text) {
            fs::write(&file, text).with_context(|| format!("cannot write {path}"))?;
            println!("written: {path}");
            changed += 1;
        }
    }
    println!("schema: {} files, {changed} changed", files.len());
    Ok(())
}

/// Returns every generated file: its path from the root of the project, and its content.
fn files() -> anyhow::Result<Vec<(String, String)>> {
    let named = documents();
    let mut files = Vec::new();
    for (name, schema) in &named {
        files.push((format!("{FOLDER}/{name}.json"), serde_json::to_string_pretty(schema)? + "\n"));
    }
    let in_python = ["plan", "result", "events", "devices", "budget"];
    let mut schemas: Vec<Value> =
        named.into_iter().filter(|(name, _)| in_python.contains(name)).map(|(_, schema)| schema).collect();
    schemas.push(schema_of::<Outcome>());
    files.push((PYTHON_MODULE.to_owned(), python::module(&schemas)?));
    Ok(files)
}

/// Returns the schema of every JSON output, each with the name of its schema file, such as `plan` for `plan.json`.
fn documents() -> Vec<(&'static str, Value)> {
    vec![
        ("plan", schema_of::<Plan>()),
        ("events", schema_of::<Record>()),
        ("result", schema_of::<RunResult>()),
        ("sweep", schema_of::<SweepReport>()),
        ("devices", schema_of::<Machine>()),
        ("models", schema_of::<ModelList>()),
        ("data", schema_of::<DataReport>()),
        ("snapshot", schema_of::<Snapshot>()),
        ("process", schema_of::<ProcessReading>()),
        ("doctor", schema_of::<doctor::Report>()),
        ("report", schema_of::<report::Report>()),
        ("runs", schema_of::<RunList>()),
        ("champions", schema_of::<ChampionFile>()),
        ("webhook", schema_of::<WebhookMessage>()),
        ("budget", schema_of::<BudgetChange>()),
        ("evaluation", schema_of::<EvaluationLoss>()),
        ("generation", schema_of::<GeneratedText>()),
        ("export-gguf", schema_of::<ExportedFile>()),
        ("export-merged", schema_of::<ExportedDirectory>()),
        ("bench-devices", schema_of::<Bench>()),
        ("bench-models", schema_of::<ModelsBench>()),
        ("bench-step", schema_of::<StepBench>()),
    ]
}

/// Returns the schema of the JSON that a type is written as, in the form in which it is published.
fn schema_of<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    published::publish(settings.into_generator().into_root_schema_for::<T>().to_value())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn generated_files_match_the_types() {
        for (path, text) in files().unwrap() {
            let on_disk = fs::read_to_string(root().join(&path)).unwrap_or_default();
            assert!(on_disk == text, "{path} differs from the Rust types; to write it anew: cargo xtask schema");
        }
    }

    #[test]
    fn schema_folder_holds_exactly_the_listed_documents() {
        let folder = root().join(FOLDER);
        let names = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let found: BTreeSet<String> = names.filter(|name| name.ends_with(".json")).collect();
        let expected: BTreeSet<String> = documents().iter().map(|(name, _)| format!("{name}.json")).collect();
        assert_eq!(found, expected);
        let readme = fs::read_to_string(folder.join("README.md")).unwrap();
        for name in expected {
            assert!(readme.contains(&format!("[{name}]({name})")), "docs/schema/README.md does not list {name}");
        }
    }
}
