//! One commit of a repository of the hub. Its files are fetched on demand and found in the cache afterwards.

use super::cache::RepositoryCache;
use super::client::{Client, Refusal, host};
use super::download::{Download, Ending};
use super::error::HubError;
use super::id::{HubId, RepositoryKind, is_commit};
use super::listing::{Checksum, Listing, RemoteFile};
use super::settings::HubSettings;
use crate::files::FilesError;
use plimsoll_core::Bytes;
use plimsoll_device::{disk, regular_file};
use std::path::PathBuf;

/// Something that the user should see while files are fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HubEvent<'a> {
    /// A note, such as that the hub cannot be reached and the cache is used.
    Note(String),
    /// Progress of a download.
    Progress {
        /// Path of the present file in the repository.
        file: &'a str,
        /// Bytes of all files that have arrived.
        done_bytes: u64,
        /// Bytes of all files that are downloaded now.
        total_bytes: u64,
    },
}

/// A commit of a repository.
pub struct Repository<'a> {
    settings: &'a HubSettings,
    client: Client<'a>,
    cache: RepositoryCache,
    pub(super) kind: RepositoryKind,
    pub(super) id: Box<HubId>,
    pub(super) listing: Listing,
    /// Reason why nothing is downloaded; `None` if the hub is asked.
    offline_reason: Option<String>,
}

impl<'a> Repository<'a> {
    /// Looks up the commit of the revision that `id` names, and the list of its files: on the hub, or in the cache if
    /// the hub cannot be reached or the user wants that.
    ///
    /// # Errors
    /// There is no such repository or revision, access is refused, or neither hub nor cache answers.
    pub fn open(
        settings: &'a HubSettings,
        kind: RepositoryKind,
        id: &HubId,
        observe: &mut dyn FnMut(HubEvent<'_>),
    ) -> Result<Repository<'a>, HubError> {
        let (client, cache) = (Client::new(settings)?, RepositoryCache::new(&settings.cache, kind, id));
        let listing = Listing { commit: String::new(), files: Vec::new() };
        let mut repository =
            Repository { settings, client, cache, kind, id: Box::new(id.clone()), listing, offline_reason: None };
        let commit = repository.cache.commit_of(id.revision());
        let stored = commit.as_ref().and_then(|commit| repository.cache.stored_listing(commit));
        let in_cache = || stored.clone().or_else(|| repository.cache.found_listing(commit.as_ref()?));
        if settings.offline {
            let folder = repository.cache.folder.display().to_string();
            repository.listing =
                in_cache().ok_or_else(|| HubError::NotCached { id: Box::new(id.clone()), cache: folder })?;
            repository.offline_reason = Some("HF_HUB_OFFLINE is set".to_owned());
        } else if let Some(stored) = stored.as_ref().filter(|_| is_commit(id.revision())) {
            // A commit never changes.
            repository.listing = stored.clone();
        } else {
            match repository.ask() {
                Ok(listing) => repository.listing = listing,
                Err(error) => {
                    let known = if passes(&error) { in_cache() } else { None };
                    let Some(known) = known else { return Err(error) };
                    observe(HubEvent::Note(format!(
                        "{error}; {id} is taken from the cache, as of commit {}",
                        known.commit
                    )));
                    repository.listing = known;
                    repository.offline_reason = Some(error.to_string());
                }
            }
        }
        Ok(repository)
    }

    /// Asks the hub for commit and files.
    fn ask(&self) -> Result<Listing, HubError> {
        let (kind, repository) = (self.kind.plural(), &self.id.repository);
        let revision = percent_encoded(self.id.revision(), false);
        let path = format!("api/{kind}/{repository}/revision/{revision}?blobs=true");
        let json = self.client.get_description(&path)?.map_err(|refusal| self.refused(refusal, None))?;
        Listing::parse(&json).map_err(|problem| HubError::BadReply { url: self.settings.address(&path), problem })
    }

    /// Returns the id of the same files in this commit.
    pub fn exact_id(&self) -> HubId {
        self.id.at_commit(&self.listing.commit)
    }

    /// Returns the folder of the commit in the cache.
    pub fn folder(&self) -> PathBuf {
        self.cache.snapshot(&self.listing.commit)
    }

    /// Returns the place of a fetched file in the cache.
    pub(super) fn path(&self, file: &RemoteFile) -> PathBuf {
        self.folder().join(&file.name)
    }

    /// Returns the error that the repository, or the part of it in the cache, has no file of this name.
    pub(super) fn no_file(&self, name: &str) -> HubError {
        let is_partial = self.listing.files.iter().any(|file| file.checksum == Checksum::Unknown);
        match &self.offline_reason {
            Some(reason) if is_partial => self.not_cached(name, reason),
            _ => {
                let known = self.listing.files.iter().map(|file| file.name.clone()).collect();
                HubError::NoFile { id: self.id.clone(), kind: self.kind, file: name.to_owned(), known }
            }
        }
    }

    fn not_cached(&self, name: &str, reason: &str) -> HubError {
        let (cache, reason) = (self.cache.folder.display().to_string(), reason.to_owned());
        HubError::FileNotCached { id: self.id.clone(), file: name.to_owned(), cache, reason }
    }

