//! The tensors in `training/`. Each tensor consists of slices in one or more safetensors files.
//!  For each tensor, `training/index.json` has its type, its shape, and the ranges of its elements that each file holds. A range counts elements of
//! the flat, row-major tensor, or of some of its columns. If one process saves, it writes whole tensors. If several processes save, each writes the
//! slices that it owns. Any number of processes can read any range. A file holds its ranges of a tensor one after another, as one safetensors tensor
//! with the same name.

use std::collections::{BTreeMap, btree_map};
use std::ops::Range;
use std::path::{Path, PathBuf};

use ottava_tensor::DType;
use serde::{Deserialize, Serialize};

use crate::safetensors::{from_name, to_safetensors};
use crate::{CheckpointWriter, ModelFiles, TensorInfo, write_tensors};
use ottava_common::fs::is_plain_name;
use ottava_common::{Error, Result, input};
use ottava_recipe::param::Region;

/// The subfolder of a checkpoint with everything that does not belong to a Hugging Face model folder.
pub const FOLDER: &str = "training";

/// The name of the index in [`FOLDER`].
const INDEX_FILE: &str = "index.json";

/// The maximum size of an index, enough for about 10 million slices.
const MAX_INDEX_BYTES: u64 = 1 << 30;

/// The elements `start..end` of a flat tensor, in `file`. With `columns`, the flat tensor has only these columns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Slice {
    file: String,
    start: u64,
    end: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    columns: Option<[u64; 2]>,
}

/// A tensor of the index.
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

/// A writer of the files of [`FOLDER`] and their index. If several processes write files of a checkpoint, they send their writers to the process that
/// finishes it.
#[derive(Default, Serialize, Deserialize)]
pub struct SliceWriter(Index);

impl SliceWriter {
    /// Writes `file` with whole `tensors`. `fetch` is called once for the bytes of each tensor.
    pub fn whole<B: AsRef<[u8]>>(
        &mut self,
        writer: &mut CheckpointWriter,
        file: &str,
        tensors: &[TensorInfo],
        fetch: impl FnMut(&TensorInfo) -> Result<B>,
    ) -> Result<()> {
        write_tensors(writer, &format!("{FOLDER}/{file}"), tensors, fetch)?;
        let whole = |tensor: &TensorInfo| Region { elements: 0..tensor.elements(), columns: None };
        tensors.iter().for_each(|tensor| self.list(file, tensor, &whole(tensor)));
        Ok(())
    }

    /// Writes `file` with regions of tensors. `fetch` is called once for the bytes of all regions of each tensor.
    pub fn regions<B: AsRef<[u8]>>(
        &mut self,
        writer: &mut CheckpointWriter,
        file: &str,
        tensors: &[Regions],
        fetch: impl FnMut(&TensorInfo) -> Result<B>,
    ) -> Result<()> {
        let flat = |regions: &Regions| TensorInfo { shape: vec![regions.elements()], ..regions.info.clone() };
        write_tensors(writer, &format!("{FOLDER}/{file}"), &tensors.iter().map(flat).collect::<Vec<_>>(), fetch)?;
        for Regions { info, regions } in tensors {
            regions.iter().for_each(|region| self.list(file, info, region));
        }
        Ok(())
    }

    fn list(&mut self, file: &str, TensorInfo { name, dtype, shape }: &TensorInfo, region: &Region) {
        let new = || Entry { dtype: to_safetensors(*dtype).into(), shape: shape.clone(), slices: Vec::new() };
        let entry = self.0.tensors.entry(name.clone()).or_insert_with(new);
        let Region { elements, columns } = region;
        entry.slices.push(Slice {
            file: file.into(),
            start: elements.start as u64,
            end: elements.end as u64,
            columns: columns.as_ref().map(|columns| [columns.start as u64, columns.end as u64]),
        });
    }

    /// Lists the files that another process has written.
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
    /// The files, by name.
    files: BTreeMap<String, ModelFiles>,
    tensors: BTreeMap<String, Stored>,
}

#[derive(Debug)]
struct Stored {
    info: TensorInfo,
    /// The slices of the tensor. Together they have each element once.
    pieces: Vec<Piece>,
}

/// A region of a tensor, and its first element in the file's tensor of the same name.
#[derive(Debug)]
struct Piece {
    file: String,
    region: Region,
    at: usize,
}

/// Consecutive elements of a tensor, and their first element in the file's tensor of the same name.
struct Run<'a> {
    file: &'a str,
    elements: Range<usize>,
    at: usize,
}

/// Returns the runs of `pieces` of a tensor of this `shape`, in ascending order.
fn runs<'a>(pieces: &'a [Piece], shape: &[usize]) -> Vec<Run<'a>> {
    let of_piece = |Piece { file, region, at }: &'a Piece| {
        let mut next = *at;
        region.ranges(shape).into_iter().map(move |elements| {
            let at = next;
            next += elements.len();
            Run { file, elements, at }
        })
    };
    let mut runs: Vec<_> = pieces.iter().flat_map(of_piece).collect();
    runs.sort_by_key(|run| (run.elements.start, run.elements.end));
    runs
}

impl SliceFiles {
    /// Opens the index in `folder` and the files that it names. Errors with [`Error::Checkpoint`], which names the tensor and the file, if slices of
    /// a tensor leave a gap, overlap, or are not in their file.
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

