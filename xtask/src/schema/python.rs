//! Python types of published schemas: the module `plimsoll.results`.
//!
//! An object becomes a `TypedDict`, a set of words a `Literal`, and the kinds of events a `Union`.

use super::published::{DEFINITIONS, is_required, reference, references};
use anyhow::{Context, bail};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fmt::Write;
use textwrap::{Options, WordSplitter};

/// First lines of the module.
const HEADER: &str = r#""""Types of the results: dictionaries with the keys of ``plan.json``, ``result.json``, ``events.jsonl`` and ``devices --json``.

Generated from the Rust types by ``cargo xtask schema``: change those, not this file. Bytes and seconds are plain numbers, not
multiples. All figures of a plan are predicted. All other figures are measured, unless their name contains ``predicted``.
``json.dump`` writes a dictionary in the format of the file that it mirrors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, Union

from plimsoll._best_batch import BestBatch as BestBatch

if TYPE_CHECKING:
    from typing_extensions import NotRequired
"#;

/// Definitions with another name in Python: the Rust name, then the Python name.
const PYTHON_NAMES: &[(&str, &str)] = &[("RecomputeLevel", "Level"), ("Record", "Event")];

/// Words of Python, which a class cannot have as names of attributes.
const KEYWORDS: &[&str] = &["class", "from", "import", "in", "is", "global", "lambda", "pass", "return", "with"];

/// Largest number of characters in a line of the generated module.
const WIDTH: usize = 128;

/// Returns the text of the Python module with the types of these schemas and of all their definitions.
///
/// # Errors
/// Fails if a schema has no Python form.
pub fn module(schemas: &[Value]) -> anyhow::Result<String> {
    let mut definitions = Map::new();
    for schema in schemas {
        definitions.extend(schema[DEFINITIONS].as_object().cloned().unwrap_or_default());
        let title = schema["title"].as_str().context("a schema has no title")?;
        let mut root = schema.clone();
        root.as_object_mut().context("a schema is no object")?.shift_remove(DEFINITIONS);
        definitions.insert(title.to_owned(), root);
    }
    let (mut seen, mut ordered) = (BTreeSet::new(), Vec::new());
    for schema in schemas {
        add_in_order(schema["title"].as_str().unwrap_or_default(), &definitions, &mut seen, &mut ordered);
    }
    let (words, others): (Vec<_>, Vec<_>) = ordered.into_iter().partition(|(_, schema)| literal(schema).is_some());
    let mut text = HEADER.to_owned() + "\n";
    for (name, schema) in &words {
        text += &comment(description(schema), "");
        writeln!(text, "{} = {}", python_name(name), literal(schema).unwrap_or_default())?;
    }
    for (name, schema) in &others {
        text += &definition(name, schema).with_context(|| format!("{name} has no Python form"))?;
    }
    Ok(text)
}

/// Appends a definition to `ordered`, after all definitions to which it refers. Skips definitions that are in `seen`.
fn add_in_order<'a>(
    name: &'a str,
    definitions: &'a Map<String, Value>,
    seen: &mut BTreeSet<String>,
    ordered: &mut Vec<(&'a str, &'a Value)>,
) {
    let Some((name, schema)) = definitions.get_key_value(name).filter(|_| seen.insert(name.to_owned())) else { return };
    for inside in references(schema) {
        if let Some((inside, _)) = definitions.get_key_value(&inside) {
            add_in_order(inside, definitions, seen, ordered);
        }
    }
    ordered.push((name, schema));
}

/// Returns the Python statements that define the type of a schema.
fn definition(name: &str, schema: &Value) -> anyhow::Result<String> {
    let Some(variants) = schema["oneOf"].as_array() else {
        return typed_dict(python_name(name), schema);
    };
    if variants.iter().all(|variant| variant["title"].is_string()) {
        let mut text = String::new();
        for variant in variants {
            text += &typed_dict(variant["title"].as_str().unwrap_or_default(), variant)?;
        }
        writeln!(text, "\n\n{}{} = Union[", comment(description(schema), ""), python_name(name))?;
        for variant in variants.iter().filter_map(|variant| variant["title"].as_str()) {
            writeln!(text, "    {variant},")?;
        }
        return Ok(text + "]\n");
    }
    typed_dict(python_name(name), &merged(variants, schema)?)
}

