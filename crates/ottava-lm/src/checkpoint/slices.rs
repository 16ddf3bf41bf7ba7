//! `training/`: logical tensors, each from slices in one or more safetensors files.
//!
//! `training/index.json` names for each tensor its type, its shape and the ranges of its elements (of the flat, row-major
//! tensor) that each file holds. One process that saves writes whole tensors; many processes write the slices that they
//! own, and any number of processes read any range. A file holds its ranges of a tensor one after another, as one
//! safetensors tensor of that name.

use std::collections::{BTreeMap, btree_map};
use std::ops::Range;
use std::path::{Path, PathBuf};

use ottava_tensor::DType;
use serde::{Deserialize, Serialize};

use super::manifest::is_plain_name;
use super::safetensors::{from_name, to_safetensors};
use super::{CheckpointWriter, ModelFiles, TensorInfo, write_tensors};
use crate::{Error, Result, input};

/// The subfolder of a checkpoint with everything that is not part of a Hugging Face model folder.
pub const FOLDER: &str = "training";

/// The name of the index in [`FOLDER`].
const INDEX_FILE: &str = "index.json";

/// The largest index: some 10 million slices.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// Elements `start..end` of a flat tensor, in `file`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Slice {
    file: String,
    start: u64,
    end: u64,
}

/// One tensor of the index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    slices: Vec<Slice>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    tensors: BTreeMap<String, Entry>,
}

/// Writes the files of [`FOLDER`] and, last, their index. Processes that write files of one checkpoint send theirs to the one that finishes.
#[derive(Default, Serialize, Deserialize)]
pub struct SliceWriter(Index);

impl SliceWriter {
    /// Writes `file` with whole `tensors`; `fetch` is asked once for the bytes of each.
    pub fn whole<B: AsRef<[u8]>>(
        &mut self,
        writer: &mut CheckpointWriter,
        file: &str,
        tensors: &[TensorInfo],
        fetch: impl FnMut(&TensorInfo) -> Result<B>,
    ) -> Result<()> {
        write_tensors(writer, &format!("{FOLDER}/{file}"), tensors, fetch)?;
        tensors.iter().for_each(|tensor| self.list(file, tensor, 0..tensor.elements()));
        Ok(())
    }

    /// Writes `file` with elements of `tensors`, one range of each; `fetch` is asked once for the bytes of each.
    pub fn ranges<B: AsRef<[u8]>>(
        &mut self,
        writer: &mut CheckpointWriter,
        file: &str,
        tensors: &[(TensorInfo, Range<usize>)],
        fetch: impl FnMut(&TensorInfo) -> Result<B>,
    ) -> Result<()> {
        let flat =
            |(tensor, range): &(TensorInfo, Range<usize>)| TensorInfo { shape: vec![range.len()], ..tensor.clone() };
        write_tensors(writer, &format!("{FOLDER}/{file}"), &tensors.iter().map(flat).collect::<Vec<_>>(), fetch)?;
        tensors.iter().for_each(|(tensor, range)| self.list(file, tensor, range.clone()));
        Ok(())
    }

    fn list(&mut self, file: &str, TensorInfo { name, dtype, shape }: &TensorInfo, range: Range<usize>) {
        let new = || Entry { dtype: to_safetensors(*dtype).into(), shape: shape.clone(), slices: Vec::new() };
        let entry = self.0.tensors.entry(name.clone()).or_insert_with(new);
        entry.slices.push(Slice { file: file.into(), start: range.start as u64, end: range.end as u64 });
    }

    /// Lists what another process has written.
    pub fn adopt(&mut self, other: SliceWriter) {
        for (name, entry) in other.0.tensors {
            match self.0.tensors.entry(name) {
                btree_map::Entry::Vacant(none) => drop(none.insert(entry)),
                btree_map::Entry::Occupied(mut known) => known.get_mut().slices.extend(entry.slices),
            }
        }
    }

    /// Writes the index.
    pub fn finish(self, writer: &mut CheckpointWriter) -> Result<()> {
        let text = serde_json::to_string(&self.0).expect("names and numbers are JSON");
        writer.file(&format!("{FOLDER}/{INDEX_FILE}"), |file| file.write(text.as_bytes()))
    }
}

/// The tensors of [`FOLDER`], open for reading any range of their elements.
#[derive(Debug)]
pub struct SliceFiles {
    /// By name of the file.
    files: BTreeMap<String, ModelFiles>,
    tensors: BTreeMap<String, Stored>,
}

#[derive(Debug)]
struct Stored {
    info: TensorInfo,
    /// The slices in ascending order, without gaps or overlaps.
    pieces: Vec<Piece>,
}

/// Elements of a tensor, and where they begin in the file's tensor of that name.
#[derive(Debug)]
struct Piece {
    file: String,
    elements: Range<usize>,
    at: usize,
}

impl SliceFiles {
    /// Opens the index in `folder` and the files that it names. Errors with [`Error::Checkpoint`], naming tensor and
    /// file, when slices of a tensor leave a gap, overlap, or are not in their file.
    pub fn open(folder: &Path) -> Result<SliceFiles> {
        let path = folder.join(INDEX_FILE);
        let wrong = |reason: String| Error::Checkpoint(format!("{}: {reason}", path.display()));
        let index: Index = serde_json::from_slice(&input::read(&path, MAX_INDEX_BYTES).map_err(Error::io(&path))?)
            .map_err(|e| wrong(format!("not a valid index: {e}")))?;
        let mut opened = SliceFiles { files: BTreeMap::new(), tensors: BTreeMap::new() };
        for slice in index.tensors.values().flat_map(|entry| &entry.slices) {
            if !is_plain_name(&slice.file) {
                return Err(wrong(format!("{:?} is not the name of a file beside it", slice.file)));
            }
            if !opened.files.contains_key(&slice.file) {
                opened.files.insert(slice.file.clone(), ModelFiles::open_file(&folder.join(&slice.file))?);
            }
        }
        for (name, entry) in index.tensors {
            let stored = opened.check(&name, entry).map_err(|reason| wrong(format!("tensor {name:?}: {reason}")))?;
            opened.tensors.insert(name, stored);
        }
        Ok(opened)
    }

