//! The terminal view of `plimsoll watch`: draws one [`Snapshot`] after the other, and reacts to keys.
//!
//! | module | shows |
//! |---|---|
//! | `overview` | the run, all devices, the plot of the loss and the newest events |
//! | `advice` | all warnings, the recommendations with their commands, and the plan |
//! | `details` | one device: its memory by category and by work, its hardware and processes |
//! | `map` | the arena of one device over a step |
//! | `bar` | the memory of a device as a row of letters, one letter per category |
//! | `plot` | a series of numbers as points |
//! | [`lines`] | a snapshot as lines, for output that is no terminal |

mod advice;
mod bar;
mod details;
pub mod lines;
mod map;
mod overview;
mod plot;
#[cfg(test)]
mod tests;

use crate::snapshot::{DeviceSnapshot, Snapshot};
use plimsoll_core::Failure;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::LeaveAlternateScreen;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style};
use ratatui::symbols::border;
use ratatui::text::Line;
use ratatui::widgets::{Block, Clear, Paragraph};
use ratatui::{DefaultTerminal, Frame};
use rustix::termios::{OutputModes, tcgetattr};
use std::cell::Cell;
use std::cmp::Reverse;
use std::io;
use std::time::{Duration, Instant};

/// Keys and their effects, for the help.
const KEYS: [(&str, &str); 11] = [
    ("q, Ctrl-C", "quit; a run goes on"),
    ("up, down", "select a device"),
    ("Enter", "details of the selected device, and back"),
    ("m", "its memory over a step, and back"),
    ("left, right", "in that map: the point before or after"),
    ("r", "recommendations, warnings and plan, and back"),
    ("Page Up/Down", "in details and recommendations: scroll"),
    (".", "next order of devices"),
    (",", "previous order of devices"),
    ("h, ?", "this help, and back"),
    ("Esc", "back; in the overview, quit"),
];

/// Lines by which Page Up and Page Down scroll.
const SCROLL_LINES: usize = 8;

/// The border of the help on a terminal that only shows ASCII.
const ASCII_BORDER: border::Set = border::Set {
    top_left: "+",
    top_right: "+",
    bottom_left: "+",
    bottom_right: "+",
    vertical_left: "|",
    vertical_right: "|",
    horizontal_top: "-",
    horizontal_bottom: "-",
};

/// The abilities of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Whether it shows colors, and the user wants them.
    pub color: bool,
    /// Whether it shows characters beyond ASCII.
    pub unicode: bool,
}

impl Abilities {
    /// Returns the abilities that the environment states: `NO_COLOR`, and the character set of the locale.
    pub fn of_environment() -> Abilities {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
        let is_utf8 = locale.to_ascii_lowercase().replace('-', "").contains("utf8");
        let is_dumb = set("TERM").as_deref() == Some("dumb");
        Abilities { color: set("NO_COLOR").is_none() && !is_dumb, unicode: is_utf8 }
    }

    /// Returns a style with this color of the text, or without color.
    fn color(self, color: Color) -> Style {
        if self.color { Style::new().fg(color) } else { Style::new() }
    }

    /// Returns text in which characters beyond ASCII are replaced, if the terminal does not show them.
    fn text(self, text: &str) -> String {
        match self.unicode {
            true => text.to_owned(),
            false => text.replace("°C", "C").replace('µ', "u").replace('×', "x").replace(|c: char| !c.is_ascii(), "?"),
        }
    }
}

/// The order in which devices are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Least bytes below the load line first.
    Headroom,
    /// As in the plan.
    Plan,
    /// Most held bytes first.
    Held,
    /// Busiest first.
    Utilization,
}

impl Order {
    const ALL: [Order; 4] = [Order::Headroom, Order::Plan, Order::Held, Order::Utilization];

    fn name(self) -> &'static str {
        match self {
            Order::Headroom => "headroom",
            Order::Plan => "plan",
            Order::Held => "held memory",
            Order::Utilization => "utilization",
        }
    }

    /// Returns the order `step` places after this one, around the end.
    fn moved(self, step: usize) -> Order {
        let place = Order::ALL.iter().position(|order| *order == self).expect("all are listed");
        Order::ALL[(place + step) % Order::ALL.len()]
    }

    /// Sorts devices. Devices without the figure come last.
    fn sort(self, devices: &mut [&DeviceSnapshot]) {
        match self {
            Order::Plan => {}
            Order::Headroom => {
                devices.sort_by_key(|device| (device.headroom_bytes().is_none(), device.headroom_bytes()));
            }
            Order::Held => devices.sort_by_key(|device| Reverse(device.held_bytes)),
            Order::Utilization => {
                let busy = |device: &DeviceSnapshot| device.utilization.unwrap_or(-1.0);
                devices.sort_by(|a, b| busy(b).total_cmp(&busy(a)));
            }
        }
    }
}

