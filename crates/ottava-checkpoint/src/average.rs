//! Averages the weights of several models, and writes a plain model folder.

use crate::model::expect_new_folder;
use crate::safetensors_write::MAX_FILE_BYTES;
use crate::template::write_settings;
use crate::{CheckpointWriter, TensorInfo, WeightFiles, adapter, write_model};
use ottava_common::error::{Error, Result};
use ottava_common::fs::RealFs;
use ottava_common::interrupt;
use ottava_models::{ConfigFile, decoder_config};
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Tensor};
use std::path::Path;

/// Averages the models of `folders`, each with its weight, writes the result as the new folder `output`, and returns the number of tensors. Weights are
/// divided by their sum.
///
/// Sums are F64, and are rounded once to the type of the first folder, whose settings and tokenizer are written. Weights in FP8 become BF16.
///
/// Errors with [`Error::Model`] if the folders have models of different sizes, or a folder has an adapter. Errors with [`Error::Config`] if `output`
/// exists or is inside a source, or if the weights are not finite or add up to 0. After an error, `output` does not exist.
pub fn average(folders: &[(&Path, f64)], output: &Path) -> Result<usize> {
    let sum: f64 = folders.iter().map(|(_, weight)| weight).sum();
    if !(sum.is_finite() && sum != 0.0) {
        return Err(Error::Config(format!(
            "the weights of the models add up to {sum}; give weights with a sum that is not 0"
        )));
    }
    let paths: Vec<&Path> = folders.iter().map(|(path, _)| *path).collect();
    expect_new_folder(output, &paths)?;
    let first = paths[0];
    if let Some(path) = paths.iter().find(|path| path.join(adapter::CONFIG_FILE).is_file()) {
        let path = path.display();
        return Err(Error::Model(format!(
            "{path}: this is an adapter, and an average of adapters is not the adapter of an average; `ottava merge BASE {path} FOLDER` writes a model"
        )));
    }
    let config = ConfigFile::read(first)?;
    let sizes = decoder_config(&config)?;
    let files = paths.iter().map(|path| WeightFiles::open(path)).collect::<Result<Vec<_>>>()?;
    let infos = files[0].names().map(|name| files[0].info(name)).collect::<Result<Vec<_>>>()?;
    for (path, own) in paths.iter().zip(&files).skip(1) {
        let differs = |what: &str| {
            Error::Model(format!(
                "{}: {what} than {}; an average is of models of one architecture and size",
                path.display(),
                first.display()
            ))
        };
        if decoder_config(&ConfigFile::read(path)?)? != sizes {
            return Err(differs("config.json describes another model"));
        }
        let same = |info: &TensorInfo| own.info(&info.name).is_ok_and(|other| other.shape == info.shape);
        if own.names().count() != infos.len() || !infos.iter().all(same) {
            return Err(differs("the folder has other tensors"));
        }
    }
    let share = |weight: f64| weight / sum;
    let mut writer = CheckpointWriter::begin_folder(&RealFs, output)?;
    let mut values = config.values().clone();
    values.shift_remove("quantization_config");
    write_settings(&mut writer, values, first)?;
    write_model(&mut writer, &infos, files[0].carried(), MAX_FILE_BYTES, |info| {
        interrupt::check("averaging the models")?;
        let mut sums = vec![0f64; info.elements()];
        for (own, (_, weight)) in files.iter().zip(folders) {
            let values = cast(&own.values(&info.name)?, DType::F32)?.to_vec::<f32>()?;
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += share(*weight) * f64::from(value));
        }
        let averaged: Vec<f32> = sums.into_iter().map(|value| value as f32).collect();
        Ok(cast(&Tensor::from_slice(&Device::Cpu, &info.shape, &averaged)?, info.dtype)?.read_bytes()?)
    })?;
    writer.finish_folder()?;
    Ok(infos.len())
}
