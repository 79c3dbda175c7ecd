//! Changes of a template's text before minijinja parses it: line ends, and the tags `generation` and `endgeneration`,
//! which minijinja does not know.
//!
//! `{% generation %}` becomes a filter around a scope of its own: `{% filter F %}{% with %}`. The marks for white space
//! (`-`, `+`) stay at the outer sides.

/// Name of the filter that stands for a `generation` block.
pub(super) const GENERATION_FILTER: &str = "__generation";

/// The text of a template as minijinja takes it.
pub(super) struct PreparedText {
    pub text: String,
    /// Whether the template has a `generation` block.
    pub has_generation: bool,
}

/// Prepares the text of a template.
pub(super) fn prepare(source: &str) -> PreparedText {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut prepared = PreparedText { text: String::with_capacity(source.len()), has_generation: false };
    let mut rest = &source[..];
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        prepared.text.push_str(before);
        let length = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'{') => tag_length(tag, "}}"),
            Some(b'%') => prepared.read_statement(tag),
            _ => 1,
        };
        if !matches!(tag.as_bytes().get(1), Some(b'%')) {
            prepared.text.push_str(&tag[..length]);
        }
        rest = &tag[length..];
    }
    prepared.text.push_str(rest);
    prepared
}

impl PreparedText {
    /// Adds the statement with which `tag` begins, and returns its length. A `raw` block counts as one statement.
    fn read_statement(&mut self, tag: &str) -> usize {
        let length = tag_length(tag, "%}");
        let whole = &tag[..length];
        let inner = whole.strip_prefix("{%").and_then(|rest| rest.strip_suffix("%}")).unwrap_or_default();
        let lead = if inner.starts_with(['-', '+']) { &inner[..1] } else { "" };
        let inner = &inner[lead.len()..];
        let trail = if inner.ends_with(['-', '+']) { &inner[inner.len() - 1..] } else { "" };
        match inner[..inner.len() - trail.len()].trim() {
            "generation" => {
                self.has_generation = true;
                self.text.push_str(&format!("{{%{lead} filter {GENERATION_FILTER} %}}{{% with {trail}%}}"));
            }
            "endgeneration" => self.text.push_str(&format!("{{%{lead} endwith %}}{{% endfilter {trail}%}}")),
            "raw" => {
                let end = length + raw_length(&tag[length..]);
                self.text.push_str(&tag[..end]);
                return end;
            }
            _ => self.text.push_str(whole),
        }
        length
    }
}

/// Returns the length of the tag with which `text` begins, up to and with `end`, which does not count inside a string.
fn tag_length(text: &str, end: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if byte == b'\\' => escaped = true,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if matches!(byte, b'"' | b'\'') => quote = Some(byte),
            None if text.as_bytes()[at..].starts_with(end.as_bytes()) => return at + end.len(),
            None => {}
        }
    }
    text.len()
}

/// Returns the length of the content of a `raw` block with its closing tag.
fn raw_length(text: &str) -> usize {
    let mut at = 0;
    while let Some(start) = text[at..].find("{%") {
        let start = at + start;
        let length = tag_length(&text[start..], "%}");
        let tag = text[start..start + length].trim_start_matches("{%").trim_end_matches("%}");
        if tag.trim_matches(['-', '+']).trim() == "endraw" {
            return start + length;
        }
        at = start + 2;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_filters() {
        let prepared = prepare("a{%- generation -%}b{% endgeneration %}\r\nc");
        assert!(prepared.has_generation);
        let expected = "a{%- filter __generation %}{% with -%}b{% endwith %}{% endfilter %}\nc";
        assert_eq!(prepared.text, expected);
    }

    #[test]
    fn strings_comments_and_raw_blocks_stay() {
        for text in [
            "{{ '{% generation %}' }}{# {% generation %} #}",
            "{% raw %}{% generation %}{%- endraw -%}",
            "{% set x = '%}' %}{% set y = \"\\\"%}\" %} { {",
            "{% raw %}{% generation %}",
            "{{ 'open",
        ] {
            let prepared = prepare(text);
            assert_eq!((prepared.text.as_str(), prepared.has_generation), (text, false));
        }
    }
}
