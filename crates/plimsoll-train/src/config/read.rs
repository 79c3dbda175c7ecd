//! Reads a [`RunConfig`] from text and `--set` settings, and writes it back.
//!
//! Settings are merged into the TOML document of the file, and then the document is deserialized. The location of each
//! key is kept for error messages.

use super::check::{RuleViolation, check};
use super::{EXAMPLE_PREFIX, HUB_PREFIX, HubSources, Init, Objective, RunConfig, Threads, all_targets, keys};
use crate::files::{ALL_LINEAR, ModuleNames};
use plimsoll_core::{Failure, Rung};
use plimsoll_device::regular_file;
use plimsoll_program::models::{Target, preset_name};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{self, Path, PathBuf};
use toml_edit::{Document, DocumentMut, Item, TableLike, Value};

/// Default of `train.learning_rate` for DPO and GRPO, as in TRL.
const RELATIVE_LEARNING_RATE: f64 = 1e-6;

/// An error in a run file or a setting.
#[derive(Debug, thiserror::Error)]
pub enum RunConfigError {
    /// The run file cannot be read, or a path in it cannot be made absolute.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// Path of the run file, or the path in it.
        path: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The text is not TOML, or has an error that belongs to no known key.
    #[error("{place}: {message}")]
    Syntax {
        /// Place of the error: file and line, or the command line.
        place: String,
        /// The parser's message, on one line.
        message: String,
    },
    /// A setting of `--set` is not of the form `section.key=value`, or its value cannot be read.
    #[error("--set {text}: {message}")]
    Setting {
        /// The setting as the user wrote it.
        text: String,
        /// Reason, such as a missing `=`.
        message: String,
    },
    /// A key is unknown.
    #[error("{place}: unknown key `{key}`")]
    UnknownKey {
        /// Place of the key: file and line, or the command line.
        place: String,
        /// The key, as `section.key`.
        key: String,
        /// The most similar key or section, for a hint; `None` if none is similar enough.
        nearest: Option<&'static str>,
    },
    /// A value has the wrong type or is out of range.
    #[error("{place}: {key} is {found}, expected {expected}")]
    Value {
        /// Place of the key: file and line, or the command line.
        place: String,
        /// The key, as `section.key`.
        key: String,
        /// The value as written.
        found: String,
        /// Description of valid values.
        expected: String,
    },
    /// A value conflicts with another one or cannot be parsed.
    #[error("{place}: {key}: {message}")]
    Invalid {
        /// Place of the key: file and line, or the command line.
        place: String,
        /// The key, as `section.key`.
        key: String,
        /// Reason.
        message: String,
        /// Hints to the user.
        hints: Vec<String>,
    },
    /// A setting names a key that belongs to the experiment, which a resumed run cannot change.
    #[error("{key} belongs to the experiment: a run that goes on cannot change it")]
    Experiment {
        /// The key, as `section.key`.
        key: String,
    },
    /// The file does not set a key that a training run needs.
    #[error("{key} is not set")]
    Missing {
        /// The key, as `section.key`.
        key: &'static str,
        /// Hint to the user.
        hint: &'static str,
    },
}

impl From<RunConfigError> for Failure {
    fn from(error: RunConfigError) -> Failure {
        let failure = Failure::input(error.to_string());
        match error {
            RunConfigError::UnknownKey { nearest: Some(near), .. } => failure.hint(format!("did you mean `{near}`?")),
            RunConfigError::UnknownKey { key, nearest: None, .. } => failure.hint(known_keys(&key)),
            RunConfigError::Unreadable { path, source } => {
                failure.hint(unreadable_hint(Path::new(&path), source.kind()))
            }
            RunConfigError::Setting { .. } => {
                failure.hint("write --set section.key=value, such as --set train.steps=20")
            }
            RunConfigError::Invalid { hints, .. } => hints.into_iter().fold(failure, Failure::hint),
            RunConfigError::Missing { hint, .. } => failure.hint(hint),
            RunConfigError::Syntax { place, .. } => match place.split(", line ").next().and_then(data_file_hint) {
                Some(hint) => failure.hint(hint),
                None => failure,
            },
            RunConfigError::Experiment { .. } => {
                failure.hint("leave it out, or start a run of its own with another run.dir")
            }
            _ => failure,
        }
    }
}

