//! Tests of Programs and of the passes on them. One program holds them all.

mod book;
mod methods;
mod offload;
mod precision;
