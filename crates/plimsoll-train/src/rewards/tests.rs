//! Tests of the built-in rewards, and of several rewards together.

use super::testing::{Sample, open, score};
use super::{Rewards, weighted_sum};
use plimsoll_core::{Exit, Failure};
use serde_json::{Value, json};
use std::fs;
use std::time::Duration;

/// Computes a reward of a text with columns.
fn try_reward(spec: &str, text: &str, columns: Value) -> Result<f64, Failure> {
    Ok(score(&mut open(&[spec]), &[Sample::new(text, columns)])?[0].expect("built-in rewards have an opinion"))
}

fn reward(spec: &str, text: &str, columns: Value) -> f64 {
    try_reward(spec, text, columns).unwrap()
}

#[test]
fn exact_match_ignores_white_space_at_ends() {
    let cases = [
        ("4", json!("4"), 1.0),
        (" \n4\u{a0}", json!("4"), 1.0),
        ("4", json!(" 4 "), 1.0),
        ("4", json!(4), 1.0),
        ("-0.5", json!(-0.5), 1.0),
        ("true", json!(true), 1.0),
        ("", json!(""), 1.0),
        ("größer 数据 😀", json!("größer 数据 😀"), 1.0),
        ("e\u{301}", json!("é"), 0.0),
        ("4.0", json!(4), 0.0),
        ("a  b", json!("a b"), 0.0),
        ("the answer is 4", json!("4"), 0.0),
        ("", json!("4"), 0.0),
    ];
    for (text, answer, expected) in cases {
        assert_eq!(reward("exact_match", text, json!({"answer": answer})), expected, "{text:?}, {answer}");
        assert_eq!(reward("exact_match:gold", text, json!({"answer": "no", "gold": answer})), expected);
    }
}

#[test]
fn unusable_column_is_named() {
    let columns = json!({"question": "2+2?", "gold": null, "list": ["4"], "object": {}, "text": "four"});
    for (spec, problem) in [
        ("exact_match", "key `answer` of a record is missing"),
        ("exact_match:gold", "key `gold` of a record is null"),
        ("exact_match:list", "key `list` of a record holds a list"),
        ("exact_match:object", "key `object` of a record holds an object"),
        ("numeric", "key `answer` of a record is missing"),
        ("numeric:gold", "key `gold` of a record is null"),
        ("numeric:text", "key `text` of a record holds \"four\", expected a number"),
        ("json_schema", "key `schema` of a record is missing"),
    ] {
        let failure = try_reward(spec, "4", columns.clone()).unwrap_err();
        assert_eq!(failure.exit, Exit::Input);
        assert!(failure.message.starts_with(&format!("reward {spec}: {problem}")), "{failure}");
        let has_keys = failure.message.contains("`question`, `gold`, `list`, `object`, `text`");
        assert_eq!(has_keys, problem.contains("missing") || problem.contains("null"), "{failure}");
    }
    let failure = try_reward("exact_match", "4", json!({})).unwrap_err();
    assert!(failure.message.ends_with("the record has no keys"), "{failure}");
}

#[test]
fn numeric_compares_last_numbers() {
    let cases = [
        ("So there are 1,234 eggs.", json!("12 * 100 + 34\n#### 1234"), 1.0),
        ("#### $18.00", json!(18), 1.0),
        ("100 %", json!(100.0), 1.0),
        ("It is 5, not 4", json!(5), 0.0),
        ("five", json!(5), 0.0),
        ("", json!(0), 0.0),
        ("10000000000000000000000000000000000000001", json!("10000000000000000000000000000000000000002"), 0.0),
        ("1e400", json!("1e400"), 1.0),
        ("-3", json!(3), 0.0),
    ];
    for (text, answer, expected) in cases {
        assert_eq!(reward("numeric", text, json!({"answer": answer})), expected, "{text:?}, {answer}");
    }
}

#[test]
fn regex_is_searched_in_text() {
    for (pattern, text, expected) in [
        (r"\bprime\b", "a prime number", 1.0),
        (r"\bprime\b", "primes", 0.0),
        ("^$", "", 1.0),
        (r"(?s)^<a>.*</a>$", "<a>x\ny</a>", 1.0),
        (r"(?<!\d)7(?!\d)", "17 70 7", 1.0),
        (r"(?<!\d)7(?!\d)", "17 70 77", 0.0),
        (r"^\p{Lu}\p{Ll}+$", "Größe", 1.0),
    ] {
        assert_eq!(reward(&format!("regex:{pattern}"), text, json!({})), expected, "{pattern} in {text:?}");
    }
}

