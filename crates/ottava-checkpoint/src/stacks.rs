//! Converts between tensors of a folder with the matrices or biases of all experts of a layer ([`Stacked`]), and tensors of each expert.

use crate::WeightFiles;
use ottava_common::error::Result;
use ottava_models::DecoderConfig;
use ottava_recipe::param::{StackOrder, Stacked};
use ottava_tensor::Tensor;
use ottava_tensor::ops::{divide_columns, join_columns, transpose};
use std::path::Path;

/// Returns the linears of an expert, `[L · outputs, inputs]`, from its part `[inputs, L · outputs]` of a folder's tensor. Biases have one input.
pub(super) fn divide(part: &Tensor, linears: usize, order: StackOrder) -> Result<Tensor> {
    let [inputs, outputs] = part.dims("an expert of a stack")?;
    let rows = transpose(part)?;
    match order {
        StackOrder::InputsFirst | StackOrder::OutputsFirst => Ok(rows),
        StackOrder::Interleaved => {
            let width = linears * inputs;
            let linears = divide_columns(&rows.reshape(&[outputs / linears, width])?, &[width], linears)?;
            Ok(linears.reshape(&[outputs, inputs])?)
        }
    }
}

/// Joins linears again, as the inverse of [`divide`].
fn join(matrices: &Tensor, order: StackOrder) -> Result<Tensor> {
    let [linears, outputs, inputs] = matrices.dims("the linears of an expert")?;
    let rows = match order {
        StackOrder::InputsFirst | StackOrder::OutputsFirst => matrices.clone(),
        StackOrder::Interleaved => join_columns(matrices, &[linears * inputs])?,
    };
    Ok(transpose(&rows.reshape(&[linears * outputs, inputs])?)?)
}

/// Returns the folder's tensor for a parameter that stacks the linears of all experts: `[E · L · outputs, inputs]`, or without inputs for biases.
pub(super) fn stored(param: &Tensor, Stacked { experts, linears, order, .. }: Stacked) -> Result<Tensor> {
    if order == StackOrder::OutputsFirst {
        return Ok(param.clone());
    }
    let (rows, inputs) = (param.shape()[0] / experts, param.shape().get(1).copied().unwrap_or(1));
    let param = param.reshape(&[experts, linears, rows / linears * inputs])?;
    let mut stored = Tensor::empty(param.device(), &[experts, rows * inputs], param.dtype())?;
    for expert in 0..experts {
        let part = join(&param.rows(expert, expert + 1)?.reshape(&[linears, rows / linears, inputs])?, order)?;
        stored.copy_from(expert, &part.reshape(&[1, rows * inputs])?)?;
    }
    Ok(stored)
}

/// Returns `values` `[outer · inner, …]` in the order of `inner · outer`: row `i` of `inner` of row `o` of `outer` becomes row `o` of row `i`.
pub(super) fn regrouped(values: &Tensor, [outer, inner]: [usize; 2]) -> Result<Tensor> {
    let groups = values.reshape(&[outer * inner, values.len() / (outer * inner)])?;
    let mut regrouped = Tensor::empty(values.device(), groups.shape(), values.dtype())?;
    for (o, i) in (0..outer).flat_map(|o| (0..inner).map(move |i| (o, i))) {
        regrouped.copy_from(i * outer + o, &groups.rows(o * inner + i, o * inner + i + 1)?)?;
    }
    Ok(regrouped.reshape(values.shape())?)
}

/// Returns the model with the layout of experts that the weights of `folder` have, so that they are written as they were read. Returns the model itself if
/// it has no experts, or if the folder has no weights that can be read.
pub fn with_experts_of(sizes: DecoderConfig, folder: &Path) -> DecoderConfig {
    match sizes.experts().map(|_| WeightFiles::open(folder)) {
        Some(Ok(weights)) => sizes.with_experts_of(|name| weights.info(name).ok().map(|info| info.shape)),
        _ => sizes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_tensor::Device;

    /// There are two experts with two linears of three outputs and two inputs. The value of an element is its index in the folder.
    #[test]
    fn every_order_is_stored_and_divided_again() {
        let index = |order, linear: usize, output: usize, input: usize| match order {
            StackOrder::Interleaved => input * 6 + output * 2 + linear,
            StackOrder::InputsFirst => input * 6 + linear * 3 + output,
            StackOrder::OutputsFirst => (linear * 3 + output) * 2 + input,
        };
        for order in [StackOrder::Interleaved, StackOrder::InputsFirst, StackOrder::OutputsFirst] {
            let mut param = Vec::new();
            for (expert, linear) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                for output in 0..3 {
                    param.extend((0..2).map(|input| (expert * 12 + index(order, linear, output, input)) as f32));
                }
            }
            let param = Tensor::from_slice(&Device::Cpu, &[12, 2], &param).unwrap();
            let layout = Stacked { name: "experts.x", order, expert: 0, experts: 2, linear: 0, linears: 2 };
            let stored = stored(&param, layout).unwrap();
            let expected: Vec<f32> = (0..24).map(|i| i as f32).collect();
            assert_eq!(stored.to_vec::<f32>().unwrap(), expected, "{order:?}");
            if order != StackOrder::OutputsFirst {
                let second = stored.rows(1, 2).unwrap().reshape(&[2, 6]).unwrap();
                let restored = divide(&second, 2, order).unwrap().to_vec::<f32>().unwrap();
                assert_eq!(restored, param.rows(6, 12).unwrap().to_vec::<f32>().unwrap(), "{order:?}");
            }
        }
    }

    #[test]
    fn rows_of_heads_are_regrouped_and_restored() {
        let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
        let memory = Tensor::from_slice(&Device::Cpu, &[12, 2], &values).unwrap();
        let folder = regrouped(&memory, [3, 2]).unwrap();
        let first: Vec<f32> = folder.to_vec::<f32>().unwrap()[..12].to_vec();
        assert_eq!(first, [0., 1., 2., 3., 8., 9., 10., 11., 16., 17., 18., 19.], "the rows of the first head");
        assert_eq!(regrouped(&folder, [2, 3]).unwrap().to_vec::<f32>().unwrap(), values);
    }
}
