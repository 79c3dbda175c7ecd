//! A report as Markdown (GitHub's), for issues and notes. Plots appear as their first, least, largest and last values.

use super::document::{Document, Part, Section};
use plimsoll_core::printable::{printable_line, printable_text};

/// Characters that mean something in Markdown, or begin HTML.
const SPECIAL: &str = "\\`*_[]<>|~&#$";

/// Returns a text of one line as Markdown that shows it unchanged.
fn escaped(text: &str) -> String {
    let mut markdown = String::with_capacity(text.len());
    for character in printable_line(text).chars() {
        if SPECIAL.contains(character) {
            markdown.push('\\');
        }
        markdown.push(character);
    }
    markdown
}

/// Returns the text of a report.
pub(super) fn text(document: &Document) -> String {
    let sections: String = document.sections.iter().map(section).collect();
    format!("# {}\n\n{}\n{sections}", escaped(&document.title), escaped(&document.subtitle))
}

fn section(section: &Section) -> String {
    let parts: String =
        section.parts.iter().map(part).filter(|part| !part.is_empty()).map(|part| format!("\n{part}")).collect();
    format!("\n## {}\n{parts}", escaped(&section.heading))
}

fn part(part: &Part) -> String {
    match part {
        Part::Text(text) => format!("{}\n", escaped(text)),
        Part::List(items) => items.iter().map(|item| format!("- {}\n", escaped(item))).collect(),
        Part::Command(command) => code(&printable_line(command)),
        Part::Preformatted(text) => code(&printable_text(text)),
        Part::Table { headings, rows } => table(headings, rows),
        Part::Facts(facts) => {
            let rows: Vec<Vec<String>> = facts.iter().map(|(name, value)| vec![name.clone(), value.clone()]).collect();
            table(&["fact".to_owned(), "value".to_owned()], &rows)
        }
        // Its numbers are in the tables below it.
        Part::Bar(_) => String::new(),
        Part::Plots(plots) => {
            plots.iter().map(|plot| format!("- {}: {}\n", escaped(&plot.title), escaped(&plot.summary()))).collect()
        }
    }
}

/// Returns text as a block of code. Its fence is longer than any row of backticks in the text, so nothing ends it early.
fn code(text: &str) -> String {
    let longest = text.split(|character| character != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest.max(2) + 1);
    format!("{fence}\n{}\n{fence}\n", text.trim_end_matches('\n'))
}

fn table(headings: &[String], rows: &[Vec<String>]) -> String {
    let row =
        |cells: &[String]| format!("| {} |\n", cells.iter().map(|cell| escaped(cell)).collect::<Vec<_>>().join(" | "));
    let rule = format!("|{}\n", "---|".repeat(headings.len()));
    row(headings) + &rule + &rows.iter().map(|cells| row(cells)).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_cannot_leave_their_place() {
        let hostile = "<script>|a_b*`\n# x";
        assert_eq!(escaped(hostile), "\\<script\\>\\|a\\_b\\*\\`\\\\n\\# x");
        let rows = [vec![hostile.to_owned(), "1".to_owned()]];
        let text = table(&["name".to_owned(), "value".to_owned()], &rows);
        assert_eq!(text.lines().count(), 3, "{text}");
        let code = part(&Part::Preformatted("a\n```\n<b>\u{1b}".to_owned()));
        assert_eq!(code, "````\na\n```\n<b>\\u{1b}\n````\n");
        assert_eq!(part(&Part::Command("plimsoll train".to_owned())), "```\nplimsoll train\n```\n");
    }
}
