use crate::element::{Float, with_float};
use crate::fp8::E4M3;
use crate::stored::ScaledTensor;
use crate::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

const CHUNK: usize = 1 << 14;

/// Returns the power-of-two scale of values with this amax, for a type with this largest value, and its inverse.
pub(in crate::ops) fn power_for(amax: f32, largest: f32) -> [f32; 2] {
    if !amax.is_finite() {
        return [1.0, f32::NAN];
    }
    let power = if amax == 0.0 { 1.0 } else { (largest / amax).min(2f32.powi(126)) };
    let power = f32::from_bits(power.to_bits() & 0x7F80_0000);
    [power, 1.0 / power]
}

pub(super) fn scaled(x: &Tensor, amax: &Tensor, out: &mut ScaledTensor) {
    let largest = out.values.dtype().max_finite().expect("F16 and E4M3 have one");
    let [power, back] = power_for(amax.host::<f32>()[0], largest);
    out.scale_inv.host_mut()[0] = back;
    match (x.dtype(), out.values.dtype()) {
        (DType::F32, DType::F16) => store::<f32, f16>(x, &mut out.values, power),
        (DType::F32, _) => store::<f32, E4M3>(x, &mut out.values, power),
        (_, DType::F16) => store::<bf16, f16>(x, &mut out.values, power),
        (_, _) => store::<bf16, E4M3>(x, &mut out.values, power),
    }
}

fn store<X: Float<Real = f32>, Y: Float<Real = f32>>(x: &Tensor, y: &mut Tensor, power: f32) {
    let pairs = y.host_mut::<Y>().par_iter_mut().with_min_len(CHUNK).zip(x.host::<X>());
    pairs.for_each(|(y, x)| *y = Y::store(x.load() * power));
}

pub(in crate::ops) fn unscaled(x: &ScaledTensor, y: &mut Tensor) {
    let scale = x.scale_inv.host::<f32>()[0];
    with_float!(y.dtype(), Y => match x.values.dtype() {
        DType::F16 => load::<f16, Y>(&x.values, y, scale),
        _ => load::<E4M3, Y>(&x.values, y, scale),
    });
}

fn load<X: Float<Real = f32>, Y: Float>(x: &Tensor, y: &mut Tensor, scale: f32) {
    let pairs = y.host_mut::<Y>().par_iter_mut().with_min_len(CHUNK).zip(x.host::<X>());
    pairs.for_each(|(y, x)| *y = Y::store(crate::element::Real::of(f64::from(x.load() * scale))));
}

pub(super) fn split(x: &Tensor, upper: &mut Tensor, rest: &mut Tensor) {
    let halves = upper.host_mut::<bf16>().iter_mut().zip(rest.host_mut::<i16>());
    halves.zip(x.host::<f32>()).for_each(|((upper, rest), x)| (*upper, *rest) = split_f32(*x));
}

/// Returns the nearest BF16, and the remainder in the low half of the bits.
pub(in crate::ops) fn split_f32(x: f32) -> (bf16, i16) {
    let bits = x.to_bits();
    (bf16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16), bits as u16 as i16)
}
