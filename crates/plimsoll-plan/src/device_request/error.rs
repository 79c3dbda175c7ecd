//! The errors of a device list.

use super::similar::similar_words;
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
    /// A figure of a card that has another form, or that follows no card.
    #[error(
        "`{figure}` is no figure of a card: expected as in `card:mine=12GiB,bf16=60TFLOPS,memory=450GB/s,link=12GB/s`"
    )]
    InvalidFigure {
        /// The figure, with its name.
        figure: String,
    },
    /// A card without a figure that it needs.
    #[error("`{card}` needs its {figure} rate, as in `{card}=12GiB,bf16=60TFLOPS,memory=450GB/s`")]
    MissingFigure {
        /// The name of the card.
        card: String,
        /// The name of the missing figure.
        figure: &'static str,
    },
    /// A share of a memory that is not present.
    #[error("`{name}` is not present, so its free memory is unknown: state an amount, as in `{name}=12GiB`")]
    ShareOnPaper {
        /// The name of the device or of the host.
        name: String,
    },
    /// A card that has a figure twice.
    #[error("`{card}` has its {figure} figure twice")]
    RepeatedFigure {
        /// The name of the card.
        card: String,
        /// The name of the figure.
        figure: String,
    },
    /// The memory or the link of a machine that has no paper device.
    #[error("`{part}`: no paper device of the list is in a machine `{machine}`")]
    UnknownMachine {
        /// The part of the list, before `=`.
        part: String,
        /// The name of the machine.
        machine: String,
        /// The names of the machines that have paper devices.
        known: Vec<String>,
    },
    /// A link from a machine to itself.
    #[error("`{part}` is a link from a machine to itself: expected the names of two machines, as in `pc1-pc2=1gbit`")]
    LinkWithinMachine {
        /// The part of the list, before `=`.
        part: String,
    },
    /// A link between two machines without its rate.
    #[error("the link `{part}` needs a rate, as in `{part}=1gbit`")]
    MissingLinkRate {
        /// The part of the list.
        part: String,
    },
    /// `host=` beside devices that all have a machine.
    #[error("`host=` belongs to no machine: name it, as in `{machine}/host=64GiB`")]
    HostWithoutMachine {
        /// The name of one of the machines.
        machine: String,
    },
    /// One host memory for paper devices that are joined by a network.
    #[error(
        "`{device}` is joined by a network, so it is in another machine and cannot use the memory that `host=` names"
    )]
    SharedHost {
        /// The name of the device.
        device: String,
    },
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Failure {
        let failure = Failure::input(error.to_string());
        match error {
            RequestError::UnknownDevice { name } => match &*similar_words(&name) {
                [] => with_known_devices(failure),
                near => failure.hint(format!("did you mean {}?", list_choices(near))),
            },
            RequestError::UnknownMachine { machine, known, .. } => {
                let failure = match &*known {
                    [] => failure,
                    known => failure.hint(format!("the list has cards in {}", known.join(", "))),
                };
                failure.hint(format!("name a card of the machine, as in {machine}/rtx3090"))
            }
            RequestError::MissingDevice { .. } => with_known_devices(failure),
            RequestError::SharedHost { .. } => failure.hint(format!("name the machines: {MACHINES}")),
            _ => failure,
        }
    }
}

/// Formats words as a choice: `` `a`, `b` or `c` ``.
fn list_choices(words: &[String]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match &*words {
        [several @ .., last] if !several.is_empty() => format!("{} or {last}", several.join(", ")),
        _ => words.concat(),
    }
}

/// Two machines on paper, each with its own memory.
const MACHINES: &str = "pc1/rtx3090,pc1/host=64GiB,pc2/rtx3070,pc2/host=32GiB,pc1-pc2=1gbit";

/// Adds the devices that a list may name to a failure.
fn with_known_devices(failure: Failure) -> Failure {
    let names = paper::names().collect::<Vec<_>>().join(", ");
    failure
        .hint("known devices: auto, cpu, cuda:0, virtual:NAME=600MiB@0.5:12GB/s, HOST/cuda:0, ray, host=64GiB, file=100GiB")
        .hint(format!("on paper, for plans: 8xrtx5090; rtx3070@1gbit, with its link to the others; {MACHINES}; \
             card:NAME=12GiB,bf16=60TFLOPS,memory=450GB/s,link=12GB/s"))
        .hint(format!("cards on paper: {names}"))
}
