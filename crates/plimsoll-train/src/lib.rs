//! plimsoll-train
