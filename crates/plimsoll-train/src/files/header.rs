//! The header of a `*.safetensors` file: a length (u64, little endian), then that many bytes of
//! JSON that give each tensor's type, shape and place, then the data. Pure: bytes in, words out.
//!
//! The published crate reads the header only together with the whole file, keeps no word of a
//! name that stands twice, and does not say which tensor is wrong; its types are used.

use super::error::HeaderError;
use safetensors::Dtype;
use serde::de::{Error as _, IgnoredAny, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;

/// Bytes of the length that a file begins with.
pub(super) const LENGTH_BYTES: u64 = 8;

/// The format's limit for a header.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Where a tensor lies, by the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// In bytes from the first byte of data.
    pub begin: u64,
    pub bytes: u64,
}

/// The length of the header, if a file of `file_bytes` can hold it.
pub(super) fn header_bytes(prefix: [u8; 8], file_bytes: u64) -> Result<u64, HeaderError> {
    let bytes = u64::from_le_bytes(prefix);
    let left = file_bytes.saturating_sub(LENGTH_BYTES);
    if bytes > left {
        return Err(HeaderError::CutOff { bytes, left });
    }
    if bytes > MAX_HEADER_BYTES {
        return Err(HeaderError::Large { bytes, largest: MAX_HEADER_BYTES });
    }
    Ok(bytes)
}

/// Reads a header of a file with `data_bytes` of data behind it. The tensors come in the order of
/// their data and tile it exactly.
pub(super) fn parse(json: &[u8], data_bytes: u64) -> Result<Vec<Place>, HeaderError> {
    let header: Header = serde_json::from_slice(json).map_err(|e| HeaderError::Json { message: e.to_string() })?;
    let mut places = header.0.into_iter().map(place).collect::<Result<Vec<_>, _>>()?;
    places.sort_by_key(|place| (place.begin, place.bytes));
    let mut end = 0;
    for place in &places {
        if place.begin != end {
            return Err(HeaderError::Offset { tensor: place.name.clone(), begin: place.begin, expected: end });
        }
        // Cannot overflow: `place` checked begin + bytes.
        end += place.bytes;
    }
    if end != data_bytes {
        return Err(HeaderError::End { needed: end, found: data_bytes });
    }
    Ok(places)
}

fn place((name, raw): (String, RawEntry)) -> Result<Place, HeaderError> {
    let RawEntry { dtype: dtype_name, shape, data_offsets: [begin, end] } = raw;
    let word: serde::de::value::StrDeserializer<serde::de::value::Error> = dtype_name.as_str().into_deserializer();
    let Ok(dtype) = Dtype::deserialize(word) else {
        return Err(HeaderError::DType { tensor: name, dtype: dtype_name });
    };
    let elements = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    let needed = elements
        .and_then(|elements| elements.checked_mul(dtype.bitsize() as u64))
        .filter(|bits| bits.is_multiple_of(8))
        .map(|bits| bits / 8);
    match end.checked_sub(begin) {
        Some(bytes) if needed == Some(bytes) => Ok(Place { name, dtype, shape, begin, bytes }),
        _ => {
            let spanned = i128::from(end) - i128::from(begin);
            Err(HeaderError::Size { tensor: name, dtype: dtype_name, shape, spanned, needed })
        }
    }
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's entries as they stand.
struct Header(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        unique_map(deserializer, "tensor", &["__metadata__"]).map(Header)
    }
}

