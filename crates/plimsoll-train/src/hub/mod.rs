//! Models and data of the Hugging Face Hub: ids such as `hub:OWNER/NAME`, the cache that is shared with Python's
//! `huggingface_hub`, and downloads that resume and are checked.
//!
//! | module | content |
//! |---|---|
//! | `id` | [`HubId`]: the text of an id |
//! | `settings` | [`HubSettings`]: cache folder, endpoint, token and offline mode, from the environment |
//! | `listing` | the files of a commit with their sizes and checksums |
//! | `selection` | the files that a model or data need |
//! | `client` | requests to the hub, with redirects and repeats |
//! | `cache` | folders, links and locks of the cache |
//! | `download` | one file: resume, checksum, rename |
//! | `repository` | [`Repository`]: one commit of a repository, whose files are fetched on demand |
//! | `error` | [`HubError`] |
//!
//! # Protocol
//! `GET ENDPOINT/api/models/OWNER/NAME/revision/REVISION?blobs=true` names the commit and its files.
//! `GET ENDPOINT/OWNER/NAME/resolve/COMMIT/FILE` returns a file, mostly by a redirect to another host. The token is sent
//! to the endpoint only.
//!
//! # Cache
//! `models--OWNER--NAME/blobs/CHECKSUM` holds the bytes of a file, `snapshots/COMMIT/FILE` links to it, and
//! `refs/REVISION` holds the commit of a branch. All this is the layout of `huggingface_hub`. `plimsoll/COMMIT.json` is an
//! addition: the list of files, so that an incomplete copy is not taken for the whole without the network.

mod cache;
mod client;
mod download;
mod error;
mod id;
mod listing;
mod repository;
mod selection;
mod settings;

pub use error::HubError;
pub use id::{HubId, MalformedHubId, RepositoryKind};
pub use repository::{HubEvent, Repository};
pub use selection::{DataUse, ModelPart};
pub use settings::{HubSettings, cache_folder};
