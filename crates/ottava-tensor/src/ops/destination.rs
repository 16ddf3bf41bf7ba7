//! Fused casts: an op whose result is the operand of a matrix product can write the FP8 codes of the result instead of its values.
//!
//! The codes are bit-identical to the codes of the plain op followed by [`amax`](super::amax()), [`quantize`](super::quantize()) or
//! [`quantize_blocks`](super::quantize_blocks()): values are rounded to the tensor's type before they are measured and cast.
//!
//! An op such as `norm_to`, `activation_to`, `activation_backward_to` or `rope_to` takes an `Output`, which selects what the op writes: the values,
//! only the amax of the values, or the FP8 operand. If the scale depends on the values, the op runs twice, first for the amax and then for the codes.
//! Running twice moves fewer bytes than storing the values in between.
//!
//! Granularity and format are defines of `destination.cuh`. They determine how a kernel casts:
//!
//! - one scale per tensor: a tile is cast from registers
//! - one scale per block: a tile stays in shared memory until its amaxes are known
//! - one scale per row or column: rows and columns are longer than a tile, so the kernel runs twice, first for amaxes and then for codes
//!
//! Without a transposed copy, casts, activations, gathers of experts, and norms of few rows take one launch. A block, or a cluster of blocks that
//! exchange amaxes, keeps a row in registers (`rows.cuh`, `produce_rows` in `quantize/cuda.rs`).
//!
//! The output of attention and the gradients of the residual stream are cast separately, because their values are also needed.

use crate::{DType, Device, Granularity, QuantizedTensor, Result, Tensor};

/// The destination of an op's result.
#[derive(Debug)]
pub enum Output<'a> {
    /// The values.
    Plain,
    /// Only the amax: `amax`, F32 `[1]`, is raised to the largest absolute value. Current scaling runs the op with this output and then again
    /// with [`Output::Fp8`]. The op then reads its inputs twice, but moves fewer bytes than writing, measuring and casting the values.
    Amax {
        /// Zero, or the amax of other tensors with the same scale.
        amax: &'a mut Tensor,
    },
    /// The FP8 operand and its statistics; the values are not written.
    Fp8(Fp8Output<'a>),
}

/// Statistics of casts, with one entry ("slot") per cast. They do not depend on the order of elements.
#[derive(Debug)]
pub struct CastStatistics {
    /// The largest absolute value since the entry was cleared, F32 `[n]`; NaN is ignored.
    pub amax: Tensor,
    /// The number of elements that exceeded the largest finite value after scaling, I64 `[n]`.
    pub saturated: Tensor,
    /// The number of nonzero elements that became zero, I64 `[n]`.
    pub underflowed: Tensor,
    /// The number of elements cast, I64 `[n]`.
    pub elements: Tensor,
    /// Whether the statistics are read. If not, kernels do not count.
    is_read: bool,
}

impl CastStatistics {
    /// Returns `n` cleared entries.
    pub fn new(device: &Device, n: usize) -> Result<CastStatistics> {
        Ok(CastStatistics {
            amax: Tensor::zeros(device, &[n], DType::F32)?,
            saturated: Tensor::zeros(device, &[n], DType::I64)?,
            underflowed: Tensor::zeros(device, &[n], DType::I64)?,
            elements: Tensor::zeros(device, &[n], DType::I64)?,
            is_read: true,
        })
    }

    /// Returns `n` entries that are not read, for passes whose casts are not measured. The contents of the entries are undefined.
    pub fn unread(device: &Device, n: usize) -> Result<CastStatistics> {
        Ok(CastStatistics { is_read: false, ..CastStatistics::new(device, n)? })
    }

    /// Returns the addresses of the entry `slot` on a GPU: amax, saturated, underflowed, elements. They are null if the statistics are not read.
    pub(super) fn device_ptrs_mut(&mut self, slot: usize) -> [u64; 4] {
        if !self.is_read {
            return [0; 4];
        }
        [&mut self.amax, &mut self.saturated, &mut self.underflowed, &mut self.elements]
            .map(|entries| entries.device_ptr_mut() + (slot * entries.dtype().size()) as u64)
    }
}

