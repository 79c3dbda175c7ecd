//! Errors of the hub, with messages and hints.

use super::id::{HubId, MalformedHubId, RepositoryKind};
use crate::files::FilesError;
use plimsoll_core::{Bytes, Failure};

/// Most names of files that a hint lists.
const NAMES_MAX: usize = 8;

/// An error while files of the hub are looked up or fetched. No message holds the token.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The text is no id.
    #[error(transparent)]
    InvalidId(#[from] MalformedHubId),
    /// A variable of the environment has a value that cannot be used.
    #[error("{variable}: {problem}")]
    Setting {
        /// Name of the variable.
        variable: &'static str,
        /// The reason.
        problem: String,
    },
    /// The hub, or a host that it refers to, cannot be reached.
    #[error("{host} cannot be reached: {reason}")]
    Unreachable {
        /// Name of the host, with its port.
        host: String,
        /// The reason.
        reason: String,
    },
    /// Offline mode, and the cache has no commit of the revision.
    #[error("{id}: HF_HUB_OFFLINE is set, and {cache} has no copy of revision `{}`", id.revision())]
    NotCached {
        /// The id.
        id: Box<HubId>,
        /// Folder of the cache.
        cache: String,
    },
    /// Offline mode, or a hub that cannot be reached, and the cache lacks a file.
    #[error("{id}: {file} is not in {cache}, and {reason}")]
    FileNotCached {
        /// The id.
        id: Box<HubId>,
        /// Path of the file in the repository.
        file: String,
        /// Folder of the cache.
        cache: String,
        /// The reason why it is not downloaded.
        reason: String,
    },
    /// The hub does not take the token.
    #[error("{id}: the hub refuses the token in {source_name}")]
    TokenRefused {
        /// The id.
        id: Box<HubId>,
        /// Variable or file with the token.
        source_name: String,
    },
    /// There is no such repository, or the user may not see it.
    #[error("{id}: {host} has no {kind} `{}`{}", id.repository, for_token(*has_token))]
    NoRepository {
        /// The id.
        id: Box<HubId>,
        /// Kind of the repository.
        kind: RepositoryKind,
        /// Name of the hub's host.
        host: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// The owner of the repository wants conditions to be accepted first.
    #[error("{id}: the {kind} is gated: its owner gives access to accounts that have accepted the conditions")]
    Gated {
        /// The id.
        id: Box<HubId>,
        /// Kind of the repository.
        kind: RepositoryKind,
        /// Address of the page with the conditions.
        page: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// The hub forbids access for another reason.
    #[error("{id}: the hub forbids access{}", of_hub(message))]
    Forbidden {
        /// The id.
        id: Box<HubId>,
        /// Message of the hub; may be empty.
        message: String,
    },
    /// The repository has no such branch, tag or commit.
    #[error("{id}: the {kind} has no revision `{}`", id.revision())]
    NoRevision {
        /// The id.
        id: Box<HubId>,
        /// Kind of the repository.
        kind: RepositoryKind,
        /// Address of the repository's page.
        page: String,
    },
    /// The repository has no such file.
    #[error("{id}: the {kind} has no file {file}")]
    NoFile {
        /// The id.
        id: Box<HubId>,
        /// Kind of the repository.
        kind: RepositoryKind,
        /// Path or glob of the file.
        file: String,
        /// Paths of files that the repository has.
        known: Vec<String>,
    },
    /// The id does not tell which of several sets of files is meant.
    #[error("{id}: {problem}")]
    Ambiguous {
        /// The id.
        id: Box<HubId>,
        /// Description of the choice.
        problem: String,
        /// Paths of files that the repository has.
        known: Vec<String>,
    },
    /// The hub asks for a longer pause than Plimsoll makes.
    #[error("{host} takes no more requests now (status 429){}", pause(*seconds))]
    TooManyRequests {
        /// Name of the host.
        host: String,
        /// Seconds until the next request; `None` if the host does not say.
        seconds: Option<u64>,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// The hub answers with another status than expected.
    #[error("{url}: status {status}{}", of_hub(message))]
    Status {
        /// Address of the request.
        url: String,
        /// The status.
        status: u16,
        /// Message of the hub; may be empty.
        message: String,
    },
    /// An answer that does not follow the protocol of the hub.
    #[error("{url}: this is no answer of a hub: {problem}")]
    BadReply {
        /// Address of the request.
        url: String,
        /// The reason.
        problem: String,
    },
    /// The disk of the cache has too little space for the files.
    #[error("{id}: {needed} are to be downloaded, and the disk of {cache} has {free} free")]
    NoSpace {
        /// The id.
        id: Box<HubId>,
        /// Folder of the cache.
        cache: String,
        /// Bytes of the files that are still to arrive.
        needed: Bytes,
        /// Free bytes of the disk.
        free: Bytes,
    },
    /// A download broke off repeatedly. The bytes that arrived stay in the cache.
    #[error("{id}: the download of {file} from {host} broke off after {received} of {size}: {reason}")]
    CutOff {
        /// The id.
        id: Box<HubId>,
        /// Path of the file in the repository.
        file: String,
        /// Name of the host.
        host: String,
        /// Bytes that arrived.
        received: Bytes,
        /// Size of the file.
        size: Bytes,
        /// The last reason.
        reason: String,
    },
    /// A downloaded file is not the one that the hub describes. It is deleted.
    #[error("{id}: {file} from {host} has checksum {found}, expected {expected}")]
    WrongChecksum {
        /// The id.
        id: Box<HubId>,
        /// Path of the file in the repository.
        file: String,
        /// Name of the host.
        host: String,
        /// Checksum of the bytes that arrived.
        found: String,
        /// Checksum that the hub names.
        expected: String,
    },
    /// A file of the cache cannot be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
}

fn of_hub(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

fn pause(seconds: Option<u64>) -> String {
    seconds.map_or(String::new(), |seconds| format!("; it asks for a pause of {seconds} s"))
}

fn for_token(has_token: bool) -> &'static str {
    if has_token { " that the token may read" } else { "" }
}

/// Lists names, at most [`NAMES_MAX`].
fn list(names: &[String]) -> String {
    let further = match names.len().saturating_sub(NAMES_MAX) {
        0 => String::new(),
        further => format!(" and {further} more"),
    };
    names.iter().take(NAMES_MAX).cloned().collect::<Vec<_>>().join(", ") + &further
}

/// Returns the advice to set a token, for a request that was sent with or without one.
fn token_hint(has_token: bool) -> &'static str {
    match has_token {
        true => "use the token of an account with access, of the type `read`: HF_TOKEN=hf_...",
        false => "set a token of your account: HF_TOKEN=hf_..., or log in with hf auth login",
    }
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Failure {
        let failure = Failure::input(error.to_string());
        match error {
            HubError::InvalidId(_) => {
                failure.hint("an id is hub:OWNER/NAME, hub:OWNER/NAME@REVISION or hub:OWNER/NAME:FILES")
            }
            HubError::Setting { variable, .. } => failure.hint(format!("set or unset {variable}")),
            HubError::Unreachable { .. } => failure
                .hint("check the network, HF_ENDPOINT and HTTPS_PROXY, then give the command again")
                .hint("use only the cache: HF_HUB_OFFLINE=1"),
            HubError::NotCached { .. } | HubError::FileNotCached { .. } => failure
                .hint("download it once with a network: the same command without HF_HUB_OFFLINE")
                .hint("or name the cache that has it: HF_HUB_CACHE=/path"),
            HubError::TokenRefused { source_name, .. } => {
                failure.hint(format!("{source_name}: set a valid token, or none for public repositories"))
            }
            HubError::NoRepository { has_token, .. } => {
                failure.hint("check OWNER/NAME").hint(format!("if it is private: {}", token_hint(has_token)))
            }
            HubError::Gated { page, has_token, .. } => {
                failure.hint(format!("accept the conditions on {page}")).hint(token_hint(has_token))
            }
            HubError::Forbidden { .. } => failure.hint(token_hint(true)),
            HubError::NoRevision { page, .. } => failure.hint(format!("its branches and tags are on {page}")),
            HubError::NoFile { known, .. } | HubError::Ambiguous { known, .. } if !known.is_empty() => {
                failure.hint(format!("its files: {}", list(&known))).hint("name files with hub:OWNER/NAME:FILES")
            }
            HubError::NoFile { .. } | HubError::Ambiguous { .. } => failure.hint("check OWNER/NAME and the files"),
            HubError::TooManyRequests { has_token, .. } if !has_token => {
                failure.hint("wait and give the command again").hint("a token raises the limit: HF_TOKEN=hf_...")
            }
            HubError::TooManyRequests { .. } => failure.hint("wait and give the command again"),
            HubError::Status { status: 500.., .. } => failure.hint("the hub has a fault: give the command again later"),
            HubError::Status { .. } | HubError::BadReply { .. } => failure.hint("check HF_ENDPOINT"),
            HubError::NoSpace { .. } => failure
                .hint("free disk space, for example with hf cache")
                .hint("or keep the cache on another disk: HF_HOME=/path"),
            HubError::CutOff { .. } => failure.hint("give the command again: the download resumes where it broke off"),
            HubError::WrongChecksum { .. } => failure
                .hint("the file was deleted: give the command again to download it anew")
                .hint("if this repeats, the host or a proxy changes files: check HF_ENDPOINT and HTTPS_PROXY"),
            HubError::Files(error) => error.into(),
        }
    }
}
