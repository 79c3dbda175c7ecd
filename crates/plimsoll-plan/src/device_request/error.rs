//! The errors of a device list.

use crate::paper;
use plimsoll_core::{Failure, ParseBudgetError};

/// An error of parsing a device list.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// An empty list, or nothing between two commas.
    #[error("a device is missing in `{text}`")]
    MissingDevice {
        /// The whole list.
        text: String,
    },
    /// An unknown device name.
    #[error("`{name}` is not a known device")]
    UnknownDevice {
        /// The unknown name.
        name: String,
    },
    /// A device name that is too long for tables and messages.
    #[error("device `{device}`: the name has {} bytes, expected at most {max_bytes}", device.len())]
    LongName {
        /// The name of the device.
        device: String,
        /// The length of the longest name.
        max_bytes: usize,
    },
    /// An invalid budget.
    #[error("device `{device}`: {source}")]
    InvalidBudget {
        /// The name of the device.
        device: String,
        /// The error of parsing the budget.
        source: ParseBudgetError,
    },
    /// A virtual device, the host or the scratch file without a budget.
    #[error("`{device}` needs a budget, as in `{device}=600MiB`")]
    MissingBudget {
        /// The name of the device.
        device: String,
    },
    /// A virtual device of a cluster, named without `ray:` and without a budget.
    #[error("`{device}` is a device of a cluster: it is named `ray:{device}`, or `ray:{device}=600MiB` to hold less")]
    ClusterDevice {
        /// The name of the device.
        device: String,
    },
    /// An invalid pace.
    #[error("device `{device}`: `{pace}` is not a pace: expected a number of cores, 0.01 or more, such as `0.5`")]
    InvalidPace {
        /// The name of the device.
        device: String,
        /// The text of the pace.
        pace: String,
    },
    /// An invalid link.
    #[error(
        "device `{device}`: `{link}` is not a link: expected bytes per second with an optional latency, such as `12GB/s+10us`, or `1gbit`"
    )]
    InvalidLink {
        /// The name of the device.
        device: String,
        /// The text of the link.
        link: String,
    },
    /// A device that is named twice.
    #[error("device `{device}` is named twice")]
    Duplicate {
        /// The name of the device.
        device: String,
    },
    /// More devices than a team may have.
    #[error("{count} devices are named, expected at most {max}")]
    TooManyDevices {
        /// The number of devices in the list.
        count: usize,
        /// The most devices of a list.
        max: usize,
    },
    /// `auto` together with devices.
    #[error("`auto` cannot be combined with other devices, only with `host=` and `file=`")]
    AutoAndOthers,
    /// Paper devices together with real ones.
    #[error("`{paper}` is a paper device: it cannot be combined with devices of this machine")]
    PaperAndReal {
        /// The name of a paper device in the list.
        paper: String,
    },
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Failure {
        let failure = Failure::input(error.to_string());
        match error {
            RequestError::UnknownDevice { .. } | RequestError::MissingDevice { .. } => failure
                .hint("known devices: auto, cpu, cuda:0, virtual:NAME=600MiB@0.5:12GB/s, HOST/cuda:0, ray, host=64GiB, file=100GiB")
                .hint(format!("paper devices, for plans: {}", paper::names().collect::<Vec<_>>().join(", "))),
            _ => failure,
        }
    }
}
