use super::Layout;
use crate::element::Float;
use crate::fp8::{E4M3, E5M2};
use crate::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

pub(super) fn dequantize(codes: &Tensor, scale_inv: &Tensor, layout: &Layout, y: &mut Tensor) {
    match (codes.dtype(), y.dtype()) {
        (DType::E4M3, DType::F32) => values::<E4M3, f32>(codes, scale_inv, layout, y),
        (DType::E4M3, _) => values::<E4M3, bf16>(codes, scale_inv, layout, y),
        (_, DType::F32) => values::<E5M2, f32>(codes, scale_inv, layout, y),
        (_, _) => values::<E5M2, bf16>(codes, scale_inv, layout, y),
    }
}

fn values<C: Float<Real = f32>, Y: Float<Real = f32>>(
    codes: &Tensor,
    scale_inv: &Tensor,
    layout: &Layout,
    y: &mut Tensor,
) {
    let Layout { columns, steps, shared, scale_steps, .. } = *layout;
    let (codes, scales) = (codes.host::<C>(), scale_inv.host::<f32>());
    y.host_mut::<Y>().par_chunks_mut(columns.max(1)).enumerate().for_each(|(row, y)| {
        let (codes, scales) = (&codes[row * steps[0]..], &scales[row / shared[0] * scale_steps[0]..]);
        for (column, y) in y.iter_mut().enumerate() {
            let scale = scales[column / shared[1] * scale_steps[1]];
            *y = Y::store(codes[column * steps[1]].load() * scale);
        }
    });
}