#[test]
fn catastrophic_pattern_counts_zero_and_warns() {
    let mut rewards = open(&["regex:(?i)(a|b|ab)*(?=c)"]);
    let samples = [&"ab".repeat(100), "abc"].map(|text| Sample::new(text, json!({})));
    assert_eq!(score(&mut rewards, &samples).unwrap(), [Some(0.0), Some(1.0)]);
    let warnings = rewards.warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("1 completion counted 0"), "{warnings:?}");
    assert!(rewards.warnings().is_empty());
}

#[test]
fn think_answer_form_has_each_tag_once() {
    let good = ["<think>a</think><answer>b</answer>", "\n<think>\n1 < 2\n</think>\n\n<answer>数</answer> "];
    let empty = "<think></think><answer></answer>";
    for text in good.into_iter().chain([empty]) {
        assert_eq!(reward("format_think_answer", text, json!({})), 1.0, "{text}");
    }
    for text in [
        "",
        "<answer>b</answer>",
        "<think>a</think>b",
        "a<think>a</think><answer>b</answer>",
        "<think>a</think>and<answer>b</answer>",
        "<think>a</think><answer>b</answer>.",
        "<answer>b</answer><think>a</think>",
        "<think>a<think>a</think><answer>b</answer>",
        "<think>a</think></think><answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a<answer></think><answer>b</answer>",
        "<think>a</think><answer>b",
        "<Think>a</Think><answer>b</answer>",
        "a</think><answer>b</answer>",
    ] {
        assert_eq!(reward("format_think_answer", text, json!({})), 0.0, "{text}");
    }
}