/// Returns a hint if the name of a run file is that of a data file.
fn data_file_hint(name: &str) -> Option<String> {
    let extension = Path::new(name).extension()?.to_str()?;
    let is_data = ["jsonl", "ndjson", "json", "csv", "tsv", "txt", "parquet", "gz", "zst"].contains(&extension);
    is_data.then(|| format!("a run file is TOML and names its data; write one: plimsoll init --data {name}"))
}

/// Returns a hint for a run file that cannot be read.
fn unreadable_hint(path: &Path, reason: ErrorKind) -> String {
    if let Some(near) = nearest_file(path).filter(|_| reason == ErrorKind::NotFound) {
        return format!("did you mean `{}`?", near.display());
    }
    match reason {
        ErrorKind::IsADirectory if path.join("run.toml").is_file() => {
            format!("to go on with the run in it: --resume {}", path.display())
        }
        ErrorKind::InvalidData => "a run file is TOML, a text in UTF-8: see docs/run-file.md".to_owned(),
        _ => "name a run file, such as run.toml; without one the built-in example is taken".to_owned(),
    }
}

/// Returns the path of the `.toml` file in the folder of `path` whose name is most similar to that of `path`. Returns
/// `None` if none is similar enough.
fn nearest_file(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".toml").unwrap_or(name);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let names = std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let near = keys::nearest(name, names.filter_map(|other| Some(other.strip_suffix(".toml")?.to_owned())))?;
    Some(path.with_file_name(format!("{near}.toml")))
}

/// Returns a hint for an unknown `section.key`. It lists the keys of the section, or all sections if the section is
/// unknown, too.
fn known_keys(key: &str) -> String {
    let (section, _) = keys::split(key);
    if keys::split_source_key(key).is_some() {
        let names: Vec<&str> = keys::SOURCE_KEYS.iter().map(|(key, _)| keys::last_name(key)).collect();
        return format!("[[data.source]] has {}", names.join(", "));
    }
    let known: Vec<&str> = if keys::is_section(section) {
        keys::KEYS
            .iter()
            .map(|(key, _)| keys::split(key))
            .filter(|(of, _)| *of == section)
            .map(|(_, name)| name)
            .collect()
    } else {
        let mut sections: Vec<&str> = keys::KEYS.iter().map(|(key, _)| keys::split(key).0).collect();
        sections.dedup();
        sections
    };
    let of = if keys::is_section(section) { format!("[{section}] has") } else { "the sections are".to_owned() };
    format!("{of} {}", known.join(", "))
}

impl RunConfig {
    /// Reads a run file (`None`: the built-in example), merges settings of the form `section.key=value`, checks the
    /// result, and makes paths absolute against the working directory.
    ///
    /// # Errors
    /// A [`RunConfigError`] as a failure with exit code 2.
    pub fn load(path: Option<&Path>, settings: &[String]) -> Result<RunConfig, Failure> {
        let file = match path {
            None => RunConfig::parse("the built-in example", include_str!("example.toml"), settings)?,
            Some(path) => {
                let name = path.display().to_string();
                let text = regular_file::read_text(path)
                    .map_err(|source| RunConfigError::Unreadable { path: name.clone(), source })?;
                RunConfig::parse(&name, &text, settings)?
            }
        };
        Ok(file.with_absolute_paths()?)
    }

    /// Builds a configuration from settings and defaults, without a run file, for commands that name their model
    /// themselves.
    ///
    /// # Errors
    /// The errors of [`RunConfig::load`].
    pub fn from_settings(settings: &[String]) -> Result<RunConfig, Failure> {
        Ok(RunConfig::parse("the command line", "", settings)?.with_absolute_paths()?)
    }

    /// Loads `run.toml` from the folder of a run that is resumed. Settings may change devices, budgets, the recipe, the
    /// length, and the intervals of evaluations and checkpoints. All other keys belong to the experiment.
    ///
    /// # Errors
    /// The errors of [`RunConfig::load`], or a setting that belongs to the experiment.
    pub fn resume(run_dir: &Path, settings: &[String]) -> Result<RunConfig, Failure> {
        const LENGTH: [&str; 3] = ["train.steps", "train.epochs", "train.hours"];
        const INTERVALS: [&str; 4] = ["train.eval_every", "train.save_every", "train.save_every_minutes", "train.keep"];
        for key in settings.iter().filter_map(|setting| setting.split_once('=')).map(|(key, _)| key.trim()) {
            let free = LENGTH.contains(&key)
                || INTERVALS.contains(&key)
                || ["memory", "recipe", "run", "watch"].contains(&keys::split(key).0);
            if keys::expected(key).is_some() && !free {
                return Err(RunConfigError::Experiment { key: key.to_owned() }.into());
            }
        }
        let path = run_dir.join("run.toml");
        if !path.is_file() {
            return Err(no_run_file(run_dir));
        }
        let mut file = RunConfig::load(Some(&path), settings)?;
        // The folder may have been moved since the run started.
        file.run.dir = run_dir.to_string_lossy().into_owned();
        Ok(file.with_absolute_paths()?)
    }

