//! The overview: the run, all devices, the plot of the loss and the newest events.

use super::{Abilities, ViewState, bar, plot};
use crate::snapshot::{DeviceSnapshot, RunSnapshot, Snapshot};
use crate::text::{clock, count, excerpt, percent, wrapped};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

/// Lines that a device takes: its figures, its memory, and the mark of its measured peak.
const DEVICE_LINES: u16 = 3;
/// Least lines below the devices for the plot and the events.
const MIN_LOWER_LINES: u16 = 4;
/// Width from which plot and events are side by side.
const MIN_WIDTH_SIDE_BY_SIDE: u16 = 100;
/// Most warnings that are shown at once.
const MAX_WARNINGS: usize = 3;
/// Least width at which warnings are wrapped.
const MIN_WARNING_WIDTH: usize = 20;

/// Draws the overview of a snapshot.
pub(super) fn draw(frame: &mut Frame, area: Rect, snapshot: &Snapshot, state: &ViewState) {
    let abilities = state.abilities;
    let head = head(snapshot, area.width, abilities);
    let devices = state.devices(snapshot);
    let legend = bar::legend(&devices, area.width, abilities);
    let room = area.height.saturating_sub((head.len() + legend.len()) as u16);
    let has_lower = snapshot.run.is_some() && room >= DEVICE_LINES + MIN_LOWER_LINES;
    let most = if has_lower { room - MIN_LOWER_LINES } else { room };
    let shown = devices.len().min((most / DEVICE_LINES) as usize);
    let [head_height, legend_height] = [head.len(), legend.len()].map(|lines| Constraint::Length(lines as u16));
    let device_height = Constraint::Length(shown as u16 * DEVICE_LINES);
    let heights = [head_height, device_height, legend_height, Constraint::Min(0)];
    let [head_area, device_area, legend_area, lower] = Layout::vertical(heights).areas(area);
    frame.render_widget(Paragraph::new(head), head_area);
    // The selected device is always among those shown.
    let selected = state.selected.min(devices.len().saturating_sub(1));
    let first = (selected + 1).saturating_sub(shown);
    for (line, device) in devices.iter().enumerate().skip(first).take(shown) {
        let top = device_area.y + (line - first) as u16 * DEVICE_LINES;
        let area = Rect { y: top, height: DEVICE_LINES, ..device_area }.intersection(device_area);
        let is_selected = line == selected && devices.len() > 1;
        draw_device(frame, area, device, is_selected, abilities);
    }
    frame.render_widget(Paragraph::new(legend), legend_area);
    if let Some(run) = &snapshot.run {
        draw_lower(frame, lower, run, snapshot, abilities);
    }
}

/// Returns the first lines: the run, the processor and the host, and the warnings, wrapped at `width` columns.
fn head(snapshot: &Snapshot, width: u16, abilities: Abilities) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    if let Some(run) = &snapshot.run {
        let simulated = if run.simulated { ", simulated speed" } else { "" };
        let title = format!("{}  {}{simulated}", excerpt(&run.folder), run.state.describe());
        lines.push(Line::styled(abilities.text(&title), Style::new().add_modifier(Modifier::BOLD)));
        lines.extend(figures_of_width(progress_parts(run), width, abilities));
    }
    lines.extend(figures_of_width(machine_parts(snapshot), width, abilities));
    let width = (width as usize).max(MIN_WARNING_WIDTH);
    let warning = |text: &String| abilities.text(&wrapped(&format!("! {}", excerpt(text)), width, "  "));
    let warnings: String = snapshot.warnings.iter().take(MAX_WARNINGS).map(warning).collect();
    lines.extend(warnings.lines().map(|line| Line::styled(line.to_owned(), abilities.color(Color::Yellow))));
    // The fastest comes first. The screen `advice` has all, with their commands.
    let fastest = snapshot.recommendations.first();
    let advice = fastest.map(|fastest| abilities.text(&wrapped(&format!("+ {}", excerpt(&fastest.text)), width, "  ")));
    let advice = advice.unwrap_or_default();
    lines.extend(advice.lines().map(|line| Line::styled(line.to_owned(), abilities.color(Color::Cyan))));
    lines
}

/// Arranges figures in lines of at most `width` columns.
fn figures_of_width(figures: Vec<String>, width: u16, abilities: Abilities) -> Vec<Line<'static>> {
    bar::lines_of(figures.iter().map(|figure| Span::raw(abilities.text(&format!("{figure}  ")))), width)
}

/// Returns the progress of a run, one figure after the other.
pub(super) fn progress_parts(run: &RunSnapshot) -> Vec<String> {
    let mut parts = vec![match run.steps {
        Some(steps) => format!("step {} of {steps}", run.step),
        None => format!("step {}", run.step),
    }];
    parts.extend(run.loss.map(|loss| format!("loss {loss:.4}")));
    parts.extend(run.eval_loss.map(|loss| format!("evaluation {loss:.4}")));
    parts.extend(run.gradient_norm.map(|norm| format!("norm {norm:.2}")));
    parts.extend(run.learning_rate.map(|rate| format!("rate {rate:.1e}")));
    parts.extend(run.tokens_per_second.map(|rate| format!("{} tok/s", count(rate))));
    parts.extend(run.peak_share.map(|share| format!("{} of peak", percent(share, 0))));
    parts.extend(run.eta_seconds.map(|left| format!("{} left", clock(left))));
    parts
}

