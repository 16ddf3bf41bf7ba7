//! Training checkpoints: a model folder and the training state from which a run resumes with the same bits.

use super::model::{FolderTemplate, rows_of};
use super::slices::{FOLDER, SliceFiles, SliceWriter};
use super::{CheckpointWriter, Manifest, TensorInfo};
use crate::data::LoaderState;
use crate::error::{Error, Result};
use crate::models::Decoder;
use crate::optim::{AdamWOptimizer, LossScale, optimizer_tensors};
use crate::param::{Param, Part};
use ottava_tensor::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;

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

/// Writes model, optimizer, scales and position.
pub fn save(
    mut writer: CheckpointWriter,
    template: &FolderTemplate,
    model: &mut Decoder,
    optimizer: &mut AdamWOptimizer,
    progress: &Progress,
) -> Result<std::path::PathBuf> {
    template.write(&mut writer, model)?;
    let mut slices = SliceWriter::default();
    let scales: HashMap<String, Tensor> = model.scaling().arrays()?.into_iter().collect();
    let info =
        |(name, t): (&String, &Tensor)| TensorInfo { name: name.clone(), dtype: t.dtype(), shape: t.shape().to_vec() };
    let mut infos: Vec<_> = scales.iter().map(info).collect();
    infos.sort_by(|a, b| a.name.cmp(&b.name));
    if !infos.is_empty() {
        slices.whole(&mut writer, SCALING, &infos, |info| Ok(scales[&info.name].read_bytes()?))?;
    }
    let mut tensors = HashMap::new();
    for (param, moments) in model.parameters().into_iter().zip(optimizer.moments_mut()) {
        let Param { parts, weights, .. } = param;
        for (kind, tensor) in optimizer_tensors(weights, moments) {
            for (name, rows) in names(parts, kind, tensor) {
                tensors.insert(name, tensor.rows(rows.start, rows.end)?);
            }
        }
    }
    let mut infos: Vec<_> = tensors.iter().map(info).collect();
    infos.sort_by(|a, b| a.name.cmp(&b.name));
    slices.whole(&mut writer, OPTIMIZER, &infos, |info| Ok(tensors[&info.name].read_bytes()?))?;
    slices.finish(&mut writer)?;
    writer.finish(json!(progress))
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
        let Param { parts, weights, .. } = param;
        for (kind, tensor) in optimizer_tensors(weights, moments) {
            let mut bytes = Vec::with_capacity(tensor.bytes());
            for (name, rows) in names(parts, kind, tensor) {
                let (expected, info) = (tensor.rows(rows.start, rows.end)?, files.info(&name)?);
                if info.shape != expected.shape() || info.dtype != expected.dtype() {
                    return Err(Error::Checkpoint(format!(
                        "{}: `{name}` is {} {:?}, this run makes it {} {:?}",
                        folder.display(),
                        info.dtype,
                        info.shape,
                        expected.dtype(),
                        expected.shape()
                    )));
                }
                bytes.extend(files.read(&name)?);
            }
            tensor.write_bytes(&bytes)?;
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

/// The names under which a tensor of a `kind` is saved, with the rows of each: one per part; a tensor without a row per weight row,
/// such as a scale of the whole parameter, is saved under the first part's name.
fn names(parts: &[Part], kind: &str, tensor: &Tensor) -> Vec<(String, std::ops::Range<usize>)> {
    let name = |part: &Part| format!("{kind}.{}", part.name);
    let rows: usize = parts.iter().map(|part| part.shape[0]).sum();
    if tensor.shape()[0] != rows {
        return vec![(name(&parts[0]), 0..tensor.shape()[0])];
    }
    rows_of(parts).map(|(part, rows)| (name(part), rows)).collect()
}
