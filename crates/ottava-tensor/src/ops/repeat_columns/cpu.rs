use super::{RepeatedColumns, Sections};
use crate::Tensor;
use crate::element::{Float, with_float};
use crate::ops::parallel_rows::ParallelRows;
use rayon::prelude::*;

/// Returns for each block its first column in the matrix, the first columns of its repetitions, and its width.
fn blocks(sections: &Sections) -> Vec<(usize, Vec<usize>, usize)> {
    let (mut from, mut to, mut blocks) = (0, 0, Vec::new());
    for RepeatedColumns { columns, block, times } in sections.of {
        for _ in 0..columns / block {
            blocks.push((from, (0..times).map(|time| to + time * block).collect(), block));
            from += block;
            to += block * times;
        }
    }
    blocks
}

pub(super) fn repeat(x: &Tensor, y: &mut Tensor, sections: &Sections) {
    if y.is_empty() {
        return;
    }
    let blocks = blocks(sections);
    with_float!(x.dtype(), S => {
        let rows = y.host_mut::<S>().par_rows_mut(sections.repeated).zip(x.host::<S>().par_rows(sections.columns));
        rows.for_each(|(y, x)| {
            for (from, places, width) in &blocks {
                places.iter().for_each(|to| y[*to..to + width].copy_from_slice(&x[*from..from + width]));
            }
        });
    });
}

pub(super) fn backward(dy: &Tensor, dx: &mut Tensor, sections: &Sections) {
    if dx.is_empty() {
        return;
    }
    let blocks = blocks(sections);
    with_float!(dy.dtype(), S => {
        let rows =
            dx.host_mut::<S>().par_rows_mut(sections.columns).zip(dy.host::<S>().par_rows(sections.repeated));
        rows.for_each(|(dx, dy)| {
            for (first, places, width) in &blocks {
                for i in 0..*width {
                    let sum = places.iter().map(|place| dy[place + i].load()).sum::<<S as Float>::Real>();
                    dx[first + i] = S::store(sum);
                }
            }
        });
    });
}