/// The choices of the user in the view.
#[derive(Clone, Debug)]
pub struct ViewState {
    abilities: Abilities,
    order: Order,
    /// Place of the selected device in the list.
    selected: usize,
    screen: Screen,
    /// Index of the selected point in the map; `None` for the peak.
    moment: Option<usize>,
    /// Lines of the details, or of the advice, that are scrolled away.
    scrolled: usize,
    /// Most lines that can be scrolled away, as they were last drawn.
    most_scrolled: Cell<usize>,
    shows_help: bool,
}

/// The contents of the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Screen {
    /// The run and all devices.
    Overview,
    /// The details of the selected device.
    Details,
    /// The arena of the selected device over a step.
    Map,
    /// Warnings, recommendations and the plan.
    Advice,
}

/// The reaction to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaction {
    Redraw,
    Quit,
    /// Ctrl-C.
    Interrupt,
}

impl ViewState {
    /// Returns the state at the start: the overview, with the device first that has the least memory left under its load line.
    pub fn new(abilities: Abilities) -> ViewState {
        ViewState {
            abilities,
            order: Order::Headroom,
            selected: 0,
            screen: Screen::Overview,
            moment: None,
            scrolled: 0,
            most_scrolled: Cell::new(usize::MAX),
            shows_help: false,
        }
    }

    /// Returns the devices in the order of the list.
    fn devices<'s>(&self, snapshot: &'s Snapshot) -> Vec<&'s DeviceSnapshot> {
        let mut devices: Vec<&DeviceSnapshot> = snapshot.devices.iter().collect();
        self.order.sort(&mut devices);
        devices
    }

    /// Returns the selected device; `None` without devices.
    fn device<'s>(&self, snapshot: &'s Snapshot) -> Option<&'s DeviceSnapshot> {
        let devices = self.devices(snapshot);
        devices.get(self.selected.min(devices.len().saturating_sub(1))).copied()
    }

    /// Shows a screen, or the overview if it is already shown.
    fn toggle(&mut self, screen: Screen) {
        self.screen = if self.screen == screen { Screen::Overview } else { screen };
        (self.moment, self.scrolled) = (None, 0);
    }

    /// Scrolls the details or the advice by `lines`, down or up.
    fn scroll(&mut self, lines: usize, is_down: bool) {
        let moved = if is_down { self.scrolled + lines } else { self.scrolled.saturating_sub(lines) };
        self.scrolled = moved.min(self.most_scrolled.get());
    }

    /// Selects the point after the present one in the map, or before it.
    fn move_moment(&mut self, snapshot: &Snapshot, is_later: bool) {
        let timeline = self.device(snapshot).map_or(&[][..], |device| &device.timeline);
        let last = timeline.len().saturating_sub(1);
        let now = self.moment.unwrap_or_else(|| map::peak_index(timeline)).min(last);
        self.moment = Some(if is_later { (now + 1).min(last) } else { now.saturating_sub(1) });
    }

    /// Lists the devices in the order `step` places after the present one.
    fn reorder(&mut self, step: usize) {
        self.order = self.order.moved(step);
        (self.moment, self.scrolled) = (None, 0);
    }

    /// Selects a device by its place in the list.
    fn select(&mut self, place: usize) {
        self.selected = place;
        (self.moment, self.scrolled) = (None, 0);
    }

    /// Reacts to a key while this snapshot is shown.
    fn press(&mut self, key: KeyEvent, snapshot: &Snapshot) -> Reaction {
        let last = snapshot.devices.len().saturating_sub(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Reaction::Interrupt,
            KeyCode::Char('q') => return Reaction::Quit,
            KeyCode::Esc if self.screen == Screen::Overview && !self.shows_help => return Reaction::Quit,
            KeyCode::Esc if self.shows_help => self.shows_help = false,
            KeyCode::Esc => self.screen = Screen::Overview,
            KeyCode::Char('h' | '?') => self.shows_help = !self.shows_help,
            KeyCode::Enter => self.toggle(Screen::Details),
            KeyCode::Char('m') => self.toggle(Screen::Map),
            KeyCode::Char('r') => self.toggle(Screen::Advice),
            KeyCode::Left | KeyCode::Right if self.screen == Screen::Map => {
                self.move_moment(snapshot, key.code == KeyCode::Right);
            }
            KeyCode::PageUp | KeyCode::PageDown if matches!(self.screen, Screen::Details | Screen::Advice) => {
                self.scroll(SCROLL_LINES, key.code == KeyCode::PageDown);
            }
            KeyCode::Up | KeyCode::Down if self.screen == Screen::Advice => self.scroll(1, key.code == KeyCode::Down),
            KeyCode::Up => self.select(self.selected.min(last).saturating_sub(1)),
            KeyCode::Down => self.select((self.selected + 1).min(last)),
            KeyCode::Char('.') => self.reorder(1),
            KeyCode::Char(',') => self.reorder(Order::ALL.len() - 1),
            _ => {}
        }
        Reaction::Redraw
    }
}

/// The caller of the view.
pub trait Viewer {
    /// Takes a snapshot; `None` ends the view.
    ///
    /// # Errors
    /// The snapshot cannot be taken.
    fn take(&mut self) -> Result<Option<Snapshot>, Failure>;

    /// Returns whether the view has to end now. It is asked several times a second.
    fn is_over(&self) -> bool;