    /// Parses the run file in `text` and merges the settings. `name` stands for the file in messages. Paths are not
    /// changed.
    ///
    /// # Errors
    /// The first error, with its location.
    pub fn parse(name: &str, text: &str, settings: &[String]) -> Result<RunConfig, RunConfigError> {
        let document = Document::parse(text).map_err(|error| RunConfigError::Syntax {
            place: format!("{name}, line {}", line_at(text, error.span().map_or(0, |span| span.start))),
            message: error.message().lines().collect::<Vec<_>>().join("; "),
        })?;
        check_keys(name, text, document.as_table())?;
        let mut merged = DocumentMut::from(document.as_table().clone());
        let mut keys_from_settings = Vec::new();
        for setting in settings {
            let key = merge(&mut merged, setting)?;
            remove_alternatives(&mut merged, &key, &keys_from_settings);
            keys_from_settings.push(key);
        }
        let locations =
            KeyLocations { name, text, file: &document, merged: &merged, keys_from_settings: &keys_from_settings };

        let merged_text = merged.to_string();
        let mut config: RunConfig = toml::from_str(&merged_text).map_err(|error| {
            let key = error.span().and_then(|span| key_at(&merged_text, span.start)).unwrap_or_default();
            locations.value_error(&key, error.message())
        })?;
        config.apply_dependent_defaults(|key| locations.value(key).is_some());
        if config.data.source.is_empty() && locations.value("data.source").is_some() {
            return Err(locations.value_error("data.source", "no source"));
        }
        check(&config).map_err(|violation| match violation {
            RuleViolation::OutOfRange(key) => locations.value_error(&key, "out of range"),
            RuleViolation::Invalid(key, message, hints) => {
                RunConfigError::Invalid { place: locations.location(&key), key: key.into_owned(), message, hints }
            }
        })?;
        Ok(config)
    }

    /// Sets the defaults that depend on other keys, such as `train.batch_tokens`. `is_set` tells whether the user has
    /// set a key.
    fn apply_dependent_defaults(&mut self, is_set: impl Fn(&str) -> bool) {
        if !is_set("model.init") && self.model.preset.is_some() {
            self.model.init = Init::Random;
        }
        if !is_set("train.learning_rate") && self.train.objective != Objective::Supervised {
            self.train.learning_rate = RELATIVE_LEARNING_RATE;
        }
        if self.train.objective == Objective::Grpo {
            // Each completion has a row.
            if !is_set("data.pack") {
                self.data.pack = false;
            }
            if !is_set("data.sequence") {
                self.data.sequence = self.grpo.sequence();
            }
            if !is_set("train.batch_tokens") {
                self.train.batch_tokens = self.grpo.completions().saturating_mul(u64::from(self.data.sequence));
            }
        }
        if !is_set("train.batch_tokens") && self.data.sequence > 0 {
            let sequence = u64::from(self.data.sequence);
            self.train.batch_tokens = (self.train.batch_tokens / sequence).max(1) * sequence;
        }
    }

    /// Makes paths absolute against the working directory, so that a stored run file does not depend on it.
    fn with_absolute_paths(mut self) -> Result<RunConfig, RunConfigError> {
        let data = &mut self.data;
        let in_sources = data.source.iter_mut().flat_map(|source| &mut source.path);
        let sources = data.train.iter_mut().chain(in_sources).chain(&mut data.eval);
        let model = self.model.path.iter_mut().chain(&mut self.model.adapter);
        // Names of built-in templates have neither a slash nor a dot.
        let template = data.template.iter_mut().filter(|template| template.contains(['/', '.']));
        let paths = model.chain(sources).chain(template).chain([&mut self.run.dir]).chain(&mut self.memory.file_dir);
        let is_path = |path: &&mut String| ![EXAMPLE_PREFIX, HUB_PREFIX].iter().any(|prefix| path.starts_with(prefix));
        for path in paths.filter(is_path) {
            let absolute =
                path::absolute(&*path).map_err(|source| RunConfigError::Unreadable { path: path.clone(), source })?;
            // Lossy only if the working directory is not UTF-8.
            *path = absolute.to_string_lossy().into_owned();
        }
        Ok(self)
    }

