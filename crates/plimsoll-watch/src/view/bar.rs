//! The memory of a device as a row of letters: one letter per category, in proportion to its bytes.

use super::Abilities;
use crate::snapshot::DeviceSnapshot;
use plimsoll_core::{Bytes, Category, TimelinePoint};
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use std::collections::{BTreeMap, BTreeSet};

/// Part of the row to the left of the load line, if the row ends a little above it.
pub(super) const LINE_AT: f64 = 0.92;
/// Most times that a device's memory may exceed its load line for the row to show all of it.
const MAX_TIMES_LINE: u64 = 4;

/// A part of a row.
pub(super) struct Part {
    pub letter: char,
    pub name: &'static str,
    pub color: Color,
    pub bytes: Bytes,
}

impl Part {
    /// Returns the letter with a text, as an entry of a legend.
    pub(super) fn entry(&self, text: &str, abilities: Abilities) -> Span<'static> {
        Span::styled(format!("{} {text}  ", self.letter), abilities.color(self.color))
    }
}

/// Returns letter, name and color of a category of tensors.
fn look(category: Category) -> (char, &'static str, Color) {
    match category {
        Category::Weight => ('w', "weight", Color::Blue),
        Category::Gradient => ('g', "gradient", Color::Green),
        Category::Optimizer => ('o', "optimizer", Color::Magenta),
        Category::Activation => ('a', "activation", Color::Yellow),
        Category::Workspace => ('k', "workspace", Color::Cyan),
        Category::Communication => ('m', "communication", Color::LightRed),
        Category::Staging => ('s', "staging", Color::LightBlue),
    }
}

/// Returns the parts of a device's memory at a point of its timeline: charges, then the categories.
pub(super) fn parts_at(device: &DeviceSnapshot, point: &TimelinePoint) -> Vec<Part> {
    let charges = device.charges_bytes.map(|bytes| Part { letter: 'c', name: "charges", color: Color::Gray, bytes });
    let categories = point.by_category.iter().map(|(category, bytes)| {
        let (letter, name, color) = look(*category);
        Part { letter, name, color, bytes: *bytes }
    });
    charges.into_iter().chain(categories).filter(|part| part.bytes > Bytes::ZERO).collect()
}

/// Returns the parts of a device's memory in the order of the row: the run's, then those of others.
fn parts(device: &DeviceSnapshot) -> Vec<Part> {
    let of_category = |(category, bytes): (&Category, &Bytes)| {
        let (letter, name, color) = look(*category);
        Part { letter, name, color, bytes: *bytes }
    };
    let mut parts: Vec<Part> = device.by_category.iter().map(of_category).collect();
    let mut add = |letter, name, color, bytes: Option<Bytes>| {
        parts.extend(bytes.map(|bytes| Part { letter, name, color, bytes }));
    };
    add('c', "charges", Color::Gray, device.charges_bytes);
    if shows_all(device) {
        add('x', "other processes", Color::Red, device.others_bytes);
    }
    parts.retain(|part| part.bytes > Bytes::ZERO);
    parts
}

/// Returns whether the row covers all memory of the device, and not only that below the load line.
fn shows_all(device: &DeviceSnapshot) -> bool {
    let limit = device.load_line_bytes.map_or(u64::MAX, |line| line.0.saturating_mul(MAX_TIMES_LINE));
    device.total_bytes.is_some_and(|total| total.0 <= limit)
}

/// Returns the bytes at the right end of the row; `None` for a device of which no bytes are known.
fn scale(device: &DeviceSnapshot) -> Option<f64> {
    if shows_all(device) {
        return device.total_bytes.map(|total| total.0 as f64);
    }
    let most = device.measured_peak_bytes.max(device.predicted_peak_bytes).unwrap_or_default().0 as f64;
    let line = device.load_line_bytes?.0 as f64;
    Some((line / LINE_AT).max(most)).filter(|scale| *scale > 0.0)
}

