//! Training checkpoints: a model folder and the training state from which a run resumes with the same bits.

use crate::formats::{SavedStates, Values};
use crate::live::LiveTensors;
use crate::model::expect_finite;
use crate::safetensors_write::{MAX_FILE_BYTES, ModelFile, model_files, write_index, write_model_file};
use crate::slices::{FOLDER, Regions, SliceFiles, SliceWriter};
use crate::{Carried, CheckpointWriter, FileStart, Manifest, Progress, TensorInfo, adapter};
use ottava_common::error::{Error, Result};
use ottava_models::Decoder;
use ottava_models::layers::VALUE;
use ottava_parallel::Partition;
use ottava_parallel::optim::{Optimizer, Per, StateTensor, optimizer_tensors, read_and_optimizer_tensors};
use ottava_recipe::param::{Param, Purpose, Region, Shard};
use ottava_tensor::comm::Axis;
use ottava_tensor::{DType, Device, ExpandedTensor, Snapshot, Tensor};
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The names of files in the subfolder [`FOLDER`]. In format 1, they are next to the weights.
const OPTIMIZER: &str = "optimizer.safetensors";
const SCALING: &str = "scaling.safetensors";

/// The name of the weight of a value head, which is part of the training state and of no model folder.
const VALUE_WEIGHT: &str = "weight.value_head.weight";

/// The prefix of the names of scaling arrays.
const SCALING_PREFIX: &str = "scaling.";

/// The files that a rank writes into a checkpoint, without the bytes of tensors. Ranks share the files of the weights, and each rank writes its
/// slices of the optimizer states. The leading rank writes the other files.
#[derive(Default)]
pub struct Contents {
    /// Files that are flushed to the disk before.
    flushed: Vec<PathBuf>,
    /// The logs of the run, by name.
    logs: Vec<(String, FileStart)>,
    /// The files of the model folder except the weights, by name.
    files: Vec<(&'static str, Arc<[u8]>)>,
    /// The files of all weights, in the compute type and in the order of the parameters, and the files of `carried` tensors.
    model_files: Vec<ModelFile>,
    /// The parts of a larger model that are copied.
    carried: Carried,
    /// The size of files of weights, in bytes.
    max_file_bytes: usize,
    /// The number of this rank. It writes every `ranks`-th file of `model_files`.
    rank: usize,
    ranks: usize,
    scaling: Vec<TensorInfo>,
    /// The master weights and optimizer states of the leading rank that ranks do not divide.
    whole: Vec<TensorInfo>,
    /// The regions that this rank holds of divided tensors, and of tensors of the other stages of a pipeline.
    divided: Vec<Regions>,
    /// The number of ranks that store the slices of this rank, and the bytes of these slices that other ranks write.
    slice_replicas: usize,
    of_other_replicas: usize,
    /// The name of the file with the tensors `divided`.
    divided_file: String,
}

/// Returns the bytes of a region of a tensor in a [`Snapshot`].
fn padded_bytes(regions: &Regions) -> usize {
    Snapshot::padded(regions.elements() * regions.info.dtype.size())
}

impl Contents {
    /// Lists the tensors that this rank writes, and where they are in memory.
    pub fn new<'a>(
        model: &'a mut Decoder,
        optimizer: &mut dyn Optimizer,
        partition: &'a Partition,
    ) -> Result<(Contents, LiveTensors<'a>)> {
        Contents::with_files_of(MAX_FILE_BYTES, model, optimizer, partition)
    }

