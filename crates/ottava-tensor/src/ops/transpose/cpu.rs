use crate::element::Element;
use crate::fp8::{E4M3, E5M2, E8M0};
use crate::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

/// Rows of the result per task; tiles of this width keep reads in cache.
const TILE: usize = 32;

pub(in crate::ops) fn transpose(x: &Tensor, y: &mut Tensor) {
    let columns = x.shape()[1];
    match x.dtype() {
        DType::F64 => tiles::<f64>(x.host(), y.host_mut(), columns),
        DType::F32 => tiles::<f32>(x.host(), y.host_mut(), columns),
        DType::F16 => tiles::<f16>(x.host(), y.host_mut(), columns),
        DType::BF16 => tiles::<bf16>(x.host(), y.host_mut(), columns),
        DType::E4M3 => tiles::<E4M3>(x.host(), y.host_mut(), columns),
        DType::E5M2 => tiles::<E5M2>(x.host(), y.host_mut(), columns),
        DType::E8M0 => tiles::<E8M0>(x.host(), y.host_mut(), columns),
        DType::I16 => tiles::<i16>(x.host(), y.host_mut(), columns),
        DType::I32 => tiles::<i32>(x.host(), y.host_mut(), columns),
        DType::I64 => tiles::<i64>(x.host(), y.host_mut(), columns),
    }
}

fn tiles<T: Element>(x: &[T], y: &mut [T], columns: usize) {
    if x.is_empty() {
        return;
    }
    let rows = x.len() / columns;
    y.par_chunks_mut(rows * TILE).enumerate().for_each(|(tile, y)| {
        for (r, x) in x.chunks_exact(columns).enumerate() {
            let start = tile * TILE;
            for (i, &value) in x[start..(start + TILE).min(columns)].iter().enumerate() {
                y[i * rows + r] = value;
            }
        }
    });
}
