use crate::Tensor;
use crate::element::{Float, Real, with_float};
use rayon::prelude::*;

pub(super) fn swiglu(x: &Tensor, y: &mut Tensor) {
    let hidden = y.shape()[1].max(1);
    with_float!(x.dtype(), S => {
        y.host_mut::<S>().par_chunks_mut(hidden).zip(x.host::<S>().par_chunks(2 * hidden)).for_each(|(y, x)| {
            let (gate, up) = x.split_at(hidden);
            for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                let gate = gate.load();
                *y = S::store(gate * sigmoid(gate) * up.load());
            }
        });
    });
}

pub(super) fn swiglu_backward(dy: &Tensor, x: &Tensor, dx: &mut Tensor) {
    let hidden = dy.shape()[1].max(1);
    with_float!(x.dtype(), S => {
        let rows = dx.host_mut::<S>().par_chunks_mut(2 * hidden).zip(x.host::<S>().par_chunks(2 * hidden));
        rows.zip(dy.host::<S>().par_chunks(hidden)).for_each(|((dx, x), dy)| {
            let ((gate, up), (dgate, dup)) = (x.split_at(hidden), dx.split_at_mut(hidden));
            for i in 0..hidden {
                let (g, dy) = (gate[i].load(), dy[i].load());
                let s = sigmoid(g);
                let one = <S as Float>::Real::of(1.0);
                dgate[i] = S::store(dy * up[i].load() * s * (one + g * (one - s)));
                dup[i] = S::store(dy * (g * s));
            }
        });
    });
}

fn sigmoid<R: Real>(x: R) -> R {
    R::of(1.0) / (R::of(1.0) + (-x).exp())
}
