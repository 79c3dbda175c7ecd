//! The filter `tojson`, with the layout of Python's `json.dumps`.

use super::failure::{Outcome, fail};
use super::python_text::{DEPTH_MAX, Number, python_float, python_str};
use minijinja::Value;
use minijinja::value::{Kwargs, Rest, ValueKind};

/// The widest indentation.
const INDENT_MAX: usize = 64;

/// Layout of JSON text.
struct Layout {
    ascii: bool,
    indent: Option<String>,
    between_items: String,
    after_key: String,
    sort_keys: bool,
}

/// Returns `value` as JSON text. Arguments by position or name: `ensure_ascii`, `indent`, `separators`, `sort_keys`.
pub(super) fn to_json(value: &Value, positional: Rest<Value>, named: Kwargs) -> Outcome<String> {
    let argument = |at: usize, name: &str| -> Outcome<Value> {
        let named: Option<Value> = named.get(name)?;
        Ok(positional.get(at).cloned().or(named).unwrap_or(Value::from(())))
    };
    let (ascii, indent, separators, sort_keys) =
        (argument(0, "ensure_ascii")?, argument(1, "indent")?, argument(2, "separators")?, argument(3, "sort_keys")?);
    named.assert_all_used()?;
    if positional.len() > 4 {
        return Err(fail("tojson takes at most 4 arguments"));
    }
    let indent = read_indent(&indent)?;
    let [between_items, after_key] = match separators.is_none() {
        true => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
        false => read_separators(&separators)?,
    };
    let layout = Layout { ascii: ascii.is_true(), indent, between_items, after_key, sort_keys: sort_keys.is_true() };
    let mut text = String::new();
    layout.write(&mut text, value, 0)?;
    Ok(text)
}

fn read_indent(indent: &Value) -> Outcome<Option<String>> {
    if indent.is_none() {
        return Ok(None);
    }
    let text = match (indent.as_str(), Number::of(indent)) {
        (Some(text), _) => text.to_owned(),
        (None, Some(Number::Int(width))) => " ".repeat(usize::try_from(width).unwrap_or(0).min(INDENT_MAX + 1)),
        _ => return Err(fail("indent of tojson must be a number or a text")),
    };
    match text.len() <= INDENT_MAX {
        true => Ok(Some(text)),
        false => Err(fail(format!("indent of tojson is wider than {INDENT_MAX}"))),
    }
}

fn read_separators(separators: &Value) -> Outcome<[String; 2]> {
    let texts: Vec<String> = separators.try_iter()?.map(|text| python_str(&text)).collect::<Outcome<_>>()?;
    texts.try_into().map_err(|_| fail("separators of tojson must be two texts"))
}

impl Layout {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Outcome<()> {
        if depth > DEPTH_MAX {
            return Err(fail(format!("a value is nested deeper than {DEPTH_MAX} levels")));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Number => match Number::of(value) {
                Some(Number::Float(float)) => out.push_str(&json_float(float)),
                _ => out.push_str(&value.to_string()),
            },
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(out, ['[', ']'], items.len(), depth, |out, at| {
                    self.write(out, &items[at], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let keys = self.read_keys(value)?;
                self.write_items(out, ['{', '}'], keys.len(), depth, |out, at| {
                    self.write_text(out, &keys[at].0);
                    out.push_str(&self.after_key);
                    self.write(out, &value.get_item(&keys[at].1)?, depth + 1)
                })?;
            }
            kind => return Err(fail(format!("tojson cannot write a value of type {kind}"))),
        }
        Ok(())
    }

    /// Returns the keys of a map as JSON and Python have them.
    fn read_keys(&self, map: &Value) -> Outcome<Vec<(String, Value)>> {
        let mut keys = Vec::new();
        for key in map.try_iter()? {
            let text = match key.kind() {
                ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                ValueKind::None => "null".to_owned(),
                ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
                ValueKind::Number => python_str(&key)?,
                kind => return Err(fail(format!("tojson cannot write a key of type {kind}"))),
            };
            keys.push((text, key));
        }
        if self.sort_keys {
            keys.sort_by(|left, right| left.0.cmp(&right.0));
        }
        Ok(keys)
    }

    /// Writes `count` items between brackets, each by `write`.
    fn write_items(
        &self,
        out: &mut String,
        brackets: [char; 2],
        count: usize,
        depth: usize,
        mut write: impl FnMut(&mut String, usize) -> Outcome<()>,
    ) -> Outcome<()> {
        out.push(brackets[0]);
        for at in 0..count {
            out.push_str(if at > 0 { &self.between_items } else { "" });
            self.break_line(out, depth + 1);
            write(out, at)?;
        }
        if count > 0 {
            self.break_line(out, depth);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn break_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
                _ if self.ascii && !(' '..='~').contains(&c) => {
                    let mut units = [0; 2];
                    c.encode_utf16(&mut units).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
                }
                _ => out.push(c),
            }
        }
        out.push('"');
    }
}

fn json_float(float: f64) -> String {
    match float {
        _ if float.is_nan() => "NaN".to_owned(),
        _ if float.is_infinite() => if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        _ => python_float(float),
    }
}
