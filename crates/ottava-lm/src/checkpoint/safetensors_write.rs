//! Writing weights as safetensors, one tensor in memory at a time.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::atomic::CheckpointWriter;
use super::safetensors::{INDEX_FILE, SINGLE_FILE, TensorInfo, to_safetensors};
use crate::{Error, Result};

/// The size at which Hugging Face starts another file.
pub const MAX_FILE_BYTES: usize = 5_000_000_000;

/// Writes a model as `model.safetensors`, or as several files with their index when it exceeds `max_file_bytes`.
///
/// `fetch` is called once for the bytes of each tensor. The order of its calls depends only on `tensors`, so that all
/// ranks can take part in gathering each one.
pub fn write_model<B: AsRef<[u8]>>(
    writer: &mut CheckpointWriter,
    tensors: &[TensorInfo],
    max_file_bytes: usize,
    mut fetch: impl FnMut(&TensorInfo) -> Result<B>,
) -> Result<()> {
    let files = divide(tensors, max_file_bytes);
    if let [all] = &files[..] {
        return write_tensors(writer, SINGLE_FILE, all, fetch);
    }
    let mut weight_map = BTreeMap::new();
    for (index, file) in files.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", index + 1, files.len());
        write_tensors(writer, &name, file, &mut fetch)?;
        weight_map.extend(file.iter().map(|tensor| (&tensor.name, name.clone())));
    }
    let total_size: usize = tensors.iter().map(TensorInfo::bytes).sum();
    let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    let text = serde_json::to_string_pretty(&index).expect("names and numbers are JSON");
    writer.file(INDEX_FILE, |file| file.write(text.as_bytes()))
}

/// Writes one safetensors file. `fetch` is called once for each tensor, in an order that depends only on `tensors`.
pub fn write_tensors<B: AsRef<[u8]>>(
    writer: &mut CheckpointWriter,
    name: &str,
    tensors: &[TensorInfo],
    mut fetch: impl FnMut(&TensorInfo) -> Result<B>,
) -> Result<()> {
    // Wide types first: each tensor then starts at a multiple of its element size, as readers that map files need.
    let mut tensors: Vec<_> = tensors.iter().collect();
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.size()));
    let header = header(&tensors)?;
    writer.file(name, |file| {
        file.write(&(header.len() as u64).to_le_bytes())?;
        file.write(header.as_bytes())?;
        for tensor in tensors {
            let fetched = fetch(tensor)?;
            let bytes = fetched.as_ref();
            if bytes.len() != tensor.bytes() {
                let (name, expected) = (&tensor.name, tensor.bytes());
                return Err(Error::Checkpoint(format!("{name}: {} bytes to save, expected {expected}", bytes.len())));
            }
            file.write(bytes)?;
        }
        Ok(())
    })
}

/// Consecutive tensors that fit one file together; a tensor that fits none gets its own.
fn divide(tensors: &[TensorInfo], max_file_bytes: usize) -> Vec<Vec<TensorInfo>> {
    let mut files = vec![Vec::new()];
    let mut size = 0;
    for tensor in tensors {
        if size > 0 && size + tensor.bytes() > max_file_bytes {
            files.push(Vec::new());
            size = 0;
        }
        size += tensor.bytes();
        files.last_mut().expect("there is always a last file").push(tensor.clone());
    }
    files
}

/// The JSON that describes the tensors, filled up with spaces so that the data after it is aligned.
fn header(tensors: &[&TensorInfo]) -> Result<String> {
    let mut entries = Map::new();
    // Readers of the transformers library insist on this entry.
    entries.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.bytes();
        let entry =
            json!({ "dtype": to_safetensors(tensor.dtype), "shape": tensor.shape, "data_offsets": [start, end] });
        if entries.insert(tensor.name.clone(), entry).is_some() {
            return Err(Error::Checkpoint(format!("there are two tensors named {:?} to save", tensor.name)));
        }
        start = end;
    }
    let mut header = Value::Object(entries).to_string();
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    Ok(header)
}