    /// Handles Ctrl-C. Returns whether the view ends.
    fn interrupt(&mut self) -> bool;
}

/// Longest wait for a key, so that the end of the view is noticed soon.
const MAX_WAIT: Duration = Duration::from_millis(200);

/// Shows snapshots on the terminal until the user quits or `viewer` ends the view. `period` is the time between two
/// snapshots.
///
/// # Errors
/// The terminal cannot be drawn on, or a snapshot cannot be taken. The terminal is restored, also after a panic.
pub fn show(period: Duration, viewer: &mut impl Viewer) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::input(format!("the terminal cannot be drawn on: {error}"));
    // Also sets a panic hook that restores the terminal before the message is printed.
    let mut terminal = ratatui::try_init().map_err(|error| {
        let _ = ratatui::try_restore();
        failed(error)
    })?;
    let result = run(&mut terminal, period, viewer);
    let restored = restore();
    result.map_err(|error| error.into_failure(failed))?;
    restored.map_err(failed)
}

/// Restores the terminal. If another program has set its mode meanwhile, as a shell does after the run that started this
/// view was killed, the mode stays, and only the screen is restored.
fn restore() -> io::Result<()> {
    // A terminal that reads single keys for the view does not process its output.
    let is_of_other = tcgetattr(io::stdin()).is_ok_and(|mode| mode.output_modes.contains(OutputModes::OPOST));
    if is_of_other {
        return execute!(io::stdout(), LeaveAlternateScreen, Show);
    }
    let restored = ratatui::try_restore();
    if restored.is_err() {
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    }
    restored
}

/// A failure of the view: of a snapshot, or of the terminal.
enum ViewError {
    Snapshot(Failure),
    Terminal(io::Error),
}

impl ViewError {
    /// Converts it to a failure; `failed` converts an error of the terminal.
    fn into_failure(self, failed: impl FnOnce(io::Error) -> Failure) -> Failure {
        match self {
            ViewError::Snapshot(failure) => failure,
            ViewError::Terminal(error) => failed(error),
        }
    }
}

impl From<io::Error> for ViewError {
    fn from(error: io::Error) -> ViewError {
        ViewError::Terminal(error)
    }
}

fn run(terminal: &mut DefaultTerminal, period: Duration, viewer: &mut impl Viewer) -> Result<(), ViewError> {
    let mut state = ViewState::new(Abilities::of_environment());
    while let Some(snapshot) = viewer.take().map_err(ViewError::Snapshot)? {
        terminal.draw(|frame| draw(frame, &snapshot, &state))?;
        let next = Instant::now() + period;
        while let Some(left) = next.checked_duration_since(Instant::now()) {
            if viewer.is_over() {
                return Ok(());
            }
            if !event::poll(left.min(MAX_WAIT))? {
                continue;
            }
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => {
                    let ends = match state.press(key, &snapshot) {
                        Reaction::Quit => true,
                        Reaction::Interrupt => viewer.interrupt(),
                        Reaction::Redraw => false,
                    };
                    if ends {
                        return Ok(());
                    }
                    terminal.draw(|frame| draw(frame, &snapshot, &state))?;
                }
                Event::Resize(..) => {
                    terminal.draw(|frame| draw(frame, &snapshot, &state))?;
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Draws a snapshot.
fn draw(frame: &mut Frame, snapshot: &Snapshot, state: &ViewState) {
    let [body, keys] = Layout::vertical([Constraint::Min(0), Constraint::Length(1)]).areas(frame.area());
    let (scrolled, abilities) = (state.scrolled, state.abilities);
    match (state.screen, state.device(snapshot)) {
        (Screen::Details, Some(device)) => {
            state.most_scrolled.set(details::draw(frame, body, device, scrolled, abilities));
        }
        (Screen::Map, Some(device)) => map::draw(frame, body, device, state.moment, abilities),
        (Screen::Advice, _) => state.most_scrolled.set(advice::draw(frame, body, snapshot, scrolled, abilities)),
        _ => overview::draw(frame, body, snapshot, state),
    }
    let order = state.order.name();
    let hint = format!("q quit  h help  Enter details  m map  r advice  , . order: {order}");
    frame.render_widget(Paragraph::new(hint).style(state.abilities.color(Color::DarkGray)), keys);
    if state.shows_help {
        draw_help(frame, state.abilities);
    }
}

fn draw_help(frame: &mut Frame, abilities: Abilities) {
    let lines: Vec<Line> = KEYS.iter().map(|(key, effect)| Line::from(format!("{key:<12} {effect}"))).collect();
    let (width, height) = (56, lines.len() as u16 + 2);
    let area = frame.area();
    let area = Rect {
        x: area.width.saturating_sub(width) / 2,
        y: area.height.saturating_sub(height) / 2,
        width: width.min(area.width),
        height: height.min(area.height),
    };
    frame.render_widget(Clear, area);
    let block = match abilities.unicode {
        true => Block::bordered(),
        false => Block::bordered().border_set(ASCII_BORDER),
    };
    frame.render_widget(Paragraph::new(lines).block(block.title("keys")), area);
}
