//! plimsoll-plan
