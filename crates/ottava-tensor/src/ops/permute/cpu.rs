use super::Slots;
use crate::element::{Element, Float, Real, with_float};
use crate::fp8::{E4M3, E5M2};
use crate::ops::groups::Groups;
use crate::ops::parallel_rows::ParallelRows;
use crate::{DType, Tensor};
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
        let rows = y.host_mut::<S>().par_rows_mut(channels).zip(pair_of);
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

/// Gathers codes and their inverse scales. `scale_inv` has one scale per row of codes (or per block of a row), or one scale for all rows, which does
/// not change.
pub(super) fn gather_quantized(
    from: &Tensor,
    from_scales: &Tensor,
    slots: &Slots,
    codes: &mut Tensor,
    scale_inv: &mut Tensor,
) {
    let (tokens, chosen) = (from.shape()[0], slots.slot_of.shape()[1]);
    let (pair_of, rows) = (slots.pair_of.host::<i32>(), slots.pair_of.len());
    match from.dtype() {
        DType::E4M3 => rows_of::<E4M3>(from, pair_of, chosen, codes),
        _ => rows_of::<E5M2>(from, pair_of, chosen, codes),
    }
    if scale_inv.len() > 1 {
        let (from, scales) = (from_scales.host::<f32>(), scale_inv.host_mut::<f32>());
        for (scales, from) in scales.chunks_exact_mut(rows).zip(from.chunks_exact(tokens)) {
            for (scale, &pair) in scales.iter_mut().zip(pair_of) {
                *scale = usize::try_from(pair).map_or(1.0, |pair| from[pair / chosen]);
            }
        }
    }
}

fn rows_of<C: Element>(from: &Tensor, pair_of: &[i32], chosen: usize, codes: &mut Tensor) {
    let (width, from) = (from.shape()[1], from.host::<C>());
    let rows = codes.host_mut::<C>().par_rows_mut(width).zip(pair_of);
    rows.for_each(|(codes, &pair)| match usize::try_from(pair) {
        Ok(pair) => codes.copy_from_slice(&from[pair / chosen * width..][..width]),
        Err(_) => codes.fill(C::zeroed()),
    });
}

pub(super) fn combine(z: &Tensor, slots: &Slots, weights: Option<&Tensor>, addend: Option<&Tensor>, y: &mut Tensor) {
    let (channels, chosen) = (z.shape()[1], slots.slot_of.shape()[1]);
    let slot_of = slots.slot_of.host::<i32>();
    with_float!(z.dtype(), S => {
        type R = <S as Float>::Real;
        let (z, weights, addend): (&[S], Option<&[R]>, Option<&[S]>) =
            (z.host(), weights.map(Tensor::host), addend.map(Tensor::host));
        y.host_mut::<S>().par_rows_mut(channels).enumerate().for_each(|(t, y)| {
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

pub(super) fn gathered_weight_gradient(z: &Tensor, x: &Tensor, slots: &Slots, dweights: &mut Tensor) {
    let (channels, chosen) = (x.shape()[1], slots.slot_of.shape()[1]);
    let slot_of = slots.slot_of.host::<i32>();
    with_float!(x.dtype(), S => {
        type R = <S as Float>::Real;
        let (z, x): (&[S], &[S]) = (z.host(), x.host());
        dweights.host_mut::<R>().par_iter_mut().zip(slot_of).enumerate().for_each(|(pair, (dweight, &slot))| {
            let Ok(slot) = usize::try_from(slot) else { return *dweight = R::default() };
            let (z, x) = (&z[slot * channels..][..channels], &x[pair / chosen * channels..][..channels]);
            *dweight = z.iter().zip(x).map(|(z, x)| z.load() * x.load()).sum();
        });
    });
}