    /// Checks that data and a length are set, which a training run needs and a plan does not.
    ///
    /// # Errors
    /// The missing key.
    pub fn check_trainable(&self) -> Result<(), RunConfigError> {
        if !self.data.has_training_data() {
            return Err(RunConfigError::Missing {
                key: "data.train",
                hint: "set data.train to a file, such as data.jsonl",
            });
        }
        if self.length().is_none() {
            let hint = "set one of train.steps, train.epochs and train.hours";
            return Err(RunConfigError::Missing { key: "train.steps", hint });
        }
        Ok(())
    }

    /// Returns the text of a run file with every key that has a value. Parsing the text gives an equal configuration,
    /// except that hub ids stand in place of the paths of fetched files.
    pub fn to_toml(&self) -> String {
        let mut named = self.clone();
        let HubSources { model, adapter, train, source, eval, .. } = std::mem::take(&mut named.hub);
        named.model.path = model.or(named.model.path);
        named.model.adapter = adapter.or(named.model.adapter);
        named.data.train = train.unwrap_or(named.data.train);
        named.data.source = source.unwrap_or(named.data.source);
        named.data.eval = eval.unwrap_or(named.data.eval);
        toml::to_string(&named).expect("a checked run file has only what TOML can say")
    }
}

/// Checks that all sections of the parsed run file `root` are tables, and all keys are known. `name` stands for the
/// file in messages, and `text` is its text.
fn check_keys(name: &str, text: &str, root: &dyn TableLike) -> Result<(), RunConfigError> {
    let place = |table: &dyn TableLike, key: &str| {
        format!("{name}, line {}", line_at(text, key_span(table, key).map_or(0, |span| span.start)))
    };
    for (section, item) in root.iter() {
        if !keys::is_section(section) {
            let nearest = keys::nearest_section(section).or_else(|| keys::nearest_key("", section));
            return Err(RunConfigError::UnknownKey { place: place(root, section), key: section.to_owned(), nearest });
        }
        let Some(table) = item.as_table_like() else {
            return Err(RunConfigError::Value {
                place: place(root, section),
                key: section.to_owned(),
                found: if item.is_array_of_tables() { format!("a list, [[{section}]]") } else { display_value(item) },
                expected: format!("a section, [{section}]"),
            });
        };
        for (key, item) in table.iter() {
            let path = format!("{section}.{key}");
            if keys::expected(&path).is_none() {
                let nearest = keys::nearest_key(section, key);
                return Err(RunConfigError::UnknownKey { place: place(table, key), key: path, nearest });
            }
            if path == SOURCES {
                check_is_list(item, place(table, key))?;
                check_source_keys(item, place)?;
            }
        }
    }
    Ok(())
}

/// The key of the sources of training data, whose value is a list of tables.
const SOURCES: &str = "data.source";

/// Checks that `data.source` is not a single table, whose text would be no clear value in a message.
fn check_is_list(sources: &Item, place: String) -> Result<(), RunConfigError> {
    if !sources.is_table() {
        return Ok(());
    }
    let expected = keys::expected(SOURCES).unwrap_or_default().to_owned();
    Err(RunConfigError::Value { place, key: SOURCES.to_owned(), found: format!("a table, [{SOURCES}]"), expected })
}

/// Checks that all keys in the tables `[[data.source]]` are known. `place` returns the place of a key in a table.
fn check_source_keys(sources: &Item, place: impl Fn(&dyn TableLike, &str) -> String) -> Result<(), RunConfigError> {
    for (index, SourceTable { table, .. }) in source_tables(sources).into_iter().enumerate() {
        if let Some((key, _)) = table.iter().find(|(key, _)| keys::expected_in_source(key).is_none()) {
            let path = format!("{}.{key}", keys::source_key(index));
            let nearest = keys::nearest_source_key(key);
            return Err(RunConfigError::UnknownKey { place: place(table, key), key: path, nearest });
        }
    }
    Ok(())
}

