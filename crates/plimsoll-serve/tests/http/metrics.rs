//! The text for Prometheus, read by a strict parser.

use super::client::{Served, full};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Samples by name and labels.
type Samples = BTreeMap<(String, BTreeMap<String, String>), f64>;

/// Serves a snapshot, and returns the samples of its metrics.
fn samples(snapshot: &Value) -> Samples {
    let snapshot = serde_json::from_value(snapshot.clone()).unwrap();
    let served = Served::start("127.0.0.1:0", Duration::from_secs(600), move |_| Ok(Clone::clone(&snapshot)));
    parse(&served.get("/metrics", &[]).body)
}

/// Parses the OpenMetrics text format. Panics at text that is not valid.
fn parse(text: &str) -> Samples {
    let body = text.strip_suffix("# EOF\n").unwrap_or_else(|| panic!("no end: {text}"));
    let (mut samples, mut types, mut helps) = (Samples::new(), BTreeSet::new(), BTreeSet::new());
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(kind == "gauge" && types.insert(name.to_owned()), "{line}");
            continue;
        }
        if let Some(rest) = line.strip_prefix("# HELP ") {
            assert!(helps.insert(rest.split(' ').next().unwrap().to_owned()), "{line}");
            continue;
        }
        let end = line.find(['{', ' ']).unwrap();
        let (name, rest) = line.split_at(end);
        assert!(is_name(name) && types.contains(name) && helps.contains(name), "{line}");
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => parse_labels(rest),
            None => (BTreeMap::new(), rest),
        };
        let value: f64 = value.strip_prefix(' ').unwrap().parse().unwrap();
        assert!(value.is_finite() && samples.insert((name.to_owned(), labels), value).is_none(), "{line}");
    }
    samples
}

fn is_name(name: &str) -> bool {
    name.starts_with("plimsoll_") && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
}

/// Parses labels up to the closing brace, and returns them with the rest of the line.
fn parse_labels(mut rest: &str) -> (BTreeMap<String, String>, &str) {
    let mut labels = BTreeMap::new();
    loop {
        let (name, quoted) = rest.split_once("=\"").unwrap();
        assert!(name.chars().all(|c| c.is_ascii_lowercase()), "{name}");
        let (mut value, mut chars) = (String::new(), quoted.char_indices());
        let end = loop {
            match chars.next().unwrap() {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next().unwrap().1 {
                    'n' => '\n',
                    c @ ('\\' | '"') => c,
                    other => panic!("escape {other}"),
                }),
                (_, c) => value.push(c),
            }
        };
        assert!(labels.insert(name.to_owned(), value).is_none(), "{name}");
        match quoted[end + 1..].split_at(1) {
            (",", more) => rest = more,
            ("}", more) => return (labels, more),
            other => panic!("{other:?}"),
        }
    }
}

fn value(samples: &Samples, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    samples.get(&(name.to_owned(), labels)).copied()
}

#[test]
fn samples_are_the_snapshot_in_base_units() {
    let samples = samples(&full());
    let (gpu, rank) = (("device", "cuda:0"), ("rank", "0"));
    for (name, labels, expected) in [
        ("plimsoll_device_load_line_bytes", &[gpu, rank][..], f64::from(7 << 20)),
        ("plimsoll_device_predicted_peak_bytes", &[gpu, rank], f64::from(6 << 20)),
        ("plimsoll_device_measured_peak_bytes", &[gpu, rank], f64::from(5 << 20)),
        ("plimsoll_device_planned_bytes", &[gpu, rank, ("category", "gradient")], f64::from(3 << 19)),
        ("plimsoll_device_measured_bytes", &[gpu, rank, ("category", "workspace")], f64::from(3 << 15)),
        ("plimsoll_device_planned_peak_bytes", &[gpu, rank, ("phase", "backward")], f64::from(9 << 18)),
        ("plimsoll_device_utilization_ratio", &[gpu, rank], 0.75),
        ("plimsoll_device_clock_hertz", &[gpu, rank], 1.5e9),
        ("plimsoll_host_free_bytes", &[], f64::from(12 << 20)),
        ("plimsoll_cpu_load_ratio", &[], 0.5),
        ("plimsoll_run_state", &[("state", "running")], 1.0),
        ("plimsoll_run_state", &[("state", "died")], 0.0),
        ("plimsoll_run_tokens_per_second", &[], 55_900.0),
        ("plimsoll_run_eta_seconds", &[], 13.2),
        ("plimsoll_warnings", &[], 1.0),
    ] {
        assert_eq!(value(&samples, name, labels), Some(expected), "{name} {labels:?}");
    }
}

#[test]
fn unknown_figures_are_absent() {
    let mut unknown = full();
    unknown["run"] = Value::Null;
    unknown["cpu"]["load"] = Value::Null;
    for key in ["load_line_bytes", "utilization", "power_w", "charges_bytes"] {
        unknown["devices"][0][key] = Value::Null;
    }
    let samples = samples(&unknown);
    let names: BTreeSet<&str> = samples.keys().map(|(name, _)| name.as_str()).collect();
    assert!(!names.iter().any(|name| name.starts_with("plimsoll_run_")), "{names:?}");
    for absent in ["cpu_load_ratio", "device_load_line_bytes", "device_utilization_ratio", "device_charges_bytes"] {
        assert!(!names.contains(&*format!("plimsoll_{absent}")), "{absent}");
    }
    assert!(names.contains("plimsoll_device_total_bytes") && names.contains("plimsoll_host_free_bytes"));
}

#[test]
fn strange_devices_keep_the_text_valid_and_short() {
    let mut strange = full();
    let device = strange["devices"][0].clone();
    let names = ["a\"b\\c\nd", "\u{1b}[31m", &"n".repeat(10_000), "}", "ü", ""];
    let named = |name: &str| {
        let mut device = device.clone();
        device["name"] = name.into();
        device
    };
    let many = (0..1000).map(|number| named(&format!("virtual:{number}")));
    strange["devices"] = names.iter().map(|name| named(name)).chain(many).collect();
    strange["run"]["loss"] = json!(1e300);
    let samples = samples(&strange);
    let devices: BTreeSet<&str> =
        samples.keys().filter_map(|(_, labels)| labels.get("device")).map(|name| &**name).collect();
    assert_eq!(devices.len(), 64);
    assert!(devices.iter().all(|name| name.chars().count() <= 200 && !name.contains(char::is_control)), "{devices:?}");
    assert!(devices.contains("a\"b\\c\\nd"), "{devices:?}");
}

#[test]
fn dashboard_names_existing_metrics() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/grafana.json");
    let text = fs::read_to_string(path).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    assert!(dashboard["panels"].as_array().is_some_and(|panels| panels.len() > 5));
    let known: BTreeSet<String> = samples(&full()).into_keys().map(|(name, _)| name).collect();
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let named: BTreeSet<&str> = words.filter(|word| word.starts_with("plimsoll_")).collect();
    assert!(named.len() > 10, "{named:?}");
    for name in named {
        assert!(known.contains(name), "{name} is in docs/grafana.json, and is no metric");
    }
}
