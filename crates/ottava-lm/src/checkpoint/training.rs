//! Training checkpoints: a model folder and the training state from which a run resumes with the same bits.

use super::fs::RealFs;
use super::model::FolderTemplate;
use super::slices::{FOLDER, SliceFiles, SliceWriter};
use super::{CheckpointWriter, Manifest, TensorInfo};
use crate::data::LoaderState;
use crate::error::{Error, Result};
use crate::models::Decoder;
use crate::optim::{AdamWOptimizer, Kept, LossScale, Per, optimizer_tensors};
use crate::parallel::{DataParallel, Partition};
use crate::param::{Param, Part};
use ottava_tensor::{ExpandedTensor, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Files of the subfolder [`FOLDER`]; in format 1 they are next to the weights.
const OPTIMIZER: &str = "optimizer.safetensors";
const SCALING: &str = "scaling.safetensors";

/// Prefix of the names of scaling arrays.
const SCALING_PREFIX: &str = "scaling.";

/// The state of a run other than its tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer steps done.
    pub step: u64,
    /// Target tokens trained on.
    pub tokens: u64,
    /// Position in the data, and the seed of its order.
    pub loader: LoaderState,
    /// Hash of the prepared data: of files, tokenizer and options.
    pub data: String,
    /// The resolved configuration of the run, as TOML.
    pub config: String,
    /// Names of the FP8 casts, in the order of the scaling arrays.
    pub scaling_slots: Vec<String>,
    /// The loss scale, with `fp16`.
    #[serde(default)]
    pub loss_scale: Option<LossScale>,
    /// Metrics of the step that are not written yet, because a signal interrupted its evaluation.
    #[serde(default)]
    pub pending: Option<Map<String, Value>>,
}

/// Writes model, optimizer, scales and position. Of several `ranks`, the leading one has the `writer`; each writes the slices of the
/// optimizer that it has. Returns the checkpoint's path on the leading rank.
///
/// Errors on all ranks when one fails.
pub fn save(
    writer: Option<Result<CheckpointWriter>>,
    template: &FolderTemplate,
    model: &mut Decoder,
    optimizer: &mut AdamWOptimizer,
    progress: &Progress,
    partition: &Partition,
) -> Result<Option<PathBuf>> {
    let ranks = partition.ranks();
    let mut weights = WholeWeights { partition, next: 0 };
    let begun = writer.map(|writer| begin(writer?, template, model, &mut weights)).transpose();
    // The other ranks gather as many.
    let rest = weights.finish(&model.parameters());
    let (mut begun, path) = match begun.and_then(|begun| rest.map(|()| begun)) {
        Ok(begun) => {
            let path = begun.as_ref().map_or(PathBuf::new(), |(writer, _)| writer.path().to_path_buf());
            (begun, Ok(path))
        }
        Err(error) => (None, Err(error)),
    };
    let path = ranks.all("begin of a checkpoint", path)?.swap_remove(0);
    let mut joined = (CheckpointWriter::join(&RealFs, &path, progress.step, &[FOLDER]), SliceWriter::default());
    let (writer, slices) = begun.as_mut().unwrap_or(&mut joined);
    let written = save_optimizer(writer, slices, model, optimizer, ranks);
    let (joined, slices) = joined;
    let others = ranks.all("files of a checkpoint", written.map(|()| (joined.into_files(), slices)))?;
    let finish = |(mut writer, mut slices): (CheckpointWriter, SliceWriter)| {
        for (files, index) in others {
            writer.adopt(files);
            slices.adopt(index);
        }
        slices.finish(&mut writer)?;
        writer.finish(json!(progress))
    };
    let (path, ended) = match begun.map(finish).transpose() {
        Ok(path) => (path, Ok(())),
        Err(error) => (None, Err(error)),
    };
    ranks.all("end of a checkpoint", ended)?;
    Ok(path)
}

/// The whole weights of a model that ranks divide, which all ranks gather in the order of the parameters.
struct WholeWeights<'a> {
    partition: &'a Partition,
    /// The first parameter that was not gathered yet.
    next: usize,
}

