//! The forms in which a snapshot is served.

use super::client::{Served, full, numbered};
use plimsoll_core::Failure;
use plimsoll_watch::view::lines;
use serde_json::Value;
use std::time::Duration;

#[test]
fn all_forms_show_the_same_numbers() {
    let served = Served::local(Duration::from_secs(600));
    let answer = served.get("/api/snapshot", &[]);
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    let printed: Value = serde_json::from_str(&lines::json(&numbered(1))).unwrap();
    assert_eq!(answer.json(), printed);
    let mut expected = full();
    expected["at"] = 1.0.into();
    assert_eq!(printed, expected, "no key is lost");
    assert_eq!(served.events().next(), ("snapshot".to_owned(), printed));
    let metrics = served.get("/metrics", &[]);
    assert!(metrics.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    for line in ["plimsoll_run_loss 0.699", "plimsoll_device_held_bytes{device=\"cuda:0\",rank=\"0\"} 4194304.0"] {
        assert!(metrics.body.lines().any(|other| other == line), "{line}: {}", metrics.body);
    }
    assert_eq!(served.readings(), 1, "one moment");
    assert_eq!(served.get("/healthz", &[]).body, "ok\n");
}

#[test]
fn page_comes_whole_and_with_its_policy() {
    let served = Served::local(Duration::from_secs(1));
    let page = served.get("/", &[]);
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    for part in ["<title>Plimsoll</title>", "EventSource", "--paper", "</html>"] {
        assert!(page.body.contains(part), "{part}");
    }
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(served.readings(), 0, "the page alone takes no snapshot");
}

#[test]
fn events_follow_the_snapshots() {
    let served = Served::local(Duration::from_millis(20));
    let mut events = served.events();
    let numbers: Vec<f64> = (0..5).map(|_| events.next().1["at"].as_f64().unwrap()).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
}

#[test]
fn failure_reaches_all_clients() {
    let take = |_| Err(Failure::input("events.jsonl cannot be read").hint("look there"));
    let served = Served::start("127.0.0.1:0", Duration::from_secs(600), take);
    for path in ["/api/snapshot", "/metrics"] {
        let answer = served.get(path, &[]);
        assert_eq!(answer.status, 503);
        assert_eq!(answer.json()["error"]["message"], "events.jsonl cannot be read");
    }
    let (name, data) = served.events().next();
    assert_eq!((name.as_str(), &data["error"]["hints"][0]), ("failure", &"look there".into()));
}
