use crate::Tensor;
use crate::element::{Float, with_float};
use rayon::prelude::*;

pub(super) fn add_bias(x: &mut Tensor, bias: &Tensor) {
    with_float!(bias.dtype(), S => {
        let bias: &[S] = bias.host();
        x.host_mut::<S>().par_chunks_mut(bias.len().max(1)).for_each(|row| {
            for (x, b) in row.iter_mut().zip(bias) {
                *x = S::store(x.load() + b.load());
            }
        });
    });
}

pub(super) fn bias_gradient(dy: &Tensor, dbias: &mut Tensor) {
    with_float!(dy.dtype(), S => {
        let columns = dbias.len();
        let dbias: &mut [<S as Float>::Real] = dbias.host_mut();
        for row in dy.host::<S>().chunks_exact(columns.max(1)) {
            for (sum, dy) in dbias.iter_mut().zip(row) {
                *sum += dy.load();
            }
        }
    });
}
