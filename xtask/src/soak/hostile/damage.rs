//! Damage to one file: another thing in its place, other bytes, or other values inside its format.

use super::super::case::Rng;
use super::{text, tokenizers};
use anyhow::Context;
use serde::de::IgnoredAny;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Size of a file that is all hole: more than any memory holds.
const HOLE_BYTES: u64 = 1 << 40;
/// Bytes of a line above the limit of data files.
const LONG_LINE: usize = 17 << 20;

/// Extension of the undamaged file beside one that has been replaced.
pub const ASIDE: &str = "aside";

/// The damage that one file has.
pub struct Damage {
    /// The damage in words, for messages.
    pub description: String,
    /// Whether no command may accept the file: it is no regular file, or its text breaks the rules of its format.
    pub unreadable: bool,
}

impl Damage {
    fn new(description: impl Into<String>, unreadable: bool) -> Damage {
        Damage { description: description.into(), unreadable }
    }
}

/// Damages one file, at random. `others` are files whose content may take its place. `victim` is a
/// file to which a link may lead in its place; no command may write there.
///
/// # Errors
/// Fails if the damage cannot be done.
pub fn damage(file: &Path, others: &[PathBuf], victim: &Path, rng: &mut Rng) -> anyhow::Result<Damage> {
    // A new name may stand in a folder that does not exist, or that earlier damage has replaced.
    if fs::create_dir_all(file.parent().context("a file has a folder")?).is_err() {
        return Ok(Damage::new("its folder is none", false));
    }
    let is_small = file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() < HOLE_BYTES);
    let bytes = if is_small && !rng.chance(0.15) { fs::read(file).ok() } else { None };
    let Some(bytes) = bytes else {
        return replace(file, others, victim, rng).with_context(|| format!("cannot replace {}", file.display()));
    };
    let (bytes, description) = damaged_content(file, bytes, rng);
    fs::write(file, &bytes)?;
    Ok(Damage::new(description, breaks_format(file, &bytes)))
}

/// Returns the damaged content of a file, and a description. Most damage respects the format of the file.
fn damaged_content(file: &Path, bytes: Vec<u8>, rng: &mut Rng) -> (Vec<u8>, String) {
    if rng.chance(0.3) {
        return damaged_bytes(bytes, rng);
    }
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let as_text = String::from_utf8(bytes);
    let (format, changed) = match (name.rsplit_once('.').map_or("", |(_, format)| format), &as_text) {
        ("json", Ok(text)) if name == "tokenizer.json" && rng.chance(0.6) => ("lie", tokenizers::lie(text, rng)),
        ("json", Ok(text)) => ("json", text::damaged_json(text, rng)),
        ("jsonl", Ok(text)) => ("line", text::damaged_lines(text, rng)),
        ("toml", Ok(text)) => ("toml", text::damaged_toml(text, rng)),
        ("safetensors", Err(error)) => {
            if let Some((bytes, described)) = damaged_safetensors(error.as_bytes(), rng) {
                return (bytes, described);
            }
            ("", None)
        }
        _ => ("", None),
    };
    match changed {
        Some((text, described)) => (text.into_bytes(), format!("{format}: {described}")),
        None => damaged_bytes(as_text.map_or_else(|error| error.into_bytes(), String::into_bytes), rng),
    }
}

/// Returns whether the content breaks the rules of the file's format, so that no reader can accept it.
fn breaks_format(file: &Path, bytes: &[u8]) -> bool {
    let is_json = |text: &[u8]| serde_json::from_slice::<IgnoredAny>(text).is_ok();
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    match file.extension().and_then(|format| format.to_str()) {
        Some("json") => !is_json(bytes),
        Some("jsonl") => {
            let mut lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
            lines.any(|line| line.len() >= LONG_LINE || !is_json(line))
        }
        Some("txt" | "toml") => std::str::from_utf8(bytes).is_err(),
        Some("safetensors") => header_end(bytes).is_none_or(|end| !is_json(&bytes[8..end])),
        _ => false,
    }
}

/// Puts something else in the place of a file.
fn replace(file: &Path, others: &[PathBuf], victim: &Path, rng: &mut Rng) -> anyhow::Result<Damage> {
    let aside = file.with_extension(ASIDE);
    if file.is_dir() {
        fs::remove_dir_all(file)?;
    } else if file.symlink_metadata().is_ok() {
        fs::rename(file, &aside)?;
    }
    let name = file.file_name().unwrap_or_default();
    let link = |target: &str, unreadable: bool| -> anyhow::Result<Damage> {
        symlink(target, file)?;
        Ok(Damage::new(format!("a link to {target}"), unreadable))
    };
    match rng.range(0, 18) {
        0 => Ok(Damage::new("removed", false)),
        1 => {
            fs::create_dir(file)?;
            Ok(Damage::new("a folder", true))
        }
        2 | 3 => {
            let made = Command::new("mkfifo").arg(file).status()?.success();
            Ok(Damage::new(if made { "a FIFO" } else { "removed" }, made))
        }
        4 => link(&name.to_string_lossy(), true),
        5 => link("nowhere", true),
        6 | 7 => link("/dev/zero", true),
        8 => link("/dev/urandom", true),
        9 => link("/dev/null", true),
        10 => link("/proc/self/mem", true),
        11 => link("/proc", true),
        12 => {
            UnixListener::bind(file)?;
            Ok(Damage::new("a socket", true))
        }
        13 => {
            fs::write(file, "")?;
            Ok(Damage::new("empty", breaks_format(file, b"")))
        }
        14 => {
            // A text may have any length.
            let is_text = file.extension().is_some_and(|format| format == "txt");
            fs::File::create(file)?.set_len(if is_text { 1 << 20 } else { HOLE_BYTES })?;
            Ok(Damage::new("a hole", !is_text))
        }
        15 => link(&victim.to_string_lossy(), false),
        16 if aside.exists() => link(&aside.file_name().unwrap_or_default().to_string_lossy(), false),
        17 if aside.exists() => {
            fs::rename(&aside, file)?;
            fs::set_permissions(file, fs::Permissions::from_mode(0o000))?;
            Ok(Damage::new("without permissions", false))
        }
        _ => {
            let other = rng.pick(others);
            let bytes = fs::read(&other).unwrap_or_default();
            fs::write(file, &bytes)?;
            let name = other.file_name().unwrap_or_default().display();
            Ok(Damage::new(format!("the content of {name}"), breaks_format(file, &bytes)))
        }
    }
}

