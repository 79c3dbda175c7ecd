//! The files of one commit of a repository, with their sizes and checksums.

use super::id::{is_commit, is_inside};
use serde::{Deserialize, Serialize};

/// Checksum of a file on the hub. It is also the name of the file's bytes in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Checksum {
    /// SHA-256 of the bytes, for large files.
    Sha256(String),
    /// The name of the file's object in git: SHA-1 of a short header and the bytes.
    Git(String),
    /// No checksum is known: the file comes from another program.
    Unknown,
}

impl Checksum {
    /// Returns the hexadecimal digits; empty if the checksum is unknown.
    pub(super) fn digits(&self) -> &str {
        match self {
            Checksum::Sha256(digits) | Checksum::Git(digits) => digits,
            Checksum::Unknown => "",
        }
    }
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RemoteFile {
    /// Path in the repository.
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) checksum: Checksum,
}

/// A commit of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: Vec<RemoteFile>,
}

/// The part of the hub's answer that matters here.
#[derive(Deserialize)]
struct Reply {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// Parses the hub's description of a revision.
    ///
    /// # Errors
    /// A reason: the text is of another form, or holds a name that leads out of the repository's folder.
    pub(super) fn parse(json: &[u8]) -> Result<Listing, String> {
        let Reply { sha, siblings } = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let files = siblings.into_iter().map(remote_file).collect::<Result<_, _>>()?;
        Listing { commit: sha, files }.checked()
    }

    /// Parses the list that the cache keeps; `None` if it is damaged.
    pub(super) fn parse_stored(json: &[u8]) -> Option<Listing> {
        serde_json::from_slice::<Listing>(json).ok()?.checked().ok()
    }

    /// Checks all that becomes the path of a file in the cache.
    fn checked(self) -> Result<Listing, String> {
        if !is_commit(&self.commit) {
            return Err(format!("`{}` is no commit", self.commit));
        }
        for RemoteFile { name, checksum, .. } in &self.files {
            if !is_inside(name) {
                return Err(format!("`{name}` is no path in a repository"));
            }
            let (digits, count) = match checksum {
                Checksum::Sha256(digits) => (digits, 64),
                Checksum::Git(digits) => (digits, 40),
                Checksum::Unknown => continue,
            };
            if digits.len() != count || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(format!("`{digits}` is no checksum of {name}"));
            }
        }
        Ok(self)
    }

    /// Returns the file with this path.
    pub(super) fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.name == name)
    }
}

fn remote_file(sibling: Sibling) -> Result<RemoteFile, String> {
    let Sibling { rfilename: name, size, blob_id, lfs } = sibling;
    let (bytes, checksum) = match lfs {
        Some(LargeFile { sha256: Some(digits), size: large }) => (large.or(size), Some(Checksum::Sha256(digits))),
        _ => (size, blob_id.map(Checksum::Git)),
    };
    match (bytes, checksum) {
        (Some(bytes), Some(checksum)) => Ok(RemoteFile { name, bytes, checksum }),
        _ => Err(format!("no size and checksum of {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str, sha: &str, blob: &str) -> Result<Listing, String> {
        let file = serde_json::json!({"rfilename": name, "size": 3, "blobId": blob});
        Listing::parse(serde_json::json!({"sha": sha, "siblings": [file]}).to_string().as_bytes())
    }

    #[test]
    fn answers_that_lead_out_of_the_cache_are_refused() {
        let (sha, blob) = ("0".repeat(40), "a".repeat(40));
        let listing = parse("a/b.json", &sha, &blob).unwrap();
        assert_eq!(listing.file("a/b.json").unwrap().checksum, Checksum::Git(blob.clone()));
        let stored = serde_json::to_vec(&listing).unwrap();
        assert_eq!(Listing::parse_stored(&stored), Some(listing));
        for name in ["../x", "/etc/x", "a/../../x", "a//b", ""] {
            assert!(parse(name, &sha, &blob).is_err(), "{name}");
        }
        assert!(parse("a", "../../x", &blob).is_err());
        assert!(parse("a", &sha, "../x").is_err());
        assert!(Listing::parse(br#"{"sha": "0"}"#).is_err());
    }
}
