//! Snapshots over HTTP: the page of `plimsoll watch --serve`, and the client of `plimsoll watch http://HOST:PORT`. Also
//! the logs that a run sends or writes for other programs.
//!
//! ```text
//!                    one thread, at most one reading per interval
//! Source ─► Snapshot ─► hub ─┬─► /api/events    server-sent events, for the page at /
//!                            ├─► /api/snapshot  JSON, for `plimsoll watch URL`
//!                            └─► /metrics       Prometheus
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`server`] | the listening socket, and the limits of connections |
//! | `routes` | the answer to each path |
//! | `access` | which requests are answered: host, origin, method, token |
//! | [`guests`] | connections that have not brought the token, and their limit |
//! | [`token`] | the token that other machines need |
//! | `hub` | the newest snapshot, shared by all clients |
//! | `metrics` | a snapshot in the text format of Prometheus |
//! | `page` | the page and its security policy |
//! | [`remote`] | the client that reads the snapshots of a server |
//! | [`run_logs`] | the logs of a run: TensorBoard's event files, the webhook |
//! | `webhook` | the client that posts the messages of a run |
//!
//! The server only reads. No request changes the run or the machine.

#![forbid(unsafe_code)]

mod access;
pub mod guests;
mod hub;
mod metrics;
mod page;
pub mod remote;
mod routes;
pub mod run_logs;
pub mod server;
pub mod token;
mod webhook;
