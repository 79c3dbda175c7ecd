//! The operators of templates, with the meaning that they have in Python. `engine` puts calls of these functions in the
//! place of minijinja's own instructions.

use super::failure::{Outcome, fail};
use super::meter;
use super::python_text::{Number, is_list, python_eq, python_order, python_str};
use minijinja::value::ValueKind;
use minijinja::{Environment, FormatStyle, Value, format_filter};
use std::cmp::Ordering;

/// The widest number or text that a format pads to, in digits of the width.
const WIDTH_DIGITS_MAX: usize = 4;

/// Adds the operators to an environment, under names that no template can use.
pub(super) fn register(environment: &mut Environment<'static>) {
    environment.add_function("+", |left: &Value, right: &Value| add(left, right));
    environment.add_function("-", negate);
    environment.add_function("*", |left: &Value, right: &Value| multiply(left, right));
    environment.add_function("%", |left: &Value, right: &Value| remainder(left, right));
    environment.add_function("~", |left: &Value, right: &Value| concatenate(left, right));
    environment.add_function("==", |left: &Value, right: &Value| python_eq(left, right));
    environment.add_function("!=", |left: &Value, right: &Value| python_eq(left, right).map(|equal| !equal));
    environment.add_function("<", |left: &Value, right: &Value| python_order(left, right).map(Ordering::is_lt));
    environment.add_function("<=", |left: &Value, right: &Value| python_order(left, right).map(Ordering::is_le));
    environment.add_function(">", |left: &Value, right: &Value| python_order(left, right).map(Ordering::is_gt));
    environment.add_function(">=", |left: &Value, right: &Value| python_order(left, right).map(Ordering::is_ge));
    environment.add_function("in", |item: &Value, container: &Value| contains(container, item));
    environment.add_function("[]", |value: &Value, key: &Value| get_item(value, key));
    environment.add_function("[:]", slice);
    environment.add_function("for", iterated);
}

/// Returns the values of a loop unchanged. Python iterates over an absent variable, but not over `none`.
fn iterated(values: Value) -> Outcome<Value> {
    if values.is_none() { Err(fail("`none` is no list that a loop can take")) } else { Ok(values) }
}

fn add(left: &Value, right: &Value) -> Outcome<Value> {
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        meter::charge_bytes(left.len() + right.len())?;
        return Ok(Value::from([left, right].concat()));
    }
    if is_list(left) && is_list(right) {
        meter::charge_items(left.len().unwrap_or(0) + right.len().unwrap_or(0))?;
        return Ok(Value::from(left.try_iter()?.chain(right.try_iter()?).collect::<Vec<Value>>()));
    }
    match (Number::of(left), Number::of(right)) {
        (Some(Number::Int(left)), Some(Number::Int(right))) => match left.checked_add(right) {
            Some(sum) => Ok(int(sum)),
            None => Err(fail("a number is too large")),
        },
        (Some(left), Some(right)) => Ok(Value::from(left.float() + right.float())),
        _ => Err(fail(format!("cannot add {} and {}", left.kind(), right.kind()))),
    }
}

/// Returns an integer in its shortest form.
fn int(value: i128) -> Value {
    i64::try_from(value).map_or_else(|_| Value::from(value), Value::from)
}

fn negate(value: &Value) -> Outcome<Value> {
    match Number::of(value) {
        Some(Number::Int(number)) => number.checked_neg().map(int).ok_or_else(|| fail("a number is too large")),
        Some(Number::Float(number)) => Ok(Value::from(-number)),
        None => Err(fail(format!("cannot negate {}", value.kind()))),
    }
}

fn multiply(left: &Value, right: &Value) -> Outcome<Value> {
    match (Number::of(left), Number::of(right)) {
        (Some(Number::Int(left)), Some(Number::Int(right))) => match left.checked_mul(right) {
            Some(product) => Ok(int(product)),
            None => Err(fail("a number is too large")),
        },
        (Some(left), Some(right)) => Ok(Value::from(left.float() * right.float())),
        (None, Some(Number::Int(count))) => repeat(left, count),
        (Some(Number::Int(count)), None) => repeat(right, count),
        _ => Err(fail(format!("cannot multiply {} by {}", left.kind(), right.kind()))),
    }
}

