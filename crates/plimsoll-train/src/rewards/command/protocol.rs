//! Lines between Plimsoll and a command: requests as JSON objects, replies as numbers.

use super::super::Completion;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

const PROMPT: &str = "prompt";
const COMPLETION: &str = "completion";
const COMPLETION_IDS: &str = "completion_ids";
/// Key of the reward in a reply that is an object.
const REWARD: &str = "reward";

/// A completion as a JSON object: the prompt, the text, its tokens, and all other keys of the record.
struct Request<'a>(&'a Completion<'a>);

impl Serialize for Request<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Request(completion) = self;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(PROMPT, completion.prompt)?;
        map.serialize_entry(COMPLETION, completion.text)?;
        map.serialize_entry(COMPLETION_IDS, completion.tokens)?;
        for (key, value) in completion.columns {
            if ![PROMPT, COMPLETION, COMPLETION_IDS].contains(&key.as_str()) {
                map.serialize_entry(key, value)?;
            }
        }
        map.end()
    }
}

/// Returns the line that asks for the reward of a completion.
pub(super) fn request_line(completion: &Completion) -> Vec<u8> {
    let mut line = serde_json::to_vec(&Request(completion)).expect("texts, numbers and JSON values have a JSON form");
    line.push(b'\n');
    line
}

/// Parses a reply: a finite number, null for no opinion, or an object with one of these under the key `reward`. Returns
/// `None` for any other line.
pub(super) fn parse_reply(line: &[u8]) -> Option<Option<f64>> {
    let reply: Value = serde_json::from_slice(line).ok()?;
    let reward = match &reply {
        Value::Object(keys) => keys.get(REWARD)?,
        reward => reward,
    };
    match reward {
        Value::Null => Some(None),
        reward => reward.as_f64().filter(|reward| reward.is_finite()).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn request_has_completion_and_columns() {
        let columns = json!({"answer": "4", "completion": "old", "level": [1, null]});
        let (prompt, Some(columns)) = (json!([{"role": "user", "content": "2+2?"}]), columns.as_object()) else {
            unreachable!()
        };
        let completion = Completion { prompt: &prompt, text: "a\n\"ü\u{2028}", tokens: &[1, 2], columns };
        let line = String::from_utf8(request_line(&completion)).unwrap();
        assert_eq!(
            line,
            "{\"prompt\":[{\"role\":\"user\",\"content\":\"2+2?\"}],\"completion\":\"a\\n\\\"ü\u{2028}\",\
             \"completion_ids\":[1,2],\"answer\":\"4\",\"level\":[1,null]}\n"
        );
    }

    #[test]
    fn replies_are_numbers_or_null() {
        let valid = [("1", Some(1.0)), (" -0.5\r", Some(-0.5)), ("1e300", Some(1e300)), ("null", None)];
        for (line, reward) in valid {
            assert_eq!(parse_reply(line.as_bytes()), Some(reward), "{line}");
            let object = format!("{{\"note\": [\"a\"], \"reward\": {line}}}");
            assert_eq!(parse_reply(object.as_bytes()), Some(reward), "{object}");
        }
        let invalid = ["", "NaN", "Infinity", "1e999", "true", "\"1\"", "[1]", "{}", "1 2", "1,", "{\"reward\": true}"];
        for line in invalid {
            assert_eq!(parse_reply(line.as_bytes()), None, "{line}");
        }
        assert_eq!(parse_reply(b"\xff"), None);
    }
}