/// The statistics of a cast on the CPU.
#[derive(Clone, Copy, Default)]
pub(in crate::ops) struct Seen {
    pub(in crate::ops) amax: f32,
    pub(in crate::ops) saturated: i64,
    pub(in crate::ops) underflowed: i64,
}

impl Seen {
    /// Counts one value: whether it was saturated, and whether it became zero. The amax ignores NaN.
    pub(in crate::ops) fn see(&mut self, x: f32, is_saturated: bool, is_zero: bool) {
        self.amax = self.amax.max(x.abs());
        self.saturated += i64::from(is_saturated);
        self.underflowed += i64::from(is_zero && x != 0.0);
    }

    pub(in crate::ops) fn add_to(self, statistics: &mut CastStatistics, slot: usize, elements: usize) {
        let amax = &mut statistics.amax.host_mut::<f32>()[slot];
        *amax = amax.max(self.amax);
        statistics.saturated.host_mut::<i64>()[slot] += self.saturated;
        statistics.underflowed.host_mut::<i64>()[slot] += self.underflowed;
        statistics.elements.host_mut::<i64>()[slot] += elements as i64;
    }

    pub(in crate::ops) fn merge(self, other: Seen) -> Seen {
        Seen {
            amax: self.amax.max(other.amax),
            saturated: self.saturated + other.saturated,
            underflowed: self.underflowed + other.underflowed,
        }
    }
}

/// The copies of the codes that matrix products will read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeCopies {
    /// Codes that are contiguous along the columns.
    Rows,
    /// Codes that are contiguous along the rows: the transpose.
    Columns,
    /// Both copies.
    Both,
}

impl CodeCopies {
    pub(super) fn rows(self) -> bool {
        self != CodeCopies::Columns
    }

    pub(super) fn columns(self) -> bool {
        self != CodeCopies::Rows
    }
}

/// Parameters of current scaling.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CurrentScaling {
    /// Lower bound of the amax.
    pub epsilon: f32,
    /// Whether the scale is rounded down to a power of two.
    pub power_of_two: bool,
}

/// The scales of a cast.
#[derive(Clone, Copy, Debug)]
pub enum CastScale<'a> {
    /// One given scale per tensor, F32 `[1]`, as in [`quantize`](super::quantize()).
    Given(&'a Tensor),
    /// Scales that the cast computes per row or block, as in [`quantize_blocks`](super::quantize_blocks()).
    Own(Granularity, CurrentScaling),
}

/// Parameters of a cast to an FP8 operand.
#[derive(Debug)]
pub struct Fp8Output<'a> {
    /// The type of the codes.
    pub format: DType,
    /// The scales.
    pub scale: CastScale<'a>,
    /// The copies of the codes to write.
    pub copies: CodeCopies,
    /// Statistics that the cast updates.
    pub statistics: &'a mut CastStatistics,
    /// The entry of `statistics` that the cast updates.
    pub slot: usize,
}

/// The result of an op with an [`Output`].
#[derive(Clone, Debug)]
pub enum Produced {
    /// The values of [`Output::Plain`].
    Plain(Tensor),
    /// [`Output::Amax`] has no result.
    Measured,
    /// The operand of [`Output::Fp8`].
    Fp8(QuantizedTensor),
}

impl Produced {
    /// Returns the values, or `None` for other results.
    pub fn plain(self) -> Option<Tensor> {
        match self {
            Produced::Plain(value) => Some(value),
            Produced::Measured | Produced::Fp8(_) => None,
        }
    }

    /// Returns the operand, or `None` for other results.
    pub fn fp8(self) -> Option<QuantizedTensor> {
        match self {
            Produced::Plain(_) | Produced::Measured => None,
            Produced::Fp8(quantized) => Some(quantized),
        }
    }
}

