use super::Sizes;
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use rayon::prelude::*;

/// Returns the share of the keys in the softmax with a sink, `σ(lse − sink)`, and the `lse` of keys and sink.
pub(in crate::ops) fn softmax_share<R: Real>(lse: R, sink: R) -> (R, R) {
    let one = R::of(1.0);
    let share = one / (one + (sink - lse).exp());
    let (larger, smaller) = if lse > sink { (lse, sink) } else { (sink, lse) };
    (share, larger + (one + (smaller - larger).exp()).ln())
}

pub(super) fn attention_sink(o: &mut Tensor, lse: &mut Tensor, sinks: &Tensor, sizes: Sizes) {
    let Sizes { heads, dim, .. } = sizes;
    with_float!(o.dtype(), S => {
        let sinks: Vec<_> = sinks.host::<S>().iter().map(|sink| sink.load()).collect();
        let lse = lse.host_mut::<<S as Float>::Real>();
        for (token, row) in o.host_mut::<S>().chunks_exact_mut(heads * dim).enumerate() {
            for (head, o) in row.chunks_exact_mut(dim).enumerate() {
                let lse = &mut lse[sizes.index(token, head)];
                let (share, with_sink) = softmax_share(*lse, sinks[head]);
                *lse = with_sink;
                o.iter_mut().for_each(|o| *o = S::store(o.load() * share));
            }
        }
    });
}

pub(super) fn attention_sink_backward(
    d_o: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    sinks: &Tensor,
    dsinks: &mut Tensor,
    sizes: Sizes,
) {
    let Sizes { tokens, heads, dim, .. } = sizes;
    with_float!(o.dtype(), S => {
        type R = <S as Float>::Real;
        let (d_o, o, sinks) = (d_o.host::<S>(), o.host::<S>(), sinks.host::<S>());
        let lse = lse.host::<R>();
        dsinks.host_mut::<R>().par_iter_mut().enumerate().for_each(|(head, dsink)| {
            for token in 0..tokens {
                let at = (token * heads + head) * dim;
                let of_head = d_o[at..at + dim].iter().zip(&o[at..at + dim]);
                let delta: R = of_head.map(|(d_o, o)| d_o.load() * o.load()).sum();
                *dsink -= (sinks[head].load() - lse[sizes.index(token, head)]).exp() * delta;
            }
        });
    });
}
