//! plimsoll-watch