/// The pairs of an object in which no name may stand twice; the values of `skipped` are passed over.
pub(super) fn unique_map<'de, D, T>(
    deserializer: D,
    noun: &'static str,
    skipped: &'static [&'static str],
) -> Result<Vec<(String, T)>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Pairs<T>(&'static str, &'static [&'static str], PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Pairs<T> {
        type Value = Vec<(String, T)>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "an object with a value for each {}", self.0)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut seen = BTreeSet::new();
            let mut pairs = Vec::new();
            while let Some(name) = map.next_key::<String>()? {
                if !seen.insert(name.clone()) {
                    return Err(A::Error::custom(format!("{} `{name}` stands twice", self.0)));
                }
                if self.1.contains(&name.as_str()) {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
                let value = map.next_value().map_err(|e| A::Error::custom(format!("{} `{name}`: {e}", self.0)))?;
                pairs.push((name, value));
            }
            Ok(pairs)
        }
    }

    deserializer.deserialize_map(Pairs(noun, skipped, PhantomData))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TWO: &str = r#"{"__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]},
        "a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}"#;

    #[test]
    fn tensors_come_in_the_order_of_their_data() {
        let places = parse(TWO.as_bytes(), 14).unwrap();
        let facts: Vec<_> = places.iter().map(|p| (p.name.as_str(), p.dtype, p.begin, p.bytes)).collect();
        assert_eq!(facts, [("a", Dtype::F32, 0, 8), ("b", Dtype::BF16, 8, 6)]);
        assert_eq!(parse(b"{}  ", 0), Ok(vec![]));
    }

    #[test]
    fn every_lie_is_named() {
        let changed = |from: &str, to: &str| {
            assert!(TWO.contains(from), "{from}");
            parse(TWO.replace(from, to).as_bytes(), 14).unwrap_err().to_string()
        };
        assert_eq!(changed("BF16", "BF17"), "tensor `b` has the unknown type `BF17`");
        assert_eq!(changed("[3]", "[4]"), "tensor `b` (BF16 [4]) spans 6 bytes, but needs 8");
        assert_eq!(changed("[8, 14]", "[14, 8]"), "tensor `b` (BF16 [3]) spans -6 bytes, but needs 6");
        let gap = "tensor `b` begins at byte 10 of the data, but the one before it ends at 8";
        assert_eq!(changed("[8, 14]", "[10, 16]"), gap);
        let overlap = "tensor `b` begins at byte 4 of the data, but the one before it ends at 8";
        assert_eq!(changed("[8, 14]", "[4, 10]"), overlap);
        let wide = changed("[3]", "[4294967296, 4294967296]");
        assert!(wide.ends_with("spans 6 bytes, but its shape is not a size"), "{wide}");
        assert!(changed("\"b\"", "\"a\"").contains("tensor `a` stands twice"));
        assert!(changed("[3]", "[-3]").contains("tensor `b`: invalid value"));
        assert!(changed("\"dtype\": \"BF16\",", "").contains("tensor `b`: missing field `dtype`"));
        let cut = parse(TWO.as_bytes(), 13).unwrap_err().to_string();
        assert_eq!(cut, "the tensors need 14 bytes of data, the file has 13: it is cut off");
        assert!(matches!(parse(TWO.as_bytes(), 15), Err(HeaderError::End { .. })));
    }

    #[test]
    fn a_lying_length_is_refused_before_anything_is_allocated() {
        assert_eq!(header_bytes(u64::MAX.to_le_bytes(), 100), Err(HeaderError::CutOff { bytes: u64::MAX, left: 92 }));
        assert!(matches!(header_bytes([0; 8], 3), Ok(0)));
        let large = header_bytes((MAX_HEADER_BYTES + 1).to_le_bytes(), 1 << 40);
        assert!(matches!(large, Err(HeaderError::Large { .. })));
    }

    proptest! {
        #[test]
        fn any_header_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), data in any::<u64>()) {
            let _ = parse(&bytes, data);
        }

        /// What is accepted tiles the data, whatever was changed.
        #[test]
        fn a_changed_header_is_refused_or_still_tiles_the_data(
            changes in prop::collection::vec((0usize..TWO.len(), any::<u8>()), 1..4),
            number in any::<u64>(),
            data in prop_oneof![Just(14u64), 0u64..64],
        ) {
            let mut bytes = TWO.as_bytes().to_vec();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            for text in [bytes, TWO.replace("14", &number.to_string()).into_bytes()] {
                if let Ok(places) = parse(&text, data) {
                    prop_assert_eq!(places.iter().map(|p| p.bytes).sum::<u64>(), data);
                }
            }
        }
    }
}