/// A table `[[data.source]]`.
struct SourceTable<'a> {
    table: &'a dyn TableLike,
    /// Its bytes in the text; `None` if it does not come from a text.
    span: Option<Range<usize>>,
}

/// Returns the tables of `data.source`, in either notation of TOML; none if its value is no list of tables.
fn source_tables(sources: &Item) -> Vec<SourceTable<'_>> {
    if let Some(tables) = sources.as_array_of_tables() {
        return tables.iter().map(|table| SourceTable { table, span: table.span() }).collect();
    }
    let tables = sources.as_array().into_iter().flatten().map(Value::as_inline_table);
    let tables = tables.map(|table| table.map(|table| SourceTable { table, span: table.span() }));
    tables.collect::<Option<_>>().unwrap_or_default()
}

/// Returns the value of `data.source`; `None` if it is not set.
fn sources_in(root: &dyn TableLike) -> Option<&Item> {
    let (section, name) = keys::split(SOURCES);
    root.get(section)?.as_table_like()?.get(name)
}

/// Returns the table that holds a key, such as `train.steps` or `data.source[2].weight`, with the name of the key in it.
fn table_of<'a, 'k>(root: &'a dyn TableLike, key: &'k str) -> Option<(&'a dyn TableLike, &'k str)> {
    if let Some((index, name)) = keys::split_source_key(key) {
        return Some((source_tables(sources_in(root)?).get(index)?.table, name));
    }
    let (section, name) = keys::split(key);
    Some((root.get(section)?.as_table_like()?, name))
}

/// Returns the bytes of a key in the text. The key of a source that is not set is located by the table of the source.
fn span_of(root: &dyn TableLike, key: &str) -> Option<Range<usize>> {
    let in_table = table_of(root, key).and_then(|(table, name)| key_span(table, name));
    let of_source = || source_tables(sources_in(root)?).into_iter().nth(keys::split_source_key(key)?.0)?.span;
    in_table.or_else(of_source)
}

/// Returns the bytes of a key in the text of its table, or else of its value.
fn key_span(table: &dyn TableLike, name: &str) -> Option<Range<usize>> {
    let (key, item) = table.get_key_value(name)?;
    key.span().or(item.span())
}

/// Merges a setting `section.key=value` into the document and returns its `section.key`.
fn merge(document: &mut DocumentMut, setting: &str) -> Result<String, RunConfigError> {
    let wrong = |message: &str| RunConfigError::Setting { text: setting.to_owned(), message: message.to_owned() };
    let (key, value) = setting.split_once('=').ok_or_else(|| wrong("no `=` between key and value"))?;
    let (key, value) = (key.trim(), value.trim());
    let (section, name) = keys::split(key);
    if keys::expected(key).is_none() {
        let nearest = keys::nearest_key(section, name).or_else(|| keys::nearest_section(key));
        return Err(RunConfigError::UnknownKey { place: COMMAND_LINE.into(), key: key.to_owned(), nearest });
    }
    let value = setting_value(value).ok_or_else(|| wrong(&format!("no value for {key} can be read from `{value}`")))?;
    let value = Item::Value(value);
    if key == SOURCES {
        check_source_keys(&value, |_, _| COMMAND_LINE.to_owned())?;
    }
    let item = document.entry(section).or_insert_with(toml_edit::table);
    let table = item.as_table_like_mut().ok_or_else(|| wrong(&format!("[{section}] is no table")))?;
    table.insert(name, value);
    Ok(key.to_owned())
}

/// Removes the keys of the file that are alternatives to a key from a setting: another way to name the model
/// or the training data, or another measure of length. Keys that come from settings are kept, so that a conflict between two settings is
/// reported.
fn remove_alternatives(document: &mut DocumentMut, key: &str, keys_from_settings: &[String]) {
    let others: &[&str] = match key {
        "model.path" => &["model.preset", "model.init", "model.adapter"],
        "model.preset" => &["model.path", "model.init", "model.adapter"],
        "data.train" => &[SOURCES],
        SOURCES => &["data.train"],
        "train.steps" => &["train.epochs", "train.hours"],
        "train.epochs" => &["train.steps", "train.hours"],
        "train.hours" => &["train.steps", "train.epochs"],
        _ => &[],
    };
    for other in others.iter().filter(|other| !keys_from_settings.iter().any(|set| set == *other)) {
        let (section, name) = keys::split(other);
        if let Some(table) = document.get_mut(section).and_then(Item::as_table_like_mut) {
            table.remove(name);
        }
    }
}

