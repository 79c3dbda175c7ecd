//! Damage inside texts: JSON, lines of JSON, TOML, and headers of tensors.

use super::super::case::Rng;
use super::values;
use serde_json::{Map, Value};

/// Stands for the text of a value until the JSON is written.
const VALUE_MARK: &str = "@VALUE@";
/// Stands for the text of a key until the JSON is written.
const KEY_MARK: &str = "@KEY@";
/// Characters of a value in a description.
const SHOWN: usize = 60;
/// Bytes of a line above the limit of data files.
const LONG_LINE: usize = 17 << 20;

/// A damaged text, and the damage in words.
type Damaged = (String, String);

/// Damages one value or key of a JSON text. Returns `None` if the text is no JSON.
pub fn damaged_json(text: &str, rng: &mut Rng) -> Option<Damaged> {
    let mut whole: Value = serde_json::from_str(text).ok()?;
    let mut place = String::new();
    if rng.chance(0.55) {
        let value = pick(&mut whole, &mut place, false, rng);
        let raw = if rng.chance(0.3) { altered(value, rng) } else { values::json(rng) };
        *value = VALUE_MARK.into();
        let text = whole.to_string().replace(&format!("\"{VALUE_MARK}\""), &raw);
        return Some((text, format!("`{place}` is {}", shown(&raw))));
    }
    let container = pick(&mut whole, &mut place, true, rng);
    let (key, described) = match container {
        Value::Object(map) if !map.is_empty() => damage_keys(map, rng),
        Value::Array(list) if !list.is_empty() => (String::new(), damage_list(list, rng)),
        _ => (String::new(), "nothing changed".to_owned()),
    };
    let text = whole.to_string().replace(KEY_MARK, &key);
    Some((text, format!("in `{place}`: {described}")))
}

/// Returns a random value inside a JSON value, more often an outer one. With `container`, it is a map or a list.
/// `place` becomes its place.
fn pick<'a>(value: &'a mut Value, place: &mut String, container: bool, rng: &mut Rng) -> &'a mut Value {
    let count = match value {
        Value::Object(map) => map.values().filter(|inner| !container || is_container(inner)).count(),
        Value::Array(list) => list.iter().filter(|inner| !container || is_container(inner)).count(),
        _ => 0,
    };
    let stops = if container { 0.5 } else { 0.12 };
    if count == 0 || (!place.is_empty() || container) && rng.chance(stops) {
        return value;
    }
    let chosen = rng.range(0, count as u64 - 1) as usize;
    match value {
        Value::Object(map) => {
            let mut inner = map.iter_mut().filter(|(_, inner)| !container || is_container(inner));
            let (key, inner) = inner.nth(chosen).expect("counted");
            *place = format!("{place}/{key}");
            pick(inner, place, container, rng)
        }
        Value::Array(list) => {
            let mut inner = list.iter_mut().enumerate().filter(|(_, inner)| !container || is_container(inner));
            let (index, inner) = inner.nth(chosen).expect("counted");
            *place = format!("{place}/{index}");
            pick(inner, place, container, rng)
        }
        other => other,
    }
}

fn is_container(value: &Value) -> bool {
    match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => false,
    }
}

/// Returns a JSON text that is close to this value: of another type, or a little more or less.
fn altered(value: &Value, rng: &mut Rng) -> String {
    match value {
        Value::Number(number) => {
            let number = number.as_f64().unwrap_or(0.0);
            let near = [number + 1.0, number - 1.0, -number, number * 2.0, number / 2.0, number * 1e9, number + 0.5];
            match rng.range(0, 2) {
                0 => format!("\"{number}\""),
                _ => Value::from(rng.pick(&near)).to_string().trim_end_matches(".0").to_owned(),
            }
        }
        Value::String(text) => {
            let odd =
                [text.to_uppercase(), format!("{text} "), format!("{text}\u{1b}[2J\n"), format!("\u{202e}{text}")];
            let odd = [&odd[..], &[text.repeat(1000), text.chars().rev().collect()]].concat();
            Value::from(rng.pick(&odd)).to_string()
        }
        other => {
            rng.pick(&[format!("[{other}]"), format!("\"{}\"", shown(&other.to_string()).replace(['"', '\\'], ""))])
        }
    }
}

/// Removes, renames, doubles or swaps keys of a map. Returns the text of the marked key, if there is one, and a
/// description.
fn damage_keys(map: &mut Map<String, Value>, rng: &mut Rng) -> (String, String) {
    let keys: Vec<String> = map.keys().cloned().collect();
    let (key, other) = (rng.pick(&keys), rng.pick(&keys));
    match rng.range(0, 4) {
        0 | 1 => {
            map.remove(&key);
            (String::new(), format!("no `{key}`"))
        }
        2 => {
            let names =
                [format!("{key}x"), key.to_uppercase(), String::new(), format!("{key}\u{1b}[2J"), "n".repeat(70_000)];
            let (name, value) = (rng.pick(&names), map.remove(&key).unwrap_or_default());
            let described = format!("`{key}` is named {}", shown(&name));
            map.insert(name, value);
            (String::new(), described)
        }
        3 => {
            let value = if rng.chance(0.5) { map[&other].clone() } else { map[&key].clone() };
            map.insert(KEY_MARK.into(), value);
            let raw = Value::from(key.as_str()).to_string();
            (raw.trim_matches('"').to_owned(), format!("`{key}` twice, once as `{other}`"))
        }
        _ => {
            let (one, two) = (map[&key].clone(), map[&other].clone());
            map.insert(key.clone(), two);
            map.insert(other.clone(), one);
            (String::new(), format!("`{key}` and `{other}` swapped"))
        }
    }
}

