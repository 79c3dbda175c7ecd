//! The page of a report: one HTML document with its style sheet and plots in it. It has no script, and its policy
//! (`Content-Security-Policy`) forbids scripts and outside requests.
//!
//! Each text from the report passes through [`escaped`].

use super::document::{Bar, Document, Part, Section};
use super::plot::{self, Plot};
use plimsoll_core::printable::{printable_line, printable_text};

/// The style sheet.
const STYLE: &str = include_str!("report.css");

/// Returns a text of one line as HTML, for content and for attributes in double quotes. Unprintable characters become
/// escapes such as `\n`.
pub(super) fn escaped(text: &str) -> String {
    with_entities(&printable_line(text))
}

/// Replaces the characters that mean something in HTML by entities.
fn with_entities(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            '\'' => html.push_str("&#39;"),
            other => html.push(other),
        }
    }
    html
}

/// Returns the page of a report.
pub(super) fn page(document: &Document) -> String {
    let (title, subtitle) = (escaped(&document.title), escaped(&document.subtitle));
    let sections: String = document.sections.iter().map(section).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
         base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title} – Plimsoll report</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>{title}</h1>\n<p>{subtitle}</p>\n{sections}</main>\n</body>\n</html>\n"
    )
}

fn section(section: &Section) -> String {
    let parts: String = section.parts.iter().map(part).collect();
    format!("<section>\n<h2>{}</h2>\n{parts}</section>\n", escaped(&section.heading))
}

fn part(part: &Part) -> String {
    match part {
        Part::Text(text) => format!("<p>{}</p>\n", escaped(text)),
        Part::List(items) => {
            let items: String = items.iter().map(|item| format!("<li>{}</li>\n", escaped(item))).collect();
            format!("<ul>\n{items}</ul>\n")
        }
        Part::Command(command) => format!("<pre><code>{}</code></pre>\n", escaped(command)),
        Part::Preformatted(text) => {
            format!("<details><summary>Show</summary>\n<pre>{}</pre></details>\n", with_entities(&printable_text(text)))
        }
        Part::Table { headings, rows } => table(headings, rows),
        Part::Facts(facts) => {
            let row = |(name, value): &(String, String)| {
                format!("<tr><th scope=\"row\">{}</th><td>{}</td></tr>\n", escaped(name), escaped(value))
            };
            let rows: String = facts.iter().map(row).collect();
            format!("<div class=\"wide\"><table class=\"facts\">\n{rows}</table></div>\n")
        }
        Part::Bar(bar) => ledger(bar),
        Part::Plots(plots) => {
            format!("<div class=\"plots\">\n{}</div>\n", plots.iter().map(figure).collect::<String>())
        }
    }
}

fn table(headings: &[String], rows: &[Vec<String>]) -> String {
    let heading = |text: &String| format!("<th scope=\"col\">{}</th>", escaped(text));
    let cell = |(column, text): (usize, &String)| match column {
        0 => format!("<th scope=\"row\">{}</th>", escaped(text)),
        _ => format!("<td>{}</td>", escaped(text)),
    };
    let head: String = headings.iter().map(heading).collect();
    let row = |cells: &Vec<String>| format!("<tr>{}</tr>\n", cells.iter().enumerate().map(cell).collect::<String>());
    let body: String = rows.iter().map(row).collect();
    format!("<div class=\"wide\"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n")
}

/// Returns a ledger bar with the names of its parts; nothing if no bytes are known.
fn ledger(bar: &Bar) -> String {
    let Some(svg) = plot::bar(bar) else { return String::new() };
    let item = |(name, _): &(String, _)| {
        format!("<li><span class=\"{}\"></span> {}</li>", plot::part_class(name), escaped(name))
    };
    let parts: String = bar.parts.iter().filter(|(_, bytes)| bytes.0 > 0).map(item).collect();
    let marks =
        "<li><span class=\"load-line\"></span> load line</li><li><span class=\"peak\">▲</span> measured peak</li>";
    format!("{svg}\n<ul class=\"legend\">{parts}{marks}</ul>\n")
}

fn figure(plot: &Plot) -> String {
    let legend = plot.legend().map(|legend| format!("; {}", escaped(&legend))).unwrap_or_default();
    let (title, summary) = (escaped(&plot.title), escaped(&plot.summary()));
    format!("<figure>{}\n<figcaption><b>{title}</b>: {summary}{legend}</figcaption></figure>\n", plot.svg())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_texts_is_inert() {
        let hostile = "<script>alert(\"1\")</script>&'\u{202e}\n";
        let safe = "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#39;\\u{202e}\\n";
        assert_eq!(escaped(hostile), safe);
        let texts = || vec![hostile.to_owned(); 2];
        let pair = || (hostile.to_owned(), hostile.to_owned());
        let bar = Bar {
            label: hostile.into(),
            parts: vec![(hostile.to_owned(), plimsoll_core::Bytes(5))],
            load_line: None,
            measured_peak: None,
        };
        let parts = vec![
            Part::Text(hostile.into()),
            Part::List(texts()),
            Part::Command(hostile.into()),
            Part::Preformatted(hostile.into()),
            Part::Table { headings: texts(), rows: vec![texts()] },
            Part::Facts(vec![pair()]),
            Part::Bar(bar),
            Part::Plots(vec![Plot::new(hostile.into(), vec![(1.0, 1.0)], |_| "<b>".to_owned())]),
        ];
        let sections = vec![Section { heading: hostile.into(), parts }];
        let page = page(&Document { title: hostile.into(), subtitle: hostile.into(), sections });
        assert!(!page.contains("<script") && !page.contains("alert(\"") && !page.contains("<b>,"), "{page}");
        assert_eq!(page.matches("&lt;script&gt;").count(), 20, "{page}");
    }
}
