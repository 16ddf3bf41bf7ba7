//! Permutes rows of tokens so that the rows of each expert are neighbours, and combines rows of experts to rows of tokens.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::destination::{Output, Produced};
use super::groups::Groups;
use super::{expect_compute, quantize, real_type, transpose};
use crate::granularity::Shared;
use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Granularity, QuantizedTensor, Result, Tensor};
use std::ops::Range;

/// The row of each choice of a token among the rows of experts.
#[derive(Clone, Debug)]
pub struct Slots {
    /// The rows of each expert. Their buffer has [`Groups::capacity`] rows, which suffices for any choices.
    pub groups: Groups,
    /// The row of each choice, I32 `[T, K]`, or -1 if the expert has no group. The choices of an expert are in the order of tokens, and then in the
    /// order of `k`.
    pub slot_of: Tensor,
    /// The choice `t · K + k` of each row, I32 `[P]`, or -1 if the row has no choice. Undefined after the last group.
    pub pair_of: Tensor,
}

impl Slots {
    /// Returns the number `T` of tokens, the number `K` of choices per token, and the number `P` of rows.
    fn sizes(&self) -> Result<[usize; 3]> {
        let [tokens, chosen] = self.slot_of.dims("permute: slot_of")?;
        Ok([tokens, chosen, self.pair_of.len()])
    }

    /// Returns the choices of a range of tokens, for [`combine`]. The rows are the rows of all tokens.
    pub fn of_tokens(&self, tokens: Range<usize>) -> Result<Slots> {
        Ok(Slots { slot_of: self.slot_of.rows(tokens.start, tokens.end)?, ..self.clone() })
    }
}

/// Places the choices `ids` I32 `[T, K]` of `experts` in rows. Choices of other experts have no row. The caller must have checked that the ids of a
/// token differ.
pub fn slots(ids: &Tensor, experts: Range<usize>) -> Result<Slots> {
    let [tokens, chosen] = ids.dims("slots: ids")?;
    ids.expect_dtype("slots: ids", &[DType::I32])?;
    let device = ids.device();
    let empty = |shape: &[usize]| Tensor::empty(device, shape, DType::I32);
    let count = experts.len();
    let mut slots = Slots {
        groups: Groups { offsets: empty(&[count + 1])?, counts: empty(&[count])? },
        slot_of: empty(&[tokens, chosen])?,
        pair_of: empty(&[Groups::capacity(tokens * chosen.min(count), count)])?,
    };
    dispatch! { device,
        cpu => cpu::slots(ids, experts.start, &mut slots),
        gpu => cuda::slots(gpu, ids, experts.start, &mut slots)?,
    }
    Ok(slots)
}

/// Writes the rows of `x` `[T, C]` in the order of slots, `[P, C]`, to `output`. With `weights` `[T, K]` (F32, or F64 for F64), each row is
/// multiplied by the weight of its choice and rounded once. Rows of groups without a choice are zero. Rows after the last group are undefined.
pub fn gather_to(x: &Tensor, slots: &Slots, weights: Option<&Tensor>, output: Output) -> Result<Produced> {
    let [tokens, chosen, rows] = slots.sizes()?;
    let [_, channels] = x.dims("gather: x")?;
    expect_compute("gather: x", x)?;
    x.expect("gather: x", &[tokens, channels])?;
    x.expect_device("gather: x", slots.pair_of.device())?;
    expect_weights("gather: weights", weights, [tokens, chosen], x)?;
    match (x.device(), output) {
        (Device::Cuda(gpu), Output::Fp8(mut to)) => {
            let mut quantized = quantize::prepare(&to, x.device(), rows, channels)?;
            cuda::gather_codes(gpu, x, slots, weights, &mut quantized, &mut to)?;
            Ok(Produced::Fp8(quantized))
        }
        (Device::Cuda(gpu), Output::Amax { amax }) => {
            quantize::expect_amax(amax, x.device())?;
            cuda::gather_amax(gpu, x, slots, weights, amax)?;
            Ok(Produced::Measured)
        }
        (device, output) => {
            let mut y = Tensor::empty(device, &[rows, channels], x.dtype())?;
            dispatch! { device,
                cpu => cpu::gather(x, slots, weights, &mut y),
                gpu => cuda::gather(gpu, x, slots, weights, &mut y)?,
            }
            output.apply(y)
        }
    }
}

