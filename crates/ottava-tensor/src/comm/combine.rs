//! The arithmetic of collectives. It computes the bytes that each rank receives from the bytes of all ranks. All CPU backends share this code.

use super::call::{Call, Op, Reduce};
use crate::dtype::DType;
use crate::element::{Element, Float, Real, with_float};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// The bytes that one rank receives, in a buffer that several ranks may share.
#[derive(Clone, Debug)]
pub(super) struct Bytes {
    pub all: Arc<Vec<u8>>,
    pub range: Range<usize>,
}

impl From<Vec<u8>> for Bytes {
    fn from(all: Vec<u8>) -> Bytes {
        Bytes { range: 0..all.len(), all: Arc::new(all) }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.all[self.range.clone()]
    }
}

/// Returns the bytes that each rank receives. `parts` are the ranks' bytes in rank order. The hub has checked their lengths.
pub(super) fn combine(call: &Call, parts: &[Vec<u8>]) -> Vec<Bytes> {
    let size = parts.len();
    let (all, split) = match call.op {
        Op::AllGather => (parts.concat(), false),
        Op::ReduceScatter { output } => (sum(call.dtype, parts, output), true),
        Op::AllReduce(Reduce::Sum) => (sum(call.dtype, parts, call.dtype.unwrap_or(DType::F32)), false),
        Op::AllReduce(Reduce::Max) => (max(call.dtype, parts), false),
        Op::AllToAll => {
            let slice = parts[0].len() / size;
            let slices = (0..size).flat_map(|to| parts.iter().map(move |from| &from[to * slice..(to + 1) * slice]));
            (slices.collect::<Vec<_>>().concat(), true)
        }
        // Only the root has sent bytes.
        Op::Broadcast { .. } | Op::Announce { .. } => {
            (parts.iter().find(|part| !part.is_empty()).cloned().unwrap_or_default(), false)
        }
        Op::Barrier => (Vec::new(), false),
        Op::Agree => (pack(parts), false),
        Op::Send { .. } | Op::Receive { .. } => return message(parts),
        Op::Split => unreachable!("the hub divides groups"),
    };
    let (all, slice) = (Arc::new(all), if split { size } else { 1 });
    let bytes = all.len() / slice;
    let start = |rank: usize| if split { rank * bytes } else { 0 };
    (0..size).map(|rank| Bytes { all: all.clone(), range: start(rank)..start(rank) + bytes }).collect()
}

/// Returns the answers to the two sides of a message. The sender contributes all bytes and receives none.
fn message(parts: &[Vec<u8>]) -> Vec<Bytes> {
    [Vec::new(), parts[0].clone()].map(Bytes::from).into()
}

fn elements<T: Element>(bytes: &[u8]) -> impl Iterator<Item = T> + '_ {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned)
}

fn bytes_of<T: Element>(values: impl Iterator<Item = T>) -> Vec<u8> {
    bytemuck::cast_slice(&values.collect::<Vec<T>>()).to_vec()
}

/// Sums in rank order, and rounds once to `output`, which is F32 or the type of the parts.
fn sum(dtype: Option<DType>, parts: &[Vec<u8>], output: DType) -> Vec<u8> {
    fn sum<T: Float>(parts: &[Vec<u8>], output: DType) -> Vec<u8> {
        let mut total: Vec<T::Real> = elements::<T>(&parts[0]).map(T::load).collect();
        for part in &parts[1..] {
            for (total, value) in total.iter_mut().zip(elements::<T>(part)) {
                *total += value.load();
            }
        }
        if output == T::DTYPE {
            bytes_of(total.into_iter().map(T::store))
        } else {
            bytes_of(total.into_iter().map(|value| value.to_f64() as f32))
        }
    }
    let dtype = dtype.expect("a checked sum has a type");
    with_float!(dtype, T => sum::<T>(parts, output))
}

/// Returns the larger value. If an operand is NaN, returns the first NaN. Of +0 and -0, returns +0.
fn larger<R: Real>(a: R, b: R) -> R {
    let is_nan = |x: R| x.partial_cmp(&x).is_none();
    let zero_over_zero = || a == b && b.to_f64().is_sign_positive();
    if !is_nan(a) && (is_nan(b) || b > a || zero_over_zero()) { b } else { a }
}

fn max(dtype: Option<DType>, parts: &[Vec<u8>]) -> Vec<u8> {
    fn max<T: Element>(parts: &[Vec<u8>], larger: fn(T, T) -> T) -> Vec<u8> {
        let mut largest: Vec<T> = elements(&parts[0]).collect();
        for part in &parts[1..] {
            for (largest, value) in largest.iter_mut().zip(elements(part)) {
                *largest = larger(*largest, value);
            }
        }
        bytes_of(largest.into_iter())
    }
    match dtype {
        Some(DType::F64) => max::<f64>(parts, larger),
        Some(DType::F32) => max::<f32>(parts, larger),
        Some(DType::I64) => max::<i64>(parts, i64::max),
        Some(DType::I32) => max::<i32>(parts, i32::max),
        other => unreachable!("a checked maximum is not of {other:?}"),
    }
}

/// Packs byte strings of any lengths into one buffer. [`unpack`] is the inverse.
fn pack(parts: &[Vec<u8>]) -> Vec<u8> {
    parts.iter().flat_map(|part| [&(part.len() as u64).to_le_bytes(), part.as_slice()].concat()).collect()
}

/// Returns the byte strings of a packed buffer, or `None` if the buffer is truncated.
pub(super) fn unpack(mut packed: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    while !packed.is_empty() {
        let (length, rest) = packed.split_first_chunk()?;
        let (part, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        parts.push(part.to_vec());
        packed = rest;
    }
    Some(parts)
}
