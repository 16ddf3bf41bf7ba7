use super::Layout;
use crate::element::Float;
use crate::fp8::{E4M3, E5M2};
use crate::ops::parallel_rows::ParallelRows;
use crate::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

/// The scales of rows or blocks, and the scale of the tensor, repeated for each row.
type Scales<'a> = (&'a Tensor, Option<&'a Tensor>);

pub(super) fn dequantize(codes: &Tensor, scales: Scales, layout: &Layout, every: usize, y: &mut Tensor) {
    match (codes.dtype(), y.dtype()) {
        (DType::E4M3, DType::F32) => values::<E4M3, f32>(codes, scales, layout, every, y),
        (DType::E4M3, _) => values::<E4M3, bf16>(codes, scales, layout, every, y),
        (_, DType::F32) => values::<E5M2, f32>(codes, scales, layout, every, y),
        (_, _) => values::<E5M2, bf16>(codes, scales, layout, every, y),
    }
}

fn values<C: Float<Real = f32>, Y: Float<Real = f32>>(
    codes: &Tensor,
    (scale_inv, of_tensor): Scales,
    layout: &Layout,
    every: usize,
    y: &mut Tensor,
) {
    let (codes, scales) = (codes.host::<C>(), scale_inv.host::<f32>());
    let of_tensor = of_tensor.map(|scale| scale.host::<f32>());
    y.host_mut::<Y>().par_rows_mut(layout.columns).enumerate().for_each(|(sampled, y)| {
        let row = sampled * every;
        let of_tensor = of_tensor.map_or(1.0, |scales| scales[row]);
        for (column, y) in y.iter_mut().enumerate() {
            let value = codes[row * layout.pitch + column].load() * scales[layout.scale_at(row, column)];
            *y = Y::store(value * of_tensor);
        }
    });
}
