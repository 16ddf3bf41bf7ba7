use super::Sections;
use crate::Tensor;
use crate::element::with_float;
use crate::ops::parallel_rows::ParallelRows;
use rayon::prelude::*;
use std::ops::Range;

/// Returns for each section of `part` its columns in the matrix, and its columns in the part.
fn ranges(sections: &Sections, part: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let mut end = 0;
    sections.widths.iter().enumerate().map(move |(section, &width)| {
        let first = sections.first(part, section);
        end += width;
        (first..first + width, end - width..end)
    })
}

pub(super) fn divide(x: &Tensor, y: &mut Tensor, sections: &Sections) {
    let (columns, width) = (sections.columns(), sections.part());
    if y.is_empty() {
        return;
    }
    with_float!(x.dtype(), S => {
        let x: &[S] = x.host();
        y.host_mut::<S>().par_rows_mut(width).enumerate().for_each(|(row, y)| {
            let (part, x) = (row / sections.rows, &x[row % sections.rows * columns..][..columns]);
            ranges(sections, part).for_each(|(from, to)| y[to].copy_from_slice(&x[from]));
        });
    });
}

pub(super) fn join(parts: &Tensor, y: &mut Tensor, sections: &Sections) {
    let (columns, width) = (sections.columns(), sections.part());
    if y.is_empty() {
        return;
    }
    with_float!(parts.dtype(), S => {
        let parts: &[S] = parts.host();
        y.host_mut::<S>().par_rows_mut(columns).enumerate().for_each(|(row, y)| {
            for part in 0..sections.parts {
                let x = &parts[(part * sections.rows + row) * width..][..width];
                ranges(sections, part).for_each(|(to, from)| y[to].copy_from_slice(&x[from]));
            }
        });
    });
}
