//! Reading compressed files, with a limit of the unpacked size.

use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};

use flate2::read::MultiGzDecoder;
use ottava_files::{bomb, most_unpacked_bytes};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};

use crate::files::Compression;
use ottava_common::hash::HashedFile;

/// The magic number of a skippable frame of Zstandard, without its lowest four bits (RFC 8878, section 3.1.2).
const SKIPPABLE: u32 = 0x184D_2A50;

/// The number of bytes that are read ahead.
const BUFFER: usize = 1 << 18;

/// Returns a reader of the unpacked bytes of a file that has `size` packed bytes.
pub(super) fn unpack(file: HashedFile, size: u64, compression: Compression) -> io::Result<Box<dyn BufRead + Send>> {
    let left = most_unpacked_bytes(size);
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

/// A frame whose first four bytes were already read.
type Frame = StreamingDecoder<Chain<Cursor<[u8; 4]>, BufReader<HashedFile>>, FrameDecoder>;

/// A reader of the consecutive frames of a Zstandard file.
struct Frames {
    packed: Option<BufReader<HashedFile>>,
    frame: Option<Box<Frame>>,
}

impl Frames {
    /// Opens the next frame with content. Returns false at the end of the file.
    fn advance(&mut self, mut packed: BufReader<HashedFile>) -> io::Result<bool> {
        while !packed.fill_buf()?.is_empty() {
            let mut magic = [0; 4];
            packed.read_exact(&mut magic).map_err(|_| cut_off())?;
            // Parallel compressors write skippable frames, which have no text.
            if u32::from_le_bytes(magic) & !0xf == SKIPPABLE {
                let mut length = [0; 4];
                packed.read_exact(&mut length).map_err(|_| cut_off())?;
                let length = u64::from(u32::from_le_bytes(length));
                if io::copy(&mut (&mut packed).take(length), &mut io::sink())? < length {
                    return Err(cut_off());
                }
                continue;
            }
            let decoder = StreamingDecoder::new(Cursor::new(magic).chain(packed));
            self.frame = Some(Box::new(decoder.map_err(|error| unreadable(&error))?));
            return Ok(true);
        }
        self.packed = Some(packed);
        Ok(false)
    }
}

fn unreadable(error: &dyn std::fmt::Display) -> io::Error {
    io::Error::other(format!("this is not a readable Zstandard file: {error}"))
}

fn cut_off() -> io::Error {
    unreadable(&"it ends within a frame")
}

impl Read for Frames {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(packed) = self.packed.take()
                && !self.advance(packed)?
            {
                return Ok(0);
            }
            let frame = self.frame.as_mut().expect("a frame is open unless the file has ended");
            let count = frame.read(buffer).map_err(|error| unreadable(&error))?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            let frame = self.frame.take().expect("the frame was read above");
            self.packed = Some(frame.into_inner().into_inner().1);
        }
    }
}

/// A reader that fails after `left` bytes, to stop decompression bombs.
struct Capped<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Capped<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| io::Error::other(bomb()))?;
        Ok(count)
    }
}
