//! Copies numbers between the host and the tensors of a step.

use ottava_common::error::Result;
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Tensor};

/// Returns a tensor of these `values`.
pub fn from_host(values: &[f64], device: &Device, dtype: DType) -> Result<Tensor> {
    Ok(cast(&Tensor::from_slice(&Device::Cpu, &[values.len()], values)?, dtype)?.to_device(device)?)
}

/// Returns the elements of `tensor`.
pub fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(cast(&tensor.to_device(&Device::Cpu)?, DType::F64)?.to_vec()?)
}

/// Overwrites `tensor` with `values`.
pub fn write(tensor: &mut Tensor, values: &[f64]) -> Result<()> {
    Ok(tensor.write_bytes(&from_host(values, &Device::Cpu, tensor.dtype())?.read_bytes()?)?)
}
