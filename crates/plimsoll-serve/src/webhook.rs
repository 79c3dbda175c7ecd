//! The client of a webhook (`watch.webhook`): posts the messages of a run, each at most twice.

use crate::remote::direct_agent;
use plimsoll_core::Failure;
use plimsoll_watch::logging::message::{WebhookEvent, WebhookMessage};
use std::thread;
use std::time::Duration;
use ureq::Agent;
use ureq::http::Uri;

/// Most time for one attempt to post a message.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Time before the only repetition of an attempt.
const PAUSE: Duration = Duration::from_millis(500);
/// Most bytes of an answer. Its content is not used; a connection with more is closed.
const MAX_RESPONSE_BYTES: u64 = 64 << 10;

/// A webhook.
pub struct Webhook {
    url: String,
    /// Host and port of the URL. Messages show no more of it, because a path may hold a secret.
    host: String,
    agent: Agent,
    /// Whether the newest message could not be posted.
    is_failing: bool,
    /// Whether the user was told of a message that could not be posted.
    has_warned: bool,
}

impl Webhook {
    /// Returns the webhook at a URL, without a connection to it.
    ///
    /// # Errors
    /// The URL does not begin with `http://`, or names no host.
    pub fn new(url: &str) -> Result<Webhook, Failure> {
        let uri = url.parse::<Uri>().ok().filter(|uri| uri.scheme_str() == Some("http"));
        let Some(host) = uri.as_ref().and_then(Uri::authority).map(ToString::to_string) else {
            let failure = Failure::input("watch.webhook: not a URL of the form http://HOST[:PORT][/PATH]");
            return Err(failure.hint("watch.webhook = \"http://127.0.0.1:8080/plimsoll\""));
        };
        let (url, agent) = (url.to_owned(), direct_agent(TIMEOUT));
        Ok(Webhook { url, host, agent, is_failing: false, has_warned: false })
    }

    /// Posts a message, and once more if that fails. While the webhook fails, messages about recoveries are left out.
    ///
    /// # Errors
    /// The first message that could not be posted, as a warning.
    pub fn take(&mut self, message: &WebhookMessage) -> Result<(), String> {
        let is_needed = message.event.is_last() || matches!(message.event, WebhookEvent::Start { .. });
        if self.is_failing && !is_needed {
            return Ok(());
        }
        let posted = self.post(message).or_else(|_| {
            thread::sleep(PAUSE);
            self.post(message)
        });
        self.is_failing = posted.is_err();
        match posted {
            Err(reason) if !self.has_warned => {
                self.has_warned = true;
                Err(format!("the webhook at {} does not take messages: {reason}; the run goes on", self.host))
            }
            _ => Ok(()),
        }
    }

    fn post(&self, message: &WebhookMessage) -> Result<(), String> {
        let body = serde_json::to_vec(message).expect("plain data has a JSON form");
        let request = self.agent.post(&self.url).header("Content-Type", "application/json");
        let mut response = request.send(&body[..]).map_err(|error| error.to_string())?;
        let status = response.status();
        // Reading the answer to its end lets the next message use the same connection.
        let _ = response.body_mut().with_config().limit(MAX_RESPONSE_BYTES).read_to_vec();
        match status.is_success() {
            true => Ok(()),
            false => Err(format!("status {}", status.as_u16())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_watch::logging::message::Messages;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::path::Path;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Instant;

    /// A request as a server receives it.
    struct Request {
        line: String,
        body: String,
    }

    fn read_request(stream: &TcpStream) -> Option<Request> {
        let mut reader = BufReader::new(stream);
        let (mut line, mut length) = (String::new(), 0);
        reader.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok()?;
            let header = header.trim().to_lowercase();
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse().ok()?;
            }
            if header.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        Some(Request { line: line.trim().to_owned(), body: String::from_utf8(body).ok()? })
    }

    /// Starts a server that answers its requests with these heads, one connection each, and then closes. Returns its
    /// address and the requests.
    fn server(answers: Vec<&'static str>) -> (String, Receiver<Request>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sender, requests) = channel();
        thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                if let Some(request) = read_request(&stream) {
                    let _ = sender.send(request);
                }
                let _ =
                    stream.write_all(format!("{answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").as_bytes());
            }
        });
        (address, requests)
    }

    fn end() -> WebhookMessage {
        Messages::new(Path::new("runs/sums")).of_outcome(Err(&Failure::stopped("no memory")))
    }

    #[test]
    fn only_plain_http_urls_are_taken() {
        for url in ["http://127.0.0.1:9/a?b=1", "http://localhost", "http://[::1]:8080/x"] {
            assert!(Webhook::new(url).is_ok(), "{url}");
        }
        for url in ["https://a/b", "ftp://a", "http://", "a", "http://a b", ""] {
            assert!(Webhook::new(url).is_err(), "{url}");
        }
    }

    #[test]
    fn message_is_posted_to_path_and_query() {
        let (address, requests) = server(vec!["HTTP/1.1 204 No Content"]);
        let mut webhook = Webhook::new(&format!("http://{address}/hook?key=1")).unwrap();
        assert_eq!(webhook.take(&end()), Ok(()));
        let request = requests.recv().unwrap();
        assert_eq!(request.line, "POST /hook?key=1 HTTP/1.1");
        let received: WebhookMessage = serde_json::from_str(&request.body).unwrap();
        assert_eq!((received.run, received.event.is_last()), ("sums".to_owned(), true));
    }

    #[test]
    fn failed_message_is_repeated_once() {
        let (address, requests) = server(vec!["HTTP/1.1 503 Busy", "HTTP/1.1 200 OK"]);
        let mut webhook = Webhook::new(&format!("http://{address}/")).unwrap();
        assert_eq!(webhook.take(&end()), Ok(()));
        assert_eq!(requests.iter().count(), 2);
    }

    #[test]
    fn failing_webhook_is_told_once_without_its_path() {
        let (address, requests) = server(vec!["HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/"; 4]);
        let mut webhook = Webhook::new(&format!("http://{address}/secret")).unwrap();
        let warning = webhook.take(&end()).unwrap_err();
        assert!(warning.contains(&address) && warning.contains("status 302"), "{warning}");
        assert!(!warning.contains("secret"), "{warning}");
        assert_eq!(webhook.take(&end()), Ok(()), "told once");
        assert_eq!(requests.iter().count(), 4, "two messages, twice each, and no redirection followed");
    }

    #[test]
    fn silent_server_costs_two_time_limits_at_most() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut webhook = Webhook::new(&format!("http://{}/", listener.local_addr().unwrap())).unwrap();
        let began = Instant::now();
        assert!(webhook.take(&end()).is_err());
        assert!(began.elapsed() < 2 * TIMEOUT + PAUSE + Duration::from_secs(5), "{:?}", began.elapsed());
    }
}
