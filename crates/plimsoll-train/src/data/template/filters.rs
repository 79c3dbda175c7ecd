//! Filters and tests of templates that minijinja has with another meaning than Jinja2, or not at all.

use super::failure::{Outcome, fail};
use super::json_text::to_json;
use super::meter;
use super::methods::{capitalize, replace, split_lines, strip};
use super::operators::{contains, format_text};
use super::python_text::{Number, is_list, python_eq, python_str};
use super::tags::GENERATION_FILTER;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, FormatStyle, Value};

/// The widest indentation, and the most items of a batch.
const WIDTH_MAX: usize = 1000;
/// Marks of a `generation` block, which Unicode reserves for uses inside a program.
pub(super) const GENERATION_MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];
/// Name of the filter that charges a value, which no template can use.
pub(super) const CHARGE_FILTER: &str = "charge!";

/// Adds the filters to an environment.
pub(super) fn register_filters(environment: &mut Environment<'static>) {
    // These would make text or lists without a limit, or show what is not JSON.
    ["slice", "batch", "pprint", "safe", "escape", "e"].iter().for_each(|name| environment.remove_filter(name));
    environment.add_filter(CHARGE_FILTER, meter::charge);
    environment.add_filter(GENERATION_FILTER, mark_generation);
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", python_str);
    environment.add_filter("safe", python_str);
    environment.add_filter("upper", |value: &Value| python_str(value).map(|text| text.to_uppercase()));
    environment.add_filter("lower", |value: &Value| python_str(value).map(|text| text.to_lowercase()));
    environment.add_filter("capitalize", |value: &Value| python_str(value).map(|text| capitalize(&text)));
    environment.add_filter("title", |value: &Value| python_str(value).map(|text| title(&text)));
    environment.add_filter("trim", trim);
    environment.add_filter("replace", replace_text);
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    environment.add_filter("int", to_int);
    environment.add_filter("float", to_float);
    environment.add_filter("format", format_values);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_filter("wordcount", |value: &Value| python_str(value).map(|text| count_words(&text)));
}

/// Adds the tests to an environment.
pub(super) fn register_tests(environment: &mut Environment<'static>) {
    for name in ["eq", "equalto", "=="] {
        environment.add_test(name, |left: &Value, right: &Value| python_eq(left, right));
    }
    for name in ["ne", "!="] {
        environment.add_test(name, |left: &Value, right: &Value| python_eq(left, right).map(|equal| !equal));
    }
    environment.add_test("in", |item: &Value, container: &Value| contains(container, item));
    environment.add_test("number", |value: &Value| Number::of(value).is_some());
    environment.add_test("integer", |value: &Value| value.kind() == ValueKind::Number && value.is_integer());
    environment.add_test("float", |value: &Value| matches!(Number::of(value), Some(Number::Float(_))));
    environment.add_test("sequence", is_container);
    environment.add_test("iterable", is_container);
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    environment.add_test("sameas", is_same);
}

/// Marks the text of a `generation` block, if this rendering asks for it.
fn mark_generation(text: String) -> String {
    let [start, end] = GENERATION_MARKS;
    if meter::is_marking() { format!("{start}{text}{end}") } else { text }
}

fn is_container(value: &Value) -> bool {
    is_list(value) || matches!(value.kind(), ValueKind::String | ValueKind::Map | ValueKind::Undefined)
}

/// Returns whether two values are the same object in Python, for the values that templates compare so.
fn is_same(left: &Value, right: &Value) -> Outcome<bool> {
    Ok(left.kind() == right.kind() && python_eq(left, right)?)
}

/// Returns `text` with the first letter of each word in upper case. Words begin after white space, a hyphen or an
/// opening bracket.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut begins = true;
    for c in text.chars() {
        match begins {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        begins = c.is_whitespace() || matches!(c, '-' | '(' | '{' | '[' | '<');
    }
    out
}

fn trim(value: &Value, set: Option<String>) -> Outcome<String> {
    Ok(strip(&python_str(value)?, set.as_deref(), true, true).to_owned())
}

fn replace_text(value: &Value, old: &Value, new: &Value, count: Option<i64>) -> Outcome<String> {
    replace(&python_str(value)?, &python_str(old)?, &python_str(new)?, count.unwrap_or(-1))
}