/// Returns the row of a device, `width` characters wide; empty if no bytes are known.
pub(super) fn row(device: &DeviceSnapshot, width: u16, abilities: Abilities) -> Line<'static> {
    let Some(scale) = scale(device).filter(|_| width > 0) else { return Line::default() };
    let column = |bytes: f64| (bytes / scale * f64::from(width)).round().clamp(0.0, f64::from(width)) as usize;
    let mut cells: Vec<(char, Style)> = vec![('.', abilities.color(Color::DarkGray)); width as usize];
    let mut below = 0.0;
    for part in parts(device) {
        let end = below + part.bytes.0 as f64;
        let style = abilities.color(part.color);
        cells[column(below)..column(end)].fill((part.letter, style));
        below = end;
    }
    if let Some(line) = device.load_line_bytes {
        let at = column(line.0 as f64).min(width as usize - 1);
        cells[at] = ('|', abilities.color(Color::White));
    }
    Line::from(cells.into_iter().map(|(letter, style)| Span::styled(letter.to_string(), style)).collect::<Vec<_>>())
}

/// Returns the line below the row: a mark at the measured peak, with its bytes. Empty without a measurement.
pub(super) fn marks(device: &DeviceSnapshot, width: u16) -> String {
    let (Some(scale), Some(peak)) = (scale(device), device.measured_peak_bytes) else { return String::new() };
    let at = ((peak.0 as f64 / scale * f64::from(width)) as usize).min(usize::from(width).saturating_sub(1));
    let text = format!("measured peak {peak}");
    match at > text.len() + 1 {
        true => format!("{text:>before$} ^", before = at - 1),
        false => format!("{:>at$}^ {text}", ""),
    }
}

/// Returns the letters of the rows with their names, in lines of at most `width` columns.
pub(super) fn legend(devices: &[&DeviceSnapshot], width: u16, abilities: Abilities) -> Vec<Line<'static>> {
    let mut shown: Vec<Part> = Vec::new();
    for part in devices.iter().flat_map(|device| parts(device)) {
        if !shown.iter().any(|other| other.letter == part.letter) {
            shown.push(part);
        }
    }
    let mut entries = vec![Span::raw("| load line  "), Span::raw(". free  ")];
    entries.extend(shown.iter().map(|part| part.entry(part.name, abilities)));
    lines_of(entries, width)
}

/// Arranges entries, which end with a gap of two columns, in lines of at most `width` columns.
pub(super) fn lines_of(entries: impl IntoIterator<Item = Span<'static>>, width: u16) -> Vec<Line<'static>> {
    let mut lines: Vec<Line> = Vec::new();
    for entry in entries {
        match lines.last_mut().filter(|line| line.width() + entry.width() <= usize::from(width) + 2) {
            Some(line) => line.push_span(entry),
            None => lines.push(Line::from(entry)),
        }
    }
    lines
}

/// A part of a device's memory by name, planned and measured.
pub(super) struct NamedPart {
    pub letter: char,
    pub name: &'static str,
    pub planned_bytes: Bytes,
    /// `None` if they are not measured.
    pub measured_bytes: Option<Bytes>,
}

/// Returns the parts of a device's memory that have planned or measured bytes, in the order of the row.
pub(super) fn named_parts(device: &DeviceSnapshot) -> Vec<NamedPart> {
    let (planned, measured) = (&device.by_category, device.measured_by_category.as_ref());
    let bytes_of = |bytes: &BTreeMap<Category, Bytes>, category| bytes.get(&category).copied().unwrap_or_default();
    let of_category = |category: Category| {
        let (letter, name, _) = look(category);
        let measured_bytes = measured.map(|measured| bytes_of(measured, category));
        NamedPart { letter, name, planned_bytes: bytes_of(planned, category), measured_bytes }
    };
    let categories: BTreeSet<Category> =
        planned.keys().chain(measured.into_iter().flat_map(BTreeMap::keys)).copied().collect();
    let names: Vec<&str> = categories.iter().map(|category| look(*category).1).collect();
    let rest = parts(device).into_iter().filter(|part| !names.contains(&part.name));
    let rest = rest.map(|Part { letter, name, bytes, .. }| NamedPart {
        letter,
        name,
        planned_bytes: bytes,
        measured_bytes: None,
    });
    let has_bytes = |part: &NamedPart| part.planned_bytes.max(part.measured_bytes.unwrap_or_default()) > Bytes::ZERO;
    categories.iter().copied().map(of_category).filter(has_bytes).chain(rest).collect()
}