    /// Opens files that each hold whole tensors, as checkpoints of format 1 have them; those that are absent hold none.
    pub fn open_whole(paths: &[PathBuf]) -> Result<SliceFiles> {
        let mut opened = SliceFiles { files: BTreeMap::new(), tensors: BTreeMap::new() };
        for path in paths.iter().filter(|path| path.exists()) {
            let (file, files) = (path.display().to_string(), ModelFiles::open_file(path)?);
            for name in files.names() {
                let info = files.info(name)?;
                let pieces = vec![Piece { file: file.clone(), elements: 0..info.elements(), at: 0 }];
                opened.tensors.insert(name.to_string(), Stored { info, pieces });
            }
            opened.files.insert(file, files);
        }
        Ok(opened)
    }

    /// Type and shape of a tensor. Errors with [`Error::Checkpoint`] when there is none of that name.
    pub fn info(&self, name: &str) -> Result<&TensorInfo> {
        Ok(&self.stored(name)?.info)
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The bytes of all elements, little endian and row-major.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        self.read_range(name, 0..self.info(name)?.elements())
    }

    /// The bytes of the elements in `range` of the flat tensor, from whichever files hold them. Panics when the range
    /// is not within the tensor: a bug of the caller.
    pub fn read_range(&self, name: &str, range: Range<usize>) -> Result<Vec<u8>> {
        let Stored { info, pieces } = self.stored(name)?;
        assert!(range.start <= range.end && range.end <= info.elements(), "{range:?} of {info:?}");
        let size = info.dtype.size();
        let mut bytes = Vec::with_capacity(range.len() * size);
        for piece in pieces {
            let (start, end) = (range.start.max(piece.elements.start), range.end.min(piece.elements.end));
            if start < end {
                let at = piece.at + start - piece.elements.start;
                bytes.extend(self.files[&piece.file].read_bytes(name, at * size..(at + end - start) * size)?);
            }
        }
        Ok(bytes)
    }

    fn stored(&self, name: &str) -> Result<&Stored> {
        let missing = || {
            let files: Vec<_> = self.files.keys().map(String::as_str).collect();
            Error::Checkpoint(format!("there is no tensor {name:?} in {}", files.join(", ")))
        };
        self.tensors.get(name).ok_or_else(missing)
    }

    /// The slices of one tensor, if they cover it and are in their files.
    fn check(&self, name: &str, entry: Entry) -> Result<Stored, String> {
        let Entry { dtype: stored_as, shape, mut slices } = entry;
        let dtype = from_name(&stored_as).ok_or_else(|| format!("its type {stored_as:?} is not supported"))?;
        let elements = elements_of(&shape, dtype).ok_or_else(|| format!("its shape {shape:?} is too large"))?;
        slices.sort_by_key(|slice| (slice.start, slice.end));
        let (mut pieces, mut held, mut end) = (Vec::<Piece>::new(), BTreeMap::<String, usize>::new(), 0);
        for Slice { file, start, end: stop } in slices {
            let (Ok(start), Ok(stop)) = (usize::try_from(start), usize::try_from(stop)) else {
                return Err(format!("{file} holds elements {start}..{stop}, the tensor has {elements}"));
            };
            if start > stop || stop > elements || (start == stop && elements > 0) {
                return Err(format!("{file} holds elements {start}..{stop}, the tensor has {elements}"));
            }
            if start > end {
                return Err(format!("elements {end}..{start} are in no file; {file} continues with {start}..{stop}"));
            }
            if start < end {
                let before = pieces.last().map_or("", |piece| &piece.file);
                return Err(format!("elements {start}..{} are in both {before} and {file}", end.min(stop)));
            }
            let held = held.entry(file.clone()).or_default();
            pieces.push(Piece { file, elements: start..stop, at: *held });
            *held += stop - start;
            end = stop;
        }
        if end < elements {
            let last =
                pieces.last().map_or("no file holds any".into(), |piece| format!("the last file is {}", piece.file));
            return Err(format!("elements {end}..{elements} are in no file; {last}"));
        }
        for (file, held) in held {
            let found = self.files[&file].info(name).map_err(|e| e.to_string())?;
            if found.dtype != dtype || found.elements() != held {
                return Err(format!(
                    "{file} holds {} elements of {}, the index says {held} of {dtype}",
                    found.elements(),
                    found.dtype
                ));
            }
        }
        Ok(Stored { info: TensorInfo { name: name.into(), dtype, shape }, pieces })
    }
}

/// The elements of a shape, if their bytes can be counted.
fn elements_of(shape: &[usize], dtype: DType) -> Option<usize> {
    let elements = shape.iter().try_fold(1_usize, |product, &n| product.checked_mul(n))?;
    elements.checked_mul(dtype.size()).map(|_| elements)
}

#[cfg(test)]
#[path = "slices_tests.rs"]
mod tests;
