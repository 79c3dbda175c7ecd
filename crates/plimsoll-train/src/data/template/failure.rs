//! Errors inside a template, as minijinja carries them.

use minijinja::{Error, ErrorKind};

/// The result of an operation of a template.
pub(super) type Outcome<T> = Result<T, Error>;

/// Returns an error of a template with a message.
pub(super) fn fail(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}