/// Returns a text or list repeated `count` times; a negative number counts as 0.
fn repeat(value: &Value, count: i128) -> Outcome<Value> {
    let count = usize::try_from(count.max(0)).map_err(|_| fail("a text or list is repeated too often"))?;
    if let Some(text) = value.as_str() {
        meter::charge_bytes(text.len().saturating_mul(count))?;
        return Ok(Value::from(text.repeat(count)));
    }
    if is_list(value) {
        let items: Vec<Value> = value.try_iter()?.collect();
        meter::charge_items(items.len().saturating_mul(count))?;
        return Ok(Value::from((0..count).flat_map(|_| items.iter().cloned()).collect::<Vec<Value>>()));
    }
    Err(fail(format!("cannot repeat {}", value.kind())))
}

fn remainder(left: &Value, right: &Value) -> Outcome<Value> {
    if let Some(format) = left.as_str() {
        let items: Vec<Value> = if is_list(right) { right.try_iter()?.collect() } else { vec![right.clone()] };
        return format_text(FormatStyle::Printf, format, &items).map(Value::from);
    }
    match (Number::of(left), Number::of(right)) {
        (Some(Number::Int(left)), Some(Number::Int(right))) => match left.checked_rem(right) {
            // Python's remainder has the sign of the divisor.
            Some(rest) if rest != 0 && (rest < 0) != (right < 0) => Ok(int(rest + right)),
            Some(rest) => Ok(int(rest)),
            None => Err(fail("division by zero")),
        },
        (Some(left), Some(right)) => {
            let (left, right) = (left.float(), right.float());
            if right == 0.0 {
                return Err(fail("division by zero"));
            }
            let rest = left % right;
            Ok(Value::from(if rest != 0.0 && (rest < 0.0) != (right < 0.0) { rest + right } else { rest }))
        }
        _ => Err(fail(format!("cannot divide {} by {}", left.kind(), right.kind()))),
    }
}

/// Returns a text with its placeholders replaced, unless it asks for a very wide one.
pub(super) fn format_text(style: FormatStyle, format: &str, items: &[Value]) -> Outcome<String> {
    let mut digits = 0;
    for byte in format.bytes() {
        digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
        if digits > WIDTH_DIGITS_MAX || (style == FormatStyle::Printf && byte == b'*') {
            return Err(fail(format!("a format has a width of more than {WIDTH_DIGITS_MAX} digits or a `*`")));
        }
    }
    let texts: Vec<Value> = items.iter().map(format_item).collect::<Outcome<_>>()?;
    let total: usize = texts.iter().filter_map(|text| Some(text.as_str()?.len())).sum();
    let places = 1 + format.bytes().filter(|byte| matches!(byte, b'%' | b'{')).count();
    meter::charge_bytes(format.len().saturating_add(total.saturating_mul(places)))?;
    format_filter(style, format, &texts)
}

/// Returns an item of a format: lists, maps, booleans and `None` as Python writes them.
fn format_item(item: &Value) -> Outcome<Value> {
    match item.kind() {
        ValueKind::Number | ValueKind::String => Ok(item.clone()),
        _ if item.is_kwargs() => Ok(item.clone()),
        _ => python_str(item).map(Value::from),
    }
}

fn concatenate(left: &Value, right: &Value) -> Outcome<Value> {
    let (left, right) = (python_str(left)?, python_str(right)?);
    meter::charge_bytes(left.len() + right.len())?;
    Ok(Value::from(left + &right))
}

