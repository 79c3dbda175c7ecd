//! Reads a [`RunConfig`] from text and `--set` settings, and writes it back.
//!
//! Settings are merged into the TOML document of the file, and then the document is deserialized. The location of each
//! key is kept for error messages.

use super::check::{RuleViolation, check};
use super::{EXAMPLE_PREFIX, Init, RunConfig, Threads, keys};
use plimsoll_core::{Failure, Rung};
use plimsoll_device::regular_file;
use plimsoll_program::models::preset_name;
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::{self, Path, PathBuf};
use toml_edit::{Document, DocumentMut, Item, TableLike, Value};

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
            RunConfigError::Experiment { .. } => {
                failure.hint("leave it out, or start a run of its own with another run.dir")
            }
            _ => failure,
        }
    }
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
        check(&config).map_err(|violation| match violation {
            RuleViolation::OutOfRange(key) => locations.value_error(key, "out of range"),
            RuleViolation::Invalid(key, message, hints) => {
                RunConfigError::Invalid { place: locations.location(key), key: key.to_owned(), message, hints }
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
        if !is_set("train.batch_tokens") && self.data.sequence > 0 {
            let sequence = u64::from(self.data.sequence);
            self.train.batch_tokens = (self.train.batch_tokens / sequence).max(1) * sequence;
        }
    }

    /// Makes paths absolute against the working directory, so that a stored run file does not depend on it.
    fn with_absolute_paths(mut self) -> Result<RunConfig, RunConfigError> {
        let sources = self.data.train.iter_mut().chain(&mut self.data.eval);
        let model = self.model.path.iter_mut().chain(&mut self.model.adapter);
        let paths = model.chain(sources).chain([&mut self.run.dir]).chain(&mut self.memory.file_dir);
        for path in paths.filter(|path| !path.starts_with(EXAMPLE_PREFIX)) {
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
        if self.data.train.is_empty() {
            return Err(RunConfigError::Missing { key: "data.train", hint: "set data.train to a .jsonl or .txt file" });
        }
        if self.length().is_none() {
            let hint = "set one of train.steps, train.epochs and train.hours";
            return Err(RunConfigError::Missing { key: "train.steps", hint });
        }
        Ok(())
    }

    /// Returns the text of a run file with every key that has a value. Parsing the text gives an equal configuration.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a checked run file has only what TOML can say")
    }
}

/// Checks that all sections of the parsed run file `root` are tables, and all keys are known. `name` stands for the
/// file in messages, and `text` is its text.
fn check_keys(name: &str, text: &str, root: &dyn TableLike) -> Result<(), RunConfigError> {
    let place = |table: &dyn TableLike, key: &str| {
        let span = table.get_key_value(key).and_then(|(key, item)| key.span().or(item.span()));
        format!("{name}, line {}", line_at(text, span.map_or(0, |span| span.start)))
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
        for (key, _) in table.iter() {
            let path = format!("{section}.{key}");
            if keys::expected(&path).is_none() {
                let nearest = keys::nearest_key(section, key);
                return Err(RunConfigError::UnknownKey { place: place(table, key), key: path, nearest });
            }
        }
    }
    Ok(())
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
    let item = document.entry(section).or_insert_with(toml_edit::table);
    let table = item.as_table_like_mut().ok_or_else(|| wrong(&format!("[{section}] is no table")))?;
    table.insert(name, Item::Value(value));
    Ok(key.to_owned())
}

/// Removes the keys of the file that are alternatives to a key from a setting: another way to name the model, or
/// another measure of length. Keys that come from settings are kept, so that a conflict between two settings is
/// reported.
fn remove_alternatives(document: &mut DocumentMut, key: &str, keys_from_settings: &[String]) {
    let others: &[&str] = match key {
        "model.path" => &["model.preset", "model.init", "model.adapter"],
        "model.preset" => &["model.path", "model.init", "model.adapter"],
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

/// Returns the setting that names `model`: `model.path=…` if the text looks like a path or exists as one, else
/// `model.preset=…` with the preset that the text stands for.
pub fn model_setting(model: &str) -> String {
    let is_path = model.contains(path::MAIN_SEPARATOR) || model.ends_with(".json") || Path::new(model).exists();
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
        let (section, name) = keys::split(key);
        self.merged.get(section)?.as_table_like()?.get(name).map(display_value)
    }

    /// Returns the place of the key for messages: file and line, or the command line. For a key that is not set, it is
    /// the name of the file.
    fn location(&self, key: &str) -> String {
        if self.keys_from_settings.iter().any(|set| set == key) {
            return COMMAND_LINE.to_owned();
        }
        let (section, name) = keys::split(key);
        let span = self.file.get(section).and_then(Item::as_table_like).and_then(|table| table.get_key_value(name));
        match span.and_then(|(key, item)| key.span().or(item.span())) {
            Some(span) => format!("{}, line {}", self.name, line_at(self.text, span.start)),
            None => self.name.to_owned(),
        }
    }

    fn value_error(&self, key: &str, message: &str) -> RunConfigError {
        let place = self.location(key);
        match (keys::expected(key), self.value(key)) {
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
        for (name, item) in table.iter() {
            if item.span().is_some_and(|span| (span.start..=span.end).contains(&byte)) {
                return Some(format!("{section}.{name}"));
            }
        }
    }
    None
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
