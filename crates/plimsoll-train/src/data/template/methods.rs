//! Methods of texts, maps and lists, as Python has them. `minijinja-contrib` has the methods that are not here.

use super::failure::{Outcome, fail};
use super::meter;
use super::operators::format_text;
use super::python_text::{Number, is_list, python_eq, python_str};
use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, FormatStyle, State, Value};

/// Methods that would change a value. The sandbox of transformers refuses them, too.
const CHANGING: [&str; 13] = [
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
    "__setitem__",
];

/// Calls a method that minijinja does not know.
pub(super) fn call(state: &State, value: &Value, method: &str, args: &[Value]) -> Outcome<Value> {
    if CHANGING.contains(&method) && !matches!(value.kind(), ValueKind::String) {
        return Err(fail(format!("the method `{method}` changes a value, which a template must not do")));
    }
    let found = match value.kind() {
        ValueKind::String => call_on_text(value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Map => call_on_map(value, method, args)?,
        ValueKind::Seq | ValueKind::Iterable => call_on_list(value, method, args)?,
        _ => None,
    };
    match found {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn call_on_text(text: &str, method: &str, args: &[Value]) -> Outcome<Option<Value>> {
    let result = match method {
        "strip" | "lstrip" | "rstrip" => {
            let args = without_none(args);
            let (set,): (Option<&str>,) = from_args(&args)?;
            Value::from(strip(text, set, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => split(text, args, method == "rsplit")?,
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            partition(text, separator, method == "rpartition")?
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            split_lines(text, keep.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            Value::from(replace(text, old, new, count.unwrap_or(-1))?)
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            let mut joined = String::new();
            for (at, item) in items.try_iter()?.enumerate() {
                let Some(item) = item.as_str() else { return Err(fail("`join` needs a list of texts")) };
                meter::check_text(joined.len() + text.len() + item.len())?;
                joined.push_str(if at > 0 { text } else { "" });
                joined.push_str(item);
            }
            Value::from(joined)
        }
        "find" | "rfind" | "index" | "rindex" => find(text, method, args)?,
        "count" => {
            let (part,): (&str,) = from_args(args)?;
            Value::from(if part.is_empty() { text.chars().count() + 1 } else { text.matches(part).count() })
        }
        "startswith" | "endswith" => {
            let (part,): (&Value,) = from_args(args)?;
            let parts: Vec<Value> = if is_list(part) { part.try_iter()?.collect() } else { vec![part.clone()] };
            let mut matches = false;
            for part in &parts {
                let Some(part) = part.as_str() else { return Err(fail(format!("`{method}` needs a text"))) };
                matches |= if method == "startswith" { text.starts_with(part) } else { text.ends_with(part) };
            }
            Value::from(matches)
        }
        "title" => Value::from(title(text)),
        "capitalize" => Value::from(capitalize(text)),
        "swapcase" => Value::from(text.chars().flat_map(swap_case).collect::<String>()),
        "casefold" => Value::from(text.to_lowercase()),
        "isdigit" | "isnumeric" | "isdecimal" | "isalpha" | "isalnum" | "isspace" | "islower" | "isupper" => {
            Value::from(is_kind(text, method))
        }
        "zfill" | "ljust" | "rjust" | "center" => pad(text, method, args)?,
        "format" => Value::from(format_text(FormatStyle::StrFormat, text, args)?),
        _ => return Ok(None),
    };
    Ok(Some(result))
}

/// Returns the arguments without a `None` at the end, which stands for the default.
fn without_none(args: &[Value]) -> Vec<Value> {
    let mut args = args.to_vec();
    while args.last().is_some_and(Value::is_none) {
        args.pop();
    }
    args
}

/// Returns whether Python counts a character as white space.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Removes the characters of `set`, or white space, from one or both ends.
pub(super) fn strip<'a>(text: &'a str, set: Option<&str>, left: bool, right: bool) -> &'a str {
    let is_removed = |c: char| set.map_or(is_space(c), |set| set.contains(c));
    let text = if left { text.trim_start_matches(is_removed) } else { text };
    if right { text.trim_end_matches(is_removed) } else { text }
}

fn split(text: &str, args: &[Value], from_right: bool) -> Outcome<Value> {
    let (positional, named): (&[Value], Kwargs) = from_args(args)?;
    let argument = |at: usize, name: &str| -> Outcome<Value> {
        let named: Option<Value> = named.get(name)?;
        Ok(positional.get(at).cloned().or(named).unwrap_or(Value::from(())))
    };
    let (separator, most) = (argument(0, "sep")?, argument(1, "maxsplit")?);
    named.assert_all_used()?;
    let most = match Number::of(&most) {
        Some(Number::Int(most)) if most >= 0 => usize::try_from(most).unwrap_or(usize::MAX),
        _ => usize::MAX,
    };
    let pieces: Vec<&str> = match (separator.as_str(), from_right) {
        (Some(""), _) => return Err(fail("`split` has an empty separator")),
        (Some(separator), false) => text.splitn(most.saturating_add(1), separator).collect(),
        (Some(separator), true) => {
            let mut pieces: Vec<&str> = text.rsplitn(most.saturating_add(1), separator).collect();
            pieces.reverse();
            pieces
        }
        (None, _) => split_at_space(text, most, from_right),
    };
    Ok(pieces.into_iter().map(Value::from).collect::<Vec<Value>>().into())
}

/// Splits at stretches of white space, at most `most` times, from the left or the right.
fn split_at_space(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = strip(text, None, true, true);
    while !rest.is_empty() {
        let found = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let (piece, next) = match found {
            Some(at) if pieces.len() < most => {
                let after = at + rest[at..].chars().next().map_or(0, char::len_utf8);
                if from_right { (&rest[after..], &rest[..at]) } else { (&rest[..at], &rest[after..]) }
            }
            _ => (rest, ""),
        };
        pieces.push(piece);
        rest = strip(next, None, !from_right, from_right);
    }
    // The piece that holds the rest keeps its inner white space only.
    if from_right {
        pieces.reverse();
    }
    pieces
}

fn partition(text: &str, separator: &str, from_right: bool) -> Outcome<Value> {
    if separator.is_empty() {
        return Err(fail("`partition` has an empty separator"));
    }
    let found = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(parts.map(Value::from).to_vec()))
}

/// Splits a text at the line ends that Python knows.
pub(super) fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut start = 0;
    let mut characters = text.char_indices().peekable();
    while let Some((at, c)) = characters.next() {
        if !matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}') {
            continue;
        }
        let mut end = at + c.len_utf8();
        if c == '\r' && characters.peek().is_some_and(|(_, next)| *next == '\n') {
            characters.next();
            end += 1;
        }
        lines.push(&text[start..if keep { end } else { at }]);
        start = end;
    }
    if start < text.len() {
        lines.push(&text[start..]);
    }
    lines
}

