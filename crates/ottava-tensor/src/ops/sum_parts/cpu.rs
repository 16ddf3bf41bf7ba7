use crate::Tensor;
use crate::element::{Float, with_float};
use crate::ops::parallel_rows::TASK;
use rayon::prelude::*;

pub(super) fn sum_parts(own: &Tensor, place: usize, others: &Tensor, addend: Option<&Tensor>, y: &mut Tensor) {
    let len = y.len().max(1);
    with_float!(own.dtype(), S => {
        let mut terms: Vec<&[S]> = others.host::<S>().chunks_exact(len).collect();
        terms.insert(place, own.host());
        terms.extend(addend.map(Tensor::host::<S>));
        y.host_mut::<S>().par_iter_mut().with_min_len(TASK).enumerate().for_each(|(i, y)| {
            let first = terms[0][i].load();
            *y = S::store(terms[1..].iter().fold(first, |sum, term| sum + term[i].load()));
        });
    });
}
