//! Writes scalars for TensorBoard, in the event files that it reads.
//!
//! A file is a sequence of TFRecords. A record has the length of an `Event`, the checksum of the length, the `Event` in protocol buffers, and the
//! checksum of the `Event`. The few fields that we need are encoded here by hand (tensorboard/compat/proto/{event,summary}.proto).

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ottava_common::{Error, Result};

/// Writes one event file.
pub struct EventWriter {
    file: File,
    path: PathBuf,
}

impl EventWriter {
    /// Starts a new event file in `folder`, after a resume at `step` (0 for a new run). TensorBoard then ignores the later steps in earlier files of
    /// the folder.
    pub fn create(folder: &Path, step: u64) -> Result<EventWriter> {
        std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // TensorBoard requires "tfevents" in the name and reads files in the order of their names.
        let (seconds, nanos) = (now.as_secs(), now.subsec_nanos());
        let path = folder.join(format!("events.out.tfevents.{seconds:010}.{nanos:09}.{}", std::process::id()));
        let file = File::create_new(&path).map_err(Error::io(&path))?;
        let mut writer = EventWriter { file, path };
        writer.event(0, |event| bytes_field(event, 3, b"brain.Event:2"))?;
        // The event `session_log { status: START }` has the first step that earlier files may also contain.
        let restart = if step > 0 { step + 1 } else { 0 };
        writer.event(restart, |event| bytes_field(event, 7, &[1 << 3, 1]))?;
        Ok(writer)
    }

    /// Records values under their tags at `step`. The tag `train/loss` is in the group `train`.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut entry = Vec::new();
            bytes_field(&mut entry, 1, tag.as_bytes());
            entry.push(2 << 3 | FIXED32);
            entry.extend((*value as f32).to_le_bytes());
            bytes_field(&mut summary, 1, &entry);
        }
        self.event(step, |event| bytes_field(event, 5, &summary))
    }

    fn event(&mut self, step: u64, what: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut event = vec![1 << 3 | FIXED64];
        event.extend(now.as_secs_f64().to_le_bytes());
        event.push(2 << 3 | VARINT);
        varint(&mut event, step);
        what(&mut event);
        self.file.write_all(&record(&event)).map_err(Error::io(&self.path))
    }
}

// The wire types of protocol buffers.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const LENGTH: u8 = 2;
const FIXED32: u8 = 5;

fn bytes_field(message: &mut Vec<u8>, number: u8, content: &[u8]) {
    message.push(number << 3 | LENGTH);
    varint(message, content.len() as u64);
    message.extend(content);
}

/// Appends `value` with seven bits per byte, the lowest bits first. The top bit is set if more bytes follow.
fn varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

fn record(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    [&length, &masked_crc(&length).to_le_bytes()[..], content, &masked_crc(content).to_le_bytes()].concat()
}

/// Returns the checksum in the form of TFRecord: rotated and shifted, so that checksums of data with checksums stay useful.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Returns the CRC-32C (Castagnoli), which is not the CRC-32 of gzip.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| CRC_TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8))
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_agree_with_the_published_ones() {
        // The check value of the algorithm, and the examples of RFC 3720 B.4: 32 bytes of zeros, 32 bytes of ones, and the bytes 0 to 31.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&std::array::from_fn::<u8, 32, _>(|i| i as u8)), 0x46dd_794e);
    }

    #[test]
    fn numbers_take_seven_bits_a_byte() {
        for (value, expected) in [(0, &[0][..]), (127, &[127]), (128, &[0x80, 1]), (300, &[0xac, 2])] {
            let mut bytes = Vec::new();
            varint(&mut bytes, value);
            assert_eq!(bytes, expected);
        }
    }

    #[test]
    fn a_file_holds_version_restart_and_scalars() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(&folder.path().join("runs"), 300).unwrap();
        writer.scalars(301, &[("train/loss", 2.5), ("lr", 1e-3)]).unwrap();
        let bytes = std::fs::read(&writer.path).unwrap();
        let mut rest = &bytes[..];
        let mut events = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let content = &rest[12..12 + length];
            assert_eq!(rest[..16 + length], record(content));
            assert_eq!(content[0], 0x09);
            events.push(content[9..].to_vec());
            rest = &rest[16 + length..];
        }
        let summary = [
            &b"\x0a\x11\x0a\x0atrain/loss\x15"[..],
            &2.5_f32.to_le_bytes(),
            b"\x0a\x09\x0a\x02lr\x15",
            &1e-3_f32.to_le_bytes(),
        ]
        .concat();
        let expected = [
            b"\x10\x00\x1a\x0dbrain.Event:2".to_vec(),
            b"\x10\xad\x02\x3a\x02\x08\x01".to_vec(),
            [b"\x10\xad\x02\x2a\x1e".to_vec(), summary].concat(),
        ];
        assert_eq!(events, expected);
    }
}