/// Returns the load of the processor and the memory of the host, one figure after the other.
pub(super) fn machine_parts(snapshot: &Snapshot) -> Vec<String> {
    let host = &snapshot.host;
    let mut parts = vec![format!("processor {} busy", percent_or_unknown(snapshot.cpu.load))];
    if let (Some(free), Some(total)) = (host.free_bytes, host.total_bytes) {
        parts.push(format!("memory {free} free of {total}"));
    }
    if let (Some(arena), Some(line)) = (host.arena_bytes, host.load_line_bytes) {
        parts.push(format!("offload {arena} of {line}"));
    }
    // A run says itself on which devices it works.
    parts.extend(snapshot.no_gpu.iter().filter(|_| snapshot.run.is_none()).map(|reason| excerpt(reason)));
    parts
}

/// Formats a fraction as percent; `?` if it is unknown.
pub(super) fn percent_or_unknown(share: Option<f64>) -> String {
    share.map_or_else(|| "?".to_owned(), |share| percent(share, 0))
}

/// Returns the figures of a device as one line.
pub(super) fn figures(device: &DeviceSnapshot) -> String {
    let simulated = if device.simulated { " (simulated)" } else { "" };
    let mut parts = vec![format!("{}{simulated}", excerpt(&device.name))];
    match device.in_run {
        true => {
            let held = device.held_bytes.map(|held| format!("holds {held}"));
            let most_held = || device.measured_peak_bytes.map(|peak| format!("held {peak} at most"));
            parts.extend(held.or_else(most_held));
            parts.extend(device.predicted_peak_bytes.map(|peak| format!("planned {peak}")));
            parts.extend(device.load_line_bytes.map(|line| format!("line {line}")));
        }
        false => {
            let free = device.free_bytes.zip(device.total_bytes);
            parts.extend(free.map(|(free, total)| format!("{free} free of {total}")));
            parts.extend(device.load_line_bytes.map(|line| format!("a run would take {line}")));
        }
    }
    parts.extend(device.utilization.map(|busy| format!("{} busy", percent(busy, 0))));
    parts.extend(device.temperature_c.map(|celsius| format!("{celsius:.0} °C")));
    parts.extend(device.power_w.map(|watts| format!("{watts:.0} W")));
    parts.join("  ")
}

fn draw_device(frame: &mut Frame, area: Rect, device: &DeviceSnapshot, is_selected: bool, abilities: Abilities) {
    let [figures_area, row, marks] = Layout::vertical([Constraint::Length(1); 3]).areas(area);
    let mark = if is_selected { "> " } else { "" };
    let text = abilities.text(&format!("{mark}{}", figures(device)));
    let style = if is_selected { Style::new().add_modifier(Modifier::BOLD) } else { Style::new() };
    frame.render_widget(Line::styled(text, style), figures_area);
    frame.render_widget(bar::row(device, row.width, abilities), row);
    frame.render_widget(bar::marks(device, marks.width), marks);
}

/// Draws the plot of the loss and the newest events: side by side, or one above the other.
fn draw_lower(frame: &mut Frame, area: Rect, run: &RunSnapshot, snapshot: &Snapshot, abilities: Abilities) {
    let halves = [Constraint::Percentage(50), Constraint::Percentage(50)];
    let [plot_area, feed_area] = match area.width >= MIN_WIDTH_SIDE_BY_SIDE {
        true => Layout::horizontal(halves).spacing(2).areas(area),
        false => Layout::vertical(halves).areas(area),
    };
    draw_plot(frame, plot_area, run, abilities);
    let lines = feed_area.height as usize;
    let newest = &snapshot.feed[snapshot.feed.len().saturating_sub(lines)..];
    let lines: Vec<Line> = newest.iter().map(|entry| Line::raw(abilities.text(&excerpt(&entry.text)))).collect();
    frame.render_widget(Paragraph::new(lines), feed_area);
}

/// Draws the losses of the run, with the first and the newest above them.
fn draw_plot(frame: &mut Frame, area: Rect, run: &RunSnapshot, abilities: Abilities) {
    let losses: Vec<f64> = run.history.iter().filter_map(|point| point.loss).collect();
    let (Some(first), Some(newest)) = (losses.first(), losses.last()) else { return };
    let mut lines = vec![Line::raw(format!("loss {first:.4} -> {newest:.4}"))];
    let height = (area.height as usize).saturating_sub(1);
    let style = abilities.color(Color::Green);
    let points = plot::points(&losses, area.width as usize, height, abilities);
    lines.extend(points.into_iter().map(|line| Line::styled(line, style)));
    frame.render_widget(Paragraph::new(lines), area);
}