/// Removes, repeats or swaps elements of a list. Returns a description.
fn damage_list(list: &mut Vec<Value>, rng: &mut Rng) -> String {
    let last = list.len() as u64 - 1;
    let (one, two) = (rng.range(0, last) as usize, rng.range(0, last) as usize);
    match rng.range(0, 3) {
        0 => {
            list.remove(one);
            format!("no element {one}")
        }
        1 => {
            let element = list[one].clone();
            list.insert(two, element);
            format!("element {one} again at {two}")
        }
        2 => {
            let element = list[one].clone();
            list.resize(1000, element);
            "1000 elements".into()
        }
        _ => {
            list.swap(one, two);
            format!("elements {one} and {two} swapped")
        }
    }
}

/// Damages one line of a JSON-lines text, or the order of its lines.
pub fn damaged_lines(text: &str, rng: &mut Rng) -> Option<Damaged> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let number = rng.range(0, lines.len().checked_sub(1)? as u64) as usize;
    let described = match rng.range(0, 13) {
        0..=7 => {
            let (line, described) = damaged_json(&lines[number], rng)?;
            lines[number] = line;
            described
        }
        8 => {
            let end = rng.range(0, lines[number].len() as u64) as usize;
            lines[number] = String::from_utf8_lossy(&lines[number].as_bytes()[..end]).into_owned();
            format!("cut to {end} bytes")
        }
        9 => {
            lines[number] = values::json(rng);
            format!("all of it is {}", shown(&lines[number]))
        }
        10 => {
            let length = rng.pick(&[1 << 16, 1 << 20, LONG_LINE]);
            lines[number] =
                format!("{{\"text\": \"{}\", \"input_ids\": [1, 2]}}", rng.pick(&["e", " ", "é"]).repeat(length));
            format!("a text of {length} equal letters")
        }
        11 => {
            lines[number] = format!("{{\"text\": \"x\", \"input_ids\": [{}1]}}", "2,".repeat(50_000));
            "50001 tokens".into()
        }
        12 => {
            let odd = [
                "",
                "   ",
                "//",
                "[]",
                "null",
                "{\"text\": null, \"input_ids\": null}",
                "{\"text\": \"\", \"input_ids\": []}",
            ];
            lines.iter_mut().for_each(|line| *line = rng.pick(&odd).to_owned());
            return Some((lines.join("\n"), "all lines are odd".into()));
        }
        _ => {
            lines[number] = format!("{{\"text\": {}, \"input_ids\": [5, 6]}}", values::json(rng));
            format!("a text that is {}", shown(&lines[number]))
        }
    };
    Some((lines.join("\n") + "\n", format!("line {}: {described}", number + 1)))
}

/// Damages one line of a TOML text.
pub fn damaged_toml(text: &str, rng: &mut Rng) -> Option<Damaged> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let settings: Vec<usize> = (0..lines.len()).filter(|number| lines[*number].contains(" = ")).collect();
    let number = if settings.is_empty() { return None } else { rng.pick(&settings) };
    let key = lines[number].split(" = ").next().unwrap_or_default().to_owned();
    let line = match rng.range(0, 12) {
        0..=7 => format!("{key} = {}", values::toml(&key, rng)),
        8 => String::new(),
        9 => format!("{0}\n{0}", lines[number]),
        10 => format!("{}{key} = 1", rng.pick(&["x", "\u{202e}", "\"\\u001b\".", "a.b.", "run.", "=", "[", "#"])),
        11 => rng.pick(&["[run]", "[[run]]", "[", "[x]", "[run.dir]", "run = 1", "[train.lora]", "\u{0}"]).to_owned(),
        _ => lines[rng.pick(&settings)].clone(),
    };
    let described = format!("line {} is {}", number + 1, shown(&line));
    lines[number] = line;
    Some((lines.join("\n") + "\n", described))
}

/// Makes one entry of a header of tensors lie about its place, its shape or its type. `data_bytes` is the size of all
/// data.
pub fn damaged_tensors(header: &str, data_bytes: u64, rng: &mut Rng) -> Option<Damaged> {
    let mut whole: Map<String, Value> = serde_json::from_str(header).ok()?;
    let names: Vec<String> = whole.keys().filter(|name| *name != "__metadata__").cloned().collect();
    if names.is_empty() {
        return None;
    }
    let (name, other) = (rng.pick(&names), rng.pick(&names));
    let numbers = [0, 1, data_bytes - 1, data_bytes, data_bytes + 1, 1 << 32, 1 << 62, u64::MAX];
    let (key, value): (&str, Value) = match rng.range(0, 5) {
        0 => ("data_offsets", whole[&other]["data_offsets"].clone()),
        1 => ("data_offsets", vec![rng.pick(&numbers), rng.pick(&numbers)].into()),
        2 => ("shape", vec![rng.pick(&numbers), rng.pick(&numbers)].into()),
        3 => ("shape", whole[&name]["shape"].as_array()?.iter().rev().cloned().collect()),
        4 => (
            "dtype",
            rng.pick(&["F16", "BF16", "F64", "I32", "U8", "BOOL", "F8_E4M3", "f32", "F4", "\u{1b}]0;x\u{7}"]).into(),
        ),
        _ => ("shape", Value::Array(vec![1.into(); 1000])),
    };
    let described = format!("{key} of {name} is {}", shown(&value.to_string()));
    whole[&name][key] = value;
    Some((Value::Object(whole).to_string(), described))
}

/// Returns the beginning of a text, for a description.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}
