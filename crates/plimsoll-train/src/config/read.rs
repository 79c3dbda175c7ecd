//! From text and `--set` to a [`RunFile`], and back to text.
//!
//! Settings are merged into the file's document before anything is typed, so that one path leads
//! from text to struct. Each key is remembered with the place it came from, for the messages.

use super::check::{Fault, check};
use super::{EXAMPLE_PREFIX, Init, RunFile, Threads, keys};
use plimsoll_core::{Failure, Rung};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::{self, Path, PathBuf};
use toml_edit::{Document, DocumentMut, Item, TableLike, Value};

/// What is wrong with a run file.
#[derive(Debug, thiserror::Error)]
pub enum RunFileError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// The run file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The text is no TOML.
    #[error("{place}: {message}")]
    Syntax {
        /// File and line.
        place: String,
        /// The parser's message, on one line.
        message: String,
    },
    /// `--set` without a key or a value that can be read.
    #[error("--set {text}: {message}")]
    Setting {
        /// What was given.
        text: String,
        /// What is missing.
        message: String,
    },
    /// There is no such key.
    #[error("{place}: unknown key `{key}`")]
    UnknownKey {
        /// File and line, or the command line.
        place: String,
        /// The key path.
        key: String,
        /// The key or section that was probably meant.
        nearest: Option<&'static str>,
    },
    /// The value is of the wrong type or out of range.
    #[error("{place}: {key} is {found}, expected {expected}")]
    Value {
        /// File and line, or the command line.
        place: String,
        /// The key path.
        key: String,
        /// The value as written.
        found: String,
        /// What the key takes.
        expected: String,
    },
    /// The value cannot stand: it does not go with another one, or names what is not there.
    #[error("{place}: {key}: {message}")]
    Cannot {
        /// File and line, or the command line.
        place: String,
        /// The key path.
        key: String,
        /// Why.
        message: String,
        /// What to do.
        hints: Vec<String>,
    },
    /// A run that goes on cannot change this.
    #[error("{key} belongs to the experiment: a run that goes on cannot change it")]
    Experiment {
        /// The key path.
        key: String,
    },
    /// A run needs this key.
    #[error("{key} is not set")]
    Missing {
        /// The key path.
        key: &'static str,
        /// What to do.
        hint: &'static str,
    },
}

impl From<RunFileError> for Failure {
    fn from(error: RunFileError) -> Failure {
        let failure = Failure::input(error.to_string());
        match error {
            RunFileError::UnknownKey { nearest: Some(near), .. } => failure.hint(format!("did you mean `{near}`?")),
            RunFileError::UnknownKey { key, nearest: None, .. } => failure.hint(known_keys(&key)),
            RunFileError::Unreadable { path, source } => failure.hint(instead(Path::new(&path), source.kind())),
            RunFileError::Setting { .. } => failure.hint("write --set section.key=value, such as --set train.steps=20"),
            RunFileError::Cannot { hints, .. } => hints.into_iter().fold(failure, Failure::hint),
            RunFileError::Missing { hint, .. } => failure.hint(hint),
            RunFileError::Experiment { .. } => {
                failure.hint("leave it out, or start a run of its own with another run.dir")
            }
            _ => failure,
        }
    }
}

/// What to do where a run file cannot be read.
fn instead(path: &Path, why: ErrorKind) -> String {
    if let Some(near) = near_file(path).filter(|_| why == ErrorKind::NotFound) {
        return format!("did you mean `{}`?", near.display());
    }
    match why {
        ErrorKind::IsADirectory if path.join("run.toml").is_file() => {
            format!("to go on with the run in it: --resume {}", path.display())
        }
        ErrorKind::InvalidData => "a run file is TOML, a text in UTF-8: see docs/run-file.md".to_owned(),
        _ => "name a run file, such as run.toml; without one the built-in example is taken".to_owned(),
    }
}

/// The file beside this one that was probably meant.
fn near_file(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".toml").unwrap_or(name);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let names = std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let near = keys::nearest(name, names.filter_map(|other| Some(other.strip_suffix(".toml")?.to_owned())))?;
    Some(path.with_file_name(format!("{near}.toml")))
}

/// The keys of the section, or the sections, for a key that resembles nothing.
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

