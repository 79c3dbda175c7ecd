//! The arena of one device over a step: a chart with time to the right and bytes upwards, one letter per category. Below
//! it are the work, and the bytes at the selected point.

use super::bar::{LINE_AT, Part, lines_of, parts_at};
use super::{Abilities, overview};
use crate::snapshot::DeviceSnapshot;
use crate::text::{excerpt, wrapped};
use plimsoll_core::{Bytes, TimelinePoint, peak_point};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

/// Columns to the left of the chart, for bytes.
const MARGIN: usize = 12;
/// Most times that the load line may exceed the peak for the chart to show it.
const MAX_TIMES_PEAK: f64 = 2.0;
/// Height of the chart in peaks, if the load line is above it.
const ABOVE_PEAK: f64 = 1.1;
/// Least width at which text is wrapped.
const MIN_WIDTH: usize = 20;

/// Returns the index of the point with the peak; 0 without points.
pub(super) fn peak_index(timeline: &[TimelinePoint]) -> usize {
    let peak = peak_point(timeline, None).map(|point| point.bytes);
    timeline.iter().position(|point| Some(point.bytes) == peak).unwrap_or(0)
}

/// Draws the map of a device. `moment` is the index of the selected point; `None` selects the peak.
pub(super) fn draw(
    frame: &mut Frame,
    area: Rect,
    device: &DeviceSnapshot,
    moment: Option<usize>,
    abilities: Abilities,
) {
    let timeline = &device.timeline;
    let Some(last) = timeline.len().checked_sub(1) else {
        let text = format!("{}: no plan of a run describes its memory over a step", excerpt(&device.name));
        frame.render_widget(Paragraph::new(abilities.text(&text)), area);
        return;
    };
    let moment = moment.unwrap_or_else(|| peak_index(timeline)).min(last);
    let point = &timeline[moment];
    let total = in_bytes(total(device, point));
    let text = format!("point {} of {}: {total} {}", moment + 1, last + 1, point.describe());
    let [head, mut below] = [head(device, area.width, abilities), lines(&text, area.width, abilities)];
    below.extend(legend(device, point, area.width, abilities));
    let heights = [head.len(), 0, 2, below.len()].map(|lines| lines as u16);
    let [head_area, chart_area, axis_area, below_area] = Layout::vertical([
        Constraint::Length(heights[0]),
        Constraint::Min(heights[1]),
        Constraint::Length(heights[2]),
        Constraint::Length(heights[3]),
    ])
    .areas(area);
    let chart = Chart::new(device, chart_area);
    frame.render_widget(Paragraph::new(head), head_area);
    frame.render_widget(Paragraph::new(chart.lines(abilities)), chart_area);
    frame.render_widget(Paragraph::new(vec![Line::raw(chart.work()), Line::raw(chart.cursor(moment))]), axis_area);
    frame.render_widget(Paragraph::new(below), below_area);
}

/// Returns text from data as lines of at most `width` columns.
fn lines(text: &str, width: u16, abilities: Abilities) -> Vec<Line<'static>> {
    let wrapped = wrapped(&excerpt(text), (width as usize).max(MIN_WIDTH), "  ");
    abilities.text(&wrapped).lines().map(|line| Line::raw(line.to_owned())).collect()
}

/// Returns the bytes of arena and charges at a point, as a number that cannot overflow.
fn total(device: &DeviceSnapshot, point: &TimelinePoint) -> f64 {
    parts_at(device, point).iter().map(|part| part.bytes.0 as f64).sum()
}

fn in_bytes(number: f64) -> Bytes {
    Bytes(number as u64)
}

/// Returns the figures of the device, and its peak with the op that sets it.
fn head(device: &DeviceSnapshot, width: u16, abilities: Abilities) -> Vec<Line<'static>> {
    let figures = Line::styled(abilities.text(&overview::figures(device)), Style::new().add_modifier(Modifier::BOLD));
    let peak = device.peak_sentence().map(|peak| lines(&format!("predicted {peak}"), width, abilities));
    std::iter::once(figures).chain(peak.into_iter().flatten()).collect()
}

/// Returns the letters of the chart with their bytes at a point, in lines of at most `width` columns.
fn legend(device: &DeviceSnapshot, point: &TimelinePoint, width: u16, abilities: Abilities) -> Vec<Line<'static>> {
    let parts = parts_at(device, point);
    let entries = parts.iter().map(|part| part.entry(&format!("{} {}", part.name, part.bytes), abilities));
    lines_of(entries, width)
}

