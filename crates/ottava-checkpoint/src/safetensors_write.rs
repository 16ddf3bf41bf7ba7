//! Writes weights as safetensors, with one tensor in memory at a time.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value, json};

use crate::atomic::CheckpointWriter;
use crate::carried::Carried;
use crate::safetensors::{INDEX_FILE, SINGLE_FILE, TensorInfo, to_safetensors};
use ottava_common::fs::{RealFs, replace_file};
use ottava_common::{Error, Result};
use ottava_tensor::Tensor;
use std::path::Path;

/// The size of a file after which Hugging Face starts another file.
pub const MAX_FILE_BYTES: usize = 5_000_000_000;

/// A file of a model folder and the tensors in it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelFile {
    /// The name of the file in the folder.
    pub name: String,
    /// The tensors in the file.
    pub tensors: Vec<TensorInfo>,
    /// Whether the tensors are copied from [`Carried`] parts of the model.
    pub is_carried: bool,
}

impl ModelFile {
    /// Returns the number of bytes of the tensors.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(TensorInfo::bytes).sum()
    }
}

/// Divides the tensors of a model into files: `model.safetensors`, or several files if there are `carried` tensors or if the model exceeds
/// `max_file_bytes`. Each file holds consecutive tensors. A tensor larger than `max_file_bytes` gets its own file. Files of `carried` tensors come
/// last.
pub fn model_files(tensors: Vec<TensorInfo>, carried: Vec<TensorInfo>, max_file_bytes: usize) -> Vec<ModelFile> {
    let mut files = divided(tensors, false, max_file_bytes);
    if !carried.is_empty() {
        files.extend(divided(carried, true, max_file_bytes));
    }
    let count = files.len();
    for (index, file) in files.iter_mut().enumerate() {
        file.name = match count {
            1 => SINGLE_FILE.to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
    }
    files
}

/// Divides tensors into files without names.
fn divided(tensors: Vec<TensorInfo>, is_carried: bool, max_file_bytes: usize) -> Vec<ModelFile> {
    let new = || ModelFile { name: String::new(), tensors: Vec::new(), is_carried };
    let (mut files, mut size) = (vec![new()], 0);
    for tensor in tensors {
        if size > 0 && size + tensor.bytes() > max_file_bytes {
            files.push(new());
            size = 0;
        }
        size += tensor.bytes();
        files.last_mut().expect("there is always a last file").tensors.push(tensor);
    }
    files
}

/// Writes the index of the `files` of a model, if there are several files.
pub fn write_index(writer: &mut CheckpointWriter, files: &[ModelFile], carried: &Carried) -> Result<()> {
    if files.len() == 1 {
        return Ok(());
    }
    let stored = |file: &ModelFile, name: &str| if file.is_carried { name.to_string() } else { carried.stored(name) };
    let names =
        files.iter().flat_map(|file| file.tensors.iter().map(|tensor| (stored(file, &tensor.name), &file.name)));
    let weight_map: BTreeMap<_, _> = names.collect();
    let total_size: usize = files.iter().map(ModelFile::bytes).sum();
    let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    let text = serde_json::to_string_pretty(&index).expect("names and numbers are JSON");
    writer.file(INDEX_FILE, |file| file.write(text.as_bytes()))
}

/// Writes a model in the files of [`model_files`], and their index. `carried` has the parts of a larger model that are copied, and the names in the
/// folder.
///
/// `fetch` is called once for the bytes of each of the `tensors`, in their order.
pub fn write_model<B: AsRef<[u8]>>(
    writer: &mut CheckpointWriter,
    tensors: &[TensorInfo],
    carried: &Carried,
    max_file_bytes: usize,
    mut fetch: impl FnMut(&TensorInfo) -> Result<B>,
) -> Result<()> {
    let files = model_files(tensors.to_vec(), carried.infos()?, max_file_bytes);
    files.iter().try_for_each(|file| write_model_file(writer, file, carried, &mut fetch))?;
    write_index(writer, &files, carried)
}

/// Writes a file of a model. Tensors of the text model get their names in the folder, and `fetch` is called with the text model's descriptions.
pub fn write_model_file<B: AsRef<[u8]>>(
    writer: &mut CheckpointWriter,
    file: &ModelFile,
    carried: &Carried,
    mut fetch: impl FnMut(&TensorInfo) -> Result<B>,
) -> Result<()> {
    if file.is_carried {
        return write_tensors(writer, &file.name, &file.tensors, |info| carried.bytes(info));
    }
    let named = |info: &TensorInfo| TensorInfo { name: carried.stored(&info.name), ..info.clone() };
    let stored: Vec<_> = file.tensors.iter().map(named).collect();
    let own: HashMap<&str, &TensorInfo> = stored.iter().map(|info| info.name.as_str()).zip(&file.tensors).collect();
    write_tensors(writer, &file.name, &stored, |info| fetch(own[info.name.as_str()]))
}

/// Writes one safetensors file. `fetch` is called once for each tensor, in an order that depends only on `tensors`.
pub fn write_tensors<B: AsRef<[u8]>>(
    writer: &mut CheckpointWriter,
    name: &str,
    tensors: &[TensorInfo],
    mut fetch: impl FnMut(&TensorInfo) -> Result<B>,
) -> Result<()> {
    // Wide types come first, so each tensor starts at a multiple of its element size, as readers that map files need.
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

/// Writes tensors of the CPU to a safetensors file at `path`. An existing file is replaced.
pub fn write_file(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let info = |(name, tensor): &(String, Tensor)| TensorInfo {
        name: name.clone(),
        dtype: tensor.dtype(),
        shape: tensor.shape().to_vec(),
    };
    let mut all: Vec<_> = tensors.iter().map(|tensor| (info(tensor), &tensor.1)).collect();
    all.sort_by_key(|(info, _)| std::cmp::Reverse(info.dtype.size()));
    let header = header(&all.iter().map(|(info, _)| info).collect::<Vec<_>>())?;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    for (_, tensor) in all {
        bytes.extend(tensor.read_bytes()?);
    }
    replace_file(&RealFs, path, &bytes)
}

/// Returns the JSON that describes the tensors, with spaces at its end so that the data after it is aligned.
fn header(tensors: &[&TensorInfo]) -> Result<String> {
    let mut entries = Map::new();
    // The transformers library requires this entry.
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