impl RunFile {
    /// Reads a run file (`None`: the built-in example), merges the settings `section.key=value`,
    /// checks all, and makes the paths absolute against the working directory.
    ///
    /// # Errors
    /// A [`RunFileError`] as a failure with exit code 2.
    pub fn load(path: Option<&Path>, settings: &[String]) -> Result<RunFile, Failure> {
        let file = match path {
            None => RunFile::parse("the built-in example", include_str!("example.toml"), settings)?,
            Some(path) => {
                let name = path.display().to_string();
                let text = std::fs::read_to_string(path)
                    .map_err(|source| RunFileError::Unreadable { path: name.clone(), source })?;
                RunFile::parse(&name, &text, settings)?
            }
        };
        Ok(file.absolute()?)
    }

    /// A run file made of settings alone, for plans and benches that name their model themselves.
    ///
    /// # Errors
    /// As [`RunFile::load`].
    pub fn from_settings(settings: &[String]) -> Result<RunFile, Failure> {
        Ok(RunFile::parse("the command line", "", settings)?.absolute()?)
    }

    /// The run file of a run that goes on: `run.toml` in its folder. Settings may move it to other
    /// devices, budgets, pins and rhythms, and change its length; what else belongs to the experiment stays.
    ///
    /// # Errors
    /// As [`RunFile::load`], and a setting of the experiment.
    pub fn resume(run_dir: &Path, settings: &[String]) -> Result<RunFile, Failure> {
        const LENGTH: [&str; 3] = ["train.steps", "train.epochs", "train.hours"];
        const RHYTHM: [&str; 4] = ["train.eval_every", "train.save_every", "train.save_every_minutes", "train.keep"];
        for key in settings.iter().filter_map(|setting| setting.split_once('=')).map(|(key, _)| key.trim()) {
            let free = LENGTH.contains(&key)
                || RHYTHM.contains(&key)
                || ["memory", "recipe", "run"].contains(&keys::split(key).0);
            if keys::expected(key).is_some() && !free {
                return Err(RunFileError::Experiment { key: key.to_owned() }.into());
            }
        }
        let path = run_dir.join("run.toml");
        if !path.is_file() {
            let message = format!("{} is no run folder: it has no run.toml", run_dir.display());
            return Err(Failure::input(message).hint("name the folder that run.dir named when the run started"));
        }
        let mut file = RunFile::load(Some(&path), settings)?;
        // The folder may have been moved since.
        file.run.dir = run_dir.to_string_lossy().into_owned();
        let says =
            |key: &str| settings.iter().any(|setting| setting.split('=').next().is_some_and(|k| k.trim() == key));
        if !says("memory.budget") && !says("run.devices") {
            file.take_moved(run_dir);
        }
        Ok(file.absolute()?)
    }

    /// The run file in `text`, with the settings merged; `name` is what messages call it. Paths stay
    /// as they are written.
    ///
    /// # Errors
    /// The first thing that is wrong, with its place.
    pub fn parse(name: &str, text: &str, settings: &[String]) -> Result<RunFile, RunFileError> {
        let document = Document::parse(text).map_err(|error| RunFileError::Syntax {
            place: format!("{name}, line {}", line_at(text, error.span().map_or(0, |span| span.start))),
            message: error.message().lines().collect::<Vec<_>>().join("; "),
        })?;
        check_keys(name, text, document.as_table())?;
        let mut merged = DocumentMut::from(document.as_table().clone());
        let mut set_keys = Vec::new();
        for setting in settings {
            let key = merge(&mut merged, setting)?;
            give_way(&mut merged, &key, &set_keys);
            set_keys.push(key);
        }
        let places = Places { name, text, file: &document, merged: &merged, set_keys: &set_keys };

        let merged_text = merged.to_string();
        let mut file: RunFile = toml::from_str(&merged_text).map_err(|error| {
            let key = error.span().and_then(|span| key_at(&merged_text, span.start)).unwrap_or_default();
            places.value_error(&key, error.message())
        })?;
        file.resolve(|key| places.found(key).is_some());
        check(&file).map_err(|fault| match fault {
            Fault::Range(key) => places.value_error(key, "out of range"),
            Fault::Cannot(key, message, hints) => {
                RunFileError::Cannot { place: places.place(key), key: key.to_owned(), message, hints }
            }
        })?;
        Ok(file)
    }

    /// Gives the defaults that depend on other keys.
    fn resolve(&mut self, given: impl Fn(&str) -> bool) {
        if !given("model.init") && self.model.preset.is_some() {
            self.model.init = Init::Random;
        }
        if !given("train.batch_tokens") && self.data.sequence > 0 {
            let sequence = u64::from(self.data.sequence);
            self.train.batch_tokens = (self.train.batch_tokens / sequence).max(1) * sequence;
        }
    }

