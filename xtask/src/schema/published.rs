//! The published form of a schema: closer to the JSON than what `schemars` derives from a Rust type.
//!
//! - A key that may be absent is never `null`, because Rust omits it instead.
//! - Descriptions mention `null` and absence, not Rust's `None`, and contain no links.
//! - Each kind of event is one object with all of its keys.

use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Key of the definitions that a schema refers to.
pub const DEFINITIONS: &str = "$defs";

/// Converts a schema that `schemars` derived, with its definitions, to the form in which it is published.
pub fn publish(mut root: Value) -> Value {
    merge_variants(&mut root);
    remove_unused_definitions(&mut root);
    refine(&mut root);
    in_reading_order(root)
}

/// Puts the title and the description of a schema first and the definitions last.
fn in_reading_order(mut root: Value) -> Value {
    let fields = root.as_object_mut().expect("a schema is an object");
    let mut ordered = Map::new();
    for key in ["$schema", "title", "description"] {
        ordered.extend(fields.shift_remove_entry(key));
    }
    let definitions = fields.shift_remove_entry(DEFINITIONS);
    ordered.extend(std::mem::take(fields));
    ordered.extend(definitions);
    ordered.into()
}

/// Returns the name of the definition if a schema is a reference to one (`$ref`), and `None` otherwise.
pub fn reference(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.strip_prefix("#/")?.strip_prefix(DEFINITIONS)?.strip_prefix('/')
}

/// Returns whether an object of this schema always has the key.
pub fn is_required(schema: &Value, key: &str) -> bool {
    schema["required"].as_array().is_some_and(|required| required.iter().any(|name| name == key))
}

/// Moves the keys that stand beside a flattened enum into each of its variants, and gives each variant a title. A
/// schema without such an enum stays as it is.
fn merge_variants(root: &mut Value) {
    if !(root["properties"].is_object() && root["oneOf"].is_array()) {
        return;
    }
    let variants: Vec<Value> =
        root["oneOf"].as_array().into_iter().flatten().map(|variant| merged_variant(root, variant)).collect();
    let fields = root.as_object_mut().expect("a schema is an object");
    fields.shift_remove("properties");
    fields.shift_remove("required");
    fields["oneOf"] = variants.into();
}

/// Returns a variant of a flattened enum as one object: the keys that stand beside the enum in `root`, then the
/// variant's own keys, then those of the type that it refers to.
fn merged_variant(root: &Value, variant: &Value) -> Value {
    let referred = reference(variant).map_or(&Value::Null, |name| &root[DEFINITIONS][name]);
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for part in [root, variant, referred] {
        properties.extend(part["properties"].as_object().cloned().unwrap_or_default());
        required.extend(part["required"].as_array().cloned().unwrap_or_default());
    }
    let tag = properties.values().find_map(|property| property["const"].as_str()).unwrap_or_default();
    let title = tag.split('_').map(capitalized).collect::<String>() + "Event";
    json!({
        "title": title,
        "description": variant["description"],
        "type": "object",
        "properties": properties,
        "required": required,
    })
}

/// Removes the definitions to which the rest of the schema no longer refers, directly or through other definitions.
fn remove_unused_definitions(root: &mut Value) {
    let Some(definitions) = root.as_object_mut().and_then(|fields| fields.shift_remove(DEFINITIONS)) else { return };
    let mut used = BTreeSet::new();
    let mut open = vec![root.clone()];
    while let Some(schema) = open.pop() {
        for name in references(&schema) {
            if used.insert(name.clone()) {
                open.push(definitions[&name].clone());
            }
        }
    }
    let all = definitions.as_object().into_iter().flatten();
    let kept: Map<String, Value> =
        all.filter(|(name, _)| used.contains(*name)).map(|(name, schema)| (name.clone(), schema.clone())).collect();
    if !kept.is_empty() {
        root[DEFINITIONS] = kept.into();
    }
}

/// Returns the names of all definitions to which a schema or its parts refer, in the order of the text. A name may
/// occur several times.
pub fn references(schema: &Value) -> Vec<String> {
    let mut names: Vec<String> = reference(schema).map(str::to_owned).into_iter().collect();
    match schema {
        Value::Object(fields) => names.extend(fields.values().flat_map(references)),
        Value::Array(items) => names.extend(items.iter().flat_map(references)),
        _ => {}
    }
    names
}

/// Rewrites all descriptions for readers of JSON instead of Rust. Removes `null` from the types of keys that may be
/// absent. Does so in this schema and in all schemas inside it.
fn refine(schema: &mut Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(refine),
        Value::Object(fields) => {
            fields.shift_remove("default");
            if let Some(Value::String(text)) = fields.get_mut("description") {
                *text = without_links(&text.split_whitespace().collect::<Vec<_>>().join(" "));
            }
            let required = json!({"required": fields.get("required")});
            if let Some(Value::Object(properties)) = fields.get_mut("properties") {
                for (key, property) in properties {
                    refine_property(property, is_required(&required, key));
                }
            }
            for (key, inside) in fields {
                match inside {
                    // The keys of these are names, not words of the schema language.
                    Value::Object(named) if key == "properties" || key == DEFINITIONS => {
                        named.values_mut().for_each(refine);
                    }
                    inside => refine(inside),
                }
            }
        }
        _ => {}
    }
}

