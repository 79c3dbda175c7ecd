//! The answer to each path.
//!
//! | path | answer |
//! |---|---|
//! | `/` | the page |
//! | `/api/snapshot` | one snapshot, as `plimsoll watch --json` prints it |
//! | `/api/events` | a server-sent event `snapshot` at each interval, and `end` when the server ends |
//! | `/api/events/last` | the server-sent events `snapshot` and `end` when the server ends, and none before |
//! | `/metrics` | figures for Prometheus, in the OpenMetrics text format |
//! | `/healthz` | `ok` |
//! | `POST /login` | the form of the token, on servers that need one |

use crate::access::{self, cookie_name};
use crate::hub::{Hub, Listener, Reading, Waiter};
use crate::page;
use crate::token::Token;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State as Shared;
use axum::http::header::{self, HeaderValue};
use axum::http::{Response as HttpResponse, StatusCode};
use axum::response::Response;
use axum::routing::{get, post};
use futures_util::stream;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

/// Path to which the form of the token is sent.
pub(crate) const LOGIN_PATH: &str = "/login";
/// Most bytes of that form.
const MAX_FORM_BYTES: usize = 1024;
/// Most time in which the form has to arrive.
const FORM_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which a stream without events gets a comment. A client that has gone is noticed by it.
const COMMENT_PERIOD: Duration = Duration::from_secs(15);
/// A server-sent event stream's comment.
const COMMENT: &[u8] = b":\n\n";

const TEXT: &str = "text/plain; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";
const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The state that all requests share.
pub(crate) struct State {
    pub hub: Hub,
    /// The token that a request has to bring; `None` if all clients are on this machine.
    pub token: Option<Token>,
    /// Port of the server.
    pub port: u16,
}

/// Returns the routes, behind the check of access.
pub(crate) fn router(state: Arc<State>) -> Router {
    Router::new()
        .route("/", get(index))
        .route("/api/snapshot", get(snapshot))
        .route("/api/events", get(events))
        .route("/api/events/last", get(last_events))
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .route(LOGIN_PATH, post(login))
        .fallback(missing)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&state), access::check))
        .with_state(state)
}

async fn index() -> Response {
    response(StatusCode::OK, HTML, page::page())
}

async fn health() -> Response {
    with_status(StatusCode::OK, "ok\n")
}

async fn missing() -> Response {
    with_status(StatusCode::NOT_FOUND, "no such page\n")
}

async fn snapshot(Shared(state): Shared<Arc<State>>) -> Response {
    with_reading(&state, |reading| (JSON, reading.json.clone())).await
}

async fn metrics(Shared(state): Shared<Arc<State>>) -> Response {
    with_reading(&state, |reading| (OPEN_METRICS, reading.metrics())).await
}

/// Answers with the newest reading in the form that `form` returns, or with its failure.
async fn with_reading(state: &State, form: fn(&Reading) -> (&'static str, Bytes)) -> Response {
    match state.hub.current().await {
        Some(reading) if reading.is_ok() => {
            let (kind, body) = form(&reading);
            response(StatusCode::OK, kind, body)
        }
        Some(reading) => response(StatusCode::SERVICE_UNAVAILABLE, JSON, reading.json.clone()),
        None => with_status(StatusCode::SERVICE_UNAVAILABLE, "no snapshot can be taken any more\n"),
    }
}

async fn events(Shared(state): Shared<Arc<State>>) -> Response {
    let events = stream::unfold(state.hub.listen(), next_event);
    response(StatusCode::OK, EVENTS, Body::from_stream(events))
}

/// Returns the next event of a stream, and the listener for those after it.
async fn next_event(mut listener: Listener) -> Option<(Result<Bytes, Infallible>, Listener)> {
    let event = listener.next_event().await?;
    Some((Ok(event), listener))
}

async fn last_events(Shared(state): Shared<Arc<State>>) -> Response {
    let events = stream::unfold(Some(state.hub.wait_for_last()), next_of_last);
    response(StatusCode::OK, EVENTS, Body::from_stream(events))
}

/// Returns the next part of a stream of the last events: a comment while there are none. `None` for the waiter is the end.
async fn next_of_last(waiter: Option<Waiter>) -> Option<(Result<Bytes, Infallible>, Option<Waiter>)> {
    let mut waiter = waiter?;
    Some(match tokio::time::timeout(COMMENT_PERIOD, waiter.last_events()).await {
        Ok(events) => (Ok(events), None),
        Err(_) => (Ok(Bytes::from_static(COMMENT)), Some(waiter)),
    })
}

/// Takes the form of the token. If it is right, sets the cookie and leads to the page.
async fn login(Shared(state): Shared<Arc<State>>, body: Body) -> Response {
    let read = tokio::time::timeout(FORM_TIMEOUT, axum::body::to_bytes(body, MAX_FORM_BYTES)).await;
    let form = match read {
        Ok(Ok(form)) => form,
        Ok(Err(_)) => return with_status(StatusCode::PAYLOAD_TOO_LARGE, "the form is too long\n"),
        Err(_) => return with_status(StatusCode::REQUEST_TIMEOUT, "the form did not arrive in time\n"),
    };
    // The digits of a token need no encoding. Spaces around them arrive as `+`.
    let digits = form.strip_prefix(b"token=").map(|text| text.trim_ascii()).unwrap_or_default();
    let digits = std::str::from_utf8(digits).unwrap_or_default().trim_matches('+');
    let Some(token) = state.token.as_ref().filter(|token| token.is(digits.as_bytes())) else {
        return unauthorized("/");
    };
    let cookie = format!("{}={}; HttpOnly; SameSite=Strict; Path=/", cookie_name(state.port), token.digits());
    let mut response = with_status(StatusCode::SEE_OTHER, "");
    let headers = response.headers_mut();
    headers.insert(header::LOCATION, HeaderValue::from_static("/"));
    headers.insert(header::SET_COOKIE, HeaderValue::from_str(&cookie).expect("digits are ASCII"));
    response
}

/// Returns the response to a request without the token: the form on the way to the page, else a line of text.
pub(crate) fn unauthorized(path: &str) -> Response {
    let mut response = match path {
        "/" => response(StatusCode::UNAUTHORIZED, HTML, page::login_page()),
        _ => with_status(StatusCode::UNAUTHORIZED, "this server needs its token: Authorization: Bearer TOKEN\n"),
    };
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// Returns a response with a line of text.
pub(crate) fn with_status(status: StatusCode, text: &'static str) -> Response {
    response(status, TEXT, text)
}

fn response(status: StatusCode, kind: &'static str, body: impl Into<Body>) -> Response {
    let response = HttpResponse::builder().status(status).header(header::CONTENT_TYPE, kind);
    response.body(body.into()).expect("status and header are valid")
}