impl WholeWeights<'_> {
    /// The weights of parameter `i`, which was not asked for before.
    fn get(&mut self, params: &[&mut Param], i: usize) -> Result<Tensor> {
        while self.next < i {
            self.gather(params)?;
        }
        self.gather(params)
    }

    fn gather(&mut self, params: &[&mut Param]) -> Result<Tensor> {
        self.next += 1;
        self.partition.value(params[self.next - 1])
    }

    /// Gathers the rest, which nobody asks for, so that all ranks do the same.
    fn finish(mut self, params: &[&mut Param]) -> Result<()> {
        while self.partition.divides() && self.next < params.len() {
            self.gather(params)?;
        }
        Ok(())
    }
}

/// Writes what one rank writes for all.
fn begin<'a>(
    mut writer: CheckpointWriter<'a>,
    template: &FolderTemplate,
    model: &mut Decoder,
    weights: &mut WholeWeights,
) -> Result<(CheckpointWriter<'a>, SliceWriter)> {
    template.write(&mut writer, model, &mut |params, i| weights.get(params, i))?;
    writer.subfolder(FOLDER)?;
    let mut slices = SliceWriter::default();
    let scales: HashMap<String, Tensor> = model.scaling().arrays()?.into_iter().collect();
    let info =
        |(name, t): (&String, &Tensor)| TensorInfo { name: name.clone(), dtype: t.dtype(), shape: t.shape().to_vec() };
    let mut infos: Vec<_> = scales.iter().map(info).collect();
    infos.sort_by(|a, b| a.name.cmp(&b.name));
    if !infos.is_empty() {
        slices.whole(&mut writer, SCALING, &infos, |info| Ok(scales[&info.name].read_bytes()?))?;
    }
    Ok((writer, slices))
}

/// Writes master weights and optimizer states: slices of matrices that are divided among ranks, and on the leading rank all others.
fn save_optimizer(
    writer: &mut CheckpointWriter,
    slices: &mut SliceWriter,
    model: &mut Decoder,
    optimizer: &mut AdamWOptimizer,
    ranks: &DataParallel,
) -> Result<()> {
    let (mut whole, mut ranges, mut tensors) = (Vec::new(), Vec::new(), HashMap::new());
    for (param, moments) in model.parameters().into_iter().zip(optimizer.moments_mut()) {
        let slice = param.is_sliced().then(|| param.slice());
        if slice.is_none() && !ranks.leads() {
            continue;
        }
        let Param { parts, weights, .. } = param;
        for kept in optimizer_tensors(weights, moments) {
            // The rank with the first element writes what all slices have alike.
            let first = slice.as_ref().is_none_or(|slice| slice.start == 0 && !slice.is_empty());
            if kept.per == Per::Parameter && !first {
                continue;
            }
            let (flat, mut start) = (kept.tensor.reshape(&[kept.tensor.len()])?, 0);
            for Piece { info, elements } in pieces(parts, &slice, &kept) {
                let end = start + elements.len();
                tensors.insert(info.name.clone(), flat.rows(start, end)?);
                start = end;
                match slice {
                    Some(_) => ranges.push((info, elements)),
                    None => whole.push(info),
                }
            }
        }
    }
    whole.sort_by(|a, b| a.name.cmp(&b.name));
    ranges.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let fetch = |info: &TensorInfo| Ok(tensors[&info.name].read_bytes()?);
    if !whole.is_empty() {
        slices.whole(writer, OPTIMIZER, &whole, fetch)?;
    }
    if !ranges.is_empty() {
        let file = format!("optimizer-{:05}-of-{:05}.safetensors", ranks.rank() + 1, ranks.size());
        slices.ranges(writer, &file, &ranges, fetch)?;
    }
    Ok(())
}

