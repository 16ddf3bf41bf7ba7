//! Files of `torch.save`: a zip archive with one pickle, which refers to tensors, and with the bytes of each tensor's storage.
//!
//! The format is described at <https://docs.pytorch.org/docs/stable/notes/serialization.html>. Entries are stored without compression, so that
//! tensors can be read
//! one at a time, directly from their positions in the file.

pub mod distributed;
mod machine;
mod node;
pub mod pickle;

pub use node::{Id, Node};
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_tensor::DType;
use pickle::{MAX_BYTES, Pickle};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use zip::{CompressionMethod, ZipArchive};

/// The classes and functions that checkpoints refer to. Classes of tensors, dictionaries and namespaces are interpreted. Other classes, such as
/// states of random number generators, become nodes that are never read.
const KNOWN: &[&str] = &[
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.deque",
    "argparse.Namespace",
    "types.SimpleNamespace",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
    "_io.BytesIO",
    "io.BytesIO",
    "pathlib.PosixPath",
    "pathlib.Path",
    "datetime.timedelta",
    "datetime.datetime",
    "signal.Signals",
];

/// The functions of PyTorch that checkpoints refer to.
const OF_TORCH: &[&str] = &[
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_parameter",
    "torch.nn.parameter.Parameter",
    "torch.Size",
    "torch.device",
    "torch.storage.UntypedStorage",
    "torch.torch_version.TorchVersion",
];

/// The names of Python that data need. Some versions write members of an enumeration with `getattr`.
const OF_PYTHON: &[&str] = &[
    "set",
    "frozenset",
    "complex",
    "slice",
    "range",
    "bytearray",
    "bytes",
    "int",
    "float",
    "str",
    "bool",
    "list",
    "dict",
    "tuple",
    "getattr",
    "object",
];

/// Whether checkpoints may refer to a class or function. It is never called.
fn knows(name: &str) -> bool {
    let of_python = || name.strip_prefix("builtins.").or(name.strip_prefix("__builtin__."));
    // The name is a type of elements or storages, such as `torch.bfloat16` or `torch.BFloat16Storage`.
    let plain =
        || name.strip_prefix("torch.").is_some_and(|name| dtype_of(name).is_some() || OTHER_TYPES.contains(&name));
    KNOWN.contains(&name)
        || OF_TORCH.contains(&name)
        || of_python().is_some_and(|name| OF_PYTHON.contains(&name))
        || plain()
        || ["megatron.", "transformer_engine."].iter().any(|start| name.starts_with(start))
}

/// The types of elements that weights never have.
const OTHER_TYPES: &[&str] = &[
    "ByteStorage",
    "CharStorage",
    "ShortStorage",
    "IntStorage",
    "LongStorage",
    "BoolStorage",
    "UntypedStorage",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
];

/// Returns the type of the elements of a storage, or the type with this name.
fn dtype_of(name: &str) -> Option<DType> {
    Some(match name {
        "FloatStorage" | "float32" | "float" => DType::F32,
        "HalfStorage" | "float16" | "half" => DType::F16,
        "BFloat16Storage" | "bfloat16" => DType::BF16,
        "DoubleStorage" | "float64" | "double" => DType::F64,
        _ => return None,
    })
}

/// Describes a file, or a part of a file, for errors.
fn described(path: &Path, part: Option<&str>) -> String {
    let file = path.display();
    part.map_or(file.to_string(), |part| format!("{file}: {part}"))
}

/// A range of a file that is read like a file. It has its own position, so other readers of the file do not affect it.
struct Bytes {
    file: File,
    /// The position in the file.
    at: u64,
    range: Range<u64>,
}