impl Fp8Output<'_> {
    /// Returns the granularity of the scales.
    pub(super) fn granularity(&self) -> Granularity {
        match self.scale {
            CastScale::Given(_) => Granularity::PerTensor,
            CastScale::Own(granularity, _) => granularity,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::ops::Activation::SwiGlu;
    use crate::ops::quantize;
    use crate::ops::{activation_backward_to, activation_to, add, amax, cast, rmsnorm_to, transpose};
    use crate::testing::{Tolerance, assert_close, dry_gpu, gpu, normals, parity, values};

    /// Returns normal values mixed with NaN, infinity and extremes.
    pub(crate) fn hostile(name: &str, shape: &[usize], dtype: DType) -> Tensor {
        let mut x = values(&normals(name, shape, DType::F32));
        let traps = [f64::NAN, f64::INFINITY, 1e30, -1e30, 1e-30, -0.0, 3e4, 1e-4];
        for (i, trap) in traps.into_iter().enumerate() {
            let at = (i + 1) * x.len() / (traps.len() + 1);
            // Small tensors keep their normal values.
            if x.len() > 40 {
                x[at] = trap;
            }
        }
        let x: Vec<f32> = x.into_iter().map(|x| x as f32).collect();
        let x = Tensor::from_slice(&Device::Cpu, shape, &x).expect("as many as the shape");
        cast(&x, dtype).expect("a floating-point type")
    }

    /// Returns all tensors that a cast writes.
    pub(crate) fn all(q: &QuantizedTensor, seen: &CastStatistics) -> Vec<Tensor> {
        let counts = [&seen.amax, &seen.saturated, &seen.underflowed, &seen.elements].map(Tensor::clone);
        let scales = [&q.scale_inv].into_iter().chain(q.transposed_scale_inv.as_deref());
        q.codes.iter().chain(&q.transposed).chain(scales).cloned().chain(counts).collect()
    }

    /// Compares `op` with each output to the plain op followed by the cast, on every device. The comparison is exact, because the fused and the
    /// separate cast round the same sums to the tensor's type first.
    pub(crate) fn destinations(inputs: &[Tensor], op: impl Fn(&[Tensor], Output) -> Result<Produced>) {
        for device in [Device::Cpu, dry_gpu()].into_iter().chain(gpu()) {
            destinations_on(&device, inputs, &op);
        }
    }

    /// Runs [`destinations`] on one device, for sizes that are slow on the CPU.
    pub(crate) fn destinations_on(
        device: &Device,
        inputs: &[Tensor],
        op: impl Fn(&[Tensor], Output) -> Result<Produced>,
    ) {
        let inputs: Vec<_> = inputs.iter().map(|x| x.to_device(device).unwrap()).collect();
        let plain = op(&inputs, Output::Plain).unwrap().plain().unwrap();

        let mut amax = Tensor::zeros(device, &[1], DType::F32).unwrap();
        let produced = op(&inputs, Output::Amax { amax: &mut amax }).unwrap();
        assert!(matches!(produced, Produced::Measured), "{produced:?}");
        assert_close("amax", &crate::ops::amax(&plain).unwrap(), &amax, Tolerance::Exact);

        for (format, copies, scale) in [
            (DType::E4M3, CodeCopies::Both, 3.7f32),
            (DType::E5M2, CodeCopies::Both, 1e-3),
            (DType::E4M3, CodeCopies::Rows, 1e-3),
            (DType::E5M2, CodeCopies::Columns, 300.0),
        ] {
            let scale = Tensor::from_slice(device, &[1], &[scale]).unwrap();
            let mut expected = CastStatistics::new(device, 3).unwrap();
            let mut seen = CastStatistics::new(device, 3).unwrap();
            let q = quantize::quantize(&plain, format, &scale, copies, &mut expected, 1).unwrap();
            let expected = all(&q, &expected);
            let scale = CastScale::Given(&scale);
            let to = Fp8Output { format, scale, copies, statistics: &mut seen, slot: 1 };
            let q = op(&inputs, Output::Fp8(to)).unwrap().fp8().unwrap();
            for (i, (expected, got)) in expected.iter().zip(all(&q, &seen)).enumerate() {
                let what = format!("{:?} {format} {copies:?}, part {i} on {device}", plain.shape());
                assert_close(&what, expected, &got, Tolerance::Exact);
            }
        }
        for (granularity, format, copies, power_of_two) in [
            (Granularity::PerRow, DType::E4M3, CodeCopies::Both, false),
            (Granularity::PerRow, DType::E5M2, CodeCopies::Columns, true),
            (Granularity::PerRow, DType::E4M3, CodeCopies::Rows, false),
            (Granularity::PerRow, DType::E5M2, CodeCopies::Rows, true),
            (Granularity::Blocks1x128, DType::E4M3, CodeCopies::Both, false),
            (Granularity::Blocks1x128, DType::E4M3, CodeCopies::Rows, true),
            (Granularity::Blocks1x128, DType::E5M2, CodeCopies::Columns, false),
            (Granularity::Blocks128x128, DType::E4M3, CodeCopies::Both, false),
            (Granularity::MixedBlocks, DType::E4M3, CodeCopies::Both, false),
            (Granularity::MixedBlocks, DType::E5M2, CodeCopies::Columns, true),
        ] {
            let scale = CastScale::Own(granularity, CurrentScaling { epsilon: 0.0, power_of_two });
            let mut expected = CastStatistics::new(device, 3).unwrap();
            let to = Fp8Output { format, scale, copies, statistics: &mut expected, slot: 1 };
            let q = to.cast(&plain).unwrap();
            let expected = all(&q, &expected);
            let mut seen = CastStatistics::new(device, 3).unwrap();
            let to = Fp8Output { format, scale, copies, statistics: &mut seen, slot: 1 };
            let q = op(&inputs, Output::Fp8(to)).unwrap().fp8().unwrap();
            for (i, (expected, got)) in expected.iter().zip(all(&q, &seen)).enumerate() {
                let what = format!("{:?} {granularity} {format} {copies:?}, part {i} on {device}", plain.shape());
                assert_close(&what, expected, &got, Tolerance::Exact);
            }
        }
    }

    /// Returns all elements except the first: a view that is not aligned to 16 bytes.
    fn unaligned(x: &Tensor, shape: &[usize]) -> Result<Tensor> {
        x.rows(1, 1 + shape.iter().product::<usize>())?.reshape(shape)
    }

    #[test]
    fn unaligned_views_give_the_same_bits() {
        let (t, c) = (33, 32);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs =
                [hostile("x", &[1 + t * c], dtype), hostile("y", &[1 + t * c], dtype), normals("w", &[c], dtype)];
            destinations(&inputs, |x, output| activation_to(SwiGlu, &unaligned(&x[0], &[t, c])?, output));
            let dx = |x: &[Tensor]| Ok::<_, crate::Error>([unaligned(&x[0], &[t, c / 2])?, unaligned(&x[1], &[t, c])?]);
            destinations(&inputs, |x, output| {
                dx(x).and_then(|[dy, x]| Ok(activation_backward_to(SwiGlu, &dy, &x, output, None)?.0))
            });
            destinations(&inputs, |x, output| Ok(rmsnorm_to(&unaligned(&x[0], &[t, c])?, &x[2], 1e-5, output)?.0));
            let both = |x: &[Tensor]| Ok::<_, crate::Error>([unaligned(&x[0], &[t, c])?, unaligned(&x[1], &[t, c])?]);
            let plain = [normals("x", &[1 + t * c], dtype), normals("y", &[1 + t * c], dtype)];
            parity(&plain, Tolerance::Exact, |x| {
                let [a, b] = both(x)?;
                Ok(vec![add(&a, &b)?, cast(&a, DType::F32)?, amax(&a)?, transpose(&a)?])
            });
        }
    }

    #[test]
    fn an_out_of_range_slot_is_an_error() {
        let (x, scale) = (normals("x", &[2, 2], DType::F32), Tensor::from_slice(&Device::Cpu, &[1], &[1f32]).unwrap());
        let mut seen = CastStatistics::new(&Device::Cpu, 2).unwrap();
        let error = quantize::quantize(&x, DType::E4M3, &scale, CodeCopies::Rows, &mut seen, 2).unwrap_err();
        assert_eq!(error.to_string(), "quantize: slot 2 of statistics with 2 entries");
    }
}