/// The chart of a device in a rectangle of characters.
struct Chart<'d> {
    device: &'d DeviceSnapshot,
    /// Columns of the chart, without the margin.
    width: usize,
    height: usize,
    /// Bytes at the upper end; more than 0.
    scale: f64,
}

impl<'d> Chart<'d> {
    fn new(device: &'d DeviceSnapshot, area: Rect) -> Chart<'d> {
        let peak = device.timeline.iter().map(|point| total(device, point)).fold(1.0, f64::max);
        let line = device.load_line_bytes.map_or(0.0, |line| line.0 as f64);
        let scale = if line > MAX_TIMES_PEAK * peak { ABOVE_PEAK * peak } else { (line / LINE_AT).max(peak) };
        Chart { device, width: (area.width as usize).saturating_sub(MARGIN), height: area.height as usize, scale }
    }

    /// Returns the row that shows an amount of bytes, counted from the bottom; `None` above the chart.
    fn row(&self, bytes: f64) -> Option<usize> {
        let row = (bytes / self.scale * self.height as f64) as usize;
        (row < self.height && bytes <= self.scale).then_some(row)
    }

    /// Returns the index of the point in a column.
    fn point_at(&self, column: usize) -> usize {
        column * self.device.timeline.len() / self.width.max(1)
    }

    /// Returns the load line with its row; `None` if there is none, or above the chart.
    fn load_line(&self) -> Option<(usize, Bytes)> {
        let line = self.device.load_line_bytes?;
        Some((self.row(line.0 as f64)?, line))
    }

    /// Returns the lines of the chart with their labels, from top to bottom.
    fn lines(&self, abilities: Abilities) -> Vec<Line<'static>> {
        let parts = |column| parts_at(self.device, &self.device.timeline[self.point_at(column)]);
        let columns: Vec<Vec<Part>> = (0..self.width).map(parts).collect();
        (0..self.height).rev().map(|row| self.line(row, &columns, abilities)).collect()
    }

    /// Returns a line of the chart: its label, and the letter of each column at its height.
    fn line(&self, row: usize, columns: &[Vec<Part>], abilities: Abilities) -> Line<'static> {
        let line = self.load_line().filter(|(of_line, _)| *of_line == row);
        let label = match line {
            Some((_, bytes)) => format!("{bytes:>11} "),
            None if row == 0 => format!("{:>11} ", "0 B"),
            None => " ".repeat(MARGIN),
        };
        let free = match (line.is_some(), abilities.unicode) {
            (true, true) => '─',
            (true, false) => '-',
            (false, _) => ' ',
        };
        let height = (row as f64 + 0.5) / self.height as f64 * self.scale;
        let cells = columns.iter().map(|parts| match part_at(parts, height) {
            Some(part) => Span::styled(part.letter.to_string(), abilities.color(part.color)),
            None => Span::styled(free.to_string(), abilities.color(Color::White)),
        });
        Line::from(std::iter::once(Span::raw(label)).chain(cells).collect::<Vec<_>>())
    }

    /// Returns the line below the chart with the name of the work, where it has room.
    fn work(&self) -> String {
        let is_above = self.device.load_line_bytes.is_some() && self.load_line().is_none();
        let mut text = format!("{:MARGIN$}", if is_above { "line above" } else { "" });
        let work = |column: usize| self.device.timeline[self.point_at(column)].work;
        let mut column = 0;
        while column < self.width {
            let end = (column..self.width).find(|next| work(*next) != work(column)).unwrap_or(self.width);
            let room = end - column;
            let name = work(column).to_string();
            text += &format!("{:room$}", if name.len() < room { &name } else { "" });
            column = end;
        }
        text.trim_end().to_owned()
    }

    /// Returns the line with marks below the columns of a point.
    fn cursor(&self, moment: usize) -> String {
        let mark = |column| if self.point_at(column) == moment { '^' } else { ' ' };
        let marks: String = (0..self.width).map(mark).collect();
        format!("{:MARGIN$}{marks}", "").trim_end().to_owned()
    }
}

/// Returns the part of a stack at a height in bytes; `None` above it.
fn part_at(parts: &[Part], height: f64) -> Option<&Part> {
    let mut below = 0.0;
    parts.iter().find(|part| {
        below += part.bytes.0 as f64;
        height < below
    })
}
