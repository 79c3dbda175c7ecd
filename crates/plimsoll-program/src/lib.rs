//! plimsoll-program
