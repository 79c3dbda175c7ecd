//! Plots and ledger bars as inline SVG. Colors come from the classes of the page's style sheet.

use super::document::Bar;
use super::html::escaped;
use plimsoll_core::Bytes;
use std::fmt::Write;

/// Width and height of a plot, in units of its view box. About the width of a phone in pixels, so that its text is
/// readable there.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 190.0;
/// Room for the labels of the axes.
const LEFT: f64 = 62.0;
const RIGHT: f64 = 8.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 24.0;
/// Most lines of the grid.
const GRID_LINES: f64 = 5.0;
/// Width and height of a ledger bar.
const BAR_WIDTH: f64 = 800.0;
const BAR_HEIGHT: f64 = 28.0;
/// Height of the marks above and below a bar.
const BAR_MARK: f64 = 8.0;
/// Part of a bar to the left of the load line, if nothing passes it.
const LINE_AT: f64 = 0.92;

/// A figure over the steps of a run.
pub(super) struct Plot {
    pub title: String,
    /// Steps with their values; all are finite.
    points: Vec<(f64, f64)>,
    /// Further values, drawn as circles, and their name.
    marks: Vec<(f64, f64)>,
    mark_name: &'static str,
    format: fn(f64) -> String,
}

/// The least and the largest of some numbers.
#[derive(Clone, Copy)]
struct Range {
    least: f64,
    most: f64,
}

impl Plot {
    /// Creates a plot of steps with their values. Values that are not finite are left out. `format` formats a value.
    pub fn new(title: String, points: Vec<(f64, f64)>, format: fn(f64) -> String) -> Plot {
        let points = points.into_iter().filter(|(_, value)| value.is_finite()).collect();
        Plot { title, points, marks: vec![], mark_name: "", format }
    }

    /// Adds values that are drawn as circles.
    #[must_use]
    pub fn with_marks(self, mark_name: &'static str, marks: Vec<(f64, f64)>) -> Plot {
        Plot { marks, mark_name, ..self }
    }

    /// Returns whether there is nothing to draw.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty() && self.marks.is_empty()
    }

    /// Returns the first, least, largest and last value in words.
    pub fn summary(&self) -> String {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else {
            return "no step has a value".to_owned();
        };
        let values = Range::of(self.points.iter().map(|(_, value)| *value));
        let [first, least, most, last] = [first.1, values.least, values.most, last.1].map(self.format);
        format!("first {first}, lowest {least}, highest {most}, last {last}")
    }

    /// Returns the names of line and circles in words; `None` without circles.
    pub fn legend(&self) -> Option<String> {
        (!self.marks.is_empty()).then(|| format!("line: training; circles: {}", self.mark_name))
    }

    /// Returns the plot as an SVG element; nothing if it is empty.
    pub fn svg(&self) -> String {
        if self.is_empty() {
            return String::new();
        }
        let all = || self.points.iter().chain(&self.marks);
        let steps = Range::of(all().map(|(step, _)| *step));
        let values = Range::of(all().map(|(_, value)| *value)).with_room();
        let x = |step: f64| LEFT + steps.share(step) * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| TOP + (1.0 - values.share(value)) * (HEIGHT - TOP - BOTTOM);
        let label = escaped(&format!("{} over {} steps: {}", self.title, steps.most, self.summary()));
        let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{label}\">");
        for value in values.grid() {
            let (at, right) = (y(value), WIDTH - RIGHT);
            let text = escaped(&tick(value, values.most - values.least));
            let _ = write!(svg, "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
            let (before, below) = (LEFT - 5.0, at + 4.0);
            let _ = write!(svg, "<text x=\"{before}\" y=\"{below:.1}\" text-anchor=\"end\">{text}</text>");
        }
        let below = HEIGHT - 7.0;
        let (first, last) = (steps.least, steps.most);
        let _ = write!(svg, "<text x=\"{LEFT}\" y=\"{below}\">step {first}</text>");
        let _ = write!(svg, "<text x=\"{}\" y=\"{below}\" text-anchor=\"end\">{last}</text>", WIDTH - RIGHT);
        let line: Vec<String> =
            self.points.iter().map(|(step, value)| format!("{:.1},{:.1}", x(*step), y(*value))).collect();
        // A line of one point would not be drawn.
        match self.points.as_slice() {
            [(step, value)] => svg += &circle("point", x(*step), y(*value), ""),
            _ => svg += &format!("<polyline points=\"{}\"/>", line.join(" ")),
        }
        for (step, value) in &self.marks {
            let title = format!("{} after step {step}: {}", self.mark_name, (self.format)(*value));
            svg += &circle("mark", x(*step), y(*value), &title);
        }
        svg + "</svg>"
    }
}