/// Returns damaged bytes and a description.
fn damaged_bytes(mut bytes: Vec<u8>, rng: &mut Rng) -> (Vec<u8>, String) {
    let length = bytes.len();
    if length == 0 {
        return (vec![0; 64], "64 zeros instead of nothing".into());
    }
    let start = rng.range(0, length as u64 - 1) as usize;
    let end = (start + rng.log_range(1, 4096) as usize).min(length);
    let range = format!("bytes {start} to {end} of {length}");
    match rng.range(0, 12) {
        0..=2 => {
            let bit = rng.range(0, 7);
            bytes[start] ^= 1 << bit;
            (bytes, format!("bit {bit} of byte {start} of {length} flipped"))
        }
        3 => {
            bytes[start..end].fill(0);
            (bytes, format!("{range} zeroed"))
        }
        4 => {
            bytes[start..end].iter_mut().for_each(|byte| *byte = rng.range(0, 255) as u8);
            (bytes, format!("{range} at random"))
        }
        5 => {
            bytes.truncate(start);
            (bytes, format!("cut to {start} of {length} bytes"))
        }
        6 => {
            let part = bytes[start..end].to_vec();
            bytes.splice(end..end, part);
            (bytes, format!("{range} twice"))
        }
        7 => {
            bytes.drain(start..end);
            (bytes, format!("{range} removed"))
        }
        8 => {
            let inserted =
                rng.pick(&[&b"\0"[..], b"\xff\xfe", b"\x1b]0;x\x07", b"\r\n", "\u{202e}".as_bytes(), b"\xc3"]);
            bytes.splice(start..start, inserted.iter().copied());
            (bytes, format!("{inserted:?} inserted at byte {start} of {length}"))
        }
        9 => {
            let added = rng.pick(&[&b"\0"[..], b"\n", b"x", b"{}", b"\n\n[[x]]\n", b"\xff"]);
            bytes.extend_from_slice(added);
            (bytes, format!("{added:?} at the end"))
        }
        10 => {
            bytes.splice(0..0, *b"\xef\xbb\xbf");
            (bytes, "a byte order mark at the start".into())
        }
        11 => {
            let again = bytes.clone();
            bytes.extend(again);
            (bytes, "twice in a row".into())
        }
        _ => {
            bytes.fill(rng.pick(&[0, 0x20, 0x5b, 0xff]));
            (bytes, "one byte all over".into())
        }
    }
}

/// Returns the offset at which the header of a safetensors file ends; `None` if the file is shorter.
fn header_end(bytes: &[u8]) -> Option<usize> {
    let length = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let end = usize::try_from(length).ok()?.checked_add(8)?;
    (end <= bytes.len()).then_some(end)
}

/// Returns a damaged safetensors file and a description; `None` if the file is none.
fn damaged_safetensors(bytes: &[u8], rng: &mut Rng) -> Option<(Vec<u8>, String)> {
    let end = header_end(bytes)?;
    let (header, data) = (std::str::from_utf8(&bytes[8..end]).ok()?, &bytes[end..]);
    let assembled = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    match rng.range(0, 9) {
        0 | 1 => {
            let (size, total) = (end as u64 - 8, bytes.len() as u64);
            let lies =
                [0, 1, 7, size - 1, size + 1, total, total - 8, 1 << 31, 1 << 40, 1 << 62, u64::MAX - 7, u64::MAX];
            let lie = rng.pick(&lies);
            let bytes = [&lie.to_le_bytes()[..], &bytes[8..]].concat();
            Some((bytes, format!("a header of {lie} bytes instead of {size}")))
        }
        2..=4 => {
            let (header, described) = text::damaged_json(header, rng)?;
            Some((assembled(&header), format!("header: {described}")))
        }
        5 | 6 => {
            let (header, described) = text::damaged_tensors(header, data.len() as u64, rng)?;
            Some((assembled(&header), format!("header: {described}")))
        }
        _ => {
            let mut bytes = bytes.to_vec();
            let at = rng.range(0, data.len().checked_sub(4)? as u64) as usize & !3;
            let value = rng.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 0.0, 1e30]);
            bytes[end + at..end + at + 4].copy_from_slice(&value.to_le_bytes());
            Some((bytes, format!("the number at byte {at} of the data is {value}")))
        }
    }
}
