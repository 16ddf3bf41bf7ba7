//! Reads weights from one `model.safetensors`, or from several files with their `model.safetensors.index.json`.
//!
//! Opening a model parses only headers, with the safetensors crate, which checks every shape and offset. Tensors are read with positioned reads, so a
//! file that shrinks while it is read causes an error and not SIGBUS. Links are followed, because the Hugging Face cache consists of links. A path in
//! an index must not leave the folder.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::fs::File;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ottava_tensor::DType;
use rayon::prelude::*;
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};

use ottava_common::fs::is_plain_name;
use ottava_common::{Error, Result, input};

/// The maximum size of a header, a limit of the format.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The maximum size of an index file. Index files of the largest models have about 10 MB.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// The number of bytes that a thread reads at once.
const PART: usize = 2 << 20;

/// The name of the file of weights, if a model has only one.
pub const SINGLE_FILE: &str = "model.safetensors";

/// The name of the file that lists the file of each tensor.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// A description of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name of the tensor, unique in the model.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// The shape, row-major.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }
}

/// The weights of a model, open for reading in any order.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles {
    files: Vec<Arc<TensorFile>>,
    /// The file that holds a tensor, by the name of the tensor.
    holders: BTreeMap<String, Holder>,
}

/// The place of a tensor.
#[derive(Clone, Debug)]
struct Holder {
    /// The number of the file.
    file: usize,
    /// The name of the tensor in the file.
    stored: String,
}

#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// The offset of the tensors, after the header.
    data_start: u64,
}

/// The maximum number of axes of a tensor. Weights of models have up to 3.
const MAX_AXES: usize = 8;

impl ModelFiles {
    /// Opens the weights in `folder`. Errors with [`Error::Model`], which names the file, and the tensor if a tensor is wrong.
    pub fn open(folder: &Path) -> Result<ModelFiles> {
        if folder.join(SINGLE_FILE).exists() {
            return ModelFiles::open_file(&folder.join(SINGLE_FILE));
        }
        let index_path = folder.join(INDEX_FILE);
        if !index_path.exists() {
            if let Some(shard) = shard_in(folder) {
                return Err(Error::Model(format!(
                    "{}: holds {shard}, one of several files of weights, without {INDEX_FILE}, which says what is in them; download it too",
                    folder.display()
                )));
            }
            return Err(Error::Model(format!(
                "{}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; other formats (.bin, .pth) can run code when loaded \
                 and are not read: convert them to safetensors first",
                folder.display()
            )));
        }
        let index = read_index(&index_path)?;
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", index_path.display()));
        let mut model = ModelFiles::default();
        let mut by_name = BTreeMap::new();
        for (tensor, file_name) in &index.weight_map {
            if by_name.contains_key(file_name) {
                continue;
            }
            if !is_plain_name(file_name) {
                return Err(wrong(format!(
                    "tensor {tensor:?} is listed in {file_name:?}, which is not the name of a file in this folder"
                )));
            }
            let path = folder.join(file_name);
            if !path.exists() {
                return Err(wrong(format!("{file_name} is missing; it holds {tensor:?} and perhaps other tensors")));
            }
            by_name.insert(file_name, model.files.len());
            model.add(TensorFile::open(&path)?)?;
        }
        for (tensor, file_name) in &index.weight_map {
            match model.holders.get(tensor) {
                Some(holder) if by_name[file_name] == holder.file => (),
                _ => return Err(wrong(format!("tensor {tensor:?} is listed, but {file_name} does not hold it"))),
            }
        }
        Ok(model)
    }

    /// Opens a single safetensors file.
    pub fn open_file(path: &Path) -> Result<ModelFiles> {
        let mut model = ModelFiles::default();
        model.add(TensorFile::open(path)?)?;
        Ok(model)
    }

    fn add(&mut self, file: TensorFile) -> Result<()> {
        for tensor in file.metadata.offset_keys() {
            if let Some(first) = self.holders.get(&tensor) {
                let (first, second) = (self.files[first.file].path.display(), file.path.display());
                return Err(Error::Model(format!("{second}: tensor {tensor:?} is also in {first}")));
            }
            self.holders.insert(tensor.clone(), Holder { file: self.files.len(), stored: tensor });
        }
        self.files.push(Arc::new(file));
        Ok(())
    }