/// Replaces `old` by `new`, at most `count` times if it is not negative.
pub(super) fn replace(text: &str, old: &str, new: &str, count: i64) -> Outcome<String> {
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    let found = text.matches(old).count().min(limit);
    meter::check_text(text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, limit))
}

fn find(text: &str, method: &str, args: &[Value]) -> Outcome<Value> {
    let (part,): (&str,) = from_args(args)?;
    let found = if method.starts_with('r') { text.rfind(part) } else { text.find(part) };
    match found {
        Some(at) => Ok(Value::from(text[..at].chars().count())),
        None if method.ends_with("index") => Err(fail(format!("`{method}` does not find the text"))),
        None => Ok(Value::from(-1)),
    }
}

/// Returns `text` with the first letter of each word in upper case, as `str.title`.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        match in_word {
            true => out.extend(c.to_lowercase()),
            false => out.push_str(&title_case(c)),
        }
        in_word = c.is_alphabetic();
    }
    out
}

/// Returns `text` with its first letter in upper case and the others in lower case.
pub(super) fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(title_case).unwrap_or_default();
    first + &characters.as_str().to_lowercase()
}

/// Returns a letter as the first of a word: in upper case, but only the first letter of those that become two (`Ss`).
fn title_case(c: char) -> String {
    let mut upper = c.to_uppercase();
    upper.next().into_iter().chain(upper.flat_map(char::to_lowercase)).collect()
}

