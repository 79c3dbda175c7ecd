//! Chat templates: where they come from, and the variables that the tokenizer's files give them.

use super::TemplateError;
use super::tags::{PreparedText, prepare};
use crate::data::builtin_template as builtin;
use plimsoll_device::regular_file;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest template. Published ones have at most 40 KiB.
const TEMPLATE_BYTES_MAX: usize = 256 << 10;
/// Special tokens that are variables of a template.
const TOKEN_VARIABLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Keys of `tokenizer_config.json` with further special tokens by name.
const TOKEN_MAPS: [&str; 2] = ["extra_special_tokens", "model_specific_special_tokens"];

/// The chat template of a run, with the variables of the model's tokenizer.
#[derive(Clone)]
pub(crate) struct ChatTemplate {
    /// Templates by their names; a single one is `default`.
    named: BTreeMap<String, Arc<NamedTemplate>>,
    /// File, folder or built-in name, for messages.
    origin: PathBuf,
    /// Values of `bos_token`, `eos_token` and the other special tokens.
    variables: Map<String, Value>,
}

/// The text of a template with the name that messages show.
pub(super) struct NamedTemplate {
    pub name: String,
    pub prepared: PreparedText,
}

impl ChatTemplate {
    /// Finds the template of a run: the one that `setting` (`data.template`) names, or the model's own.
    ///
    /// # Errors
    /// There is none, or a file cannot be read or has another form.
    pub fn find(model_folder: &Path, setting: Option<&str>) -> Result<ChatTemplate, TemplateError> {
        let variables = read_variables(model_folder)?;
        let single = |origin: PathBuf, name: String, text: &str| {
            let template = NamedTemplate::new(name, text)?;
            let named = BTreeMap::from([("default".to_owned(), Arc::new(template))]);
            Ok(ChatTemplate { named, origin, variables: variables.clone() })
        };
        let Some(setting) = setting else { return ChatTemplate::find_own(model_folder, variables) };
        single(setting.into(), setting.to_owned(), &read_template(setting)?)
    }

    /// Finds the template in the model's folder: its files, else the entry of `tokenizer_config.json`.
    fn find_own(folder: &Path, variables: Map<String, Value>) -> Result<ChatTemplate, TemplateError> {
        let OwnTemplates { origin, texts } = OwnTemplates::read(folder)?;
        if texts.is_empty() {
            return Err(TemplateError::NoTemplate { folder: folder.to_owned() });
        }
        let mut named = BTreeMap::new();
        for (name, OwnText { shown, text }) in texts {
            named.insert(name, Arc::new(NamedTemplate::new(shown, &text)?));
        }
        Ok(ChatTemplate { named, origin, variables })
    }

    /// Returns the template for a conversation: `tool_use` if there is one and the conversation has tools, else
    /// `default`.
    pub(super) fn choose(&self, has_tools: bool) -> Result<&NamedTemplate, TemplateError> {
        let tool_use = if has_tools { self.named.get("tool_use") } else { None };
        let chosen = tool_use.or_else(|| self.named.get("default"));
        chosen.map(|template| &**template).ok_or_else(|| TemplateError::NoDefault {
            file: self.origin.clone(),
            names: self.named.keys().cloned().collect(),
        })
    }

    /// Returns all templates.
    pub(super) fn templates(&self) -> impl Iterator<Item = &NamedTemplate> {
        self.named.values().map(|template| &**template)
    }

    /// Returns the special tokens as variables.
    pub(super) fn variables(&self) -> &Map<String, Value> {
        &self.variables
    }

    /// Returns the SHA-256 of all that a rendering depends on beside the conversation and the settings, in hexadecimal:
    /// a part of the key of the token cache.
    #[allow(dead_code)]
    pub fn fingerprint(&self) -> String {
        let mut hasher = Sha256::new();
        for (name, template) in &self.named {
            for part in [name.as_str(), &template.prepared.text] {
                hasher.update((part.len() as u64).to_le_bytes());
                hasher.update(part);
            }
        }
        hasher.update(serde_json::to_vec(&self.variables).unwrap_or_default());
        format!("{:x}", hasher.finalize())
    }
}

impl NamedTemplate {
    fn new(name: String, text: &str) -> Result<NamedTemplate, TemplateError> {
        if text.len() > TEMPLATE_BYTES_MAX {
            return Err(TemplateError::TooLong { template: name, bytes: text.len(), limit: TEMPLATE_BYTES_MAX });
        }
        Ok(NamedTemplate { name, prepared: prepare(text) })
    }
}

/// The templates of a model's folder by their names; a single one is `default`.
struct OwnTemplates {
    /// The folder or file with the templates.
    origin: PathBuf,
    texts: BTreeMap<String, OwnText>,
}

/// The text of a template with the name that messages show.
struct OwnText {
    shown: String,
    text: String,
}

impl OwnText {
    /// Takes the value of `chat_template`, or of its entry `name`, in the `tokenizer_config.json` that `file` names.
    fn from_config(file: &Path, name: &str, text: &Value) -> Result<OwnText, TemplateError> {
        let text = text.as_str().ok_or_else(|| invalid(file, "`chat_template` is no text"))?;
        let suffix = if name == "default" { String::new() } else { format!(" ({name})") };
        Ok(OwnText { shown: format!("{}{suffix}", file.display()), text: text.to_owned() })
    }
}

