//! The server as its clients see it: over sockets, with requests that are written byte by byte.

mod access;
mod attach;
mod client;
mod end;
mod forms;
mod load;
mod metrics;
