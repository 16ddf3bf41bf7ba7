//! Compressed files, with protection from those that never end.

use std::io::{self, BufRead, BufReader, Read};

use flate2::read::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;

use super::files::Compression;
use crate::hash::HashedFile;

/// A compressed file may unpack to this many times its size (text seldom passes 20) or to [`FREE_BYTES`], and no further.
const MAX_RATIO: u64 = 200;

/// Unpacked bytes that are always allowed, so that small files of repeated text pass.
const FREE_BYTES: u64 = 16 << 20;

/// Bytes that are read ahead.
const BUFFER: usize = 1 << 18;

/// The unpacked bytes of a file of `size` bytes.
pub(super) fn unpack(file: HashedFile, size: u64, compression: Compression) -> io::Result<Box<dyn BufRead + Send>> {
    let left = FREE_BYTES.max(size.saturating_mul(MAX_RATIO));
    Ok(match compression {
        Compression::None => Box::new(BufReader::with_capacity(BUFFER, file)),
        Compression::Gzip => {
            let inner = MultiGzDecoder::new(BufReader::new(file));
            Box::new(BufReader::with_capacity(BUFFER, Capped { inner, left }))
        }
        Compression::Zstd => {
            let inner = Frames { packed: Some(BufReader::new(file)), frame: None };
            Box::new(BufReader::with_capacity(BUFFER, Capped { inner, left }))
        }
    })
}

/// The frames of a file of Zstandard, one after another.
struct Frames {
    packed: Option<BufReader<HashedFile>>,
    frame: Option<Box<StreamingDecoder<BufReader<HashedFile>, ruzstd::decoding::FrameDecoder>>>,
}

impl Read for Frames {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(mut packed) = self.packed.take() {
                if packed.fill_buf()?.is_empty() {
                    self.packed = Some(packed);
                    return Ok(0);
                }
                self.frame = Some(Box::new(StreamingDecoder::new(packed).map_err(io::Error::other)?));
            }
            let frame = self.frame.as_mut().expect("a frame is open unless the file has ended");
            let count = frame.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            let frame = self.frame.take().expect("the frame was read above");
            self.packed = Some(frame.into_inner());
        }
    }
}

/// Fails after `left` bytes: protects against decompression bombs.
struct Capped<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Capped<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| {
            io::Error::other(format!(
                "it unpacks to more than {MAX_RATIO} times its size; unpack it yourself if you trust it"
            ))
        })?;
        Ok(count)
    }
}
