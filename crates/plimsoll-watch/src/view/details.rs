//! The details of one device: its memory by category and by work, its hardware and processes.

use super::{Abilities, bar, overview};
use crate::snapshot::{DeviceSnapshot, ProcessSnapshot};
use crate::text::{columns, columns_with_notes, excerpt};
use plimsoll_core::{Bytes, peak_point};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

/// Draws the details of a device. Of the lines below its memory, the first `scrolled` are left out, but no more than are
/// needed to show the last one: that number is returned.
pub(super) fn draw(
    frame: &mut Frame,
    area: Rect,
    device: &DeviceSnapshot,
    scrolled: usize,
    abilities: Abilities,
) -> usize {
    let mut lines = vec![
        Line::raw(abilities.text(&overview::figures(device))),
        bar::row(device, area.width, abilities),
        Line::raw(bar::marks(device, area.width)),
    ];
    let text = text(device);
    let (all, room) = (text.lines().count(), (area.height as usize).saturating_sub(lines.len()));
    let most = all.saturating_sub(room);
    let first = scrolled.min(most);
    lines.extend(text.lines().skip(first).take(room).map(|line| Line::raw(abilities.text(line))));
    let below = all - (first + room).min(all);
    if let Some(last) = lines.last_mut().filter(|_| below > 0) {
        *last = Line::raw(format!("{} more lines: Page Down", below + 1));
    }
    frame.render_widget(Paragraph::new(lines), area);
    most
}

/// Returns the lines below the memory of a device: tables of its memory, its hardware and its processes.
fn text(device: &DeviceSnapshot) -> String {
    [memory(device), by_program(device), hardware(device), processes(device)].concat()
}

/// Returns a table of the bytes of each part of the memory: planned, and measured if the run measured them.
fn memory(device: &DeviceSnapshot) -> String {
    let headings = match device.measured_by_category {
        None => vec!["when the arena is fullest (planned)", "bytes"],
        Some(_) => vec!["when the arena is fullest", "planned", "measured"],
    };
    let mut rows = vec![headings.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    rows.extend(bar::named_parts(device).into_iter().map(|part| {
        let planned = [format!("{} {}", part.letter, part.name), part.planned_bytes.to_string()];
        planned.into_iter().chain(part.measured_bytes.map(|bytes| bytes.to_string())).collect()
    }));
    let mut add = |name: &str, bytes: Option<Bytes>| {
        rows.extend(bytes.map(|bytes| vec![name.to_owned(), bytes.to_string()]));
    };
    add("planned peak", device.predicted_peak_bytes);
    add("measured peak", device.measured_peak_bytes);
    add("load line", device.load_line_bytes);
    add("left under the load line", device.headroom_bytes());
    add("free on the device", device.free_bytes);
    columns(&rows) + "\n"
}

/// Returns a table of the planned peak of the arena in each kind of work, with the op that sets it.
fn by_program(device: &DeviceSnapshot) -> String {
    if device.by_program.is_empty() {
        return String::new();
    }
    let mut rows = vec![["peak of the arena (planned)", "bytes"].map(str::to_owned).to_vec()];
    let mut notes = vec!["set by".to_owned()];
    for (work, bytes) in &device.by_program {
        rows.push(vec![work.to_string(), bytes.to_string()]);
        let point = peak_point(&device.timeline, Some(*work));
        notes.push(point.map_or(String::new(), |point| excerpt(&point.describe_place())));
    }
    columns_with_notes(&rows, &notes, usize::MAX) + "\n"
}

/// Returns the hardware of a device, one property per line.
fn hardware(device: &DeviceSnapshot) -> String {
    let mut lines: Vec<String> = device.model.iter().map(|model| excerpt(model)).collect();
    let limit = |limit: Option<String>| limit.map_or(String::new(), |limit| format!(" of at most {limit}"));
    lines.extend(device.clock_mhz.map(|mhz| {
        let most = limit(device.clock_limit_mhz.map(|mhz| format!("{mhz} MHz")));
        format!("clock {mhz} MHz{most}")
    }));
    lines.extend(device.power_w.map(|watts| {
        let most = limit(device.power_limit_w.map(|watts| format!("{watts:.0} W")));
        format!("power {watts:.0} W{most}")
    }));
    lines.extend(device.pcie.map(|pcie| {
        format!(
            "PCIe {}.0 × {}, of at most {}.0 × {}",
            pcie.generation_now, pcie.lanes_now, pcie.generation, pcie.lanes
        )
    }));
    lines.into_iter().map(|line| line + "\n").collect()
}

/// Returns the processes that hold memory on a GPU, one per line.
fn processes(device: &DeviceSnapshot) -> String {
    device.processes.iter().map(process_line).collect()
}

fn process_line(process: &ProcessSnapshot) -> String {
    let name = process.name.as_deref().map_or_else(|| "process".to_owned(), excerpt);
    let own = if process.is_plimsoll { " (Plimsoll)" } else { "" };
    let bytes = process.held_bytes.map_or("?".to_owned(), |bytes| bytes.to_string());
    format!("{:>8} {bytes:>12} {name}{own}\n", process.pid)
}