impl Read for Bytes {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.range.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let count = buffer.len().min(left);
        let read = self.file.read_at(&mut buffer[..count], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Bytes {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => self.range.start.checked_add(at),
            SeekFrom::End(by) => self.range.end.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.filter(|at| *at >= self.range.start).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at - self.range.start)
    }
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchTensor {
    /// The type of the elements.
    pub dtype: DType,
    /// The shape; elements are row-major.
    pub shape: Vec<usize>,
    /// The position of the first byte in the file.
    start: u64,
}

/// An open file of `torch.save`, which may be a part of another file.
#[derive(Debug)]
pub struct TorchFile {
    path: PathBuf,
    /// The name of the part, for errors.
    part: Option<String>,
    file: File,
    /// The pickle of the file.
    pub pickle: Pickle,
    /// The start and the size of each storage, by its key.
    storages: HashMap<String, (u64, u64)>,
}

impl TorchFile {
    /// Reads the pickle of the file at `path`, and the positions of its tensors.
    ///
    /// Errors with [`Error::Model`] if the file is damaged, compressed, or written by PyTorch before 1.6, or if it refers to code.
    pub fn open(path: &Path) -> Result<TorchFile> {
        let (file, size) = input::open(path).map_err(Error::io(path))?;
        TorchFile::read_pickle(path, None, file, 0..size)
    }

    /// Opens the bytes `range` of the file at `path`, like [`TorchFile::open`]. Errors call these bytes `part`.
    pub fn open_part(path: &Path, part: String, range: Range<u64>) -> Result<TorchFile> {
        let (file, size) = input::open(path).map_err(Error::io(path))?;
        if range.start > range.end || range.end > size {
            return Err(Error::Model(format!(
                "{}: {part}: it should be at bytes {} to {}, but the file has {size}; it is cut off",
                path.display(),
                range.start,
                range.end
            )));
        }
        TorchFile::read_pickle(path, Some(part), file, range)
    }

    fn read_pickle(path: &Path, part: Option<String>, file: File, range: Range<u64>) -> Result<TorchFile> {
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", described(path, part.as_deref())));
        let bytes = Bytes { file: file.try_clone().map_err(Error::io(path))?, at: range.start, range: range.clone() };
        let mut archive = ZipArchive::new(BufReader::new(bytes))
            .map_err(|e| wrong(format!("this is not a file of torch.save (PyTorch 1.6 or later): {e}")))?;
        let (mut places, mut root) = (HashMap::new(), None);
        for index in 0..archive.len() {
            let entry = archive.by_index_raw(index).map_err(|e| wrong(e.to_string()))?;
            let name = entry.name().map_err(|e| wrong(e.to_string()))?.into_owned();
            let place =
                entry.data_start().filter(|_| !entry.encrypted() && entry.compression() == CompressionMethod::Stored);
            let Some(start) = place else {
                return Err(wrong(format!("its entry {name:?} is compressed or encrypted; torch.save writes neither")));
            };
            let end = range.start.checked_add(start).and_then(|start| start.checked_add(entry.size()));
            if end.is_none_or(|end| end > range.end) {
                return Err(wrong(format!("its entry {name:?} is cut off")));
            }
            let start = range.start + start;
            if let Some(folder) = name.strip_suffix("data.pkl") {
                root = Some(folder.to_string());
            }
            places.insert(name, (start, entry.size()));
        }
        let root = root.ok_or_else(|| wrong("it has no data.pkl; this is not a file of torch.save".into()))?;
        let read = |name: &str, most: u64| match places.get(&format!("{root}{name}")) {
            Some((_, size)) if *size > most => {
                Err(wrong(format!("its {name} has {size} bytes; at most {most} are read")))
            }
            Some((start, size)) => {
                let mut bytes = vec![0; *size as usize];
                file.read_exact_at(&mut bytes, *start).map_err(Error::io(path))?;
                Ok(Some(bytes))
            }
            None => Ok(None),
        };
        if read("byteorder", 16)?.is_some_and(|order| order != b"little") {
            return Err(wrong("its tensors are not little endian".into()));
        }
        let pickle = Pickle::read(&read("data.pkl", MAX_BYTES)?.expect("it was found above"), knows).map_err(wrong)?;
        let data = format!("{root}data/");
        let storages =
            places.into_iter().filter_map(|(name, place)| Some((name.strip_prefix(&data)?.to_string(), place)));
        Ok(TorchFile { path: path.to_path_buf(), pickle, storages: storages.collect(), file, part })
    }