/// Gathers the codes of `x` `[T, C]` in the order of slots. They equal the codes that the cast of [`gather_to`] writes, because the cast of a row
/// does not depend on its place: there is one scale, or scales along rows. Rows of groups without a choice have codes of zero and a scale of one. Rows
/// after the last group are undefined. `x` must have the copy that is contracted along the columns. With `transposes`, the result has both copies.
///
/// Errors with [`Error::Value`] if `x` has no such copy, if its rows are padded, if blocks of several rows share a scale, or if `transposes` is set
/// and the scales are not per-tensor.
pub fn gather_quantized(x: &QuantizedTensor, slots: &Slots, transposes: bool) -> Result<QuantizedTensor> {
    let [tokens, _, rows] = slots.sizes()?;
    let wrong = |what: &str| Error::Value(format!("gather_quantized: {what}"));
    let codes = x.codes.as_ref().ok_or_else(|| wrong("there are no codes along the rows"))?;
    codes.expect_device("gather_quantized: x", slots.pair_of.device())?;
    let [padded, width] = codes.dims("gather_quantized: x")?;
    if x.rows != tokens || padded != tokens {
        return Err(wrong(&format!("{} rows of codes for {tokens} tokens", padded)));
    }
    let granularity = x.granularity.of_rows();
    if matches!(granularity.info().shared, Shared::Square(_)) || transposes && granularity != Granularity::PerTensor {
        return Err(wrong(&format!("scales {granularity} are not those of single rows")));
    }
    let device = codes.device();
    let mut gathered = Tensor::empty(device, &[rows, width], codes.dtype())?;
    let mut scale_inv = match granularity {
        Granularity::PerTensor => x.scale_inv.clone(),
        _ => Tensor::empty(device, &granularity.scales_shape(rows, width), DType::F32)?,
    };
    dispatch! { device,
        cpu => cpu::gather_quantized(codes, &x.scale_inv, slots, &mut gathered, &mut scale_inv),
        gpu => cuda::gather_quantized(gpu, codes, &x.scale_inv, slots, &mut gathered, &mut scale_inv)?,
    }
    let transposed = transposes.then(|| transpose(&gathered)).transpose()?;
    let (codes, transposed_scale_inv) = (Some(gathered), None);
    Ok(QuantizedTensor { codes, transposed, scale_inv, transposed_scale_inv, granularity, rows, ..x.clone() })
}

/// Sets the rows of `x` `[P, C]` after the last group to zero, for an op that reads all rows.
pub fn clear_unused_rows(x: &mut Tensor, groups: &Groups) -> Result<()> {
    let [rows, columns] = x.dims("clear_unused_rows: x")?;
    expect_compute("clear_unused_rows: x", x)?;
    groups.expect("clear_unused_rows: groups", x.device())?;
    dispatch! { x.device().clone(),
        cpu => {
            let end = groups.offsets.host::<i32>()[groups.len()] as usize;
            let rest = Tensor::zeros(x.device(), &[rows - end, columns], x.dtype())?;
            x.copy_from(end, &rest)?;
        },
        gpu => cuda::clear_unused_rows(&gpu, x, groups)?,
    }
    Ok(())
}