/// Returns whether `container` has `item`: a part of a text, a key of a map, or an item of a list.
pub(super) fn contains(container: &Value, item: &Value) -> Outcome<bool> {
    match container.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::String => match (container.as_str(), item.as_str()) {
            (Some(text), Some(part)) => Ok(text.contains(part)),
            _ => Err(fail(format!("`in` of a text needs a text, not {}", item.kind()))),
        },
        ValueKind::Map => Ok(container.as_object().is_some_and(|object| object.get_value(item).is_some())),
        ValueKind::Seq | ValueKind::Iterable => {
            for candidate in container.try_iter()? {
                if python_eq(&candidate, item)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        kind => Err(fail(format!("`in` needs a list, a map or a text, not {kind}"))),
    }
}

fn get_item(value: &Value, key: &Value) -> Outcome<Value> {
    if value.is_undefined() {
        return Err(fail("cannot read an item of an undefined value"));
    }
    if let (Some(text), Some(Number::Int(index))) = (value.as_str(), Number::of(key)) {
        let length = text.chars().count() as i128;
        let index = if index < 0 { index + length } else { index };
        let found = usize::try_from(index).ok().and_then(|index| text.chars().nth(index));
        return Ok(found.map_or(Value::UNDEFINED, |c| Value::from(String::from(c))));
    }
    if let (true, Some(Number::Int(index))) = (is_list(value), Number::of(key)) {
        let length = value.len().unwrap_or(0);
        let index = if index < 0 { index + length as i128 } else { index };
        return match usize::try_from(index) {
            Ok(index) if index < length => value.get_item_by_index(index),
            _ => Ok(Value::UNDEFINED),
        };
    }
    value.get_item(key)
}

/// Returns a part of a text or list, as `value[start:stop:step]`.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Outcome<Value> {
    let bound = |bound: &Value| match (bound.is_none(), Number::of(bound)) {
        (true, _) => Ok(None),
        (_, Some(Number::Int(index))) => Ok(Some(index)),
        _ => Err(fail(format!("an index must be a whole number, not {}", bound.kind()))),
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(fail("the step of a slice is 0"));
    }
    if let Some(text) = value.as_str() {
        meter::charge_bytes(4 * text.len())?;
        let characters: Vec<char> = text.chars().collect();
        let indices = slice_indices(characters.len(), start, stop, step);
        return Ok(Value::from(indices.into_iter().map(|at| characters[at]).collect::<String>()));
    }
    if is_list(value) {
        let items: Vec<Value> = value.try_iter()?.collect();
        meter::charge_items(items.len())?;
        let indices = slice_indices(items.len(), start, stop, step);
        return Ok(Value::from(indices.into_iter().map(|at| items[at].clone()).collect::<Vec<Value>>()));
    }
    Err(fail(format!("cannot take a slice of {}", value.kind())))
}

/// Returns the indices of a slice of `length` items.
fn slice_indices(length: usize, start: Option<i128>, stop: Option<i128>, step: i128) -> Vec<usize> {
    let length = length as i128;
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |index: i128| (if index < 0 { index.saturating_add(length) } else { index }).clamp(low, high);
    let stop = stop.map_or(if step > 0 { high } else { low }, place);
    let mut at = start.map_or(if step > 0 { low } else { high }, place);
    let mut indices = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        indices.push(at as usize);
        at = at.saturating_add(step);
    }
    indices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_follow_python() {
        let of = |start, stop, step| slice_indices(5, start, stop, step);
        assert_eq!(of(None, None, 1), [0, 1, 2, 3, 4]);
        assert_eq!(of(None, None, -1), [4, 3, 2, 1, 0]);
        assert_eq!(of(Some(1), Some(-1), 2), [1, 3]);
        assert_eq!(of(Some(-2), None, 1), [3, 4]);
        assert_eq!(of(Some(3), Some(0), -2), [3, 1]);
        assert_eq!(of(Some(9), None, 1), Vec::<usize>::new());
        assert_eq!(of(Some(9), Some(-99), -3), [4, 1]);
        assert_eq!(of(Some(i128::MAX), Some(i128::MIN), i128::MIN), [4]);
    }

    #[test]
    fn remainders_have_the_sign_of_the_divisor() {
        let of = |left: i64, right: i64| remainder(&Value::from(left), &Value::from(right)).unwrap();
        assert_eq!(of(-7, 3), Value::from(2));
        assert_eq!(of(7, -3), Value::from(-2));
        assert_eq!(of(6, 3), Value::from(0));
        assert!(remainder(&Value::from(1), &Value::from(0)).is_err());
    }
}