    /// Paths, made absolute against the working directory: the run folder must mean the same from
    /// everywhere.
    fn absolute(mut self) -> Result<RunFile, RunFileError> {
        let sources = self.data.train.iter_mut().chain(&mut self.data.eval);
        let model = self.model.path.iter_mut().chain(&mut self.model.adapter);
        let paths = model.chain(sources).chain([&mut self.run.dir]).chain(&mut self.memory.file_dir);
        for path in paths.filter(|path| !path.starts_with(EXAMPLE_PREFIX)) {
            let whole =
                path::absolute(&*path).map_err(|source| RunFileError::Unreadable { path: path.clone(), source })?;
            // A path from a String with parts of the working directory; lossy only where that is no UTF-8.
            *path = whole.to_string_lossy().into_owned();
        }
        Ok(self)
    }

    /// What a training run needs and a plan does not: data and a length.
    ///
    /// # Errors
    /// The key that is missing.
    pub fn check_trainable(&self) -> Result<(), RunFileError> {
        if self.data.train.is_empty() {
            return Err(RunFileError::Missing { key: "data.train", hint: "set data.train to a .jsonl or .txt file" });
        }
        if self.length().is_none() {
            let hint = "set one of train.steps, train.epochs and train.hours";
            return Err(RunFileError::Missing { key: "train.steps", hint });
        }
        Ok(())
    }

    /// The file with every key written out. Reading it again gives an equal run file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a checked run file has only what TOML can say")
    }
}

/// Refuses sections that are no tables, and keys that nobody knows.
fn check_keys(name: &str, text: &str, root: &dyn TableLike) -> Result<(), RunFileError> {
    let place = |table: &dyn TableLike, key: &str| {
        let span = table.get_key_value(key).and_then(|(key, item)| key.span().or(item.span()));
        format!("{name}, line {}", line_at(text, span.map_or(0, |span| span.start)))
    };
    for (section, item) in root.iter() {
        if !keys::is_section(section) {
            let nearest = keys::nearest_section(section).or_else(|| keys::nearest_key("", section));
            return Err(RunFileError::UnknownKey { place: place(root, section), key: section.to_owned(), nearest });
        }
        let Some(table) = item.as_table_like() else {
            return Err(RunFileError::Value {
                place: place(root, section),
                key: section.to_owned(),
                found: if item.is_array_of_tables() { format!("a list, [[{section}]]") } else { shown(item) },
                expected: format!("a section, [{section}]"),
            });
        };
        for (key, _) in table.iter() {
            let path = format!("{section}.{key}");
            if keys::expected(&path).is_none() {
                let nearest = keys::nearest_key(section, key);
                return Err(RunFileError::UnknownKey { place: place(table, key), key: path, nearest });
            }
        }
    }
    Ok(())
}

/// Puts `section.key=value` into the document; answers the key.
fn merge(document: &mut DocumentMut, setting: &str) -> Result<String, RunFileError> {
    let wrong = |message: &str| RunFileError::Setting { text: setting.to_owned(), message: message.to_owned() };
    let (key, value) = setting.split_once('=').ok_or_else(|| wrong("no `=` between key and value"))?;
    let (key, value) = (key.trim(), value.trim());
    let (section, name) = keys::split(key);
    if keys::expected(key).is_none() {
        let nearest = keys::nearest_key(section, name).or_else(|| keys::nearest_section(key));
        return Err(RunFileError::UnknownKey { place: COMMAND_LINE.into(), key: key.to_owned(), nearest });
    }
    let value = setting_value(value).ok_or_else(|| wrong(&format!("no value for {key} can be read from `{value}`")))?;
    let item = document.entry(section).or_insert_with(toml_edit::table);
    let table = item.as_table_like_mut().ok_or_else(|| wrong(&format!("[{section}] is no table")))?;
    table.insert(name, Item::Value(value));
    Ok(key.to_owned())
}

/// A setting replaces what the file says in its own words and in others: another model, another
/// measure of length. Two settings do not replace each other.
fn give_way(document: &mut DocumentMut, key: &str, set_keys: &[String]) {
    let others: &[&str] = match key {
        "model.path" => &["model.preset", "model.init", "model.adapter"],
        "model.preset" => &["model.path", "model.init", "model.adapter"],
        "train.steps" => &["train.epochs", "train.hours"],
        "train.epochs" => &["train.steps", "train.hours"],
        "train.hours" => &["train.steps", "train.epochs"],
        _ => &[],
    };
    for other in others.iter().filter(|other| !set_keys.iter().any(|set| set == *other)) {
        let (section, name) = keys::split(other);
        if let Some(table) = document.get_mut(section).and_then(Item::as_table_like_mut) {
            table.remove(name);
        }
    }
}

