//! Checkpoints of `torch.distributed.checkpoint`. The files `__RANK_N.distcp` have consecutive chunks of tensors, each in the format of `torch.save`.
//! `.metadata` is a pickle with the tensors and the positions of their chunks.
//!
//! A tensor is divided by a grid, and is joined here. Chunks are read one at a time, and only the needed bytes are read.

use super::node::{Id, Node};
use super::pickle::{MAX_BYTES, Pickle};
use super::{TorchFile, dtype_of, knows};
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The name of the metadata file, a pickle.
pub const METADATA: &str = ".metadata";

/// The classes and functions in the metadata, in addition to the classes and functions of other files of PyTorch.
const OF_METADATA: &[&str] = &[
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    // The plans of ranks, which Megatron may also store.
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.WriteItemType",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    "torch.distributed.checkpoint.planner.BytesIOWriteData",
    // A class of PyTorch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
    "pathlib._local.PosixPath",
];

/// The maximum numbers of axes of a tensor, attributes of an object, and bytes of a name. Files with more are not written by PyTorch, and would take
/// long to read.
const MAX_AXES: usize = 8;
const MAX_ATTRIBUTES: usize = 32;
const MAX_NAME: usize = 1024;

/// An open checkpoint.
#[derive(Debug)]
pub struct Distributed {
    folder: PathBuf,
    pickle: Pickle,
    /// The stored entries. Each name has a number.
    entries: BTreeMap<String, (usize, Id)>,
    /// The location of each chunk, by the number of its tensor and its offsets. Objects have no offsets.
    places: HashMap<(usize, Vec<usize>), Id>,
    /// The sizes of the files in the folder.
    files: BTreeMap<String, u64>,
}

/// A tensor that is stored in chunks.
#[derive(Debug)]
pub struct ShardedTensor {
    name: String,
    /// The type of the elements.
    pub dtype: DType,
    /// The shape; elements are row-major.
    pub shape: Vec<usize>,
    /// The chunks, in the order of their offsets. Together they are the whole tensor.
    chunks: Vec<Chunk>,
}

/// A part of a tensor.
#[derive(Clone, Debug)]
struct Chunk {
    /// The range of the chunk on each axis.
    ranges: Vec<Range<usize>>,
    place: Place,
}

/// A part of a file.
#[derive(Clone, Debug)]
struct Place {
    file: String,
    bytes: Range<u64>,
}

impl Distributed {
    /// Reads the metadata of the checkpoint in `folder`.
    ///
    /// Errors with [`Error::Model`] if the metadata are damaged or refer to code.
    pub fn open(folder: &Path) -> Result<Distributed> {
        let path = folder.join(METADATA);
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let bytes = input::read(&path, MAX_BYTES).map_err(Error::io(&path))?;
        let pickle = Pickle::read(&bytes, |name| knows(name) || OF_METADATA.contains(&name)).map_err(wrong)?;
        drop(bytes);
        let dictionary = |name: &str| {
            let found = attribute(&pickle, pickle.root(), name).and_then(|id| pickle.entries(id));
            found.ok_or_else(|| {
                wrong(format!("it has no `{name}`; this is not metadata of torch.distributed.checkpoint"))
            })
        };
        let mut entries = BTreeMap::new();
        for (number, (name, entry)) in dictionary("state_dict_metadata")?.iter().enumerate() {
            let name = name_of(&pickle, *name).ok_or_else(|| wrong("the name of an entry is no short text".into()))?;
            entries.insert(name.to_string(), (number, *entry));
        }
        let mut places = HashMap::new();
        for (index, place) in dictionary("storage_data")?.iter().copied() {
            let name = attribute(&pickle, index, "fqn").and_then(|name| name_of(&pickle, name));
            let offsets = match attribute(&pickle, index, "offset") {
                Some(offsets) => sizes(&pickle, offsets),
                None => Some(Vec::new()),
            };
            let (Some(name), Some(offsets)) = (name, offsets) else {
                return Err(wrong(
                    "its `storage_data` has a key that is not the name and the offsets of a chunk".into(),
                ));
            };
            // A position without an entry is skipped here. A missing entry is noticed when it is looked up.
            if let Some((number, _)) = entries.get(name) {
                places.insert((*number, offsets), place);
            }
        }
        let mut files = BTreeMap::new();
        for file in std::fs::read_dir(folder).map_err(Error::io(folder))? {
            let file = file.map_err(Error::io(folder))?;
            let size = std::fs::metadata(file.path()).map_err(Error::io(&file.path()))?.len();
            files.extend(file.file_name().into_string().ok().map(|name| (name, size)));
        }
        Ok(Distributed { folder: folder.to_path_buf(), entries, places, files, pickle })
    }

