//! A quick parser for the lines of steps, which are nearly all lines of a log. A view that follows a run of many steps a
//! second spends most of its time here.

use plimsoll_core::{Bytes, Event, Record};
use std::str::FromStr;

/// Parses the line of a step without measured memory, with its fields in the order in which runs write them. Takes less
/// time than [`Record::from_line`]. Returns `None` for all other lines, which may still be records.
pub(super) fn parse(line: &[u8]) -> Option<Record> {
    let mut fields = Fields(str::from_utf8(line).ok()?);
    let version = fields.next("{\"version\":")?;
    let time = fields.next(",\"time\":")?;
    let step = fields.next(",\"event\":\"step\",\"step\":")?;
    let loss = fields.next(",\"loss\":")?;
    let norm = fields.next(",\"norm\":")?;
    let learning_rate = fields.next(",\"learning_rate\":")?;
    let tokens = fields.next(",\"tokens\":")?;
    let labelled_tokens = fields.next(",\"labelled_tokens\":")?;
    let seconds = fields.next(",\"seconds\":")?;
    let bytes = Bytes(fields.next(",\"bytes\":")?);
    let event = Event::Step { step, loss, norm, learning_rate, tokens, labelled_tokens, seconds, bytes, memory: None };
    // JSON has no infinite numbers, also none that are written as `1e999`.
    let is_finite = [time, loss, norm, learning_rate, seconds].into_iter().all(f64::is_finite);
    (fields.0 == "}" && is_finite).then_some(Record { version, time, event })
}

/// The rest of a line.
struct Fields<'l>(&'l str);

impl Fields<'_> {
    /// Takes a number after `name`; `None` if the rest of the line does not begin so.
    fn next<T: FromStr>(&mut self, name: &str) -> Option<T> {
        let rest = self.0.strip_prefix(name)?;
        let length = rest.bytes().position(|byte| !matches!(byte, b'0'..=b'9' | b'.' | b'-' | b'+' | b'e'))?;
        let (number, rest) = rest.split_at(length);
        self.0 = rest;
        number.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::HeldMemory;

    fn record(numbers: [f64; 5], counts: [u64; 4], memory: Option<Vec<HeldMemory>>) -> Record {
        let [time, loss, norm, learning_rate, seconds] = numbers;
        let [step, tokens, labelled_tokens, bytes] = counts;
        let bytes = Bytes(bytes);
        let event = Event::Step { step, loss, norm, learning_rate, tokens, labelled_tokens, seconds, bytes, memory };
        Record { version: 1, time, event }
    }

    #[test]
    fn parsed_step_equals_that_of_serde() {
        let mut state = 1u64;
        // Bits of a linear congruential generator, of which the high ones are mixed best.
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state ^ state >> 32
        };
        let mut parsed = 0;
        for _ in 0..10_000 {
            let numbers = [(); 5].map(|()| f64::from_bits(random()));
            let record = record(numbers, [(); 4].map(|()| random()), None);
            let line = serde_json::to_string(&record).unwrap();
            let found = parse(line.as_bytes());
            // JSON has no infinite numbers: those lines are left to the other parser.
            let is_finite = numbers.iter().all(|number| number.is_finite());
            assert_eq!(found, is_finite.then_some(record), "{line}");
            assert!(found.is_none() || found == Record::from_line(line.as_bytes()).ok(), "{line}");
            parsed += usize::from(found.is_some());
        }
        assert!(parsed > 9_000, "{parsed}");
    }

    #[test]
    fn other_lines_are_left_to_the_other_parser() {
        let held =
            HeldMemory { device: "cpu".to_owned(), held_bytes: Bytes(1), peak_bytes: None, arena_by_category: None };
        let line = |memory| serde_json::to_string(&record([1.5; 5], [3; 4], memory)).unwrap();
        let step = line(None);
        assert!(parse(step.as_bytes()).is_some());
        let others = [
            line(Some(vec![held])),
            step.replace("\"step\":3", "\"step\":3,\"more\":1"),
            step.replace("\"version\":1,", ""),
            step.replace("\"step\":3", "\"step\":-3"),
            step.replace("1.5", "NaN"),
            step.replace("1.5", "1e999"),
            step.replace("1.5", ""),
            step[..step.len() - 1].to_owned(),
            step.clone() + " ",
            String::new(),
        ];
        for other in others {
            assert_eq!(parse(other.as_bytes()), None, "{other}");
        }
    }
}