/// `key="text"`, a setting whose value is text whatever it looks like.
pub fn setting(key: &str, text: &str) -> String {
    format!("{key}={}", Value::from(text))
}

/// `key=["text", …]`, a setting whose value is a list of texts.
pub fn list_setting(key: &str, texts: &[String]) -> String {
    format!("{key}={}", Value::from_iter(texts))
}

/// The setting that names a model: by its path if it looks like one or is there, else as a preset.
pub fn model_setting(model: &str) -> String {
    let is_path = model.contains(path::MAIN_SEPARATOR) || model.ends_with(".json") || Path::new(model).exists();
    setting(if is_path { "model.path" } else { "model.preset" }, model)
}

/// A TOML value; what is none, and does not begin like one, is a string.
fn setting_value(text: &str) -> Option<Value> {
    if let Ok(value) = text.parse::<Value>() {
        return Some(value);
    }
    let bare = !text.is_empty() && !text.starts_with(['"', '\'', '[', '{']) && !text.contains(char::is_control);
    bare.then(|| Value::from(text))
}

const COMMAND_LINE: &str = "command line";

/// Where each key was given.
struct Places<'a> {
    name: &'a str,
    text: &'a str,
    file: &'a Document<&'a str>,
    merged: &'a DocumentMut,
    set_keys: &'a [String],
}

impl Places<'_> {
    /// The key's value, if anybody gave one.
    fn found(&self, key: &str) -> Option<String> {
        let (section, name) = keys::split(key);
        self.merged.get(section)?.as_table_like()?.get(name).map(shown)
    }

    /// File and line of the key, or the command line.
    fn place(&self, key: &str) -> String {
        if self.set_keys.iter().any(|set| set == key) {
            return COMMAND_LINE.to_owned();
        }
        let (section, name) = keys::split(key);
        let span = self.file.get(section).and_then(Item::as_table_like).and_then(|table| table.get_key_value(name));
        match span.and_then(|(key, item)| key.span().or(item.span())) {
            Some(span) => format!("{}, line {}", self.name, line_at(self.text, span.start)),
            None => self.name.to_owned(),
        }
    }

    fn value_error(&self, key: &str, message: &str) -> RunFileError {
        let place = self.place(key);
        match (keys::expected(key), self.found(key)) {
            (Some(expected), Some(found)) => {
                RunFileError::Value { place, key: key.to_owned(), found, expected: expected.to_owned() }
            }
            _ => RunFileError::Syntax { place, message: message.lines().collect::<Vec<_>>().join("; ") },
        }
    }
}

/// The path of the key whose value spans this byte of the text.
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

/// A value as it stands in a message: one line, not long.
fn shown(item: &Item) -> String {
    const LONGEST: usize = 60;
    let text = item.to_string();
    let line: String = text.trim().chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// The line of a byte, counted from 1.
fn line_at(text: &str, byte: usize) -> usize {
    1 + text.bytes().take(byte).filter(|byte| *byte == b'\n').count()
}

/// One value, or a list of them.
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

/// Rungs by name, one or many, with commas or in a list; `16,8,4` is the fall in bits. Each once.
pub(super) fn rungs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Rung>, D::Error> {
    let texts: Vec<String> = one_or_many(deserializer)?;
    let mut rungs = Vec::new();
    for word in texts.iter().flat_map(|text| text.split(',')).map(str::trim).filter(|word| !word.is_empty()) {
        let rung = match word {
            "bf16" | "16" => Rung::Bf16,
            "adam8bit" => Rung::Adam8bit,
            "lora" => Rung::Lora,
            "int8" | "8" => Rung::Int8,
            "nf4" | "4" => Rung::Nf4,
            _ => return Err(de::Error::custom(format!("`{word}` is no rung"))),
        };
        if !rungs.contains(&rung) {
            rungs.push(rung);
        }
    }
    Ok(rungs)
}

/// Rungs that have been decided.
pub(super) fn decided_rungs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<Rung>>, D::Error> {
    rungs(deserializer).map(Some)
}

/// How [`Threads`] is written.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum WordOrNumber {
    Number(u32),
    Word(String),
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