    /// Opens files that each hold whole tensors, as in checkpoints of format 1. Files that do not exist are skipped.
    pub fn open_whole(paths: &[PathBuf]) -> Result<SliceFiles> {
        let mut opened = SliceFiles { files: BTreeMap::new(), tensors: BTreeMap::new() };
        for path in paths.iter().filter(|path| path.exists()) {
            let (file, files) = (path.display().to_string(), ModelFiles::open_file(path)?);
            for name in files.names() {
                let info = files.info(name)?;
                let region = Region { elements: 0..info.elements(), columns: None };
                let pieces = vec![Piece { file: file.clone(), region, at: 0 }];
                opened.tensors.insert(name.to_string(), Stored { info, pieces });
            }
            opened.files.insert(file, files);
        }
        Ok(opened)
    }

    /// Returns the type and the shape of a tensor. Errors with [`Error::Checkpoint`] if there is no tensor with this name.
    pub fn info(&self, name: &str) -> Result<&TensorInfo> {
        Ok(&self.stored(name)?.info)
    }

    /// Returns whether there is a tensor with this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the bytes of all elements, little endian and row-major.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        self.read_region(name, &Region { elements: 0..self.info(name)?.elements(), columns: None })
    }

    /// Returns the bytes of a region, which may be in several files. Panics if the region is not within the tensor, which would be a bug of the
    /// caller.
    pub fn read_region(&self, name: &str, region: &Region) -> Result<Vec<u8>> {
        let Stored { info, pieces } = self.stored(name)?;
        let (size, runs) = (info.dtype.size(), runs(pieces, &info.shape));
        let mut bytes = Vec::with_capacity(region.elements.len() * size);
        for range in region.ranges(&info.shape) {
            assert!(range.end <= info.elements(), "{range:?} of {info:?}");
            let first = runs.partition_point(|run| run.elements.end <= range.start);
            for Run { file, elements, at } in runs[first..].iter().take_while(|run| run.elements.start < range.end) {
                let (start, end) = (range.start.max(elements.start), range.end.min(elements.end));
                let at = at + start - elements.start;
                bytes.extend(self.files[*file].read_bytes(name, at * size..(at + end - start) * size)?);
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

    /// Returns the slices of a tensor, if they cover it and are in their files.
    fn check(&self, name: &str, entry: Entry) -> Result<Stored, String> {
        let Entry { dtype: stored_as, shape, slices } = entry;
        let dtype = from_name(&stored_as).ok_or_else(|| format!("its type {stored_as:?} is not supported"))?;
        let elements = elements_of(&shape, dtype).ok_or_else(|| format!("its shape {shape:?} is too large"))?;
        let (mut pieces, mut held) = (Vec::<Piece>::new(), BTreeMap::<String, usize>::new());
        for slice in slices {
            let region = slice.region(&shape, elements)?;
            let (file, length) = (slice.file, region.elements.len());
            let held = held.entry(file.clone()).or_default();
            pieces.push(Piece { file, region, at: *held });
            *held += length;
        }
        let (mut end, mut before) = (0, None);
        for Run { file, elements, .. } in runs(&pieces, &shape) {
            let Range { start, end: stop } = elements;
            if start > end {
                return Err(format!("elements {end}..{start} are in no file; {file} continues with {start}..{stop}"));
            }
            if start < end {
                let before = before.unwrap_or("");
                return Err(format!("elements {start}..{} are in both {before} and {file}", end.min(stop)));
            }
            (end, before) = (stop, Some(file));
        }
        if end < elements {
            let last = before.map_or("no file holds any".into(), |file| format!("the last file is {file}"));
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

impl Slice {
    /// Returns the region of a tensor of this `shape`, which has `elements` elements. Errors if the region is not within the tensor.
    fn region(&self, shape: &[usize], elements: usize) -> Result<Region, String> {
        let Slice { file, start, end, columns } = self;
        let [rows, width] = match columns {
            Some(_) => [shape.first().copied().unwrap_or(0), shape.iter().skip(1).product()],
            None => [elements, 1],
        };
        let columns = columns.unwrap_or([0, width as u64]);
        let is_within = columns[0] < columns[1] && columns[1] <= width as u64;
        let most = if is_within { rows as u64 * (columns[1] - columns[0]) } else { 0 };
        if !is_within && elements > 0 || start > end || *end > most || (start == end && elements > 0) {
            let of = self.columns.map_or(String::new(), |[from, to]| format!(" of columns {from}..{to}"));
            return Err(format!("{file} holds elements {start}..{end}{of}, the tensor has {elements}"));
        }
        let range = |[start, end]: [u64; 2]| start as usize..end as usize;
        Ok(Region { elements: range([*start, *end]), columns: self.columns.map(range) })
    }
}

/// Regions of a tensor that a file holds one after another.
pub struct Regions {
    /// The whole tensor.
    pub info: TensorInfo,
    /// The regions.
    pub regions: Vec<Region>,
}

impl Regions {
    /// Returns the number of elements of all regions.
    pub fn elements(&self) -> usize {
        self.regions.iter().map(|region| region.elements.len()).sum()
    }
}

/// Returns the number of elements of a shape. Returns `None` if the number of their bytes overflows.
fn elements_of(shape: &[usize], dtype: DType) -> Option<usize> {
    let elements = shape.iter().try_fold(1_usize, |product, &n| product.checked_mul(n))?;
    elements.checked_mul(dtype.size()).map(|_| elements)
}

#[cfg(test)]
#[path = "slices_tests.rs"]
mod tests;
