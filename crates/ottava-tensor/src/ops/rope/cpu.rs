use super::{RopeLayout, Rotation};
use crate::Tensor;
use crate::element::{Float, with_float};
use rayon::prelude::*;

pub(super) fn rope(x: &mut Tensor, table: &Tensor, layout: RopeLayout, rotation: Rotation) {
    let width = x.shape()[1];
    let dim = layout.head_dim;
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let table: &[R] = table.host();
        x.host_mut::<S>().par_chunks_mut(width).enumerate().for_each(|(t, row)| {
            let position = layout.start + t % layout.seq_len;
            let (cos, sin) = table[position * dim..][..dim].split_at(dim / 2);
            for head in row.chunks_exact_mut(dim).take(layout.heads) {
                let (first, second) = head.split_at_mut(dim / 2);
                for i in 0..dim / 2 {
                    let sin = if rotation == Rotation::Forward { sin[i] } else { -sin[i] };
                    let (a, b) = (first[i].load(), second[i].load());
                    first[i] = S::store(a * cos[i] - b * sin);
                    second[i] = S::store(b * cos[i] + a * sin);
                }
            }
        });
    });
}
