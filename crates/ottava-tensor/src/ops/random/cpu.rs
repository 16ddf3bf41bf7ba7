use crate::Tensor;
use crate::ops::parallel_rows::TASK;
use rayon::prelude::*;

pub(super) fn normal(x: &mut Tensor, std: f32, seed: u64, first: u64) {
    x.host_mut::<f32>()
        .par_iter_mut()
        .with_min_len(TASK)
        .enumerate()
        .for_each(|(i, x)| *x = (quantile(uniform(seed, first + i as u64)) as f32) * std);
}

/// Returns a number in (0, 1): the midpoint of one of 2^32 equal intervals.
fn uniform(seed: u64, i: u64) -> f64 {
    ((hash(seed ^ hash(i)) >> 32) as f64 + 0.5) * (1.0 / 4_294_967_296.0)
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014).
pub(in crate::ops) fn hash(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180625 - q * q;
        let numerator = ((59.10937472 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179;
        let denominator = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0;
        return q * numerator / denominator;
    }
    let tail = if q < 0.0 { p } else { 1.0 - p };
    let r = (-ln(tail)).sqrt();
    let x = if r <= 5.0 {
        let r = r - 1.6;
        let numerator = ((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777;
        numerator / ((0.12021132975 * r + 0.73700164250) * r + 1.0)
    } else {
        let r = r - 5.0;
        let numerator = ((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150;
        numerator / ((0.012258202635 * r + 0.24197894225) * r + 1.0)
    };
    if q < 0.0 { -x } else { x }
}

/// Returns the natural logarithm of a positive, normal number, with an error of about 1e-12: `ln(m · 2^e) = e·ln 2 + 2·atanh((m-1)/(m+1))`.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    let mantissa = f64::from_bits((bits & 0x000F_FFFF_FFFF_FFFF) | 0x3FF0_0000_0000_0000);
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let (square, mut sum) = (s * s, 0.0);
    let mut odd = 23.0;
    while odd > 0.0 {
        sum = sum * square + 1.0 / odd;
        odd -= 2.0;
    }
    f64::from(exponent) * std::f64::consts::LN_2 + 2.0 * s * sum
}