    /// Divides the tensors in two: the tensors to which `name` gives a name, under this name, and all others. Both parts share the open files.
    ///
    /// Errors if two tensors get the same name.
    pub(super) fn divide(self, name: impl Fn(&str) -> Option<String>) -> Result<[ModelFiles; 2]> {
        let of = |files: &Vec<Arc<TensorFile>>| ModelFiles { files: files.clone(), holders: BTreeMap::new() };
        let [mut named, mut others] = [of(&self.files), of(&self.files)];
        for (tensor, holder) in self.holders {
            match name(&tensor) {
                None => drop(others.holders.insert(tensor, holder)),
                Some(name) => {
                    if let Some(other) = named.holders.insert(name.clone(), holder) {
                        let path = self.files[other.file].path.display();
                        return Err(Error::Model(format!(
                            "{path}: tensors {:?} and {tensor:?} both are `{name}` of the text model",
                            other.stored
                        )));
                    }
                }
            }
        }
        Ok([named, others])
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.holders.keys().map(String::as_str)
    }

    /// Returns the type and the shape of a tensor. Errors if there is no tensor with this name, or if its type is not supported.
    pub fn info(&self, name: &str) -> Result<TensorInfo> {
        let (file, stored, info) = self.find(name)?;
        let dtype = from_safetensors(info.dtype)
            .ok_or_else(|| file.wrong(stored, format!("its type {} is not supported", info.dtype)))?;
        Ok(TensorInfo { name: name.into(), dtype, shape: info.shape.clone() })
    }

    /// Returns whether there is a tensor with this name.
    pub fn has(&self, name: &str) -> bool {
        self.holders.contains_key(name)
    }

    /// Returns the shape of a tensor of unsigned bytes. Errors for other types. Unsigned bytes hold codes, and the type does not tell their format.
    pub fn shape_of_bytes(&self, name: &str) -> Result<Vec<usize>> {
        let (file, stored, info) = self.find(name)?;
        match info.dtype {
            Dtype::U8 => Ok(info.shape.clone()),
            other => Err(file.wrong(stored, format!("its type is {other}; it is U8"))),
        }
    }

    /// Returns the bytes of a tensor, little endian and row-major.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let (_, _, info) = self.find(name)?;
        self.read_bytes(name, 0..info.data_offsets.1 - info.data_offsets.0)
    }

    /// Returns the bytes in `range` of a tensor. Errors if the file does not hold them.
    pub fn read_bytes(&self, name: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; range.len()];
        self.read_into(name, range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills `bytes` with the bytes of a tensor from byte `first` on, in parallel. Errors if the file does not hold them.
    pub fn read_into(&self, name: &str, first: usize, bytes: &mut [u8]) -> Result<()> {
        let (file, stored, info) = self.find(name)?;
        let (start, end) = info.data_offsets;
        let range = first..first + bytes.len();
        assert!(range.end <= end - start, "{range:?} of {name:?}, {} bytes", end - start);
        let begin = file.data_start + (start + first) as u64;
        let read = |(part, bytes): (usize, &mut [u8])| file.file.read_exact_at(bytes, begin + (part * PART) as u64);
        // A single part is read by the calling thread, since a shard of columns has a part of a few kB for each row.
        let done = match bytes.len() <= PART {
            true => read((0, bytes)),
            false => bytes.par_chunks_mut(PART).enumerate().try_for_each(read),
        };
        done.map_err(|e| file.wrong(stored, format!("cannot be read: {e}")))
    }

    /// Returns the file of a tensor, its name there, and its description.
    fn find(&self, name: &str) -> Result<(&TensorFile, &str, &safetensors::tensor::TensorInfo)> {
        let missing = || {
            let files: Vec<_> = self.files.iter().map(|file| file.path.display().to_string()).collect();
            let other = match self.holders.values().next() {
                Some(Holder { stored, .. }) => {
                    format!(", whose first tensor is {stored:?}: config.json may be of a model of another family")
                }
                None => String::new(),
            };
            Error::Model(format!("there is no tensor {name:?} in {}{other}", files.join(", ")))
        };
        let Holder { file, stored } = self.holders.get(name).ok_or_else(missing)?;
        let file = &self.files[*file];
        Ok((file, stored, file.metadata.info(stored).expect("every holder has its tensor")))
    }
}

/// Finds a file in `folder` whose name says that it is one of several files, such as `model-00001-of-00002.safetensors`.
fn shard_in(folder: &Path) -> Option<String> {
    let names = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("-of-") && name.ends_with(".safetensors")).min()
}

