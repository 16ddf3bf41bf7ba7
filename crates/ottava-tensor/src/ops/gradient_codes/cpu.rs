use super::{CodingError, GROUP, gradient_code_bytes};
use crate::element::Float;
use crate::fp8::{E4M3, E8M0};
use crate::ops::compress::smallest_scale_inv;
use crate::ops::parallel_rows::ParallelRows;
use crate::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

pub(super) fn encode(x: &Tensor, feedback: Option<&mut Tensor>, codes: &mut Tensor, error: Option<&mut CodingError>) {
    let sums = match x.dtype() {
        DType::F32 => encode_of::<f32>(x, feedback, codes),
        _ => encode_of::<bf16>(x, feedback, codes),
    };
    if let Some(error) = error {
        for (all, sum) in error.sums.host_mut::<f64>().iter_mut().zip(sums) {
            *all += sum;
        }
    }
}

/// Encodes all slices. Returns the sum of squared errors and the sum of squared values.
fn encode_of<S: Float<Real = f32>>(x: &Tensor, feedback: Option<&mut Tensor>, codes: &mut Tensor) -> [f64; 2] {
    let &[slices, stride] = codes.shape() else { unreachable!("allocated as a matrix") };
    let slice = x.len() / slices;
    let mut none = Vec::new();
    let feedback = match feedback {
        Some(feedback) => feedback.host_mut::<bf16>(),
        None => &mut none,
    };
    let mut feedback: Vec<Option<&mut [bf16]>> = match feedback.is_empty() {
        true => (0..slices * slice / GROUP).map(|_| None).collect(),
        false => feedback.chunks_mut(GROUP).map(Some).collect(),
    };
    let mut sums = [0.0; 2];
    let parts = codes.host_mut::<E4M3>().chunks_mut(stride).zip(x.host::<S>().chunks(slice));
    for ((codes, x), feedback) in parts.zip(feedback.chunks_mut(slice / GROUP)) {
        let (codes, scales) = codes.split_at_mut(slice);
        scales[slice / GROUP..].fill(E4M3(0));
        let groups = codes.par_rows_mut(GROUP).zip(scales).zip(x.par_rows(GROUP)).zip(feedback);
        let of_groups: Vec<[f32; 2]> = groups
            .map(|(((codes, scale_inv), x), feedback)| encode_group(x, feedback.as_deref_mut(), codes, scale_inv))
            .collect();
        for [error, value] in of_groups {
            sums[0] += f64::from(error);
            sums[1] += f64::from(value);
        }
    }
    sums
}

/// Encodes a group. Returns the sum of squared errors and the sum of squared values.
fn encode_group<S: Float<Real = f32>>(
    x: &[S],
    feedback: Option<&mut [bf16]>,
    codes: &mut [E4M3],
    scale_inv: &mut E4M3,
) -> [f32; 2] {
    let mut values = [0.0; GROUP];
    for (value, x) in values.iter_mut().zip(x) {
        *value = x.load();
    }
    for (value, lost) in values.iter_mut().zip(feedback.as_deref().unwrap_or_default()) {
        *value += lost.to_f32();
    }
    let amax = values.iter().map(|value| value.to_bits() & 0x7FFF_FFFF).fold(0, u32::max);
    let exponent = smallest_scale_inv(amax);
    scale_inv.0 = exponent.0;
    if exponent == E8M0::NAN {
        codes.fill(E4M3(0));
        feedback.into_iter().for_each(|feedback| feedback.fill(bf16::ZERO));
        return [f32::NAN; 2];
    }
    let (scale, back) = (f32::from_bits((254 - u32::from(exponent.0)) << 23), exponent.to_f32());
    let (mut lost, mut sums) = ([0.0; GROUP], [0.0; 2]);
    for ((code, &value), lost) in codes.iter_mut().zip(&values).zip(&mut lost) {
        *code = E4M3::from_f32(value * scale);
        *lost = value - code.to_f32() * back;
        sums[0] += *lost * *lost;
        sums[1] += value * value;
    }
    for (to, lost) in feedback.into_iter().flatten().zip(lost) {
        *to = bf16::from_f32(lost);
    }
    sums
}

pub(super) fn decode(codes: &Tensor, parts: usize, elements: usize, y: &mut Tensor) {
    match y.dtype() {
        DType::F32 => decode_to::<f32>(codes, parts, elements, y),
        _ => decode_to::<bf16>(codes, parts, elements, y),
    }
}

fn decode_to<S: Float<Real = f32>>(codes: &Tensor, parts: usize, elements: usize, y: &mut Tensor) {
    let (codes, stride) = (codes.host::<E4M3>(), gradient_code_bytes(elements));
    let groups = elements / GROUP;
    y.host_mut::<S>().par_rows_mut(GROUP).enumerate().for_each(|(group, y)| {
        let (slice, group) = (group / groups, group % groups);
        let mut sums = [0.0; GROUP];
        for part in codes[slice * parts * stride..][..parts * stride].chunks(stride) {
            let back = E8M0(part[elements + group].0).to_f32();
            for (sum, code) in sums.iter_mut().zip(&part[group * GROUP..]) {
                *sum += code.to_f32() * back;
            }
        }
        for (y, sum) in y.iter_mut().zip(sums) {
            *y = S::store(sum);
        }
    });
}

pub(super) fn relative(sums: &Tensor, error: &mut Tensor) {
    let sum = |first: usize| sums.host::<f64>().iter().skip(first).step_by(2).sum::<f64>();
    error.host_mut::<f32>()[0] = (sum(0) / sum(1)).sqrt() as f32;
}
