//! Requests to the hub: redirects, the token, repeats after errors that pass.

use super::error::HubError;
use super::settings::HubSettings;
use std::thread;
use std::time::Duration;
use ureq::http::{HeaderMap, Response, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

/// Longest time to connect to a host.
const CONNECT_SECONDS: u64 = 20;
/// Longest time without a byte.
const READ_SECONDS: u64 = 60;
/// Most redirects of one request.
const REDIRECTS_MAX: u32 = 10;
/// Tries of a request that fails by errors that may pass.
pub(super) const TRIES: u32 = 5;
/// Longest pause before another try that a host may ask for.
const PAUSE_SECONDS_MAX: u64 = 120;
/// Most bytes of the description of a repository.
const DESCRIPTION_BYTES_MAX: u64 = 256 << 20;
/// Most characters of a message of the hub that are repeated.
const MESSAGE_MAX: usize = 300;

/// A client of one hub.
pub(super) struct Client<'a> {
    settings: &'a HubSettings,
    agent: Agent,
}

/// A refusal by the hub.
pub(super) struct Refusal {
    pub(super) url: String,
    pub(super) status: u16,
    /// The hub's word for the reason, such as `GatedRepo`; empty if it gives none.
    pub(super) code: String,
    /// The hub's message; may be empty.
    pub(super) message: String,
}

/// Result of a request that reached a host.
pub(super) enum Reply {
    /// The requested content.
    Content(Response<Body>),
    /// A status from 400 on that another try would not change.
    Refused(Refusal),
}

/// Result of a single try.
enum Try {
    Done(Reply),
    /// Another try may succeed, after this pause if the host asks for one.
    Again(HubError, Option<Duration>),
}

