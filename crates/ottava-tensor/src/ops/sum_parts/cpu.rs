use crate::Tensor;
use crate::element::{Float, with_float};
use rayon::prelude::*;

pub(super) fn sum_parts(parts: &Tensor, addend: Option<&Tensor>, y: &mut Tensor) {
    let len = y.len();
    with_float!(parts.dtype(), S => {
        let (parts, addend): (&[S], Option<&[S]>) = (parts.host(), addend.map(Tensor::host));
        y.host_mut::<S>().par_iter_mut().with_min_len(1 << 12).enumerate().for_each(|(i, y)| {
            let mut sum = parts[i].load();
            parts[i..].iter().step_by(len).skip(1).for_each(|part| sum += part.load());
            addend.iter().for_each(|addend| sum += addend[i].load());
            *y = S::store(sum);
        });
    });
}