/// Merges the variants of a tagged enum into one object. A key is required if all variants require it.
fn merged(variants: &[Value], schema: &Value) -> anyhow::Result<Value> {
    let mut merged = schema.clone();
    let (mut properties, mut tags) = (Map::new(), Vec::new());
    for variant in variants {
        for (key, property) in variant["properties"].as_object().context("a variant has no keys")? {
            tags.extend(property.get("const").cloned());
            properties.entry(key.clone()).or_insert_with(|| property.clone());
        }
    }
    let everywhere = |key: &&String| variants.iter().all(|variant| is_required(variant, key));
    let required: Vec<String> = properties.keys().filter(everywhere).cloned().collect();
    for property in properties.values_mut().filter_map(Value::as_object_mut) {
        if property.shift_remove("const").is_some() {
            property.insert("enum".to_owned(), tags.clone().into());
        }
    }
    let fields = merged.as_object_mut().context("a schema is no object")?;
    fields.shift_remove("oneOf");
    fields.insert("properties".to_owned(), properties.into());
    fields.insert("required".to_owned(), required.into());
    Ok(merged)
}

/// Returns the statement that defines a `TypedDict`. If a key is a word of Python, the statement is a call of
/// `TypedDict`, which takes any keys; otherwise it is a class.
fn typed_dict(name: &str, schema: &Value) -> anyhow::Result<String> {
    let properties = schema["properties"].as_object().context("it has no keys")?;
    let mut text = String::from("\n\n");
    let called = properties.keys().any(|key| KEYWORDS.contains(&key.as_str()));
    if called {
        text += &comment(description(schema), "");
        writeln!(text, "{name} = TypedDict(\n    \"{name}\",\n    {{")?;
    } else {
        writeln!(text, "class {name}(TypedDict):\n{}", docstring(description(schema)))?;
    }
    for (key, property) in properties {
        let of = python_type(property).with_context(|| format!("key {key}"))?;
        let required = is_required(schema, key);
        let of = if required { of } else { format!("NotRequired[{of}]") };
        if called {
            text += &key_comment(property, "        ");
            let quote = if required { "" } else { "\"" };
            writeln!(text, "        \"{key}\": {quote}{of}{quote},")?;
        } else {
            text += &key_comment(property, "    ");
            writeln!(text, "    {key}: {of}")?;
        }
    }
    Ok(if called { text + "    },\n)\n" } else { text })
}

/// Returns the Python type of a schema.
fn python_type(schema: &Value) -> anyhow::Result<String> {
    if let Some(name) = reference(schema) {
        return Ok(python_name(name).to_owned());
    }
    if let Some(literal) = literal(schema) {
        return Ok(literal);
    }
    if let Some(options) = schema["anyOf"].as_array() {
        return Ok(options.iter().map(python_type).collect::<anyhow::Result<Vec<_>>>()?.join(" | "));
    }
    let types = match &schema["type"] {
        Value::Array(types) => {
            types.iter().map(|name| python_type_of(name, schema)).collect::<anyhow::Result<Vec<_>>>()?
        }
        name => vec![python_type_of(name, schema)?],
    };
    Ok(types.join(" | "))
}

/// Returns the Python type for the JSON type `name`, such as `float` for `number`. `schema` gives further details, such
/// as the type of an array's elements.
fn python_type_of(name: &Value, schema: &Value) -> anyhow::Result<String> {
    Ok(match name.as_str() {
        Some("null") => "None".to_owned(),
        Some("boolean") => "bool".to_owned(),
        Some("integer") => "int".to_owned(),
        Some("number") => "float".to_owned(),
        Some("string") => "str".to_owned(),
        Some("array") => format!("list[{}]", python_type(&schema["items"])?),
        Some("object") => format!("dict[str, {}]", python_type(&schema["additionalProperties"])?),
        _ => bail!("no Python type for {schema}"),
    })
}

