use crate::element::Element;
use crate::fp8::{E4M3, E5M2, E8M0};
use crate::{DType, Tensor};
use bytemuck::Pod;
use half::{bf16, f16};
use rayon::prelude::*;

/// The number of rows, and of columns, of a tile, which is transposed in registers.
const TILE: usize = 16;

/// The number of rows of the result per task.
const ROWS: usize = 2 * TILE;

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
        DType::U8 => tiles::<u8>(x.host(), y.host_mut(), columns),
        DType::I16 => tiles::<i16>(x.host(), y.host_mut(), columns),
        DType::I32 => tiles::<i32>(x.host(), y.host_mut(), columns),
        DType::I64 => tiles::<i64>(x.host(), y.host_mut(), columns),
    }
}

fn tiles<T: Element>(x: &[T], y: &mut [T], columns: usize) {
    if x.is_empty() {
        return;
    }
    y.par_chunks_mut(x.len() / columns * ROWS)
        .enumerate()
        .for_each(|(task, y)| columns_to_rows(x, columns, task * ROWS, y));
}

/// Writes the columns of `x` `[R, columns]` from `first` on as the rows of `y` `[…, R]`.
pub(in crate::ops) fn columns_to_rows<T: Pod>(x: &[T], columns: usize, first: usize, y: &mut [T]) {
    let rows = x.len() / columns;
    if rows == 0 {
        return;
    }
    for (tile, y) in y.chunks_mut(rows * TILE).enumerate() {
        let (first, count) = (first + tile * TILE, y.len() / rows);
        let mut done = 0;
        if count == TILE {
            for rows_of_tile in x.chunks_exact(TILE * columns) {
                let mut tile = [[T::zeroed(); TILE]; TILE];
                for (r, row) in rows_of_tile.chunks_exact(columns).enumerate() {
                    for (to, &value) in tile.iter_mut().zip(&row[first..][..TILE]) {
                        to[r] = value;
                    }
                }
                for (y, tile) in y.chunks_exact_mut(rows).zip(&tile) {
                    y[done..][..TILE].copy_from_slice(tile);
                }
                done += TILE;
            }
        }
        for (r, row) in x.chunks_exact(columns).enumerate().skip(done) {
            for (y, &value) in y.chunks_exact_mut(rows).zip(&row[first..][..count]) {
                y[r] = value;
            }
        }
    }
}