/// Returns `y[t] = Σ_k weights[t, k] · z[slot of (t, k)] + addend[t]`, `[T, C]` in the type of `z`, for `z` `[P, C]`. The sum is computed in the
/// order of `k`, in F32 (F64 for F64), and rounded once. Without `weights`, all weights are 1. Choices without a row add nothing.
///
/// With and without weights, this is the gradient of [`gather_to`], and vice versa.
pub fn combine(z: &Tensor, slots: &Slots, weights: Option<&Tensor>, addend: Option<&Tensor>) -> Result<Tensor> {
    let [tokens, chosen, rows] = slots.sizes()?;
    let [_, channels] = z.dims("combine: z")?;
    expect_compute("combine: z", z)?;
    z.expect("combine: z", &[rows, channels])?;
    z.expect_device("combine: z", slots.slot_of.device())?;
    expect_weights("combine: weights", weights, [tokens, chosen], z)?;
    if let Some(addend) = addend {
        addend.expect("combine: addend", &[tokens, channels])?;
        addend.expect_dtype("combine: addend", &[z.dtype()])?;
        addend.expect_device("combine: addend", z.device())?;
    }
    let mut y = Tensor::empty(z.device(), &[tokens, channels], z.dtype())?;
    dispatch! { z.device(),
        cpu => cpu::combine(z, slots, weights, addend, &mut y),
        gpu => cuda::combine(gpu, z, slots, weights, addend, &mut y)?,
    }
    Ok(y)
}

/// Returns the gradient of [`combine`] by the weights, `[T, K]` like `weights`: `dweights[t, k] = dots[slot of (t, k)] / weights[t, k]`. `dots` `[P]`
/// has the dot products of the rows of `z` and the gradients by these rows, which contain the weight as a factor. So neither `z` nor a gradient
/// without weights has to be kept (arXiv:2512.14080).
///
/// The result is 0 for choices without a row, and for a weight of 0: the gradient of the router multiplies it by the score, which is also 0.
pub fn weight_gradient(dots: &Tensor, slots: &Slots, weights: &Tensor) -> Result<Tensor> {
    let [tokens, chosen, rows] = slots.sizes()?;
    dots.expect("weight_gradient: dots", &[rows])?;
    weights.expect("weight_gradient: weights", &[tokens, chosen])?;
    weights.expect_dtype("weight_gradient: weights", &[DType::F32, DType::F64])?;
    dots.expect_dtype("weight_gradient: dots", &[weights.dtype()])?;
    dots.expect_device("weight_gradient: dots", weights.device())?;
    let mut dweights = weights.empty_like()?;
    dispatch! { weights.device(),
        cpu => cpu::weight_gradient(dots, slots, weights, &mut dweights),
        gpu => cuda::weight_gradient(gpu, dots, slots, weights, &mut dweights)?,
    }
    Ok(dweights)
}

/// Returns the gradient of [`gather_to`] by its weights, `[T, K]` in F32 (F64 for F64): `dweights[t, k] = Σ_c z[slot of (t, k), c] · x[t, c]`, where
/// `z` `[P, C]` are the gradients by the weighted rows and `x` is `[T, C]`. The result is 0 for choices without a row.
pub fn gathered_weight_gradient(z: &Tensor, x: &Tensor, slots: &Slots) -> Result<Tensor> {
    let [tokens, chosen, rows] = slots.sizes()?;
    let [_, channels] = x.dims("gathered_weight_gradient: x")?;
    expect_compute("gathered_weight_gradient: x", x)?;
    x.expect("gathered_weight_gradient: x", &[tokens, channels])?;
    x.expect_device("gathered_weight_gradient: x", slots.slot_of.device())?;
    z.expect("gathered_weight_gradient: z", &[rows, channels])?;
    z.expect_dtype("gathered_weight_gradient: z", &[x.dtype()])?;
    z.expect_device("gathered_weight_gradient: z", x.device())?;
    let mut dweights = Tensor::empty(x.device(), &[tokens, chosen], real_type(x.dtype()))?;
    dispatch! { x.device(),
        cpu => cpu::gathered_weight_gradient(z, x, slots, &mut dweights),
        gpu => cuda::gathered_weight_gradient(gpu, z, x, slots, &mut dweights)?,
    }
    Ok(dweights)
}

fn expect_weights(what: &str, weights: Option<&Tensor>, shape: [usize; 2], x: &Tensor) -> Result<()> {
    let Some(weights) = weights else { return Ok(()) };
    weights.expect(what, &shape)?;
    weights.expect_device(what, x.device())?;
    match weights.dtype() == real_type(x.dtype()) {
        true => Ok(()),
        false => {
            Err(Error::DType { what: what.into(), expected: real_type(x.dtype()).to_string(), got: weights.dtype() })
        }
    }
}