fn join(value: &Value, positional: Rest<Value>, named: Kwargs) -> Outcome<String> {
    let separator: Option<Value> = named.get("d")?;
    let attribute: Option<Value> = named.get("attribute")?;
    named.assert_all_used()?;
    let separator = positional.first().cloned().or(separator).unwrap_or(Value::from(""));
    let separator = python_str(&separator)?;
    let attribute = positional.get(1).cloned().or(attribute);
    let mut joined = String::new();
    if let Some(text) = value.as_str() {
        // The items of a text are its characters.
        meter::check_text(text.len().saturating_mul(1 + separator.len()))?;
        let characters: Vec<String> = text.chars().map(String::from).collect();
        return Ok(characters.join(&separator));
    }
    for (at, item) in value.try_iter()?.enumerate() {
        let item = match &attribute {
            Some(attribute) => python_str(&item.get_item(attribute)?)?,
            None => python_str(&item)?,
        };
        meter::check_text(joined.len() + separator.len() + item.len())?;
        joined.push_str(if at > 0 { &separator } else { "" });
        joined.push_str(&item);
    }
    Ok(joined)
}

/// Indents all lines but the first, as Jinja2: `width` blanks or a text, the first line too if `first`, and empty lines
/// if `blank`.
fn indent(value: &Value, positional: Rest<Value>, named: Kwargs) -> Outcome<String> {
    let argument = |at: usize, name: &str| -> Outcome<Value> {
        let named: Option<Value> = named.get(name)?;
        Ok(positional.get(at).cloned().or(named).unwrap_or(Value::UNDEFINED))
    };
    let (width, first, blank) = (argument(0, "width")?, argument(1, "first")?, argument(2, "blank")?);
    named.assert_all_used()?;
    let lead = match (width.as_str(), Number::of(&width)) {
        (Some(text), _) => text.to_owned(),
        (None, Some(Number::Int(width))) => " ".repeat(usize::try_from(width).unwrap_or(0).min(WIDTH_MAX + 1)),
        _ => " ".repeat(4),
    };
    if lead.len() > WIDTH_MAX {
        return Err(fail(format!("an indentation is wider than {WIDTH_MAX}")));
    }
    // As Jinja2: the line end that is added makes a line of what follows the last one.
    let text = python_str(value)? + "\n";
    let lines = split_lines(&text, false);
    meter::check_text(text.len().saturating_add(lines.len().saturating_mul(lead.len())))?;
    let mut out = String::new();
    for (at, line) in lines.iter().enumerate() {
        let is_indented = if at == 0 { first.is_true() } else { blank.is_true() || !line.is_empty() };
        out.push_str(if at > 0 { "\n" } else { "" });
        out.push_str(if is_indented { &lead } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// Returns the number of words, as Jinja2: of runs of letters, digits and underscores.
fn count_words(text: &str) -> usize {
    let is_between = |c: char| !c.is_alphanumeric() && c != '_';
    text.split(is_between).filter(|word| !word.is_empty()).count()
}

fn to_int(value: &Value, default: Option<Value>) -> Outcome<Value> {
    let parsed = match (Number::of(value), value.as_str()) {
        (Some(Number::Int(int)), _) => Some(int),
        (Some(Number::Float(float)), _) => float.is_finite().then_some(float as i128),
        (None, Some(text)) => {
            let text = text.trim().replace('_', "");
            let float = || text.parse::<f64>().ok().filter(|float| float.is_finite()).map(|float| float as i128);
            text.parse().ok().or_else(float)
        }
        _ => None,
    };
    let int = parsed.map(|int| i64::try_from(int).map_or_else(|_| Value::from(int), Value::from));
    Ok(int.or(default).unwrap_or(Value::from(0)))
}

fn to_float(value: &Value, default: Option<Value>) -> Outcome<Value> {
    let parsed = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => Number::of(value).map(Number::float),
    };
    Ok(parsed.map(Value::from).or(default).unwrap_or(Value::from(0.0)))
}

fn format_values(value: &Value, items: Rest<Value>) -> Outcome<String> {
    format_text(FormatStyle::Printf, &python_str(value)?, &items)
}

fn escape(value: &Value) -> Outcome<String> {
    let text = python_str(value)?;
    meter::check_text(text.len().saturating_mul(5))?;
    let escaped = [('&', "&amp;"), ('>', "&gt;"), ('<', "&lt;"), ('\'', "&#39;"), ('"', "&#34;")];
    Ok(escaped.iter().fold(text, |text, (c, entity)| text.replace(*c, entity)))
}