    /// Makes files available in [`folder`](Self::folder). They get their names there when all of them are complete.
    ///
    /// # Errors
    /// Access is refused, a download fails, or a file is neither in the cache nor may be downloaded.
    pub(super) fn fetch(&self, files: &[RemoteFile], observe: &mut dyn FnMut(HubEvent<'_>)) -> Result<(), HubError> {
        let commit = &self.listing.commit;
        let missing: Vec<&RemoteFile> = files.iter().filter(|file| !self.cache.has(commit, file)).collect();
        self.download(&missing, observe)?;
        missing.iter().try_for_each(|file| self.cache.link(commit, file))?;
        if self.offline_reason.is_none() {
            self.cache.store(&self.listing, self.id.revision())?;
        }
        Ok(())
    }

    /// Reads a small file without giving it its name in the folder.
    pub(super) fn read(&self, file: &RemoteFile, observe: &mut dyn FnMut(HubEvent<'_>)) -> Result<Vec<u8>, HubError> {
        let path = match self.cache.has(&self.listing.commit, file) {
            true => self.path(file),
            false => {
                self.download(&[file], observe)?;
                self.cache.blob(&file.checksum)
            }
        };
        Ok(regular_file::read(&path).map_err(|error| FilesError::io(&path, "read", error))?)
    }

    /// Downloads the bytes of files.
    fn download(&self, files: &[&RemoteFile], observe: &mut dyn FnMut(HubEvent<'_>)) -> Result<(), HubError> {
        if let (Some(reason), Some(file)) = (&self.offline_reason, files.first()) {
            return Err(self.not_cached(&file.name, reason));
        }
        let total_bytes = files.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
        self.check_space(files)?;
        let mut before: u64 = 0;
        for file in files {
            let prefix = self.kind.address_prefix();
            let name = percent_encoded(&file.name, true);
            let path = format!("{prefix}{}/resolve/{}/{name}", self.id.repository, self.listing.commit);
            let host = host(&self.settings.endpoint);
            let download = Download { client: &self.client, cache: &self.cache, id: &self.id, file, path, host };
            let mut observe_file = |bytes| {
                observe(HubEvent::Progress { file: &file.name, done_bytes: before.saturating_add(bytes), total_bytes })
            };
            if let Ending::Refused(refusal) = download.run(&mut observe_file)? {
                return Err(self.refused(refusal, Some(&file.name)));
            }
            before = before.saturating_add(file.bytes);
        }
        Ok(())
    }

    /// Checks that the disk of the cache has space for what files still lack.
    fn check_space(&self, files: &[&RemoteFile]) -> Result<(), HubError> {
        let lacking = |file: &&RemoteFile| file.bytes.saturating_sub(self.cache.present_bytes(file));
        let needed = Bytes(files.iter().map(lacking).fold(0, u64::saturating_add));
        match disk::free(&self.cache.folder) {
            Some(free) if free < needed => {
                let cache = self.cache.folder.display().to_string();
                Err(HubError::NoSpace { id: self.id.clone(), cache, needed, free })
            }
            _ => Ok(()),
        }
    }

    /// Returns the meaning of a refusal. `file` was requested; `None` for the description of the repository.
    fn refused(&self, refusal: Refusal, file: Option<&str>) -> HubError {
        let Refusal { url, status, code, message } = refusal;
        let (id, kind, token) = (self.id.clone(), self.kind, self.settings.token.as_ref());
        let page = self.settings.address(&format!("{}{}", kind.address_prefix(), id.repository));
        let (host, has_token) = (host(&self.settings.endpoint), token.is_some());
        match (status, &*code, token) {
            (401 | 403, "GatedRepo", _) => HubError::Gated { id, kind, page, has_token },
            (401, code, Some(token)) if code != "RepoNotFound" => {
                HubError::TokenRefused { id, source_name: token.source.clone() }
            }
            (401, ..) | (404, "RepoNotFound", _) => HubError::NoRepository { id, kind, host, has_token },
            (403, ..) => HubError::Forbidden { id, message },
            (404, "RevisionNotFound", _) => HubError::NoRevision { id, kind, page },
            (404, ..) => match file {
                Some(file) => self.no_file(file),
                None => HubError::NoRepository { id, kind, host, has_token },
            },
            _ => HubError::Status { url, status, message },
        }
    }
}

/// Returns whether an error says that the hub cannot answer now.
fn passes(error: &HubError) -> bool {
    matches!(
        error,
        HubError::Unreachable { .. } | HubError::TooManyRequests { .. } | HubError::Status { status: 500.., .. }
    )
}

/// Returns text for the path of an address. With `is_path`, slashes stay.
fn percent_encoded(text: &str, is_path: bool) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'/' if is_path => encoded.push('/'),
            b'-' | b'_' | b'.' | b'~' => encoded.push(byte.into()),
            _ if byte.is_ascii_alphanumeric() => encoded.push(byte.into()),
            _ => encoded += &format!("%{byte:02X}"),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_hold_any_name() {
        assert_eq!(percent_encoded("refs/pr/1", false), "refs%2Fpr%2F1");
        assert_eq!(percent_encoded("a b/ü?#%.json", true), "a%20b/%C3%BC%3F%23%25.json");
    }
}
