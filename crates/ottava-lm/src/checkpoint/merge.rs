//! Adapters added to the weights of their base model, as a plain model folder.

use super::adapter::LinearAdapter;
use super::model::{expect_new_folder, write_settings};
use super::safetensors::TensorInfo;
use super::safetensors_write::MAX_FILE_BYTES;
use super::{AdapterFolder, CheckpointWriter, WeightFiles, write_model};
use crate::error::{Error, Result};
use crate::fs::RealFs;
use crate::interrupt;
use crate::models::{ConfigFile, decoder_config};
use ottava_tensor::ops::{
    Accumulation, Operand, add, cast, gemm_nt, magnitude_factors, row_squares, scale_columns, transpose,
};
use ottava_tensor::{DType, Device, Tensor};
use std::path::Path;

/// Writes the model of the folder `base` with `W + scale · B · A` in place of each `W` that has an adapter, and with DoRA each row of it times
/// its magnitude over its norm, as the new folder `output`, and returns the number of those. Sums are F32, and rounded once to the type of
/// `W`; other weights keep their bits, and weights in FP8 become BF16.
///
/// Errors with [`Error::Model`] when the adapter has matrices of other weights, and with [`Error::Config`] when `output` exists or is
/// inside a source; nothing is left then.
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
    write_model(&mut writer, &infos, MAX_FILE_BYTES, |info| {
        interrupt::check("merging the model")?;
        let Some(own) = adapter.of_weight(&info.name)? else { return files.bytes(info) };
        merged += 1;
        let sum = adapted(&files.values(&info.name)?, &own, transposed, info)?;
        Ok(cast(&sum, info.dtype)?.read_bytes()?)
    })?;
    writer.finish_folder()?;
    Ok(merged)
}

/// `W + scale · B · A`, F32, with rows of their magnitudes if there are any.
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
