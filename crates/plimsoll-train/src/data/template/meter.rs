//! The limits of one rendering: the bytes that all its texts and lists may take together.
//!
//! minijinja limits the number of instructions (its fuel), but a text that is doubled forty times takes few of them. So
//! every text and list that a template makes is charged here, before or right after it is made. A rendering runs on one
//! thread, so its account is a value of the thread.

use super::failure::{Outcome, fail};
use super::python_text::is_list;
use minijinja::Value;
use minijinja::value::ValueKind;
use std::cell::Cell;

/// The deepest nesting of a list or map that a template makes.
const DEPTH_MAX: usize = 150;
/// Bytes of an item of a list.
const ITEM_BYTES: usize = size_of::<Value>();

thread_local! {
    /// Bytes that the rendering of this thread may still take.
    static LEFT: Cell<usize> = const { Cell::new(0) };
    /// Whether the rendering of this thread marks its `generation` blocks.
    static MARKING: Cell<bool> = const { Cell::new(false) };
}

/// Begins a rendering that may take `bytes`, and marks its `generation` blocks if `marking`.
pub(super) fn begin(bytes: usize, marking: bool) {
    LEFT.set(bytes);
    MARKING.set(marking);
}

/// Returns whether `generation` blocks are marked.
pub(super) fn is_marking() -> bool {
    MARKING.get()
}

/// Checks that a text of `bytes` may be made, without charging it.
pub(super) fn check_text(bytes: usize) -> Outcome<()> {
    match bytes <= LEFT.get() {
        true => Ok(()),
        false => Err(fail("the texts and lists of the template take too much memory")),
    }
}

/// Charges a list of `count` items.
pub(super) fn charge_items(count: usize) -> Outcome<()> {
    charge_bytes(count.saturating_mul(ITEM_BYTES))
}

/// Charges `bytes` to the rendering.
pub(super) fn charge_bytes(bytes: usize) -> Outcome<()> {
    check_text(bytes)?;
    LEFT.set(LEFT.get() - bytes);
    Ok(())
}

/// Charges a value that an instruction has made, and returns it. An iterator becomes a list, so that no chain of
/// iterators grows.
pub(super) fn charge(value: Value) -> Outcome<Value> {
    if let Some(text) = value.as_str() {
        charge_bytes(text.len())?;
        return Ok(value);
    }
    if value.kind() == ValueKind::Iterable {
        let mut items = Vec::new();
        for item in value.try_iter()? {
            charge_bytes(ITEM_BYTES)?;
            items.push(item);
        }
        let list = Value::from(items);
        check_depth(&list, 0)?;
        return Ok(list);
    }
    if is_list(&value) || value.kind() == ValueKind::Map {
        charge_bytes(value.len().unwrap_or(0).saturating_mul(ITEM_BYTES))?;
        check_depth(&value, 0)?;
    }
    Ok(value)
}

/// Checks that a value is not nested too deep: to free such a value takes as much of the stack.
fn check_depth(value: &Value, depth: usize) -> Outcome<()> {
    if depth > DEPTH_MAX {
        return Err(fail(format!("the template nests lists and maps deeper than {DEPTH_MAX} levels")));
    }
    match value.kind() {
        ValueKind::Seq => value.try_iter()?.try_for_each(|item| check_depth(&item, depth + 1)),
        ValueKind::Map => value.try_iter()?.try_for_each(|key| check_depth(&value.get_item(&key)?, depth + 1)),
        _ => Ok(()),
    }
}