    /// Lists the tensors like [`Contents::new`], with files of weights of at most `max_file_bytes`.
    pub fn with_files_of<'a>(
        max_file_bytes: usize,
        model: &'a mut Decoder,
        optimizer: &mut dyn Optimizer,
        partition: &'a Partition,
    ) -> Result<(Contents, LiveTensors<'a>)> {
        let ranks = partition.ranks();
        let divided_file = format!("optimizer-{:05}-of-{:05}.safetensors", ranks.rank() + 1, ranks.size());
        let (rank, size, has_adapters) = (ranks.rank(), ranks.size(), model.config().lora.is_some());
        let slice_replicas = ranks.slice_replicas().size();
        let mut contents =
            Contents { divided_file, rank, ranks: size, slice_replicas, max_file_bytes, ..Contents::default() };
        let mut others = HashMap::new();
        let arrays = partition.scaling_arrays(model)?;
        for (name, array) in arrays.into_iter().filter(|_| ranks.leads()) {
            contents.scaling.push(TensorInfo {
                name: name.clone(),
                dtype: array.dtype(),
                shape: array.shape().to_vec(),
            });
            others.insert(name, array);
        }
        let whole = match ranks.have_whole_model() {
            true => None,
            false => Some(Decoder::unloaded(model.config(), model.recipe(), &Device::Cpu.dry(), Purpose::Infer, 1)?),
        };
        let (device, copy) = (model.device().clone(), model.copy());
        let place = ranks.place(Axis::Tensor);
        let is_first_of_tensors = place.rank == 0;
        let mut params = model.parameters();
        for (param, states) in params.iter_mut().zip(optimizer.states()) {
            let slice = param.is_sliced().then(|| param.slice());
            let is_whole = param.identity.is_whole() || !place.is_divided();
            // If several ranks have the same elements, one of these ranks writes them.
            let writes = match &slice {
                None => ranks.replicas(param).rank() == 0,
                // Shard groups write different units, so all hosts write.
                Some(_) => ranks.slice_replicas().rank() == param.identity.id.unit.0 % ranks.slice_replicas().size(),
            };
            if slice.is_none() && !writes || is_whole && !is_first_of_tensors || Some(param.identity.id) == copy {
                continue;
            }
            let Param { identity, weights, .. } = &mut **param;
            if identity.name() == VALUE && ranks.leads() {
                let (name, dtype, shape) = (VALUE_WEIGHT.to_string(), weights.dtype(), weights.shape().to_vec());
                others.insert(name.clone(), weights.value()?);
                contents.whole.push(TensorInfo { name, dtype, shape });
            }
            for kept in optimizer_tensors(weights, states) {
                // The rank with the first element writes the values that belong to the whole parameter.
                let first =
                    identity.begins_stack() && slice.as_ref().is_none_or(|slice| slice.start == 0 && !slice.is_empty());
                if kept.per == Per::Parameter && !(first && is_first_of_tensors) {
                    continue;
                }
                let flat = kept.tensor.reshape(&[kept.tensor.len()])?;
                // If several ranks have the same heads, the first of these ranks writes them.
                for Held { regions, values } in
                    regions_of(identity.name(), &identity.shards, &slice, &kept, |shard| shard.replica.rank == 0)
                {
                    if !writes {
                        contents.of_other_replicas += padded_bytes(&regions);
                        continue;
                    }
                    others.insert(regions.info.name.clone(), flat.rows(values.start, values.end)?);
                    match slice {
                        None if ranks.leads() && is_whole => contents.whole.push(regions.info),
                        _ => contents.divided.push(regions),
                    }
                }
            }
        }
        let (mut weights_of_all, live) = LiveTensors::new(partition, &device, whole, params, others)?;
        weights_of_all.retain(|info| info.name != VALUE);
        contents.model_files = match has_adapters {
            true => vec![ModelFile { name: adapter::WEIGHTS_FILE.into(), tensors: weights_of_all, is_carried: false }],
            false => model_files(weights_of_all, Vec::new(), max_file_bytes),
        };
        contents.scaling.sort_by(|a, b| a.name.cmp(&b.name));
        contents.whole.sort_by(|a, b| a.name.cmp(&b.name));
        contents.divided.sort_by(|a, b| a.info.name.cmp(&b.info.name));
        Ok((contents, live))
    }

    /// Leaves out the states of the optimizer, and all else that only a resumed run reads. Scales of casts stay, which inference reads.
    pub fn keep_model(&mut self) {
        self.whole.clear();
        self.divided.clear();
    }

    /// Adds files that the leading rank writes.
    pub fn add_files(&mut self, logs: Vec<(String, FileStart)>, files: Vec<(&'static str, Arc<[u8]>)>) {
        self.logs.extend(logs);
        self.files.extend(files);
    }

    /// Flushes the files at `paths` to the disk before the files of the checkpoint are written.
    pub fn flush_first(&mut self, paths: Vec<PathBuf>) {
        self.flushed = paths;
    }

    /// Adds the parts of a larger model that are copied, unless only adapters are written. Each rank still writes the same files of trained weights.
    ///
    /// Errors if a tensor of these parts is not written.
    pub fn carry(&mut self, carried: &Carried) -> Result<()> {
        self.carried = carried.clone();
        if self.model_files.iter().any(|file| file.name == adapter::WEIGHTS_FILE) {
            return Ok(());
        }
        let weights = std::mem::take(&mut self.model_files);
        let tensors = weights.into_iter().flat_map(|file| file.tensors).collect();
        self.model_files = model_files(tensors, carried.infos()?, self.max_file_bytes);
        Ok(())
    }

    /// Returns the files of weights that a rank writes.
    fn files_of(&self, rank: usize) -> impl Iterator<Item = &ModelFile> {
        self.model_files.iter().skip(rank).step_by(self.ranks)
    }

    /// Returns the trained weights that a rank writes.
    fn weights_of(&self, rank: usize) -> impl Iterator<Item = &TensorInfo> {
        self.files_of(rank).filter(|file| !file.is_carried).flat_map(|file| &file.tensors)
    }

    /// Returns the names of all tensors of the run that this rank writes. Weights come first, in the order of the parameters.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let weights = self.weights_of(self.rank);
        let whole = weights.chain(&self.scaling).chain(&self.whole);
        whole.chain(self.divided.iter().map(|regions| &regions.info)).map(|info| info.name.as_str())
    }

    /// Returns the bytes of a [`Snapshot`] of what this rank writes, the maximum bytes for a rank that does not lead, and the bytes of all ranks, each
    /// with as many divided tensors as this one.
    pub fn snapshot_bytes(&self) -> [usize; 3] {
        let padded = |info: &TensorInfo| Snapshot::padded(info.bytes());
        let weights = |rank| -> usize { self.weights_of(rank).map(padded).sum() };
        let divided = self.divided.iter().map(padded_bytes);
        let (divided, whole) =
            (divided.sum::<usize>(), self.scaling.iter().chain(&self.whole).map(padded).sum::<usize>());
        let others = (1..self.ranks).map(weights).max().unwrap_or(0);
        let all = (0..self.ranks).map(weights).sum::<usize>();
        [
            weights(self.rank) + whole + divided,
            others + divided,
            all + whole + self.ranks / self.slice_replicas * (divided + self.of_other_replicas),
        ]
    }

    /// Writes the files of this rank. `fetch` is called once for the bytes of each tensor, by name. Weights come first, in the order of the
    /// parameters.
    ///
    /// Errors with [`Error::NonFinite`] if a weight is infinite or NaN.
    pub fn write<B: AsRef<[u8]>>(
        &self,
        writer: &mut CheckpointWriter,
        mut fetch: impl FnMut(&str) -> Result<B>,
    ) -> Result<SliceWriter> {
        let flush = |path: &PathBuf| File::open(path).and_then(|file| file.sync_all()).map_err(Error::io(path));
        self.flushed.iter().try_for_each(flush)?;
        self.logs.iter().try_for_each(|(name, log)| writer.copy(name, log))?;
        self.files.iter().try_for_each(|(name, bytes)| writer.file(name, |file| file.write(bytes)))?;
        for file in self.files_of(self.rank) {
            write_model_file(writer, file, &self.carried, |info| {
                let bytes = fetch(&info.name)?;
                expect_finite(info, bytes.as_ref())?;
                Ok(bytes)
            })?;
        }
        if self.rank == 0 {
            write_index(writer, &self.model_files, &self.carried)?;
        }
        let (mut slices, mut fetch) = (SliceWriter::default(), |info: &TensorInfo| fetch(&info.name));
        for (file, tensors) in [(SCALING, &self.scaling), (OPTIMIZER, &self.whole)] {
            if !tensors.is_empty() {
                slices.whole(writer, file, tensors, &mut fetch)?;
            }
        }
        if !self.divided.is_empty() {
            slices.regions(writer, &self.divided_file, &self.divided, &mut fetch)?;
        }
        Ok(slices)
    }
}