    /// Returns the names of all tensors and objects.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns the tensor with this name; `None` if there is none, or if the name is an object.
    ///
    /// Errors with [`Error::Model`] if its chunks are not the whole tensor, or if its elements are not floating-point numbers.
    pub fn tensor(&self, name: &str) -> Result<Option<ShardedTensor>> {
        let wrong = |reason: String| self.error(&format!("`{name}` {reason}"));
        let pickle = &self.pickle;
        let Some(&(number, entry)) = self.entries.get(name) else { return Ok(None) };
        let Some(chunks) = attribute(pickle, entry, "chunks") else { return Ok(None) };
        let of = |name: &str| attribute(pickle, entry, name);
        let described = || {
            let kind = pickle.items(pickle.state(of("properties")?)?)?.first()?;
            Some((pickle.global(*kind)?, sizes(pickle, of("size")?)?, pickle.items(chunks)?))
        };
        let (kind, shape, stored) =
            described().ok_or_else(|| wrong("is not described as torch.distributed.checkpoint does".into()))?;
        let dtype = kind.strip_prefix("torch.").and_then(dtype_of);
        let dtype = dtype.ok_or_else(|| wrong(format!("is in {kind}; weights are floats of 16 bits or more")))?;
        let bytes = shape.iter().try_fold(dtype.size(), |bytes, n| bytes.checked_mul(*n));
        let stored_bytes: u64 = self.files.values().sum();
        if bytes.is_none_or(|bytes| bytes as u64 > stored_bytes) {
            return Err(wrong(format!("has shape {shape:?}, more than the folder's files hold")));
        }
        let mut chunks = Vec::new();
        for chunk in stored {
            let field = |name: &str| attribute(pickle, *chunk, name).and_then(|id| sizes(pickle, id));
            let (Some(offsets), Some(sizes)) = (field("offsets"), field("sizes")) else {
                return Err(wrong("has a chunk without offsets and sizes".into()));
            };
            let ends = offsets.iter().zip(&sizes).map(|(offset, size)| offset.checked_add(*size));
            let ends = ends.zip(&shape).map(|(end, n)| end.filter(|end| end <= n)).collect::<Option<Vec<_>>>();
            let ends = ends.filter(|_| [offsets.len(), sizes.len()] == [shape.len(); 2]);
            let Some(ends) = ends else {
                return Err(wrong(format!(
                    "has shape {shape:?}, and a chunk at {offsets:?} of {sizes:?} outside of it"
                )));
            };
            let ranges = offsets.iter().zip(ends).map(|(start, end)| *start..end).collect();
            let place = self.place(number, &offsets);
            let place = place.map_err(|reason| wrong(format!("has a chunk at {offsets:?} that {reason}")))?;
            chunks.push(Chunk { ranges, place });
        }
        let order = |chunk: &Chunk| -> Vec<_> { chunk.ranges.iter().map(|range| (range.start, range.end)).collect() };
        chunks.sort_by_cached_key(order);
        if !tiles(&chunks, &shape, 0) {
            return Err(wrong(format!(
                "has shape {shape:?}, which its chunks do not fill once each; the checkpoint is not whole"
            )));
        }
        Ok(Some(ShardedTensor { name: name.to_string(), dtype, shape, chunks }))
    }

    /// Returns the file of `torch.save` in an object; `None` if there is no object with this name.
    pub fn object(&self, name: &str) -> Result<Option<TorchFile>> {
        let Some((number, _)) = self.entries.get(name) else { return Ok(None) };
        let place = self.place(*number, &[]).map_err(|reason| self.error(&format!("`{name}` {reason}")))?;
        self.read_part(name, &[], &place).map(Some)
    }

    /// Returns the elements of a tensor in `region` (a range for each axis), row-major in F32.
    ///
    /// Errors with [`Error::Model`] if a chunk is damaged or does not match the metadata. Panics if the region exceeds the tensor.
    pub fn read(&self, tensor: &ShardedTensor, region: &[Range<usize>]) -> Result<Vec<f32>> {
        let inside = region.iter().zip(&tensor.shape).all(|(range, n)| range.start <= range.end && range.end <= *n);
        assert!(inside && region.len() == tensor.shape.len(), "{region:?} of {:?}", tensor.shape);
        let mut values = vec![0.0; region.iter().map(Range::len).product()];
        for chunk in &tensor.chunks {
            let both = |(a, b): (&Range<usize>, &Range<usize>)| a.start.max(b.start)..a.end.min(b.end);
            let wanted: Vec<_> = chunk.ranges.iter().zip(region).map(both).collect();
            if wanted.iter().all(|range| !range.is_empty()) {
                self.read_chunk(tensor, chunk, &wanted, region, &mut values)?;
            }
        }
        Ok(values)
    }

