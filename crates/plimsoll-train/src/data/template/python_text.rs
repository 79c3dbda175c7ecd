//! Values as Python writes them: `str`, `repr`, and the equality and order of values.

use super::failure::{Outcome, fail};
use minijinja::Value;
use minijinja::value::ValueKind;
use std::cmp::Ordering;

/// The deepest nesting of lists and maps that is written or compared.
pub(super) const DEPTH_MAX: usize = 200;

/// A number of a template. Python counts `True` as 1.
#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    /// Returns the number in `value`, and `None` if it is none.
    pub fn of(value: &Value) -> Option<Number> {
        match value.kind() {
            ValueKind::Bool => Some(Number::Int(i128::from(value.is_true()))),
            ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Int),
            ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
            _ => None,
        }
    }

    /// Returns the number as a float.
    pub fn float(self) -> f64 {
        match self {
            Number::Int(int) => int as f64,
            Number::Float(float) => float,
        }
    }
}

/// Returns whether `value` is a list, a tuple or an iterator.
pub(super) fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// Returns `str(value)`. An undefined value is the empty text.
pub(super) fn python_str(value: &Value) -> Outcome<String> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => python_repr(value),
    }
}

/// Returns `repr(value)`.
pub(super) fn python_repr(value: &Value) -> Outcome<String> {
    let mut text = String::new();
    write_repr(&mut text, value, 0)?;
    Ok(text)
}

fn write_repr(out: &mut String, value: &Value, depth: usize) -> Outcome<()> {
    if depth > DEPTH_MAX {
        return Err(fail(format!("a value is nested deeper than {DEPTH_MAX} levels")));
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Number => match Number::of(value) {
            Some(Number::Float(float)) => out.push_str(&python_float(float)),
            _ => out.push_str(&value.to_string()),
        },
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (at, item) in value.try_iter()?.enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_repr(out, &item, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                write_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Writes a text in quotes: single ones, unless it has single quotes and no double ones.
fn write_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if c == quote => out.extend(['\\', c]),
            _ if is_printable(c) => out.push(c),
            _ => out.push_str(&match u32::from(c) {
                code @ 0..=0xff => format!("\\x{code:02x}"),
                code @ 0x100..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.push(quote);
}

/// Returns whether `repr` writes a character as it is: no control or format character, and no blank but a space.
fn is_printable(c: char) -> bool {
    let hidden = c.is_control()
        || (c.is_whitespace() && c != ' ')
        || matches!(c, '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{180e}' | '\u{200b}'..='\u{200f}')
        || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff0}'..='\u{fffb}')
        || matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{fdd0}'..='\u{fdef}' | '\u{fffe}'..='\u{ffff}')
        || matches!(c, '\u{e0000}'..='\u{10ffff}' if !matches!(c, '\u{e0100}'..='\u{e01ef}'));
    !hidden
}

/// Returns the shortest text of a float that reads back as the same float, as Python lays it out.
pub(super) fn python_float(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = float.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// Returns whether Python finds two values equal.
pub(super) fn python_eq(left: &Value, right: &Value) -> Outcome<bool> {
    is_equal(left, right, 0)
}

fn is_equal(left: &Value, right: &Value, depth: usize) -> Outcome<bool> {
    if depth > DEPTH_MAX {
        return Err(fail(format!("a value is nested deeper than {DEPTH_MAX} levels")));
    }
    if let (Some(left), Some(right)) = (Number::of(left), Number::of(right)) {
        return Ok(match (left, right) {
            (Number::Int(left), Number::Int(right)) => left == right,
            _ => left.float() == right.float(),
        });
    }
    if is_list(left) && is_list(right) {
        let (mut left, mut right) = (left.try_iter()?, right.try_iter()?);
        loop {
            match (left.next(), right.next()) {
                (None, None) => return Ok(true),
                (Some(left), Some(right)) if is_equal(&left, &right, depth + 1)? => {}
                _ => return Ok(false),
            }
        }
    }
    match (left.kind(), right.kind()) {
        (ValueKind::Map, ValueKind::Map) => {
            if left.len() != right.len() {
                return Ok(false);
            }
            for key in left.try_iter()? {
                let (left, right) = (left.get_item(&key)?, right.get_item(&key)?);
                if left.is_undefined() != right.is_undefined() || !is_equal(&left, &right, depth + 1)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        (ValueKind::String, ValueKind::String) => Ok(left.as_str() == right.as_str()),
        (ValueKind::None, ValueKind::None) | (ValueKind::Undefined, ValueKind::Undefined) => Ok(true),
        (ValueKind::Plain, ValueKind::Plain) => Ok(left == right),
        _ => Ok(false),
    }
}

/// Returns the order of two values. Values of different kinds have none, which is an error as in Python.
pub(super) fn python_order(left: &Value, right: &Value) -> Outcome<Ordering> {
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        return Ok(left.cmp(right));
    }
    if let (Some(left), Some(right)) = (Number::of(left), Number::of(right)) {
        return Ok(match (left, right) {
            (Number::Int(left), Number::Int(right)) => left.cmp(&right),
            _ => left.float().partial_cmp(&right.float()).unwrap_or(Ordering::Equal),
        });
    }
    Err(fail(format!("cannot compare {} with {}", left.kind(), right.kind())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_print_as_in_python() {
        for (value, expected) in [
            (json!(true), "True"),
            (json!(null), "None"),
            (json!(1.0), "1.0"),
            (json!(0.1), "0.1"),
            (json!(1e16), "1e+16"),
            (json!(1.5e-5), "1.5e-05"),
            (json!(0.0001), "0.0001"),
            (json!(-0.0), "-0.0"),
            (json!(123456789012345680.0), "1.2345678901234568e+17"),
            (json!(18446744073709551615u64), "18446744073709551615"),
            (json!({"a": [1, "b'c", "d\"e'f"], "ü": {}}), r#"{'a': [1, "b'c", 'd"e\'f'], 'ü': {}}"#),
            (json!(["\n\u{1}\u{200b}\u{a0}\u{1f600}"]), "['\\n\\x01\\u200b\\xa0\u{1f600}']"),
        ] {
            assert_eq!(python_str(&Value::from_serialize(&value)).unwrap(), expected);
        }
    }

    #[test]
    fn equality_follows_python() {
        let equal = |left, right| {
            python_eq(&Value::from_serialize::<serde_json::Value>(left), &Value::from_serialize(right)).unwrap()
        };
        assert!(equal(json!(true), json!(1)));
        assert!(equal(json!({"a": 1, "b": [2.0]}), json!({"b": [2], "a": true})));
        assert!(!equal(json!("1"), json!(1)));
        assert!(!equal(json!([1]), json!([1, 2])));
        assert!(!equal(json!(null), json!(false)));
        assert!(python_order(&Value::from("a"), &Value::from(1)).is_err());
    }
}
