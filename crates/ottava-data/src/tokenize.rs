//! Tokenizes one source. One thread reads the source, all cores encode its documents, and the calling thread writes them in order.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rayon::prelude::*;

use crate::encode::{Encoded, Encoder};
use crate::left_out::{BadRecords, LeftOutOfFile};
use crate::parts::SourceUnits;
use crate::source::{Document, DocumentReader, Failure, SourceOptions};
use crate::token_writer::TokenWriter;
use ottava_common::{Error, Result, interrupt, limits};

/// The number of text bytes that are encoded together. It limits memory and keeps all cores busy.
const CHUNK_BYTES: usize = 8 << 20;

/// The number of chunks that wait for the next thread, in addition to the chunk that each thread processes.
const WAITING: usize = 1;

/// A document, or the reason why a record cannot be used.
type Record = Result<Document, String>;

/// The encoded documents of a record, with its line and unit.
struct EncodedRecord {
    line: u64,
    unit: u64,
    documents: Vec<Encoded>,
}

/// Tokenizes the documents of `reader`, which reads the file `source`. Returns the units of the source, and the size and SHA-256 of the bytes that
/// were read.
///
/// Errors with [`Error::Data`] if the file or too many of its records cannot be used. The error is about the earliest line.
pub(super) fn tokenize(
    source: &Path,
    reader: DocumentReader,
    options: &SourceOptions,
    encoder: &Encoder,
    writer: &mut TokenWriter,
) -> Result<(SourceUnits, u64, String)> {
    let (records, to_encode) = sync_channel(WAITING);
    let (encoded, to_write) = sync_channel(WAITING);
    // A thread that fails closes its channels, which ends the other threads. The writer sees records in order, so its error is about the earliest
    // line.
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || read(reader, &records));
        let encoding = scope.spawn(move || encode(source, encoder, to_encode, &encoded));
        let mut documents_of_units: Vec<(u64, u64)> = Vec::new();
        let mut left_out = LeftOutOfFile::default();
        let mut bad = BadRecords::new(options);
        for record in to_write.into_iter().flatten() {
            let EncodedRecord { line, unit, documents } = match record {
                Err(error @ Error::Data(_)) => {
                    bad.skip(error)?;
                    continue;
                }
                record => record?,
            };
            for document in &documents {
                left_out.add(&document.left_out, line);
                writer.push(document)?;
            }
            match documents_of_units.last_mut() {
                Some((last, count)) if *last == unit => *count += documents.len() as u64,
                _ => documents_of_units.push((unit, documents.len() as u64)),
            }
        }
        encoding.join().expect("the encoder does not panic")?;
        let reader = reading.join().expect("the reader does not panic")?;
        left_out.warn(source, encoder);
        bad.warn(source);
        let units = SourceUnits { units: reader.units(), documents: documents_of_units, bad_records: bad.count() };
        let (size, sha256) = reader.finish()?;
        Ok((units, size, sha256))
    })
}

/// Sends the records of a file in chunks. Returns the reader at the end of the file.
fn read(mut reader: DocumentReader, records: &SyncSender<Vec<Record>>) -> Result<DocumentReader> {
    loop {
        let (mut chunk, mut size, mut failure) = (Vec::new(), 0, None);
        while size < CHUNK_BYTES {
            let record = match interrupt::check("tokenizing").map(|()| reader.next_or_failure()) {
                Ok(None) => break,
                Ok(Some(Ok(document))) => Ok(document),
                Ok(Some(Err(Failure::Record(error)))) => Err(error.to_string()),
                Ok(Some(Err(Failure::File(error)))) | Err(error) => {
                    failure = Some(error);
                    break;
                }
            };
            // The overhead of a document is counted too, so that many short documents also fill a chunk.
            size += record.as_ref().map_or(0, |document| document.bytes) + 64;
            chunk.push(record);
        }
        let is_last = chunk.is_empty();
        // An error is sent after the records before it. If the channel is closed, the receiving thread reports its own error.
        let is_closed = !is_last && records.send(chunk).is_err();
        match failure {
            Some(error) => return Err(error),
            None if is_last || is_closed => return Ok(reader),
            None => {}
        }
    }
}

/// Encodes chunks of records on all cores, and sends them in order. The number of records at a time is limited by memory.
fn encode(
    source: &Path,
    encoder: &Encoder,
    chunks: Receiver<Vec<Record>>,
    encoded: &SyncSender<Vec<Result<EncodedRecord>>>,
) -> Result<()> {
    let encode = |record: &Record| {
        let document = record.as_ref().map_err(|reason| Error::Data(reason.clone()))?;
        interrupt::check("tokenizing")?;
        let wrong = |error| Error::Data(format!("{}:{}: {error}", source.display(), document.line));
        let documents = encoder.encode(document).map_err(wrong)?;
        Ok(EncodedRecord { line: document.line, unit: document.unit, documents })
    };
    for chunk in chunks {
        let mut rest = &chunk[..];
        while !rest.is_empty() {
            let (together, others) = rest.split_at(fitting(rest, encoder, source)?);
            if encoded.send(together.par_iter().map(encode).collect()).is_err() {
                return Ok(());
            }
            rest = others;
        }
    }
    Ok(())
}

/// Returns the number of `records` (at least one) that can be encoded at once in the available memory. Errors with [`Error::Data`] if even the first
/// record does not fit.
fn fitting(records: &[Record], encoder: &Encoder, source: &Path) -> Result<usize> {
    let available = limits::available_memory().unwrap_or(u64::MAX);
    let needed = |record: &Record| record.as_ref().map_or(0, |document| encoder.memory(document));
    let mut total = needed(&records[0]);
    if let (true, Ok(first)) = (total > available, &records[0]) {
        return Err(Error::Data(format!(
            "{}:{}: tokenizing this document of {:.1} MiB takes about {:.1} GiB of memory, \
             {:.1} GiB available; split it, or set text_documents = \"line\"",
            source.display(),
            first.line,
            first.bytes as f64 / f64::from(1 << 20),
            total as f64 / f64::from(1 << 30),
            available as f64 / f64::from(1 << 30),
        )));
    }
    // Half of the memory is left for other uses.
    let more = records[1..].iter().take_while(|record| {
        total = total.saturating_add(needed(record));
        total <= available / 2
    });
    Ok(1 + more.count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Content, Tokenizer};

    #[test]
    fn documents_are_encoded_together_as_far_as_memory_reaches() {
        let document = |megabytes: usize| {
            let content = Content::Text("x".repeat(megabytes << 20));
            Ok(Document { content, bytes: megabytes << 20, line: 1, unit: 0 })
        };
        let path = Path::new("a.txt");
        let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer");
        let tokenizer = Tokenizer::load(&tokenizer).unwrap();
        let encoder = Encoder::new(&tokenizer, &SourceOptions::default(), &[]).unwrap();
        let fitting = |records: &[Record]| fitting(records, &encoder, path);
        assert_eq!(fitting(&[document(0), document(0)]).unwrap(), 2);
        let available = limits::available_memory().unwrap() >> 20;
        let large = (available / 270) as usize;
        assert_eq!(fitting(&[document(large / 2), document(large / 2)]).unwrap(), 1);
        let error = fitting(&[document(large * 3 / 2)]).unwrap_err().to_string();
        assert!(error.starts_with("a.txt:1: tokenizing this document of "), "{error}");
    }
}