/// Returns the `Literal` type of a schema that permits only certain words; `None` for any other schema.
fn literal(schema: &Value) -> Option<String> {
    let words: Vec<&str> = if let Some(word) = schema["const"].as_str() {
        vec![word]
    } else if let Some(words) = schema["enum"].as_array() {
        words.iter().map(Value::as_str).collect::<Option<_>>()?
    } else {
        let variants = schema["oneOf"].as_array()?;
        variants
            .iter()
            .map(|variant| variant["const"].as_str().or(variant["enum"][0].as_str()))
            .collect::<Option<_>>()?
    };
    let words: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    Some(format!("Literal[{}]", words.join(", ")))
}

fn python_name(name: &str) -> &str {
    PYTHON_NAMES.iter().find(|(rust, _)| *rust == name).map_or(name, |(_, python)| python)
}

/// Returns the description of a schema, with backquotes doubled as in Python documentation; empty without a
/// description.
fn description(schema: &Value) -> String {
    schema["description"].as_str().unwrap_or_default().replace('`', "``")
}

/// Returns the description of a key as comment lines; empty without a description.
fn key_comment(property: &Value, indent: &str) -> String {
    comment(description(property).replace("``null``", "``None``"), indent)
}

/// Returns a text as comment lines (`#:`) that document the next statement; empty without text.
fn comment(text: String, indent: &str) -> String {
    wrapped(&text, WIDTH - indent.len() - 3).iter().map(|line| format!("{indent}#: {line}\n")).collect()
}

/// Returns a text as the docstring of a class. If it needs several lines, an empty line follows its first sentence.
fn docstring(text: String) -> String {
    const INDENT: &str = "    ";
    // The quotes take three letters at either end.
    let width = WIDTH - INDENT.len() - 6;
    let lines = |text: &str| wrapped(text, width).join(&format!("\n{INDENT}"));
    let content = match text.split_once(". ") {
        _ if text.len() <= width => return format!("{INDENT}\"\"\"{text}\"\"\"\n"),
        Some((summary, rest)) => format!("{}.\n\n{INDENT}{}", lines(summary), lines(rest)),
        None => lines(&text),
    };
    format!("{INDENT}\"\"\"{content}\n{INDENT}\"\"\"\n")
}

/// Breaks a text between words into lines of at most `width` characters; none for an empty text. A longer word stays
/// whole.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    if text.is_empty() {
        return Vec::new();
    }
    let options = Options::new(width).break_words(false).word_splitter(WordSplitter::NoHyphenation);
    textwrap::wrap(text, options).into_iter().map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn generated(schema: Value) -> String {
        module(&[schema]).unwrap().strip_prefix(HEADER).unwrap().to_owned()
    }

    #[test]
    fn object_becomes_a_typed_dict() {
        let text = generated(json!({
            "title": "Plan",
            "description": "A plan.",
            "type": "object",
            "properties": {
                "level": {"$ref": "#/$defs/RecomputeLevel", "description": "The level; `null` without layers."},
                "loss": {"type": ["number", "null"]},
                "names": {"type": "array", "items": {"type": "string"}},
                "by_name": {"type": "object", "additionalProperties": {"type": "integer"}},
            },
            "required": ["level", "loss", "names"],
            "$defs": {"RecomputeLevel": {"description": "A level.", "oneOf": [{"const": "nothing"}, {"const": "block"}]}},
        }));
        let expected = r#"
#: A level.
Level = Literal["nothing", "block"]


class Plan(TypedDict):
    """A plan."""

    #: The level; ``None`` without layers.
    level: Level
    loss: float | None
    names: list[str]
    by_name: NotRequired[dict[str, int]]
"#;
        assert_eq!(text, expected);
    }

    #[test]
    fn keyword_as_key_is_permitted() {
        let text = generated(json!({
            "title": "Recovery",
            "type": "object",
            "properties": {"from": {"type": "string"}, "to": {"type": "integer"}},
            "required": ["to"],
        }));
        let expected = "\n\n\nRecovery = TypedDict(\n    \"Recovery\",\n    {\n        \"from\": \"NotRequired[str]\",\n        \
            \"to\": int,\n    },\n)\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn schema_without_python_form_is_an_error() {
        let odd = json!({"title": "Odd", "properties": {"any": {"type": "array"}}});
        assert!(format!("{:#}", module(&[odd]).unwrap_err()).contains("key any"));
    }
}