impl TensorFile {
    fn open(path: &Path) -> Result<TensorFile> {
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let (file, size) = input::open(path).map_err(Error::io(path))?;
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(|_| wrong(format!("{size} bytes are too few for safetensors")))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES || length > size - 8 {
            return Err(wrong(format!(
                "its header should have {length} bytes; the file has {size}: cut off, or not safetensors"
            )));
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8).map_err(Error::io(path))?;
        if header.first() != Some(&b'{') {
            return Err(wrong("its header does not start as JSON; not a safetensors file".into()));
        }
        let invalid = |e: serde_json::Error| wrong(format!("its header is not valid: {e}"));
        serde_json::from_slice::<Unique<IgnoredAny>>(&header).map_err(invalid)?;
        let metadata: Metadata = serde_json::from_slice(&header).map_err(invalid)?;
        let axes = |name: &String| metadata.info(name).map_or(0, |info| info.shape.len());
        if let Some(name) = metadata.offset_keys().iter().find(|name| axes(name) > MAX_AXES) {
            return Err(wrong(format!("tensor {name:?} has {} axes; at most {MAX_AXES} are read", axes(name))));
        }
        let (data_start, present) = (8 + length, size - 8 - length);
        if present != metadata.data_len() as u64 {
            let cut = metadata
                .offset_keys()
                .into_iter()
                .find(|name| metadata.info(name).is_some_and(|info| info.data_offsets.1 as u64 > present));
            let first = cut.map(|name| format!("; tensor {name:?} is the first that is cut off")).unwrap_or_default();
            return Err(wrong(format!(
                "{present} bytes of tensors, its header describes {}{first}",
                metadata.data_len()
            )));
        }
        Ok(TensorFile { path: path.to_path_buf(), file, metadata, data_start })
    }

    fn wrong(&self, tensor: &str, reason: String) -> Error {
        Error::Model(format!("{}: tensor {tensor:?}: {reason}", self.path.display()))
    }
}

#[derive(Deserialize)]
struct Index {
    #[serde(deserialize_with = "unique")]
    weight_map: BTreeMap<String, String>,
}

/// A JSON object without duplicate keys. Readers differ in which duplicate they use, so duplicates are rejected.
struct Unique<V>(BTreeMap<String, V>);

fn unique<'de, V: Deserialize<'de>, D: serde::Deserializer<'de>>(from: D) -> Result<BTreeMap<String, V>, D::Error> {
    Unique::deserialize(from).map(|Unique(map)| map)
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Unique<V>, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = Unique<V>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Unique<V>, A::Error> {
                let mut map = BTreeMap::new();
                while let Some((key, value)) = entries.next_entry::<String, V>()? {
                    match map.entry(key) {
                        Entry::Vacant(entry) => drop(entry.insert(value)),
                        Entry::Occupied(entry) => {
                            return Err(A::Error::custom(format!("{:?} appears twice", entry.key())));
                        }
                    }
                }
                Ok(Unique(map))
            }
        }
        from.deserialize_map(Entries(PhantomData))
    }
}

fn read_index(path: &Path) -> Result<Index> {
    let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
    let index: Index = serde_json::from_slice(&input::read(path, MAX_INDEX_BYTES).map_err(Error::io(path))?)
        .map_err(|e| wrong(format!("not a valid index: {e}")))?;
    if index.weight_map.is_empty() {
        return Err(wrong("it lists no tensor".into()));
    }
    Ok(index)
}

fn from_safetensors(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F8_E4M3 => DType::E4M3,
        Dtype::F8_E5M2 => DType::E5M2,
        Dtype::F8_E8M0 => DType::E8M0,
        Dtype::U8 => DType::U8,
        Dtype::I16 => DType::I16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        _ => return None,
    })
}

/// Returns the type with this name in a safetensors header.
pub(super) fn from_name(name: &str) -> Option<DType> {
    from_safetensors(serde_json::from_value(name.into()).ok()?)
}

/// Returns the name of a type in a safetensors header.
pub(super) fn to_safetensors(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::E4M3 => "F8_E4M3",
        DType::E5M2 => "F8_E5M2",
        DType::E8M0 => "F8_E8M0",
        DType::U8 => "U8",
        DType::I16 => "I16",
        DType::I32 => "I32",
        DType::I64 => "I64",
    }
}

#[cfg(test)]
#[path = "safetensors_tests.rs"]
mod tests;