    /// Reads the elements `wanted` from a chunk that has all of them, and writes them to their positions in `region`.
    fn read_chunk(
        &self,
        tensor: &ShardedTensor,
        chunk: &Chunk,
        wanted: &[Range<usize>],
        region: &[Range<usize>],
        values: &mut [f32],
    ) -> Result<()> {
        let file = self.read_part(&tensor.name, &chunk.offsets(), &chunk.place)?;
        let stored = file.tensor(file.pickle.root()).map_err(|reason| file.error(&format!("the tensor {reason}")))?;
        let stored = stored.ok_or_else(|| file.error("this is no tensor"))?;
        let sizes: Vec<_> = chunk.ranges.iter().map(Range::len).collect();
        if stored.shape != sizes || stored.dtype != tensor.dtype {
            return Err(file.error(&format!(
                "the tensor is {} {:?}, and {METADATA} makes it {} {sizes:?}",
                stored.dtype.name(),
                stored.shape,
                tensor.dtype.name()
            )));
        }
        let starts: Vec<_> = wanted.iter().map(|range| range.start).collect();
        let last: Vec<_> = wanted.iter().map(|range| range.end - 1).collect();
        let (first, end) = (index_in(&chunk.ranges, &starts), index_in(&chunk.ranges, &last) + 1);
        let bytes = file.read(&stored, first..end)?;
        let read = Tensor::from_bytes(&Device::Cpu, &[end - first], tensor.dtype, &bytes)?;
        let read = cast(&read, DType::F32)?.to_vec::<f32>()?;
        // Elements along the last axis are consecutive in the chunk and in the region.
        let run = wanted.last().map_or(1, Range::len);
        let runs: usize = wanted.iter().rev().skip(1).map(Range::len).product();
        for number in 0..runs {
            let (mut at, mut rest) = (starts.clone(), number);
            for (axis, range) in wanted.iter().enumerate().rev().skip(1) {
                at[axis] += rest % range.len();
                rest /= range.len();
            }
            let (from, to) = (index_in(&chunk.ranges, &at) - first, index_in(region, &at));
            values[to..to + run].copy_from_slice(&read[from..from + run]);
        }
        Ok(())
    }

    fn read_part(&self, name: &str, offsets: &[usize], place: &Place) -> Result<TorchFile> {
        let at = if offsets.is_empty() { String::new() } else { format!(" at {offsets:?}") };
        TorchFile::open_part(&self.folder.join(&place.file), format!("`{name}`{at}"), place.bytes.clone())
    }

    /// Returns the location of a chunk or an object. Errors with a description.
    fn place(&self, number: usize, offsets: &[usize]) -> Result<Place, String> {
        let pickle = &self.pickle;
        let id = self.places.get(&(number, offsets.to_vec())).ok_or("has no place in `storage_data`")?;
        let field = |name: &str| attribute(pickle, *id, name);
        if field("transform_descriptors").is_some() {
            return Err("is compressed or encrypted, which is not read".into());
        }
        let number = |name: &str| Some(pickle.count(field(name)?)? as u64);
        let described = || Some((name_of(pickle, field("relative_path")?)?, number("offset")?, number("length")?));
        let (file, start, length) = described().ok_or("has a place without file, offset and length")?;
        let size = self.files.get(file).ok_or_else(|| format!("lies in {file:?}, which the folder does not have"))?;
        match start.checked_add(length).filter(|end| end <= size) {
            Some(end) => Ok(Place { file: file.to_string(), bytes: start..end }),
            None => Err(format!("has {length} bytes from {start} on in {file:?}, which has {size}; it is cut off")),
        }
    }

    /// Returns an error about the metadata.
    pub fn error(&self, text: &str) -> Error {
        Error::Model(format!("{}: {text}", self.folder.join(METADATA).display()))
    }
}

impl Chunk {
    fn offsets(&self) -> Vec<usize> {
        self.ranges.iter().map(|range| range.start).collect()
    }
}

/// Returns the row-major index of an element within a region that includes it.
fn index_in(region: &[Range<usize>], at: &[usize]) -> usize {
    region.iter().zip(at).fold(0, |index, (range, at)| index * range.len() + at - range.start)
}

/// Whether chunks fill a tensor of `shape`, each element once. The chunks must have equal ranges on each axis before `axis`, and be in the order of
/// their ranges. Axes are checked one after another.
fn tiles(chunks: &[Chunk], shape: &[usize], axis: usize) -> bool {
    let Some(size) = shape.get(axis) else { return chunks.len() == 1 };
    let mut end = 0;
    for chunks in chunks.chunk_by(|a, b| a.ranges[axis] == b.ranges[axis]) {
        if chunks[0].ranges[axis].start != end || !tiles(chunks, shape, axis + 1) {
            return false;
        }
        end = chunks[0].ranges[axis].end;
    }
    end == *size
}

/// Returns an attribute of an object, unless it is `None`.
fn attribute(pickle: &Pickle, object: Id, name: &str) -> Option<Id> {
    let few = pickle.entries(object)?.len() <= MAX_ATTRIBUTES;
    pickle.get(object, name).filter(|id| few && *pickle.node(*id) != Node::None)
}

fn name_of(pickle: &Pickle, id: Id) -> Option<&str> {
    pickle.text(id).filter(|name| name.len() <= MAX_NAME)
}

/// Reads a `torch.Size`, or another list or tuple of numbers.
fn sizes(pickle: &Pickle, id: Id) -> Option<Vec<usize>> {
    let items = match pickle.call(id) {
        Some(("torch.Size", [items])) => pickle.items(*items),
        _ => pickle.items(id),
    };
    let items = items.filter(|items| items.len() <= MAX_AXES)?;
    items.iter().map(|item| pickle.count(*item)).collect()
}

#[cfg(test)]
#[path = "distributed_tests.rs"]
mod tests;
