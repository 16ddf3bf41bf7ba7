//! A checkpoint: a model folder, plus all that is needed to go on as if nothing had happened.

use super::model::{FolderTemplate, part_bytes, parts};
use super::{CheckpointWriter, Manifest, ModelFiles, TensorInfo, write_tensors};
use crate::data::LoaderState;
use crate::error::{Error, Result};
use crate::models::Decoder;
use crate::optim::{AdamWOptimizer, LossScale, Moments};
use crate::param::Param;
use ottava_tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;

const OPTIMIZER: &str = "optimizer.safetensors";
const SCALING: &str = "scaling.safetensors";

/// Where a run stands, beside its tensors.
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
    /// The loss scale, where there is one.
    #[serde(default)]
    pub loss_scale: Option<LossScale>,
}

/// Writes model, optimizer, scales and position.
pub fn save(
    mut writer: CheckpointWriter,
    template: &FolderTemplate,
    model: &mut Decoder,
    optimizer: &AdamWOptimizer,
    progress: &Progress,
) -> Result<std::path::PathBuf> {
    template.write(&mut writer, model)?;
    let scales: HashMap<String, Tensor> = model.scaling().arrays()?.into_iter().collect();
    let info =
        |(name, t): (&String, &Tensor)| TensorInfo { name: name.clone(), dtype: t.dtype(), shape: t.shape().to_vec() };
    let mut infos: Vec<_> = scales.iter().map(info).collect();
    infos.sort_by(|a, b| a.name.cmp(&b.name));
    if !infos.is_empty() {
        write_tensors(&mut writer, SCALING, &infos, |info| Ok(scales[&info.name].read_bytes()?))?;
    }
    let params = model.parameters();
    let indices: HashMap<*const Param, usize> = params.iter().enumerate().map(|(i, p)| (&raw const **p, i)).collect();
    let mut infos = Vec::new();
    for param in &params {
        let kinds = param.master.as_ref().map(|_| "master").into_iter().chain(["m", "v"]);
        for (kind, (part, _)) in kinds.flat_map(|kind| parts(param).map(move |part| (kind, part))) {
            infos.push(TensorInfo {
                name: format!("{kind}.{}", part.name),
                dtype: if kind == "master" { DType::F32 } else { optimizer.state_dtype() },
                shape: part.shape.clone(),
            });
        }
    }
    write_tensors(&mut writer, OPTIMIZER, &infos, |info| {
        let (kind, name) = info.name.split_once('.').expect("names start with their kind");
        part_bytes(&params, name, |param| match kind {
            "master" => param.master.as_ref().expect("listed because it is there"),
            "m" => &optimizer.moments()[indices[&(&raw const *param)]].m,
            _ => &optimizer.moments()[indices[&(&raw const *param)]].v,
        })
    })?;
    writer.finish(json!(progress))
}

/// Reads the position from the manifest of a checkpoint.
pub fn progress(folder: &Path, manifest: &Manifest) -> Result<Progress> {
    serde_json::from_value(manifest.extra.clone()).map_err(|e| {
        Error::Checkpoint(format!("{}: manifest.json does not describe a training run: {e}", folder.display()))
    })
}

/// Puts masters, moments and scales of a checkpoint into a model that was built with its weights.
pub fn restore(folder: &Path, progress: &Progress, model: &mut Decoder, optimizer: &mut AdamWOptimizer) -> Result<()> {
    let files = ModelFiles::open_file(&folder.join(OPTIMIZER))?;
    let mut params = model.parameters();
    let mut moments = Vec::new();
    for param in &mut params {
        moments.push(Moments {
            m: stacked(&files, param, "m", optimizer.state_dtype())?,
            v: stacked(&files, param, "v", optimizer.state_dtype())?,
        });
        if param.master.is_some() {
            param.master = Some(stacked(&files, param, "master", DType::F32)?);
        }
    }
    let skipped = progress.loss_scale.as_ref().map_or(0, |scale| scale.skipped_steps);
    optimizer.restore(moments, progress.step - skipped);
    if !progress.scaling_slots.is_empty() && folder.join(SCALING).is_file() {
        let scales = ModelFiles::open_file(&folder.join(SCALING))?;
        model.scaling().restore(&progress.scaling_slots, |name| {
            let info = scales.info(name)?;
            Ok(Tensor::from_bytes(&ottava_tensor::Device::Cpu, &info.shape, info.dtype, &scales.read(name)?)?)
        })?;
    }
    Ok(())
}

fn stacked(files: &ModelFiles, param: &Param, kind: &str, dtype: DType) -> Result<Tensor> {
    let mut bytes = Vec::new();
    for (part, _) in parts(param) {
        let name = format!("{kind}.{}", part.name);
        let info = files.info(&name)?;
        if info.shape != part.shape || info.dtype != dtype {
            return Err(Error::Checkpoint(format!(
                "{OPTIMIZER}: `{name}` is {} {:?}, this run makes it {dtype} {:?}",
                info.dtype, info.shape, part.shape
            )));
        }
        bytes.extend(files.read(&name)?);
    }
    Ok(Tensor::from_bytes(param.value.device(), param.value.shape(), dtype, &bytes)?)
}
