//! The reason why a JSON line is refused, in words that name the cause.

/// Values that Python's `json.dumps` writes and that are not JSON.
const NOT_JSON: [&str; 3] = ["NaN", "-Infinity", "Infinity"];

/// Returns the reason for which the parser refused the record `line` with `error`, with the column, and with the line if
/// the record has several.
pub(super) fn reason(line: &str, error: &serde_json::Error) -> String {
    let column = error.column();
    let suffix = format!(" at line {} column {column}", error.line());
    let message = error.to_string();
    let message = message.strip_suffix(&suffix).unwrap_or(&message);
    let near = line.split('\n').nth(error.line().saturating_sub(1)).unwrap_or(line);
    let value = NOT_JSON.into_iter().find(|word| begins_near(near, column, word));
    let cause = match value.filter(|_| error.is_syntax()) {
        Some(word) => format!("{word} is no JSON value; write null, or omit the key"),
        None if message.contains("surrogate") || message.contains("end of hex escape") => {
            "a lone surrogate, such as \\ud83d, is no character; remove it".to_owned()
        }
        None if line.starts_with('[') => "expected an object, found a list".to_owned(),
        None => message.to_owned(),
    };
    match error.line() {
        // The value as a whole has another type.
        _ if column == 0 => cause,
        0 | 1 => format!("{cause} (column {column})"),
        number => format!("{cause} (line {number} of the record, column {column})"),
    }
}

/// Returns whether `word` begins at the column `column` or one of its neighbours. The parser stops at the first or
/// second character of a value that is not JSON.
fn begins_near(line: &str, column: usize, word: &str) -> bool {
    let starts = column.saturating_sub(2)..=column;
    starts.into_iter().any(|at| line.as_bytes().get(at..).is_some_and(|rest| rest.starts_with(word.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde::de::IgnoredAny;

    #[test]
    fn causes_are_named() {
        #[derive(Debug, Deserialize)]
        struct Line {
            #[serde(rename = "text")]
            _text: String,
        }
        for (line, expected) in [
            (r#"{"text": "a", "score": NaN}"#, "NaN is no JSON value; write null, or omit the key (column 24)"),
            (r#"{"text": NaN}"#, "NaN is no JSON value"),
            (r#"{"text": "a", "x": [1, Infinity]}"#, "Infinity is no JSON value"),
            (r#"{"text": "a", "x": -Infinity}"#, "-Infinity is no JSON value"),
            (r#"{"text": "hi \ud83d there"}"#, "a lone surrogate, such as \\ud83d, is no character; remove it"),
            (r#"{"text": "\ud83d"}"#, "a lone surrogate"),
            (r#"{"text": "\udc00 a"}"#, "a lone surrogate"),
            (r#"{"text": "\ud83d\u0041"}"#, "a lone surrogate"),
            (r#"{"text": "NaN" 5}"#, "expected `,` or `}`"),
        ] {
            let error = serde_json::from_str::<Line>(line).unwrap_err();
            let found = reason(line, &error);
            assert!(found.starts_with(expected), "{line}: {found}");
        }
        let error = serde_json::from_str::<IgnoredAny>("{\"a\": -Infinity}").unwrap_err();
        assert!(reason("{\"a\": -Infinity}", &error).starts_with("-Infinity is no JSON value"));
    }
}
