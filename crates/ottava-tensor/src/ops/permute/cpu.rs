use super::Slots;
use crate::Tensor;
use crate::element::{Float, Real, with_float};
use crate::ops::grouped_gemm::Groups;
use rayon::prelude::*;

pub(super) fn slots(ids: &Tensor, first: usize, slots: &mut Slots) {
    let Slots { groups: Groups { offsets, counts }, slot_of, pair_of } = slots;
    let experts = counts.len();
    let (ids, counts, offsets) = (ids.host::<i32>(), counts.host_mut::<i32>(), offsets.host_mut::<i32>());
    let group_of = |id: i32| (id as usize).checked_sub(first).filter(|&group| group < experts);
    counts.fill(0);
    ids.iter().filter_map(|&id| group_of(id)).for_each(|group| counts[group] += 1);
    offsets[0] = 0;
    for (g, &count) in counts.iter().enumerate() {
        offsets[g + 1] = offsets[g] + (count as usize).next_multiple_of(Groups::ALIGNMENT) as i32;
    }
    let pair_of = pair_of.host_mut::<i32>();
    pair_of.fill(-1);
    let mut next = offsets.to_vec();
    for (pair, (slot, &id)) in slot_of.host_mut::<i32>().iter_mut().zip(ids).enumerate() {
        *slot = -1;
        if let Some(group) = group_of(id) {
            *slot = next[group];
            next[group] += 1;
            pair_of[*slot as usize] = pair as i32;
        }
    }
}

pub(super) fn gather(x: &Tensor, slots: &Slots, weights: Option<&Tensor>, y: &mut Tensor) {
    let (channels, chosen) = (x.shape()[1], slots.slot_of.shape()[1]);
    let pair_of = slots.pair_of.host::<i32>();
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let (x, weights): (&[S], Option<&[R]>) = (x.host(), weights.map(Tensor::host));
        let rows = y.host_mut::<S>().par_chunks_mut(channels.max(1)).zip(pair_of);
        rows.for_each(|(y, &pair)| {
            let Ok(pair) = usize::try_from(pair) else { return y.fill(S::store(R::default())) };
            let x = &x[pair / chosen * channels..][..channels];
            match weights {
                None => y.copy_from_slice(x),
                Some(weights) => y.iter_mut().zip(x).for_each(|(y, x)| *y = S::store(x.load() * weights[pair])),
            }
        });
    });
}

pub(super) fn combine(z: &Tensor, slots: &Slots, weights: Option<&Tensor>, addend: Option<&Tensor>, y: &mut Tensor) {
    let (channels, chosen) = (z.shape()[1], slots.slot_of.shape()[1]);
    let slot_of = slots.slot_of.host::<i32>();
    with_float!(z.dtype(), S => {
        type R = <S as Float>::Real;
        let (z, weights, addend): (&[S], Option<&[R]>, Option<&[S]>) =
            (z.host(), weights.map(Tensor::host), addend.map(Tensor::host));
        y.host_mut::<S>().par_chunks_mut(channels.max(1)).enumerate().for_each(|(t, y)| {
            let mut sums = vec![R::default(); channels];
            for pair in t * chosen..(t + 1) * chosen {
                let Ok(slot) = usize::try_from(slot_of[pair]) else { continue };
                let z = &z[slot * channels..][..channels];
                let weight = weights.map_or(R::of(1.0), |weights| weights[pair]);
                sums.iter_mut().zip(z).for_each(|(sum, z)| *sum += weight * z.load());
            }
            for (c, (y, sum)) in y.iter_mut().zip(sums).enumerate() {
                *y = S::store(addend.map_or(sum, |addend| sum + addend[t * channels + c].load()));
            }
        });
    });
}

pub(super) fn weight_gradient(dots: &Tensor, slots: &Slots, weights: &Tensor, dweights: &mut Tensor) {
    let slot_of = slots.slot_of.host::<i32>();
    with_float!(weights.dtype(), S => {
        let (dots, weights): (&[S], &[S]) = (dots.host(), weights.host());
        for ((dweight, &weight), &slot) in dweights.host_mut::<S>().iter_mut().zip(weights).zip(slot_of) {
            let zero = S::store(<S as Float>::Real::default());
            *dweight = match usize::try_from(slot) {
                Ok(slot) if weight != zero => S::store(dots[slot].load() / weight.load()),
                _ => zero,
            };
        }
    });
}