impl OwnTemplates {
    /// Reads the template files of a folder, else the entry of `tokenizer_config.json`. There may be no template.
    fn read(folder: &Path) -> Result<OwnTemplates, TemplateError> {
        let mut texts = BTreeMap::new();
        for (name, file) in template_files(folder)? {
            texts.insert(name, OwnText { shown: file.display().to_string(), text: read_text(&file)? });
        }
        if !texts.is_empty() {
            return Ok(OwnTemplates { origin: folder.to_owned(), texts });
        }
        let file = folder.join("tokenizer_config.json");
        let config = read_object(&file)?.unwrap_or_default();
        let mut add = |name: &str, text: &Value| -> Result<(), TemplateError> {
            let text = OwnText::from_config(&file, name, text)?;
            texts.insert(name.to_owned(), text);
            Ok(())
        };
        match config.get("chat_template") {
            None | Some(Value::Null) => {}
            Some(Value::Array(list)) => {
                for entry in list {
                    let Some(name) = entry["name"].as_str() else {
                        return Err(invalid(&file, "an entry of `chat_template` has no `name`"));
                    };
                    add(name, &entry["template"])?;
                }
            }
            Some(Value::Object(map)) => map.iter().try_for_each(|(name, text)| add(name, text))?,
            Some(text) => add("default", text)?,
        }
        Ok(OwnTemplates { origin: file, texts })
    }
}

/// Returns the text of the template that `setting` (`data.template`) names: a built-in one, or a file.
///
/// # Errors
/// It names neither, or the file cannot be read.
pub(crate) fn read_template(setting: &str) -> Result<String, TemplateError> {
    if let Some(text) = builtin::text(setting) {
        return Ok(text.to_owned());
    }
    let file = Path::new(setting);
    if !regular_file::is_present(file) {
        return Err(TemplateError::UnknownTemplate { name: setting.to_owned() });
    }
    read_text(file)
}

/// Returns the texts of the templates in a model's folder by their names, unchanged. A single one is `default`; a folder
/// may have none.
///
/// # Errors
/// A file that cannot be read or has another form.
pub(crate) fn read_own_templates(folder: &Path) -> Result<BTreeMap<String, String>, TemplateError> {
    let templates = OwnTemplates::read(folder)?.texts.into_iter();
    Ok(templates.map(|(name, template)| (name, template.text)).collect())
}

/// Returns the template files of a model's folder by the names of their templates.
fn template_files(folder: &Path) -> Result<Vec<(String, PathBuf)>, TemplateError> {
    let mut files = Vec::new();
    let main = folder.join("chat_template.jinja");
    if regular_file::is_present(&main) {
        files.push(("default".to_owned(), main));
    }
    let more = folder.join("additional_chat_templates");
    let entries = match std::fs::read_dir(&more) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(files),
        Err(source) => return Err(TemplateError::Io { file: more, source }),
    };
    for entry in entries {
        let path = entry.map_err(|source| TemplateError::Io { file: more.clone(), source })?.path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned);
        if let (Some(name), Some("jinja")) = (name, path.extension().and_then(|end| end.to_str())) {
            files.push((name, path));
        }
    }
    Ok(files)
}

/// Returns the special tokens in the tokenizer's files, each a text or an object with `content`. The entries of
/// `tokenizer_config.json` have precedence.
fn read_variables(folder: &Path) -> Result<Map<String, Value>, TemplateError> {
    let mut variables = Map::new();
    for file in ["special_tokens_map.json", "tokenizer_config.json"] {
        let Some(config) = read_object(&folder.join(file))? else { continue };
        let direct = TOKEN_VARIABLES.iter().filter_map(|name| Some((*name, config.get(*name)?)));
        let further = TOKEN_MAPS.iter().filter_map(|name| config.get(*name)?.as_object()).flatten();
        for (name, token) in direct.chain(further.map(|(name, token)| (name.as_str(), token))) {
            let text = token.as_str().or_else(|| token.get("content")?.as_str());
            if let Some(text) = text {
                variables.insert(name.to_owned(), text.into());
            }
        }
    }
    Ok(variables)
}

fn read_object(file: &Path) -> Result<Option<Map<String, Value>>, TemplateError> {
    if !regular_file::is_present(file) {
        return Ok(None);
    }
    let text = read_text(file)?;
    serde_json::from_str(&text).map(Some).map_err(|error| invalid(file, &error.to_string()))
}

fn read_text(file: &Path) -> Result<String, TemplateError> {
    let bytes = regular_file::read(file).map_err(|source| TemplateError::Io { file: file.to_owned(), source })?;
    String::from_utf8(bytes).map_err(|_| invalid(file, "it is not UTF-8"))
}

fn invalid(file: &Path, reason: &str) -> TemplateError {
    TemplateError::InvalidFile { file: file.to_owned(), reason: reason.to_owned() }
}