/// Returns `key="text"`, as `--set` takes it. The value is a string, even if the text looks like a number.
pub fn setting(key: &str, text: &str) -> String {
    format!("{key}={}", Value::from(text))
}

/// Returns `key=["text", …]`, as `--set` takes it: a list of strings.
pub fn list_setting(key: &str, texts: &[String]) -> String {
    format!("{key}={}", Value::from_iter(texts))
}

/// Returns the failure of resuming from a folder without `run.toml`.
fn no_run_file(run_dir: &Path) -> Failure {
    let folder = run_dir.display();
    // A run opens its event log first, and writes run.toml when its devices are ready.
    if run_dir.join("events.jsonl").exists() {
        let message = format!("{folder}: this run ended before it began to train, so there is nothing to resume");
        return Failure::input(message).hint("start it again: plimsoll train, with the run file and flags of that run");
    }
    Failure::input(format!("{folder} is no run folder: it has no run.toml"))
        .hint("name the folder that run.dir named when the run started")
}

/// Returns the setting that names `model`: `model.path=…` if the text looks like a path or hub id, or exists as one, else
/// `model.preset=…` with the preset that the text stands for.
pub fn model_setting(model: &str) -> String {
    let is_path = model.contains(path::MAIN_SEPARATOR)
        || model.starts_with(HUB_PREFIX)
        || [".json", ".gguf"].iter().any(|ending| model.ends_with(ending))
        || Path::new(model).exists();
    match is_path {
        true => setting("model.path", model),
        false => setting("model.preset", preset_name(model).unwrap_or(model)),
    }
}

/// Parses a TOML value. Text that is no TOML value, and does not begin like one, is taken as a string. Returns `None`
/// for any other text, such as an unclosed list, and for empty text.
fn setting_value(text: &str) -> Option<Value> {
    if let Ok(value) = text.parse::<Value>() {
        return Some(value);
    }
    let bare = !text.is_empty() && !text.starts_with(['"', '\'', '[', '{']) && !text.contains(char::is_control);
    bare.then(|| Value::from(text))
}

const COMMAND_LINE: &str = "command line";

/// A run file and settings, in which messages look up the value and the place of a key.
struct KeyLocations<'a> {
    name: &'a str,
    text: &'a str,
    file: &'a Document<&'a str>,
    merged: &'a DocumentMut,
    keys_from_settings: &'a [String],
}

impl KeyLocations<'_> {
    /// Returns the key's value as text; `None` if neither the file nor a setting gives one.
    fn value(&self, key: &str) -> Option<String> {
        let (table, name) = table_of(self.merged.as_table(), key)?;
        table.get(name).map(display_value)
    }

    /// Returns the place of the key for messages: file and line, or the command line. For a key that is not set, it is
    /// the name of the file.
    fn location(&self, key: &str) -> String {
        let setting = if keys::split_source_key(key).is_some() { SOURCES } else { key };
        if self.keys_from_settings.iter().any(|set| set == setting) {
            return COMMAND_LINE.to_owned();
        }
        match span_of(self.file.as_table(), key) {
            Some(span) => format!("{}, line {}", self.name, line_at(self.text, span.start)),
            None => self.name.to_owned(),
        }
    }

    fn value_error(&self, key: &str, message: &str) -> RunConfigError {
        let place = self.location(key);
        let expected = match keys::split_source_key(key) {
            Some((_, name)) => keys::expected_in_source(name),
            None => keys::expected(key),
        };
        match (expected, self.value(key)) {
            (Some(expected), Some(found)) => {
                RunConfigError::Value { place, key: key.to_owned(), found, expected: expected.to_owned() }
            }
            _ => RunConfigError::Syntax { place, message: message.lines().collect::<Vec<_>>().join("; ") },
        }
    }
}

/// Returns the `section.key` whose value contains byte `byte` of the TOML text; `None` if no value contains it.
fn key_at(text: &str, byte: usize) -> Option<String> {
    let document = Document::parse(text).ok()?;
    for (section, item) in document.iter() {
        let Some(table) = item.as_table_like() else { continue };
        if let Some(key) = table.get("source").filter(|_| section == "data").and_then(|item| source_key_at(item, byte))
        {
            return Some(key);
        }
        if let Some(name) = name_at(table, byte) {
            return Some(format!("{section}.{name}"));
        }
    }
    None
}

