//! The client of a server: reads its snapshots by URL.

use plimsoll_core::Failure;
use plimsoll_core::printable::{MAX_NAME_CHARS, shortened};
use plimsoll_watch::snapshot::{SNAPSHOT_VERSION, Snapshot};
use std::time::Duration;
use ureq::Agent;
use ureq::http::{StatusCode, Uri};

/// Environment variable with the token of a server.
pub const TOKEN_VARIABLE: &str = "PLIMSOLL_TOKEN";
/// Most bytes of a response. A snapshot of the longest run on many devices has a twentieth of this.
const MAX_RESPONSE_BYTES: u64 = 4 << 20;
/// Most time in which a response has to arrive.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A server of snapshots.
pub struct RemoteRun {
    /// Address of the server, `http://HOST:PORT`.
    url: String,
    token: Option<String>,
    agent: Agent,
}

/// Returns whether a word of the command line is a URL, and no folder.
pub fn is_url(word: &str) -> bool {
    word.starts_with("http://") || word.starts_with("https://")
}

/// Returns a client that connects to the host of a URL itself, and gives each request this time. A proxy of the environment
/// is for other sites, and would see tokens and messages. A redirection could lead elsewhere, so none is followed.
pub(crate) fn direct_agent(timeout: Duration) -> Agent {
    let config = Agent::config_builder()
        .proxy(None)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        .timeout_global(Some(timeout))
        .build();
    config.into()
}

impl RemoteRun {
    /// Returns the server at a URL, without a connection to it. `token` is the value of [`TOKEN_VARIABLE`].
    ///
    /// # Errors
    /// The URL is not `http://HOST:PORT`, or the token has characters that no token has.
    pub fn new(url: &str, token: Option<String>) -> Result<RemoteRun, Failure> {
        let shown = shortened(url, MAX_NAME_CHARS);
        if url.starts_with("https:") {
            let failure = Failure::input(format!("{shown}: https is not supported"));
            return Err(failure.hint("forward the port through SSH: ssh -L 1876:127.0.0.1:1876 HOST, then plimsoll watch http://127.0.0.1:1876"));
        }
        let uri = url.parse::<Uri>().ok();
        let is_plain = |uri: &Uri| matches!(uri.path(), "" | "/") && uri.query().is_none() && !url.contains(['@', '#']);
        let Some(authority) = uri.as_ref().filter(|uri| is_plain(uri)).and_then(Uri::authority) else {
            let failure = Failure::input(format!("{shown}: no address of a served run"));
            return Err(failure.hint("give it as plimsoll watch --serve prints it: http://HOST:PORT"));
        };
        if token.as_ref().is_some_and(|token| token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_hexdigit())) {
            let failure = Failure::input(format!("{TOKEN_VARIABLE}: a token has hexadecimal digits only"));
            return Err(failure.hint("take the token that plimsoll watch --serve printed at its start"));
        }
        Ok(RemoteRun { url: format!("http://{authority}"), token, agent: direct_agent(TIMEOUT) })
    }

    /// Reads the present snapshot.
    ///
    /// # Errors
    /// The server cannot be reached, wants another token, or answers with no snapshot of this version.
    pub fn snapshot(&self) -> Result<Snapshot, Failure> {
        let url = &self.url;
        let unreachable = |error: ureq::Error| {
            let failure = Failure::input(format!("{url}: no snapshot can be read: {error}"));
            failure.hint("on that machine: plimsoll watch RUN_DIR --serve")
        };
        let mut request = self.agent.get(format!("{url}/api/snapshot"));
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let mut response = request.call().map_err(unreachable)?;
        let status = response.status();
        let body = response.body_mut().with_config().limit(MAX_RESPONSE_BYTES).read_to_vec().map_err(unreachable)?;
        match status {
            StatusCode::OK => parse(&body).map_err(|reason| Failure::input(format!("{url}: {reason}"))),
            StatusCode::UNAUTHORIZED => {
                let failure =
                    Failure::input(format!("{url}: the server needs its token, which it printed at its start"));
                Err(failure.hint(format!("{TOKEN_VARIABLE}=TOKEN plimsoll watch {url}")))
            }
            StatusCode::FORBIDDEN => {
                let failure = Failure::input(format!("{url}: the server refuses this name of its machine"));
                Err(failure.hint("use the IP address of the machine, or localhost"))
            }
            _ => Err(failed(url, status, &body)),
        }
    }
}

/// Returns the failure that a server reports, or its status.
fn failed(url: &str, status: StatusCode, body: &[u8]) -> Failure {
    let reported: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let message = reported.as_ref().and_then(|value| value["error"]["message"].as_str());
    match message {
        Some(message) => Failure::input(format!("{url}: {message}")),
        None => Failure::input(format!("{url}: no served run (status {status})", status = status.as_u16())),
    }
}

/// Parses a snapshot. Returns the reason if the text is none of this version.
fn parse(json: &[u8]) -> Result<Snapshot, String> {
    let value: serde_json::Value = serde_json::from_slice(json).map_err(|_| "no served run (no JSON)".to_owned())?;
    match value["version"].as_u64() {
        Some(version) if version == u64::from(SNAPSHOT_VERSION) => {}
        Some(version) => {
            return Err(format!("its snapshots have version {version}, and this program reads {SNAPSHOT_VERSION}"));
        }
        None => return Err("no served run (no snapshot)".to_owned()),
    }
    serde_json::from_value(value).map_err(|error| format!("no valid snapshot: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_server_only() {
        for url in ["http://127.0.0.1:1876", "http://localhost:1876/", "http://[::1]:1876", "http://gpu.example"] {
            assert!(is_url(url) && RemoteRun::new(url, None).is_ok(), "{url}");
        }
        for url in
            ["http://", "http://a/b", "http://a:1/?token=1", "http://user:word@a:1", "http://a:1#b", "http://a b"]
        {
            let failure = RemoteRun::new(url, None).err().unwrap_or_else(|| panic!("{url}"));
            assert!(failure.message.contains("no address of a served run"), "{failure}");
        }
        let failure = RemoteRun::new("https://a:1", None).err().unwrap();
        assert!(failure.message.contains("https is not supported"), "{failure}");
        assert!(!is_url("runs/http://a") && RemoteRun::new("http://a", Some("x\r\nHost: b".to_owned())).is_err());
    }

    #[test]
    fn other_versions_and_other_json_are_refused() {
        let refused = [
            ("{}", "no snapshot"),
            ("[1", "no JSON"),
            ("{\"version\": 2}", "its snapshots have version 2, and this program reads 1"),
            ("{\"version\": 1}", "no valid snapshot: missing field"),
        ];
        for (json, reason) in refused {
            let told = parse(json.as_bytes()).unwrap_err();
            assert!(told.contains(reason), "{told}");
        }
    }
}
