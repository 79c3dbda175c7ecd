//! All warnings of a snapshot, its recommendations with their commands, and the plan of the run.

use super::Abilities;
use crate::snapshot::Snapshot;
use crate::text::{shell_word, wrapped};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

/// Least width at which lines are wrapped.
const MIN_WIDTH: usize = 20;
/// Beginning of each line of a command.
const INDENT: &str = "  ";
/// End of a line of a command that goes on in the next.
const CONTINUED: &str = " \\";

/// Draws the advice. The first `scrolled` lines are left out, but no more than are needed to show the last one: that number
/// is returned.
pub(super) fn draw(frame: &mut Frame, area: Rect, snapshot: &Snapshot, scrolled: usize, abilities: Abilities) -> usize {
    let (all, room) = (lines(snapshot, area.width, abilities), area.height as usize);
    let most = all.len().saturating_sub(room);
    let first = scrolled.min(most);
    let below = all.len() - (first + room).min(all.len());
    let mut shown: Vec<Line> = all.into_iter().skip(first).take(room).collect();
    if let Some(last) = shown.last_mut().filter(|_| below > 0) {
        *last = Line::raw(format!("{} more lines: Page Down", below + 1));
    }
    frame.render_widget(Paragraph::new(shown), area);
    most
}

/// Returns the advice as lines of at most `width` columns; a longer word stays whole.
fn lines(snapshot: &Snapshot, width: u16, abilities: Abilities) -> Vec<Line<'static>> {
    let width = (width as usize).max(MIN_WIDTH);
    let styled = |text: String, indent: &str, style: Style| -> Vec<Line<'static>> {
        let text = abilities.text(&wrapped(&text, width, indent));
        text.lines().map(|line| Line::styled(line.to_owned(), style)).collect()
    };
    let warning = |text: &String| styled(format!("! {text}"), "  ", abilities.color(Color::Yellow));
    let mut lines: Vec<Line> = snapshot.warnings.iter().flat_map(warning).collect();
    for advice in &snapshot.recommendations {
        lines.extend(styled(format!("+ {}", advice.text), "  ", abilities.color(Color::Cyan)));
        lines.extend(command_lines(&advice.command, width).into_iter().map(Line::raw));
    }
    if lines.is_empty() {
        lines.push(Line::raw("no warnings and no recommendations"));
    }
    let plan = snapshot.run.iter().flat_map(|run| &run.plan).flat_map(|plan| plan.lines());
    lines.extend(plan.flat_map(|line| styled(line, "  ", Style::new())));
    lines
}

/// Returns a command as lines of at most `width` columns that a shell takes as one command; a longer word stays whole.
fn command_lines(command: &str, width: usize) -> Vec<String> {
    let words = shlex::split(command).unwrap_or_else(|| vec![command.to_owned()]);
    let mut lines: Vec<String> = Vec::new();
    for word in words.iter().map(|word| shell_word(word)) {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() + CONTINUED.len() <= width => {
                line.push(' ');
                line.push_str(&word);
            }
            last => {
                last.into_iter().for_each(|line| line.push_str(CONTINUED));
                lines.push(format!("{INDENT}{word}"));
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_command_is_continued_for_the_shell() {
        let command = "plimsoll train run.toml --devices virtual:a=64MiB@0.3 --set recipe.micro_batch=8";
        let lines = command_lines(command, 40);
        assert_eq!(
            lines,
            ["  plimsoll train run.toml --devices \\", "  virtual:a=64MiB@0.3 --set \\", "  recipe.micro_batch=8"]
        );
    }
}