#[test]
fn opened_think_tag_is_absent_from_text() {
    let [without, with] = ["a</think><answer>b</answer>", "<think>a</think><answer>b</answer>"];
    assert_eq!(reward("format_think_answer:opened", without, json!({})), 1.0);
    assert_eq!(reward("format_think_answer:opened", with, json!({})), 0.0);
    let messages = json!([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\n"}]);
    for prompt in [json!("2+2? <think>"), messages] {
        let samples = [without, with].map(|text| Sample { prompt: prompt.clone(), ..Sample::new(text, json!({})) });
        let scores = score(&mut open(&["format_think_answer"]), &samples).unwrap();
        assert_eq!(scores, [Some(1.0), Some(0.0)], "{prompt}");
    }
}

#[test]
fn length_penalty_grows_to_minus_one() {
    for (count, expected) in [(0, 0.0), (4, 0.0), (5, -0.25), (7, -0.75), (8, -1.0), (100_000, -1.0)] {
        let sample = Sample { tokens: vec![7; count], ..Sample::new("a", json!({})) };
        let scores = score(&mut open(&["length_penalty:4"]), &[sample]).unwrap();
        assert_eq!(scores, [Some(expected)], "{count} tokens");
        assert!(count > 4 || scores[0].unwrap().is_sign_positive());
    }
}

#[test]
fn text_satisfies_schema_of_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("schema.json");
    let schema = json!({"type": "object", "required": ["name"], "properties": {
        "name": {"type": "string", "pattern": "^\\p{Lu}"}, "age": {"type": "integer", "minimum": 0}}});
    fs::write(&file, schema.to_string()).unwrap();
    let spec = format!("json_schema:{}", file.display());
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    for (text, expected) in [
        (" {\"name\": \"Ö\", \"age\": 3} ", 1.0),
        ("{\"name\": \"Ö\", \"age\": -3}", 0.0),
        ("{\"name\": \"ö\"}", 0.0),
        ("{\"name\": \"Ö\"} done", 0.0),
        ("```json\n{\"name\": \"Ö\"}\n```", 0.0),
        ("{\"name\": \"Ö\", \"age\": 1e999}", 0.0),
        ("", 0.0),
        (&deep, 0.0),
    ] {
        assert_eq!(reward(&spec, text, json!({})), expected, "{text:.60}");
    }
}

#[test]
fn schema_of_each_record_is_used() {
    let schemas = [json!({"type": "number"}), json!("{\"type\": \"string\"}"), json!(true), json!(false)];
    let samples: Vec<_> = schemas.map(|schema| Sample::new("\"a\"", json!({"schema": schema}))).into();
    let scores = score(&mut open(&["json_schema"]), &samples).unwrap();
    assert_eq!(scores, [Some(0.0), Some(1.0), Some(1.0), Some(0.0)]);
}

#[test]
fn invalid_schema_is_refused_with_its_place() {
    let external = json!({"$ref": "https://example.com/schema.json"});
    for schema in [json!({"type": "strng"}), json!(5), json!("{"), external.clone()] {
        let failure = try_reward("json_schema", "1", json!({"schema": schema})).unwrap_err();
        let starts = failure.message.starts_with("reward json_schema: `schema` of a record: it is not");
        assert!(starts && failure.exit == Exit::Input, "{failure}");
    }
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in [("a.json", "{"), ("b.json", "{\"type\": 1}"), ("c.json", &*external.to_string())] {
        fs::write(folder.path().join(name), content).unwrap();
        let spec = format!("json_schema:{}", folder.path().join(name).display()).parse().unwrap();
        let failure = Rewards::open(&[spec], &[], Duration::MAX).map(|_| ()).unwrap_err();
        assert!(failure.message.contains(name), "{failure}");
    }
    let missing = "json_schema:none/d.json".parse().unwrap();
    let failure = Rewards::open(&[missing], &[], Duration::MAX).map(|_| ()).unwrap_err();
    assert!(failure.message.contains("none/d.json"), "{failure}");
}

#[test]
fn each_completion_has_one_entry_per_reward() {
    let mut rewards = open(&["numeric", "length_penalty:2", "exact_match"]);
    assert_eq!(rewards.names(), ["numeric", "length_penalty:2", "exact_match"]);
    assert_eq!(rewards.weights(), [1.0; 3]);
    let samples = [Sample::new("It is 4", json!({"answer": 4})), Sample::new("4", json!({"answer": "4"}))];
    let completions = samples.each_ref().map(Sample::completion);
    let scores = rewards.score(&completions, &[]).unwrap();
    assert_eq!(scores, [[Some(1.0), Some(-0.5), Some(0.0)], [Some(1.0), Some(-0.5), Some(1.0)]]);
    assert!(rewards.score(&[], &[]).unwrap().is_empty());
}

#[test]
fn inconsistent_rewards_are_refused() {
    let open = |specs: &[&str], weights: &[f64]| {
        let specs: Vec<_> = specs.iter().map(|spec| spec.parse().unwrap()).collect();
        Rewards::open(&specs, weights, Duration::MAX).map(|rewards| rewards.weights().to_vec())
    };
    assert_eq!(open(&["numeric", "exact_match"], &[0.5, -2.0]), Ok(vec![0.5, -2.0]));
    for (specs, weights, problem) in [
        (&[] as &[&str], &[] as &[f64], "no reward"),
        (&["numeric", "numeric:answer"], &[], "reward numeric occurs twice"),
        (&["numeric"], &[1.0, 2.0], "2 weights for 1 reward"),
        (&["numeric", "exact_match"], &[1.0], "1 weight for 2 rewards"),
        (&["numeric"], &[f64::NAN], "weight NaN"),
        (&["numeric"], &[f64::INFINITY], "weight inf"),
    ] {
        let failure = open(specs, weights).unwrap_err();
        assert!(failure.exit == Exit::Input && failure.message.contains(problem), "{failure}");
    }
}

#[test]
fn weighted_sum_skips_missing_opinions() {
    assert_eq!(weighted_sum(&[Some(1.0), None, Some(0.5)], &[2.0, 10.0, -1.0]), Some(1.5));
    assert_eq!(weighted_sum(&[None, Some(0.0)], &[1.0, 1.0]), Some(0.0));
    assert_eq!(weighted_sum(&[None, None], &[1.0, 1.0]), None);
    assert_eq!(weighted_sum(&[Some(1.0), None, Some(3.0)], &[]), Some(4.0));
    assert_eq!(weighted_sum(&[], &[]), None);
}