/// Reads the position from the manifest of a checkpoint.
pub fn progress(folder: &Path, manifest: &Manifest) -> Result<Progress> {
    serde_json::from_value(manifest.extra.clone()).map_err(|e| {
        Error::Checkpoint(format!(
            "{}: it does not describe a training run: {e}",
            folder.join("manifest.json").display()
        ))
    })
}

/// Restores master weights, optimizer states and scales into a model built from the checkpoint's weights.
pub fn restore(folder: &Path, progress: &Progress, model: &mut Decoder, optimizer: &mut AdamWOptimizer) -> Result<()> {
    let files = open(folder)?;
    for (param, moments) in model.parameters().into_iter().zip(optimizer.moments_mut()) {
        let slice = param.is_sliced().then(|| param.slice());
        let Param { parts, weights, .. } = param;
        for kept in optimizer_tensors(weights, moments) {
            let mut bytes = Vec::with_capacity(kept.tensor.bytes());
            for Piece { info: expected, elements } in pieces(parts, &slice, &kept) {
                let info = files.info(&expected.name)?;
                if *info != expected {
                    return Err(Error::Checkpoint(format!(
                        "{}: `{}` is {} {:?}, this run makes it {} {:?}",
                        folder.display(),
                        expected.name,
                        info.dtype,
                        info.shape,
                        expected.dtype,
                        expected.shape
                    )));
                }
                bytes.extend(files.read_range(&expected.name, elements)?);
            }
            kept.tensor.write_bytes(&bytes)?;
        }
    }
    let skipped = progress.loss_scale.as_ref().map_or(0, |scale| scale.skipped_steps);
    optimizer.set_steps(progress.step - skipped);
    if !progress.scaling_slots.is_empty() && files.names().any(|name| name.starts_with(SCALING_PREFIX)) {
        model.scaling().restore(&progress.scaling_slots, |name| {
            let info = files.info(name)?;
            Ok(Tensor::from_bytes(&ottava_tensor::Device::Cpu, &info.shape, info.dtype, &files.read(name)?)?)
        })?;
    }
    Ok(())
}

/// The tensors of a checkpoint that are not the model's weights.
fn open(folder: &Path) -> Result<SliceFiles> {
    match Manifest::read(folder)? {
        Some(Manifest { format: 1, .. }) => SliceFiles::open_whole(&[OPTIMIZER, SCALING].map(|name| folder.join(name))),
        _ => SliceFiles::open(&folder.join(FOLDER)),
    }
}

/// Elements of a tensor of a checkpoint that this process has.
struct Piece {
    info: TensorInfo,
    elements: Range<usize>,
}

/// The pieces of a tensor, in its order, which this process has of a parameter, or of a `slice` of one: one per part that it touches. What
/// belongs to the whole parameter has the first part's name.
fn pieces(parts: &[Part], slice: &Option<Range<usize>>, Kept { kind, per, tensor }: &Kept) -> Vec<Piece> {
    let info = |part: &Part, shape| TensorInfo { name: format!("{kind}.{}", part.name), dtype: tensor.dtype(), shape };
    if *per == Per::Parameter {
        return vec![Piece { info: info(&parts[0], tensor.shape().to_vec()), elements: 0..tensor.len() }];
    }
    let (mut end, mut found) = (0, Vec::new());
    for part in parts {
        let start = end;
        end = start + part.shape.iter().product::<usize>();
        let (from, to) = slice.as_ref().map_or((start, end), |slice| (slice.start.max(start), slice.end.min(end)));
        if from >= to {
            continue;
        }
        let (shape, elements) = match per {
            Per::Group => {
                // Groups lie within rows, and a slice has whole groups.
                let shape = ExpandedTensor::groups_shape(part.shape[0], part.shape[1]).to_vec();
                let whole: usize = shape.iter().product();
                let at = |weight: usize| weight * whole / (end - start);
                (shape, at(from - start)..at(to - start))
            }
            Per::Element | Per::Parameter => (part.shape.clone(), from - start..to - start),
        };
        found.push(Piece { info: info(part, shape), elements });
    }
    found
}
