use super::{Angles, RopeLayout, RopePairs, Rotation};
use crate::element::{Float, with_float};
use crate::ops::parallel_rows::ParallelRows;
use crate::{Error, Result, Tensor};
use rayon::prelude::*;

pub(super) fn rope(x: &mut Tensor, angles: Angles, layout: RopeLayout, rotation: Rotation) -> Result<()> {
    let (width, [ends, dim]) = (x.shape()[1], angles.table.dims("rope: table")?);
    let positions: &[i32] = angles.positions.host();
    if let Some(position) = positions.iter().find(|&&position| position < 0 || position as usize >= ends) {
        return Err(Error::Value(format!("rope: position {position} is needed, the table has 0..{ends}")));
    }
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let table: &[R] = angles.table.host();
        x.host_mut::<S>().par_rows_mut(width).enumerate().for_each(|(t, row)| {
            let position = positions[t] as usize;
            let (cos, sin) = table[position * dim..][..dim].split_at(dim / 2);
            for head in row.chunks_exact_mut(layout.head_dim).take(layout.heads) {
                for i in 0..dim / 2 {
                    let (first, second) = match layout.pairs {
                        RopePairs::Halves => (i, i + dim / 2),
                        RopePairs::Neighbours => (2 * i, 2 * i + 1),
                    };
                    let sin = if rotation == Rotation::Forward { sin[i] } else { -sin[i] };
                    let (a, b) = (head[first].load(), head[second].load());
                    head[first] = S::store(a * cos[i] - b * sin);
                    head[second] = S::store(b * cos[i] + a * sin);
                }
            }
        });
    });
    Ok(())
}