fn swap_case(c: char) -> Vec<char> {
    if c.is_lowercase() { c.to_uppercase().collect() } else { c.to_lowercase().collect() }
}

/// Returns whether all characters are of a kind. An empty text is of none.
fn is_kind(text: &str, method: &str) -> bool {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    match method {
        "isdigit" | "isdecimal" => all(|c| c.is_ascii_digit() || is_other_digit(c)),
        "isnumeric" => all(char::is_numeric),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isspace" => all(is_space),
        "islower" => text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase),
        _ => text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase),
    }
}

/// Returns whether a character is a digit of another script.
fn is_other_digit(c: char) -> bool {
    matches!(c, '\u{660}'..='\u{669}' | '\u{6f0}'..='\u{6f9}' | '\u{966}'..='\u{96f}' | '\u{ff10}'..='\u{ff19}')
}

fn pad(text: &str, method: &str, args: &[Value]) -> Outcome<Value> {
    let (width, fill): (usize, Option<&str>) = from_args(args)?;
    meter::check_text(width.saturating_mul(4))?;
    let missing = width.saturating_sub(text.chars().count());
    let fill = if method == "zfill" { "0" } else { fill.unwrap_or(" ") };
    if fill.chars().count() != 1 {
        return Err(fail(format!("`{method}` fills with one character")));
    }
    let padded = match method {
        "ljust" => format!("{text}{}", fill.repeat(missing)),
        "rjust" => format!("{}{text}", fill.repeat(missing)),
        "zfill" => {
            let digits = text.trim_start_matches(['+', '-']);
            let sign = if text.len() == digits.len() { "" } else { &text[..1] };
            format!("{sign}{}{}", fill.repeat(missing), &text[sign.len()..])
        }
        _ => {
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", fill.repeat(left), fill.repeat(missing - left))
        }
    };
    Ok(Value::from(padded))
}

fn call_on_map(map: &Value, method: &str, args: &[Value]) -> Outcome<Option<Value>> {
    let Some(object) = map.as_object() else { return Ok(None) };
    let pairs = || object.try_iter_pairs().into_iter().flatten();
    let result = match method {
        "get" => {
            let (key, default): (&Value, Option<Value>) = from_args(args)?;
            object.get_value(key).or(default).unwrap_or(Value::from(()))
        }
        "items" => pairs().map(|(key, value)| Value::from(vec![key, value])).collect::<Vec<Value>>().into(),
        "keys" => pairs().map(|(key, _)| key).collect::<Vec<Value>>().into(),
        "values" => pairs().map(|(_, value)| value).collect::<Vec<Value>>().into(),
        "copy" => map.clone(),
        _ => return Ok(None),
    };
    if method != "get" && !args.is_empty() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    Ok(Some(result))
}

fn call_on_list(list: &Value, method: &str, args: &[Value]) -> Outcome<Option<Value>> {
    if method == "copy" {
        return Ok(Some(list.clone()));
    }
    if !matches!(method, "count" | "index") {
        return Ok(None);
    }
    let (item,): (&Value,) = from_args(args)?;
    let mut count = 0;
    for (at, candidate) in list.try_iter()?.enumerate() {
        if python_eq(&candidate, item)? {
            if method == "index" {
                return Ok(Some(Value::from(at)));
            }
            count += 1;
        }
    }
    match method {
        "index" => Err(fail(format!("`index` does not find {}", python_str(item)?))),
        _ => Ok(Some(Value::from(count))),
    }
}
