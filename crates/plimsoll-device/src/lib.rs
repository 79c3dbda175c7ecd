//! plimsoll-device