/// Reads the progress of a run from the manifest of a checkpoint.
pub fn progress(folder: &Path, manifest: &Manifest) -> Result<Progress> {
    serde_json::from_value(manifest.extra.clone()).map_err(|e| {
        Error::Checkpoint(format!(
            "{}: it does not describe a training run: {e}",
            folder.join("manifest.json").display()
        ))
    })
}

/// Restores master weights, optimizer states and scales into a model that was built from the checkpoint's weights. States of another storage are
/// converted.
pub fn restore(folder: &Path, progress: &Progress, model: &mut Decoder, optimizer: &mut dyn Optimizer) -> Result<()> {
    let files = open(folder)?;
    for (param, states) in model.parameters().into_iter().zip(optimizer.states()) {
        let slice = param.is_sliced().then(|| param.slice());
        let Param { identity, weights, .. } = param;
        let (name, shards) = (identity.name(), &identity.shards);
        if let (VALUE, Some(value)) = (name, weights.tensors_mut().0) {
            value.write_bytes(&files.read(VALUE_WEIGHT)?)?;
        }
        let (read, mut kept) = read_and_optimizer_tensors(weights, states);
        let held: Vec<_> = kept.iter().map(|kept| regions_of(name, shards, &slice, kept, |_| true)).collect();
        let all = || held.iter().flatten().map(|held| &held.regions.info);
        if !all().all(|expected| files.info(&expected.name).is_ok_and(|info| info == expected)) {
            let saved = SavedStates { folder, files: &files, parameter: name, shards };
            restore_from_other_formats(&saved, &slice, read, &mut kept)?;
            continue;
        }
        for (kept, held) in kept.into_iter().zip(held) {
            let mut bytes = Vec::with_capacity(kept.tensor.bytes());
            for Held { regions: Regions { info, regions }, .. } in held {
                for region in &regions {
                    bytes.extend(files.read_region(&info.name, region)?);
                }
            }
            kept.tensor.write_bytes(&bytes)?;
        }
    }
    let skipped = progress.loss_scale.as_ref().map_or(0, |scale| scale.skipped_steps);
    optimizer.set_steps(progress.step - skipped - progress.sentinel.skipped_steps);
    // Frozen weights are cast when they are loaded. Only the first step of the run counts the amaxes of these casts, so a resumed run discards them.
    model.scaling().forget_amaxes()?;
    restore_scales_from(&files, progress, model)
}

