//! Converts between tensors of a folder with the matrices or biases of all experts of a layer ([`Stacked`]), and tensors of each expert.

use ottava_common::error::Result;
use ottava_recipe::param::Stacked;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{divide_columns, join_columns, transpose};

/// Returns the linears of an expert, `[L, outputs, inputs]`, from its part `[inputs, L · outputs]` of a folder's tensor. Biases have one input.
pub(super) fn divide(part: &Tensor, linears: usize) -> Result<Tensor> {
    let [inputs, outputs] = part.dims("an expert of a stack")?;
    let width = linears * inputs;
    Ok(divide_columns(&transpose(part)?.reshape(&[outputs / linears, width])?, &[width], linears)?)
}

/// Joins linears again, as the inverse of [`divide`].
fn join(matrices: &Tensor) -> Result<Tensor> {
    let [linears, outputs, inputs] = matrices.dims("the linears of an expert")?;
    let rows = join_columns(matrices, &[linears * inputs])?;
    Ok(transpose(&rows.reshape(&[linears * outputs, inputs])?)?)
}

/// Returns the folder's tensor for a parameter that stacks the linears of all experts: `[E · L · outputs, inputs]`, or without inputs for biases.
pub(super) fn stored(param: &Tensor, Stacked { experts, linears, .. }: Stacked) -> Result<Tensor> {
    let (rows, inputs) = (param.shape()[0] / experts, param.shape().get(1).copied().unwrap_or(1));
    let param = param.reshape(&[experts, linears, rows / linears * inputs])?;
    let mut stored = Tensor::empty(param.device(), &[experts, rows * inputs], param.dtype())?;
    for expert in 0..experts {
        let part = join(&param.rows(expert, expert + 1)?.reshape(&[linears, rows / linears, inputs])?)?;
        stored.copy_from(expert, &part.reshape(&[1, rows * inputs])?)?;
    }
    Ok(stored)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_tensor::Device;

    /// There are two experts with two linears of three outputs and two inputs. The value of an element is its index in the folder.
    #[test]
    fn outputs_are_interleaved_and_inputs_are_rows() {
        let value = |expert: usize, linear: usize, output: usize, input: usize| {
            ((expert * 2 + input) * 6 + output * 2 + linear) as f32
        };
        let mut param = Vec::new();
        for (expert, linear) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for output in 0..3 {
                param.extend((0..2).map(|input| value(expert, linear, output, input)));
            }
        }
        let param = Tensor::from_slice(&Device::Cpu, &[12, 2], &param).unwrap();
        let layout = Stacked { name: "gate_up_proj", expert: 0, experts: 2, linear: 0, linears: 2 };
        let stored = stored(&param, layout).unwrap();
        let expected: Vec<f32> = (0..24).map(|i| i as f32).collect();
        assert_eq!(stored.to_vec::<f32>().unwrap(), expected);
        let second = stored.rows(1, 2).unwrap().reshape(&[2, 6]).unwrap();
        let restored = divide(&second, 2).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(restored, param.rows(6, 12).unwrap().to_vec::<f32>().unwrap());
    }
}
