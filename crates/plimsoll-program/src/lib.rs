//! plimsoll-program
pub mod models;