/// Restores the state tensors `kept` of a parameter or of its `slice`, and the weights that layers `read`, from a checkpoint with other formats. If
/// the checkpoint does not have master weights, they keep the values that were made from the weights. Remainders of weights do too.
fn restore_from_other_formats(
    saved: &SavedStates,
    slice: &Option<Range<usize>>,
    read: Option<&mut Tensor>,
    kept: &mut [StateTensor],
) -> Result<()> {
    let part_of = |values: &Values, slice: &Option<Range<usize>>, kept: &StateTensor| {
        let held = regions_of(saved.parameter, saved.shards, slice, kept, |_| true);
        values.part(kept.kind, held.iter().map(|held| &held.regions))
    };
    let (mut beside, mut read) = (HashMap::<String, Vec<u8>>::new(), read);
    for kept in kept.iter_mut() {
        if kept.per != Per::Element {
            if let Some(bytes) = beside.remove(kept.kind) {
                kept.tensor.write_bytes(&bytes)?;
            }
            continue;
        }
        let of_weights = kept.kind.starts_with("master");
        let values = if kept.kind == "master_rest" { None } else { saved.values(kept.kind)? };
        let Some(values) = values else {
            if !of_weights && !saved.shards.is_empty() {
                saved.files.info(&format!("{}.{}", kept.kind, saved.shards[0].tensor.name))?;
            }
            continue;
        };
        let encoded = values.encode(&part_of(&values, slice, kept)?, kept.tensor)?;
        kept.tensor.write_bytes(&encoded.values.read_bytes()?)?;
        if let Some((end, tensor)) = encoded.beside {
            beside.insert(format!("{}_{end}", kept.kind), tensor.read_bytes()?);
        }
        if let Some(read) = read.take_if(|_| of_weights && kept.tensor.dtype() == DType::F16) {
            // The weights that layers read are a slice or the whole parameter.
            let slice = slice.clone().filter(|slice| slice.len() == read.len());
            let weights = values.through_f16(&part_of(&values, &slice, kept)?, read.dtype())?;
            read.write_bytes(&weights.read_bytes()?)?;
        }
    }
    Ok(())
}