fn circle(class: &str, x: f64, y: f64, title: &str) -> String {
    format!("<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"><title>{}</title></circle>", escaped(title))
}

impl Range {
    fn of(numbers: impl Iterator<Item = f64>) -> Range {
        let start = Range { least: f64::INFINITY, most: f64::NEG_INFINITY };
        numbers.fold(start, |range, number| Range { least: range.least.min(number), most: range.most.max(number) })
    }

    /// Returns the range, or one around its only number, in which that number is in the middle.
    fn with_room(self) -> Range {
        let room = if self.least < self.most { 0.0 } else { (self.least.abs() * 0.1).max(f64::MIN_POSITIVE) };
        Range { least: self.least - room, most: self.most + room }
    }

    /// Returns where a number lies between the least (0) and the largest (1); 0.5 if both are equal.
    fn share(self, number: f64) -> f64 {
        let span = self.most - self.least;
        if span > 0.0 && span.is_finite() { (number - self.least) / span } else { 0.5 }
    }

    /// Returns round numbers in the range, at equal distances.
    fn grid(self) -> Vec<f64> {
        let span = self.most - self.least;
        let power = 10f64.powf((span / GRID_LINES).log10().floor());
        let Some(step) =
            [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| span / step <= GRID_LINES)
        else {
            return vec![];
        };
        let first = (self.least / step).ceil();
        let numbers = (0..=GRID_LINES as u32).map(|number| (first + f64::from(number)) * step);
        numbers.filter(|number| *number <= self.most && number.is_finite()).collect()
    }
}

/// Formats a number of an axis with a range of this `span`.
fn tick(number: f64, span: f64) -> String {
    let largest = number.abs().max(span);
    if number == 0.0 {
        return "0".to_owned();
    }
    if largest >= 1e4 {
        return crate::text::count(number);
    }
    if largest < 1e-2 {
        return format!("{number:.1e}");
    }
    let decimals = (1.0 - span.log10().floor()).clamp(0.0, 6.0) as usize;
    format!("{number:.decimals$}")
}

/// Returns a ledger bar as an SVG element; `None` if no bytes are known.
pub(super) fn bar(bar: &Bar) -> Option<String> {
    let held = bar.parts.iter().map(|(_, bytes)| *bytes).sum::<Bytes>();
    let most = held.max(bar.measured_peak.unwrap_or_default()).0 as f64;
    let scale = bar.load_line.map_or(0.0, |line| line.0 as f64 / LINE_AT).max(most);
    if scale <= 0.0 {
        return None;
    }
    let x = |bytes: f64| (bytes / scale * BAR_WIDTH).min(BAR_WIDTH);
    let height = BAR_HEIGHT + 2.0 * BAR_MARK;
    let label = escaped(&bar.label);
    let mut svg = format!(
        "<svg class=\"bar\" preserveAspectRatio=\"none\" viewBox=\"0 0 {BAR_WIDTH} {height}\" role=\"img\" aria-label=\"{label}\">"
    );
    svg += &rectangle("free", 0.0, BAR_WIDTH, "free");
    let mut below = 0.0;
    for (name, bytes) in &bar.parts {
        let (left, right) = (x(below), x(below + bytes.0 as f64));
        svg += &rectangle(&part_class(name), left, right - left, &format!("{name}: {bytes}"));
        below += bytes.0 as f64;
    }
    if let Some(line) = bar.load_line {
        let at = x(line.0 as f64);
        let place = format!("x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"0\" y2=\"{height}\"");
        let _ = write!(svg, "<line class=\"load-line\" {place}><title>load line: {line}</title></line>");
    }
    if let Some(peak) = bar.measured_peak {
        let (at, top) = (x(peak.0 as f64), BAR_MARK + BAR_HEIGHT);
        let (left, right) = (at - BAR_MARK / 2.0, at + BAR_MARK / 2.0);
        let shape = format!("M{at:.1} {top}L{left:.1} {height}L{right:.1} {height}Z");
        let _ = write!(svg, "<path class=\"peak\" d=\"{shape}\"><title>measured peak: {peak}</title></path>");
    }
    Some(svg + "</svg>")
}

/// Returns a rectangle of a bar. `left` and `width` are in units of its view box.
fn rectangle(class: &str, left: f64, width: f64, title: &str) -> String {
    let place = format!("x=\"{left:.1}\" y=\"{BAR_MARK}\" width=\"{width:.1}\" height=\"{BAR_HEIGHT}\"");
    format!("<rect class=\"{class}\" {place}><title>{}</title></rect>", escaped(title))
}

/// Returns the class of a part of a bar in the style sheet. The names are those of categories, and `charges`.
pub(super) fn part_class(name: &str) -> String {
    format!("part {}", name.chars().filter(char::is_ascii_alphabetic).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_lie_inside_the_plot() {
        let points = vec![(1.0, 4.0), (2.0, f64::NAN), (3.0, 1.0), (9.0, 2.0)];
        let plot = Plot::new("loss".into(), points, |value| format!("{value:.1}"));
        assert_eq!(plot.summary(), "first 4.0, lowest 1.0, highest 4.0, last 2.0");
        let (top, bottom) = (TOP, HEIGHT - BOTTOM);
        assert!(plot.svg().contains(&format!("points=\"{LEFT:.1},{top:.1} ")), "{}", plot.svg());
        assert!(plot.svg().contains(&format!(",{bottom:.1} {:.1},", WIDTH - RIGHT)), "{}", plot.svg());
    }

    #[test]
    fn extreme_values_give_finite_coordinates() {
        let cases: [&[(f64, f64)]; 6] = [
            &[],
            &[(1.0, 0.0)],
            &[(1.0, 5.0), (2.0, 5.0)],
            &[(1.0, f64::MAX), (2.0, f64::MIN)],
            &[(1.0, 1e-300), (2.0, 2e-300)],
            &[(u64::MAX as f64, f64::INFINITY)],
        ];
        for points in cases {
            let svg = Plot::new("x".into(), points.to_vec(), |value| value.to_string()).svg();
            let coordinates = svg.split_once('>').map_or("", |(_, below_label)| below_label);
            assert!(!coordinates.contains("NaN") && !coordinates.contains("inf"), "{points:?}: {svg}");
        }
    }

    #[test]
    fn grid_has_round_numbers() {
        assert_eq!(Range { least: 0.0, most: 3.02 }.grid(), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(Range { least: 12.0, most: 49.0 }.grid(), [20.0, 30.0, 40.0]);
        assert_eq!([tick(0.5, 3.0), tick(20_000.0, 40_000.0), tick(0.003, 0.003)], ["0.5", "20.0 k", "3.0e-3"]);
    }

    #[test]
    fn bar_ends_at_or_after_its_load_line() {
        let parts = vec![("weight".to_owned(), Bytes::mib(46)), ("charges".to_owned(), Bytes::mib(23))];
        let ledger =
            Bar { label: "x".into(), parts, load_line: Some(Bytes::mib(92)), measured_peak: Some(Bytes::mib(50)) };
        let svg = bar(&ledger).unwrap();
        assert!(svg.contains("class=\"part weight\" x=\"0.0\" y=\"8\" width=\"368.0\""), "{svg}");
        assert!(svg.contains("class=\"part charges\" x=\"368.0\" y=\"8\" width=\"184.0\""), "{svg}");
        assert!(svg.contains("class=\"load-line\" x1=\"736.0\"") && svg.contains("M400.0 36"), "{svg}");
        let most = vec![("weight".to_owned(), Bytes(u64::MAX)), ("charges".to_owned(), Bytes(u64::MAX))];
        let most = Bar { label: "x".into(), parts: most, load_line: None, measured_peak: None };
        assert!(bar(&most).unwrap().contains("class=\"part weight\" x=\"0.0\" y=\"8\" width=\"800.0\""));
        let unknown = Bar { label: "x".into(), parts: vec![], load_line: None, measured_peak: None };
        assert_eq!(bar(&unknown), None);
    }
}