    /// Returns an error about this file.
    pub fn error(&self, text: &str) -> Error {
        Error::Model(format!("{}: {text}", described(&self.path, self.part.as_deref())))
    }

    /// Returns the tensor of a node; `None` if the node is not a tensor. Errors with a description if the tensor is incomplete, not floating-point,
    /// or not row-major.
    pub fn tensor(&self, id: Id) -> Result<Option<TorchTensor>, String> {
        let Some((function, arguments)) = self.pickle.call(id) else { return Ok(None) };
        match (function, arguments) {
            ("torch._utils._rebuild_parameter" | "torch.nn.parameter.Parameter", [data, ..]) => {
                match self.pickle.call(*data) {
                    // A parameter that wraps another parameter is refused, so the recursion ends.
                    Some(("torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor", _)) => self.tensor(*data),
                    _ => Ok(None),
                }
            }
            (
                "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor",
                [storage, offset, shape, strides, ..],
            ) => self.view(*storage, *offset, *shape, *strides).map(Some),
            _ => Ok(None),
        }
    }

    fn view(&self, storage: Id, offset: Id, shape: Id, strides: Id) -> Result<TorchTensor, String> {
        let numbers = |id: Id| -> Option<Vec<usize>> {
            self.pickle.items(id)?.iter().map(|item| self.pickle.count(*item)).collect()
        };
        let described = || -> Option<_> {
            let Node::Persistent(storage) = self.pickle.node(storage) else { return None };
            let [_, kind, key, ..] = self.pickle.items(*storage)? else { return None };
            let (kind, key) = (self.pickle.global(*kind)?, self.pickle.text(*key)?);
            Some((kind, key, self.pickle.count(offset)?, numbers(shape)?, numbers(strides)?))
        };
        let (kind, key, offset, shape, strides) = described().ok_or("is not described as torch.save does")?;
        let dtype = kind.strip_prefix("torch.").and_then(dtype_of);
        let dtype = dtype.ok_or_else(|| format!("is in a {kind}; weights are floats of 16 bits or more"))?;
        let mut elements = 1usize;
        for (n, stride) in shape.iter().zip(&strides).rev() {
            if *n != 1 && *stride != elements {
                return Err(format!("has strides {strides:?} for shape {shape:?}; it is not row-major"));
            }
            elements = elements.checked_mul(*n).ok_or("is too large")?;
        }
        if shape.len() != strides.len() {
            return Err("has another number of strides than axes".into());
        }
        let (start, size) =
            self.storages.get(key).ok_or_else(|| format!("is in the storage {key:?}, which the file does not have"))?;
        let bytes = |elements: usize| elements.checked_mul(dtype.size()).map(|bytes| bytes as u64);
        let end = offset.checked_add(elements).and_then(bytes);
        match (end, bytes(offset)) {
            (Some(end), Some(first)) if end <= *size => Ok(TorchTensor { dtype, shape, start: start + first }),
            _ => Err(format!("lies outside of its storage {key:?} of {size} bytes")),
        }
    }

    /// Returns the bytes of some elements of a tensor, little-endian and row-major.
    ///
    /// Panics if the tensor does not have these elements.
    pub fn read(&self, tensor: &TorchTensor, elements: Range<usize>) -> Result<Vec<u8>> {
        assert!(elements.end <= tensor.shape.iter().product(), "{elements:?} of {tensor:?}");
        let size = tensor.dtype.size();
        let mut bytes = vec![0; elements.len() * size];
        let start = tensor.start + (elements.start * size) as u64;
        self.file.read_exact_at(&mut bytes, start).map_err(Error::io(&self.path))?;
        Ok(bytes)
    }
}