/// Rewrites the description of a property for readers of JSON instead of Rust, such as `None` to `null`. If the key may
/// be absent (not `required`), also removes `null` from its types.
fn refine_property(property: &mut Value, required: bool) {
    let holds_several = matches!(property["type"].as_str(), Some("array" | "object"));
    if !required {
        remove_null(property);
    }
    let Some(fields) = property.as_object_mut() else { return };
    if let Some(Value::String(text)) = fields.get_mut("description") {
        *text = replace_word(&text.replace("`None`", "None"), "None", if required { "`null`" } else { "absent" });
        if !required && holds_several {
            *text = replace_word(text, "empty", "absent");
        }
    }
}

/// Removes `null` from the types that a schema permits.
fn remove_null(schema: &mut Value) {
    let Some(fields) = schema.as_object_mut() else { return };
    if let Some(Value::Array(types)) = fields.get_mut("type") {
        types.retain(|name| name != "null");
        if let [one] = types.as_slice() {
            fields["type"] = one.clone();
        }
    }
    if let Some(Value::Array(options)) = fields.get_mut("anyOf") {
        options.retain(|option| option["type"] != "null");
        if let [Value::Object(one)] = options.as_slice() {
            let one = one.clone();
            fields.shift_remove("anyOf");
            fields.extend(one);
        }
    }
}

/// Replaces each occurrence of `word` that is a whole word. At the start of a sentence the replacement gets a capital
/// letter.
fn replace_word(text: &str, word: &str, by: &str) -> String {
    let mut replaced = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, after) = (&rest[..at], &rest[at + word.len()..]);
        replaced += before;
        let inside_word = replaced.ends_with(char::is_alphanumeric) || after.starts_with(char::is_alphanumeric);
        let starts_sentence = replaced.is_empty() || replaced.ends_with(". ");
        replaced += &match (inside_word, starts_sentence) {
            (true, _) => word.to_owned(),
            (false, true) => capitalized(by),
            (false, false) => by.to_owned(),
        };
        rest = after;
    }
    replaced + rest
}

/// Replaces rustdoc links by their text. A link that stands alone in parentheses is removed with them.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("[`") {
        let Some((name, after)) = after.split_once("`]") else { break };
        if let (Some(before), Some(after)) = (before.strip_suffix(" ("), after.strip_prefix(')')) {
            plain += before;
            rest = after;
        } else {
            plain += &format!("{before}`{name}`");
            // The target of a link with a text of its own.
            rest = match after.strip_prefix('(').and_then(|target| target.split_once(')')) {
                Some((_, after)) => after,
                None => after,
            };
        }
    }
    plain + rest
}

/// Returns a text with its first letter as a capital.
fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().collect::<String>() + letters.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_key_is_never_null() {
        let derived = json!({
            "type": "object",
            "properties": {
                "bytes": {"type": ["integer", "null"], "description": "Bytes. `None` without a file."},
                "plan": {"anyOf": [{"$ref": "#/$defs/Plan"}, {"type": "null"}], "default": null},
                "team": {"type": "array", "description": "Workers; empty for one device."},
                "eval": {"type": ["number", "null"], "description": "Loss; None without\ndata."},
            },
            "required": ["eval"],
            "$defs": {"Plan": {"type": "object"}, "Unused": {"type": "object"}},
        });
        let expected = json!({
            "type": "object",
            "properties": {
                "bytes": {"type": "integer", "description": "Bytes. Absent without a file."},
                "plan": {"$ref": "#/$defs/Plan"},
                "team": {"type": "array", "description": "Workers; absent for one device."},
                "eval": {"type": ["number", "null"], "description": "Loss; `null` without data."},
            },
            "required": ["eval"],
            "$defs": {"Plan": {"type": "object"}},
        });
        assert_eq!(publish(derived), expected);
    }

    #[test]
    fn event_has_shared_keys_before_its_own() {
        let derived = json!({
            "type": "object",
            "properties": {"time": {"type": "number"}},
            "required": ["time"],
            "oneOf": [{
                "description": "A device was lost.",
                "type": "object",
                "properties": {"event": {"const": "device_lost"}},
                "required": ["event"],
                "$ref": "#/$defs/Lost",
            }],
            "$defs": {"Lost": {"properties": {"device": {"type": "string"}}, "required": ["device"]}},
        });
        let published = publish(derived);
        let event = &published["oneOf"][0];
        assert_eq!(
            (&event["title"], &event["required"]),
            (&json!("DeviceLostEvent"), &json!(["time", "event", "device"]))
        );
        assert_eq!(event["properties"].as_object().unwrap().keys().collect::<Vec<_>>(), ["time", "event", "device"]);
        assert_eq!(published.get("$defs"), None);
    }

    #[test]
    fn descriptions_contain_no_links() {
        assert_eq!(without_links("Version ([`VERSION`]). See [`Plan`] and [`x`](y)."), "Version. See `Plan` and `x`.");
    }
}