/// Returns the key of `[[data.source]]` whose value contains byte `byte` of the TOML text.
fn source_key_at(sources: &Item, byte: usize) -> Option<String> {
    let mut names = source_tables(sources).into_iter().map(|source| name_at(source.table, byte)).enumerate();
    names.find_map(|(index, name)| Some(format!("{}.{}", keys::source_key(index), name?)))
}

/// Returns the name in a table whose value contains byte `byte` of the TOML text.
fn name_at(table: &dyn TableLike, byte: usize) -> Option<&str> {
    let mut names = table.iter();
    names
        .find(|(_, item)| item.span().is_some_and(|span| (span.start..=span.end).contains(&byte)))
        .map(|(name, _)| name)
}

/// Formats a value for a message: on one line, shortened to 60 characters.
fn display_value(item: &Item) -> String {
    const LONGEST: usize = 60;
    let text = item.to_string();
    let line: String = text.trim().chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// Returns the number of the line that contains byte `byte` of the text. Lines are counted from 1.
fn line_at(text: &str, byte: usize) -> usize {
    1 + text.bytes().take(byte).filter(|byte| *byte == b'\n').count()
}

/// Deserializes one value or a list of values.
pub(super) fn one_or_many<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany<T> {
        One(T),
        Many(Vec<T>),
    }
    Ok(match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(one) => vec![one],
        OneOrMany::Many(many) => many,
    })
}

/// Deserializes the matrices with adapters. As in PEFT, a text is a regular expression, and `all-linear` names all
/// matrices. A text may also be the name of a matrix.
pub(super) fn lora_targets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ModuleNames, D::Error> {
    Ok(match ModuleNames::deserialize(deserializer)? {
        ModuleNames::Pattern(word) if word == ALL_LINEAR => all_targets(),
        ModuleNames::Pattern(name) if Target::named(&name).is_some() => ModuleNames::List(vec![name]),
        ModuleNames::List(names) if names == [ALL_LINEAR] => all_targets(),
        targets => targets,
    })
}

/// Deserializes lossy memory savings (rungs) from their names, in a list or in one text with commas. The numbers in
/// `16,8,4` name rungs by their bits. Duplicates are dropped.
pub(super) fn rungs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Rung>, D::Error> {
    let texts: Vec<String> = one_or_many(deserializer)?;
    let mut rungs = Vec::new();
    for word in texts.iter().flat_map(|text| text.split(',')).map(str::trim).filter(|word| !word.is_empty()) {
        let rung = Rung::named(word).ok_or_else(|| de::Error::custom(format!("`{word}` is no rung")))?;
        if !rungs.contains(&rung) {
            rungs.push(rung);
        }
    }
    Ok(rungs)
}

/// Deserializes `train.rungs` like [`rungs`]. A present key gives `Some`, even if its list is empty: the rungs of the
/// run are decided.
pub(super) fn decided_rungs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Rung>>, D::Error> {
    rungs(deserializer).map(Some)
}

/// The TOML form of [`Threads`]: a number, or the word `auto`.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum WordOrNumber {
    Number(u32),
    Word(String),
}

/// Reads a number, or `auto` as `None`.
pub(super) fn auto_or_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    match WordOrNumber::deserialize(deserializer)? {
        WordOrNumber::Number(number) => Ok(Some(number)),
        WordOrNumber::Word(word) if word == "auto" => Ok(None),
        WordOrNumber::Word(word) => Err(de::Error::custom(format!("`{word}` is neither a number nor \"auto\""))),
    }
}

impl TryFrom<WordOrNumber> for Threads {
    type Error = String;

    fn try_from(written: WordOrNumber) -> Result<Threads, String> {
        match written {
            WordOrNumber::Number(count) => Ok(Threads::Count(count)),
            WordOrNumber::Word(word) if word == "auto" => Ok(Threads::Auto),
            WordOrNumber::Word(word) => Err(format!("`{word}` is no number of threads")),
        }
    }
}

impl From<Threads> for WordOrNumber {
    fn from(threads: Threads) -> WordOrNumber {
        match threads {
            Threads::Auto => WordOrNumber::Word("auto".into()),
            Threads::Count(count) => WordOrNumber::Number(count),
        }
    }
}