/// Restores the scales of a model for inference that was built from the checkpoint's weights.
pub fn restore_scales(folder: &Path, progress: &Progress, model: &mut Decoder) -> Result<()> {
    restore_scales_from(&open(folder)?, progress, model)
}

fn restore_scales_from(files: &SliceFiles, progress: &Progress, model: &mut Decoder) -> Result<()> {
    if progress.scaling_slots.is_empty() || !files.names().any(|name| name.starts_with(SCALING_PREFIX)) {
        return Ok(());
    }
    model.scaling().restore(&progress.scaling_slots, |name| {
        let info = files.info(name)?;
        Ok(Tensor::from_bytes(&Device::Cpu, &info.shape, info.dtype, &files.read(name)?)?)
    })
}

/// Opens the tensors of a checkpoint that are not weights of the model.
fn open(folder: &Path) -> Result<SliceFiles> {
    match Manifest::read(folder)? {
        Some(Manifest { format: 1, .. }) => SliceFiles::open_whole(&[OPTIMIZER, SCALING].map(|name| folder.join(name))),
        _ => SliceFiles::open(&folder.join(FOLDER)),
    }
}

/// Regions of a tensor of a checkpoint, and the range of their values among the values of a parameter.
struct Held {
    regions: Regions,
    values: Range<usize>,
}

/// Returns the regions of checkpoint tensors that this process holds of a parameter, or of a `slice` of it. They are in the order of the values, with
/// an entry for each tensor. A value that belongs to the whole parameter is in a tensor called `name`. Shards for which `is_meant` is false are left
/// out.
fn regions_of(
    name: &str,
    shards: &[Shard],
    slice: &Option<Range<usize>>,
    StateTensor { kind, per, tensor }: &StateTensor,
    is_meant: impl Fn(&Shard) -> bool,
) -> Vec<Held> {
    let info = |name: &str, shape: &[usize]| TensorInfo {
        name: format!("{kind}.{name}"),
        dtype: tensor.dtype(),
        shape: shape.to_vec(),
    };
    let of_shard = |shard: &Shard| info(&shard.tensor.name, &shard.tensor.shape);
    if *per == Per::Parameter {
        let region = Region { elements: 0..tensor.len(), columns: None };
        let regions = Regions { info: info(name, tensor.shape()), regions: vec![region] };
        return vec![Held { regions, values: 0..tensor.len() }];
    }
    let (mut end, mut value, mut found) = (0, 0, Vec::<Held>::new());
    for shard in shards {
        let start = end;
        end = start + shard.elements();
        let (from, to) = slice.as_ref().map_or((start, end), |slice| (slice.start.max(start), slice.end.min(end)));
        if from >= to {
            continue;
        }
        let region = shard.region(from - start..to - start);
        let (info, region) = match per {
            Per::Group => of_groups(of_shard(shard), region),
            Per::Element | Per::Parameter => (of_shard(shard), region),
        };
        let values = value..value + region.elements.len();
        value = values.end;
        if !is_meant(shard) {
            continue;
        }
        match found.last_mut().filter(|last| last.regions.info.name == info.name && last.values.end == values.start) {
            Some(last) => {
                last.regions.regions.push(region);
                last.values.end = values.end;
            }
            None => found.push(Held { regions: Regions { info, regions: vec![region] }, values }),
        }
    }
    found
}

/// Returns the tensor of the groups of a matrix, and the groups of `region`. Groups lie within rows, and a region consists of whole groups.
fn of_groups(matrix: TensorInfo, Region { elements, columns }: Region) -> (TensorInfo, Region) {
    let [rows, width] = [matrix.shape[0], matrix.shape[1]];
    // Returns the number of values of the groups in this number of columns of a row.
    let values = |columns| ExpandedTensor::groups_shape(1, columns).iter().product::<usize>();
    let held = columns.as_ref().map_or(width, Range::len);
    let at = |element: usize| element * values(held) / held;
    let elements = at(elements.start)..at(elements.end);
    let columns = columns.map(|columns| values(columns.start)..values(columns.end));
    let shape = ExpandedTensor::groups_shape(rows, width).to_vec();
    (TensorInfo { shape, ..matrix }, Region { elements, columns })
}
