//! Requests that are refused, and the token.

use super::client::{Served, numbered};
use std::time::Duration;

fn served() -> Served {
    Served::local(Duration::from_secs(600))
}

/// Serves at all addresses of this machine, which needs a token.
fn served_to_all() -> Served {
    Served::start("0.0.0.0:0", Duration::from_secs(600), |number| Ok(numbered(number)))
}

const PATHS: [&str; 6] = ["/", "/api/snapshot", "/api/events", "/metrics", "/healthz", "/missing"];

#[test]
fn other_hosts_and_origins_are_refused() {
    let served = served();
    for host in ["evil.example", "10.0.0.5", "127.0.0.1.evil.example", ""] {
        let answer = served.request(&format!("GET /api/snapshot HTTP/1.1\r\nhost: {host}\r\n"), &[], "");
        assert_eq!(answer.status, 403, "{host}: {}", answer.body);
    }
    let answer = served.request("GET /api/snapshot HTTP/1.0\r\n", &[], "");
    assert_eq!(answer.status, 403, "no host");
    // The target of a request may name another host than its header.
    let absolute = "GET http://evil.example/api/snapshot HTTP/1.1\r\nhost: evil.example\r\n";
    assert_eq!(served.request(absolute, &[], "").status, 403);
    for origin in ["http://evil.example", "null", "https://localhost"] {
        assert_eq!(served.get("/api/events", &[&format!("origin: {origin}")]).status, 403, "{origin}");
    }
    let own = format!("origin: http://{}", served.address);
    assert_eq!(served.get("/api/snapshot", &[&own]).status, 200);
    assert_eq!(served.readings(), 1);
}

#[test]
fn only_known_paths_are_read() {
    let served = served();
    let paths =
        ["/missing", "/api", "/api/", "/api/snapshot/", "/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"];
    for path in paths.into_iter().chain(["/api/..%2f..%2fetc/passwd", "/run.toml", "/events.jsonl", "/\\..\\run.toml"])
    {
        let answer = served.get(path, &[]);
        assert_eq!((answer.status, answer.body.as_str()), (404, "no such page\n"), "{path}");
    }
    for method in ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "ODD"] {
        for path in ["/", "/api/snapshot", "/login"] {
            let head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", served.address);
            assert_eq!(served.request(&head, &[], "").status, 405, "{head}");
        }
    }
    assert_eq!(served.readings(), 0);
}

#[test]
fn other_machines_need_the_token() {
    let served = served_to_all();
    let wrong = "0".repeat(64);
    let bearer = format!("authorization: Bearer {wrong}");
    let cookie = format!("cookie: plimsoll_token_{}={wrong}", served.address.port());
    for path in PATHS {
        let in_url = format!("{path}?token={}", served.token);
        for (path, headers) in [(path, vec![]), (path, vec![&*bearer]), (path, vec![&*cookie]), (&in_url, vec![])] {
            let answer = served.get(path, &headers);
            assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")), "{path} {headers:?}");
            assert!(!answer.body.contains("runs/sums"), "{path}");
        }
    }
    assert!(served.get("/", &[]).body.contains("<form method=\"post\" action=\"/login\""));
    assert_eq!(served.readings(), 0);
    let right = format!("authorization: Bearer {}", served.token);
    assert_eq!(served.get("/api/snapshot", &[&right]).status, 200);
    assert_eq!(served.get("/missing", &[&right]).status, 404);
}

#[test]
fn form_of_the_token_sets_a_cookie() {
    let served = served_to_all();
    let head = format!("POST /login HTTP/1.1\r\nhost: {}\r\n", served.address);
    let send = |headers: &[&str], body: &str| {
        let length = format!("content-length: {}", body.len());
        served.request(&head, &[&[&*length], headers].concat(), body)
    };
    for wrong in ["", "token=", "token=0", "other=1", &format!("token={}0", served.token)] {
        let answer = send(&[], wrong);
        assert_eq!((answer.status, answer.header("set-cookie")), (401, None), "{wrong}");
    }
    assert_eq!(send(&[], &format!("token={}", "0".repeat(2000))).status, 413);
    let form = format!("token={}", served.token);
    assert_eq!(send(&["origin: http://evil.example"], &form).status, 403);
    let answer = send(&[&format!("origin: http://{}", served.address)], &form);
    assert_eq!((answer.status, answer.header("location")), (303, Some("/")));
    let cookie = answer.header("set-cookie").unwrap();
    assert!(cookie.contains("; HttpOnly") && cookie.contains("; SameSite=Strict"), "{cookie}");
    let pair = cookie.split(';').next().unwrap();
    let page = served.get("/", &[&format!("cookie: {pair}")]);
    assert!(page.status == 200 && page.body.contains("EventSource"));
}