impl<'a> Client<'a> {
    /// Creates a client. Opens no connection.
    ///
    /// # Errors
    /// Root certificates that the environment names and that cannot be read.
    pub(super) fn new(settings: &'a HubSettings) -> Result<Client<'a>, HubError> {
        let mut tls = TlsConfig::builder();
        if let Some(certificates) = named_certificates()? {
            tls = tls.root_certs(certificates);
        }
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .tls_config(tls.build())
            .user_agent(concat!("plimsoll/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(Duration::from_secs(CONNECT_SECONDS)))
            .timeout_recv_response(Some(Duration::from_secs(READ_SECONDS)))
            .timeout_per_read(Some(Duration::from_secs(READ_SECONDS)))
            .build();
        Ok(Client { settings, agent: config.new_agent() })
    }

    /// Requests a path of the hub, from the byte `first` on. Repeats the request after errors that may pass.
    ///
    /// # Errors
    /// A host that cannot be reached, takes no more requests or has a fault, or an answer against the protocol.
    pub(super) fn get(&self, path: &str, first: u64) -> Result<Reply, HubError> {
        let mut tries = 1;
        loop {
            match self.try_get(path, first)? {
                Try::Done(answer) => return Ok(answer),
                Try::Again(error, pause) => {
                    let pause = pause.unwrap_or_else(|| pause_after(tries));
                    if tries == TRIES || pause.as_secs() > PAUSE_SECONDS_MAX {
                        return Err(error);
                    }
                    thread::sleep(pause);
                }
            }
            tries += 1;
        }
    }

    fn try_get(&self, path: &str, first: u64) -> Result<Try, HubError> {
        let mut url = self.settings.address(path);
        for _ in 0..=REDIRECTS_MAX {
            let response = match self.send(&url, first) {
                Ok(response) => response,
                Err(error) => return unreachable(&url, error),
            };
            let status = response.status().as_u16();
            match status {
                301..=303 | 307 | 308 => url = self.redirected(&url, response.headers())?,
                429 => {
                    let seconds = header(response.headers(), "retry-after").trim().parse::<u64>().ok();
                    let has_token = self.settings.token.is_some();
                    let error = HubError::TooManyRequests { host: host(&url), seconds, has_token };
                    return Ok(Try::Again(error, seconds.map(Duration::from_secs)));
                }
                500.. => {
                    let Refusal { url, status, message, .. } = refusal(url, response);
                    return Ok(Try::Again(HubError::Status { url, status, message }, None));
                }
                400.. => return Ok(Try::Done(Reply::Refused(refusal(url, response)))),
                _ => return Ok(Try::Done(Reply::Content(response))),
            }
        }
        Err(HubError::BadReply { problem: format!("more than {REDIRECTS_MAX} redirects"), url: without_query(&url) })
    }

    /// Sends a request. Only the hub itself gets the token: a redirect may lead to another host.
    fn send(&self, url: &str, first: u64) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = self.settings.token.as_ref().filter(|_| is_same_origin(url, &self.settings.endpoint)) {
            request = request.header("Authorization", format!("Bearer {}", token.value));
        }
        if first > 0 {
            request = request.header("Range", format!("bytes={first}-"));
        }
        request.call()
    }

    /// Returns the address to which a host redirects a request to `url`.
    fn redirected(&self, url: &str, headers: &HeaderMap) -> Result<String, HubError> {
        let bad = |problem: &str| HubError::BadReply { url: without_query(url), problem: problem.to_owned() };
        let location = header(headers, "location");
        let uri: Uri = url.parse().map_err(|_| bad("an address that cannot be parsed"))?;
        let scheme = uri.scheme_str().unwrap_or("https");
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        if location.starts_with("https://") || location.starts_with("http://") && scheme == "http" {
            Ok(location.to_owned())
        } else if location.starts_with("//") {
            Ok(format!("{scheme}:{location}"))
        } else if location.starts_with('/') {
            Ok(format!("{scheme}://{authority}{location}"))
        } else {
            Err(bad("a redirect to no address, or to one without encryption"))
        }
    }

    /// Reads a description in JSON.
    ///
    /// # Errors
    /// As [`get`](Self::get), or a description that ends early or is too long.
    pub(super) fn get_description(&self, path: &str) -> Result<Result<Vec<u8>, Refusal>, HubError> {
        let mut response = match self.get(path, 0)? {
            Reply::Content(response) => response,
            Reply::Refused(refusal) => return Ok(Err(refusal)),
        };
        let read = response.body_mut().with_config().limit(DESCRIPTION_BYTES_MAX).read_to_vec();
        let url = self.settings.address(path);
        read.map(Ok).map_err(|error| HubError::Unreachable { host: host(&url), reason: error.to_string() })
    }
}

/// Returns the pause after a number of tries: a quarter of a second, doubled each time.
pub(super) fn pause_after(tries: u32) -> Duration {
    Duration::from_millis(250 << (tries - 1).min(6))
}

/// Sorts an error of a connection: another try may help unless the address or a certificate is wrong.
fn unreachable(url: &str, error: ureq::Error) -> Result<Try, HubError> {
    let passes = matches!(error, ureq::Error::Io(_) | ureq::Error::Timeout(_) | ureq::Error::Protocol(_));
    let is_refused = matches!(&error, ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused);
    let error = HubError::Unreachable { host: host(url), reason: error.to_string() };
    if passes && !is_refused { Ok(Try::Again(error, None)) } else { Err(error) }
}

/// Reads the reason of a refusal.
fn refusal(url: String, response: Response<Body>) -> Refusal {
    let headers = response.headers();
    let message: String = header(headers, "x-error-message").chars().take(MESSAGE_MAX).collect();
    let (status, code) = (response.status().as_u16(), header(headers, "x-error-code").to_owned());
    Refusal { url: without_query(&url), status, code, message }
}

/// Returns the value of a header; empty if it is absent or no text.
pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Returns the address without its query, which may hold the right to download the file.
fn without_query(url: &str) -> String {
    url.split('?').next().unwrap_or_default().to_owned()
}

/// Returns host and port of an address.
pub(super) fn host(url: &str) -> String {
    let uri: Option<Uri> = url.parse().ok();
    let authority = uri.as_ref().and_then(Uri::authority).map(|authority| authority.as_str());
    authority.map_or(url, |authority| authority.rsplit('@').next().unwrap_or_default()).to_owned()
}

/// Returns whether two addresses have the same scheme, host and port.
fn is_same_origin(a: &str, b: &str) -> bool {
    let origins = (origin(a), origin(b));
    origins.0.is_some() && origins.0 == origins.1
}

/// Returns scheme, host and port of an address as an address of their own.
fn origin(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?;
    let port = uri.port_u16().unwrap_or(if scheme == "http" { 80 } else { 443 });
    Some(format!("{scheme}://{}:{port}", uri.host()?.to_ascii_lowercase()))
}

/// Reads the root certificates that the environment names in place of the built-in ones, as Python's clients do.
fn named_certificates() -> Result<Option<RootCerts>, HubError> {
    let names = ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"];
    let named = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(|path| (name, path));
    let Some((variable, path)) = names.into_iter().find_map(named) else { return Ok(None) };
    let wrong = |problem: String| {
        let problem = format!("certificates in {}: {problem}", path.to_string_lossy());
        HubError::Setting { variable, problem }
    };
    let text = plimsoll_device::regular_file::read(path.as_ref()).map_err(|error| wrong(error.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&text) {
        if let Ok(PemItem::Certificate(certificate)) = item {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() { Err(wrong("there are none".to_owned())) } else { Ok(Some(certificates.into())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_same_scheme_host_and_port_are_one_origin() {
        let hub = "https://hub.example";
        assert!(is_same_origin("https://HUB.example:443/a/b?c", hub));
        for other in ["http://hub.example/a", "https://hub.example:8443/a", "https://hub.example.org/a", "no address"] {
            assert!(!is_same_origin(other, hub), "{other}");
        }
        assert!(!is_same_origin("https://hub.example@other.example/a", hub));
        assert_eq!(host("https://user:secret@other.example:81/a?b"), "other.example:81");
        assert_eq!(without_query("https://a/b?Signature=c"), "https://a/b");
    }
}
