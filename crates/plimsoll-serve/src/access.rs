//! Which requests are answered. A request has to name this server as its host, may not come from a page of another
//! site, may only read, and from another machine has to bring the token.
//!
//! The host is checked because a page of another site can have its own name resolve to 127.0.0.1 (DNS rebinding). A
//! browser then sends that name as the host.

use crate::guests::Guest;
use crate::routes::{LOGIN_PATH, State, with_status};
use crate::token::Token;
use crate::{page, routes};
use axum::Extension;
use axum::extract::{Request, State as Shared};
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The address of this machine at which a connection was accepted.
#[derive(Clone, Copy)]
pub(crate) struct LocalAddress(pub SocketAddr);

/// Name of the cookie that holds the token. Cookies are shared by all ports of a host, so the port is part of it.
pub(crate) fn cookie_name(port: u16) -> String {
    format!("plimsoll_token_{port}")
}

/// Headers of every response.
const HEADERS: [(HeaderName, &str); 7] = [
    (header::CACHE_CONTROL, "no-store"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    // With `no-referrer`, browsers would send the form of the token with the origin `null`.
    (header::REFERRER_POLICY, "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=()"),
];

/// Answers a request if it is permitted, else refuses it. Adds the headers that every response has. A connection that has
/// not brought the token is closed after its first response, so that it holds its place for a short time only.
pub(crate) async fn check(
    Shared(state): Shared<Arc<State>>,
    Extension(LocalAddress(local)): Extension<LocalAddress>,
    Extension(guest): Extension<Arc<Guest>>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match refusal(&state, local, &request) {
        Some(refused) => refused,
        None => {
            if !is_login(&state, &request) {
                guest.trust();
            }
            next.run(request).await
        }
    };
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let policy = HeaderValue::from_str(page::content_security_policy()).expect("the policy is ASCII");
    headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    if !guest.is_trusted() {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Returns the response to a request that is not permitted; `None` for one that is.
fn refusal(state: &State, local: SocketAddr, request: &Request) -> Option<Response> {
    let headers = request.headers();
    let Some(host) = own_host(headers, local) else {
        let text = "this server answers only if it is addressed by localhost or by its IP address\n";
        return Some(with_status(StatusCode::FORBIDDEN, text));
    };
    if !is_own_origin(headers, host) {
        return Some(with_status(StatusCode::FORBIDDEN, "requests of other sites are refused\n"));
    }
    let is_login = is_login(state, request);
    if request.method() != Method::GET && !is_login {
        let mut refused = with_status(StatusCode::METHOD_NOT_ALLOWED, "only GET is served\n");
        refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
        return Some(refused);
    }
    let token = state.token.as_ref().filter(|_| !is_login)?;
    (!brings_token(headers, token, state.port)).then(|| routes::unauthorized(request.uri().path()))
}

/// Returns whether a request brings the form of the token.
fn is_login(state: &State, request: &Request) -> bool {
    request.uri().path() == LOGIN_PATH && request.method() == Method::POST && state.token.is_some()
}

/// Returns the host that the request names, if it is this server: a name of the loopback interface on a connection
/// through it, or the IP address of the connection.
fn own_host(headers: &HeaderMap, local: SocketAddr) -> Option<&str> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next()?.to_str().ok()?;
    let address = local.ip().to_canonical();
    let name = without_port(host)?;
    let is_named = name.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical() == address);
    let is_own = is_named || (address.is_loopback() && is_loopback_name(name));
    // Two hosts may mean one to a proxy and the other to this server.
    (is_own && hosts.next().is_none()).then_some(host)
}

/// Returns the name or address of a `Host` header: without its port, and without the brackets of IPv6; `None` if the
/// port is no number.
fn without_port(host: &str) -> Option<&str> {
    let (name, rest) = match host.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once(']')?,
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let is_port = |port: &str| port.parse::<u16>().is_ok();
    (rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port)).then_some(name)
}

fn is_loopback_name(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Returns whether the request comes from a page of this server, or from no page at all.
fn is_own_origin(headers: &HeaderMap, host: &str) -> bool {
    let is_own = |origin: &HeaderValue| {
        let origin = origin.to_str().ok().and_then(|origin| origin.strip_prefix("http://"));
        origin.is_some_and(|origin| origin.eq_ignore_ascii_case(host))
    };
    headers.get_all(header::ORIGIN).iter().all(is_own)
}

/// Returns whether a request brings the token: in the header `Authorization`, or in the cookie that the form sets.
fn brings_token(headers: &HeaderMap, token: &Token, port: u16) -> bool {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    let name = cookie_name(port);
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.trim().split_once('='));
    bearer.is_some_and(|text| token.is(text)) || pairs.any(|(key, text)| key == name && token.is(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap())).collect()
    }

    fn is_own(host: &str, local: &str) -> bool {
        own_host(&headers(&[(header::HOST, host)]), local.parse().unwrap()).is_some()
    }

    #[test]
    fn only_own_hosts_are_answered() {
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1:1876", "127.0.0.9", "[::1]:1876"] {
            assert!(is_own(host, "127.0.0.1:1876"), "{host}");
        }
        let others =
            ["evil.example", "evil.example:1876", "localhost.evil.example", "127.0.0.1.evil.example", "", ":80"];
        for host in others.into_iter().chain(["10.0.0.5", "localhost:x", "[::1", "[::1]x", "user@localhost"]) {
            assert!(!is_own(host, "127.0.0.1:1876"), "{host}");
        }
        // From another machine, the host is the address at which the connection arrived.
        assert!(is_own("10.0.0.5:1876", "10.0.0.5:1876") && is_own("10.0.0.5:1876", "[::ffff:10.0.0.5]:1876"));
        for host in ["localhost:1876", "127.0.0.1:1876", "10.0.0.6:1876", "gpu.example:1876"] {
            assert!(!is_own(host, "10.0.0.5:1876"), "{host}");
        }
        let local = "127.0.0.1:1876".parse().unwrap();
        let mut two = headers(&[(header::HOST, "localhost")]);
        two.append(header::HOST, HeaderValue::from_static("localhost"));
        assert!(own_host(&two, local).is_none() && own_host(&HeaderMap::new(), local).is_none());
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let from = |origin: &str| is_own_origin(&headers(&[(header::ORIGIN, origin)]), "localhost:1876");
        assert!(from("http://localhost:1876") && is_own_origin(&HeaderMap::new(), "localhost:1876"));
        for origin in
            ["http://evil.example", "https://localhost:1876", "http://localhost", "http://localhost:18760", "null"]
        {
            assert!(!from(origin), "{origin}");
        }
    }

    #[test]
    fn token_is_read_from_header_or_cookie() {
        let token = Token::random().unwrap();
        let digits = token.digits();
        let brings = |name: HeaderName, value: &str| brings_token(&headers(&[(name, value)]), &token, 1876);
        assert!(brings(header::AUTHORIZATION, &format!("Bearer {digits}")));
        assert!(brings(header::COOKIE, &format!("a=b; plimsoll_token_1876={digits}; c=d")));
        for wrong in [digits.to_owned(), format!("Basic {digits}"), "Bearer ".to_owned(), format!("Bearer {digits} ")] {
            assert!(!brings(header::AUTHORIZATION, &wrong), "{wrong}");
        }
        for wrong in [format!("plimsoll_token={digits}"), format!("plimsoll_token_18={digits}"), digits.to_owned()] {
            assert!(!brings(header::COOKIE, &wrong), "{wrong}");
        }
    }
}
