//! Recognition of data files that hold another format than their name says, by their first bytes.

use super::error::DataError;
use std::path::Path;

const DECOMPRESS: &str = "decompress it, for example with `xz -d` or `unzip`";
const NAME_GZIP: &str = "give a data file the ending .gz after its own, or decompress it with `gzip -d`";
const NAME_ZSTD: &str = "give a data file the ending .zst after its own, or decompress it with `zstd -d`";
const NAME_PARQUET: &str = "give a data file the ending .parquet";
const TO_JSON: &str = "convert it, for example with `Dataset.to_json` of the Python package `datasets`";
const TO_UTF8: &str = "convert it to UTF-8, for example with `iconv -f utf-16 -t utf-8`";
const DOWNLOAD: &str = "download the file itself: `git lfs pull`, or `hf download`";

/// First bytes of other formats, with the name of the format and a hint.
const FORMATS: [(&[u8], &str, &str); 13] = [
    (b"\x1f\x8b", "gzip data", NAME_GZIP),
    (b"\x28\xb5\x2f\xfd", "zstd data", NAME_ZSTD),
    (b"\xfd7zXZ\0", "xz data", DECOMPRESS),
    (b"BZh91AY&SY", "bzip2 data", DECOMPRESS),
    (b"PK\x03\x04", "a zip archive", DECOMPRESS),
    (b"PAR1", "Parquet data", NAME_PARQUET),
    (b"ARROW1", "Arrow data", TO_JSON),
    (b"\xff\xff\xff\xff", "Arrow data", TO_JSON),
    (b"\xff\xfe\0\0", "UTF-32 text", TO_UTF8),
    (b"\0\0\xfe\xff", "UTF-32 text", TO_UTF8),
    (b"\xff\xfe", "UTF-16 text", TO_UTF8),
    (b"\xfe\xff", "UTF-16 text", TO_UTF8),
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS", DOWNLOAD),
];

/// Checks the first bytes of a data file.
///
/// # Errors
/// They begin another format than text.
pub(super) fn check(file: &Path, first_bytes: &[u8]) -> Result<(), DataError> {
    match FORMATS.iter().find(|(magic, ..)| first_bytes.starts_with(magic)) {
        None => Ok(()),
        Some(&(_, found, remedy)) => {
            Err(DataError::ForeignFormat { file: file.to_owned(), expected: "text", found, remedy })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_formats_are_named() {
        let refusal = |bytes: &[u8]| check(Path::new("a.jsonl"), bytes).map_err(|error| error.to_string());
        assert_eq!(refusal(b"\x1f\x8b\x08\0"), Err("a.jsonl: expected text, found gzip data".to_owned()));
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0";
        assert_eq!(refusal(pointer), Err("a.jsonl: expected text, found a pointer of Git LFS".to_owned()));
        for text in [&b"{\"text\": \"a\"}"[..], b"version", b"BZh", b"", b"\xef\xbb\xbf{"] {
            assert_eq!(refusal(text), Ok(()));
        }
    }
}
