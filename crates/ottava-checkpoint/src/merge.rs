//! Merges adapters into the weights of their base model, and writes a plain model folder.

use crate::adapter::LinearAdapter;
use crate::model::expect_new_folder;
use crate::safetensors::TensorInfo;
use crate::safetensors_write::MAX_FILE_BYTES;
use crate::template::write_settings;
use crate::{AdapterFolder, CheckpointWriter, WeightFiles, write_model};
use ottava_common::error::{Error, Result};
use ottava_common::fs::RealFs;
use ottava_common::interrupt;
use ottava_models::{ConfigFile, decoder_config};
use ottava_tensor::ops::{
    Accumulation, Operand, add, cast, gemm_nt, magnitude_factors, row_squares, scale_columns, transpose,
};
use ottava_tensor::{DType, Device, Tensor};
use std::path::Path;

/// Merges `adapter` into the model of the folder `base`, writes the result as the new folder `output`, and returns the number of merged weights.
///
/// Each `W` that has an adapter becomes `W + scale · B · A`. With DoRA, each row of this sum is also multiplied by its magnitude and divided by its
/// norm. Sums are F32, and are rounded once to the type of `W`. Other weights keep their bits, except that weights in FP8 become BF16.
///
/// Errors with [`Error::Model`] if the adapter has matrices of weights that the model does not have. Errors with [`Error::Config`] if `output` exists
/// or is inside a source. After an error, `output` does not exist.
pub fn merge(base: &Path, adapter: &AdapterFolder, output: &Path) -> Result<usize> {
    expect_new_folder(output, &[base, adapter.path()])?;
    let config = ConfigFile::read(base)?;
    let transposed = decoder_config(&config)?.stream.names.transposed;
    let files = WeightFiles::open(base)?;
    let infos = files.names().map(|name| files.info(name)).collect::<Result<Vec<_>>>()?;
    adapter.expect_weights(&infos)?;
    let mut writer = CheckpointWriter::begin_folder(&RealFs, output)?;
    let mut values = config.values().clone();
    values.shift_remove("quantization_config");
    write_settings(&mut writer, values, base)?;
    let mut merged = 0;
    write_model(&mut writer, &infos, files.carried(), MAX_FILE_BYTES, |info| {
        interrupt::check("merging the model")?;
        let Some(own) = adapter.of_weight(&info.name)? else { return files.bytes(info) };
        merged += 1;
        let sum = adapted(&files.values(&info.name)?, &own, transposed, info)?;
        Ok(cast(&sum, info.dtype)?.read_bytes()?)
    })?;
    writer.finish_folder()?;
    Ok(merged)
}

/// Returns `W + scale · B · A` in F32. If the adapter has magnitudes, the rows are scaled to them.
fn adapted(w: &Tensor, adapter: &LinearAdapter, transposed: bool, info: &TensorInfo) -> Result<Tensor> {
    let LinearAdapter { a, b, magnitude, scale } = adapter;
    let product = gemm_nt(Operand::plain(b), Operand::plain_transposed(a), DType::F32, Accumulation::Exact)?;
    let [rows, columns] = product.dims("merge: adapter")?;
    let expected = if transposed { [columns, rows] } else { [rows, columns] };
    if w.shape() != expected {
        return Err(Error::Model(format!(
            "`{}` has shape {:?}, and its adapter makes it {expected:?}",
            info.name,
            w.shape(),
        )));
    }
    let w = if transposed { transpose(w)? } else { w.clone() };
    let change: Vec<f32> = product.to_vec::<f32>()?.into_iter().map(|change| *scale as f32 * change).collect();
    let change = Tensor::from_slice(&Device::Cpu, &[rows, columns], &change)?;
    let mut sums = add(&w, &change)?;
    if let Some(magnitude) = magnitude {
        let factors = magnitude_factors(&row_squares(&w, Some(&change))?, magnitude)?;
        sums = transpose(&scale_columns(&transpose(&sums)?, &factors)?)?;
    }
    let sums = if transposed { transpose(&sums)? } else { sums };
    Ok(sums.reshape(&info.shape)?)
}
