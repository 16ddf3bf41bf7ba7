//! The values of FP8 codes.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::{DType, Device, Error, Granularity, QuantizedTensor, Result, Tensor};

pub(crate) use cuda::{SOURCE, VARIANTS};

/// Where the codes of a matrix and their scales are, for the row and column of an element.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Layout {
    rows: usize,
    columns: usize,
    /// Codes from a row to the next, and from a column to the next.
    steps: [usize; 2],
    /// Rows, and columns, that share a scale.
    shared: [usize; 2],
    /// Scales from a group of rows to the next, and from a group of columns to the next.
    scale_steps: [usize; 2],
}

impl Layout {
    /// That of codes with this row `pitch` and inverse scales of this `shape`.
    fn new(granularity: Granularity, [rows, columns]: [usize; 2], pitch: usize, shape: &[usize]) -> Layout {
        let (shared, scale_steps) = match granularity {
            Granularity::PerTensor => ([1, 1], [0, 0]),
            Granularity::PerRow => ([1, 1], [1, 0]),
            Granularity::Blocks1x128 | Granularity::MixedBlocks => ([1, 128], [1, shape[1]]),
            Granularity::Mx => ([1, 32], [1, shape[1]]),
            Granularity::Blocks128x128 => ([128, 128], [shape[1], 1]),
        };
        Layout { rows, columns, steps: [pitch, 1], shared, scale_steps }
    }

    /// The same for the transposed matrix.
    fn transposed(self) -> Layout {
        let swap = |[a, b]: [usize; 2]| [b, a];
        let (steps, shared, scale_steps) = (swap(self.steps), swap(self.shared), swap(self.scale_steps));
        Layout { rows: self.columns, columns: self.rows, steps, shared, scale_steps }
    }
}

/// The matrix `[rows, columns]` whose FP8 codes are `x`, in F32 or BF16: `code · scale_inv` in F32, rounded once. Reads `codes` if there are
/// any, else `transposed`.
pub fn dequantize(x: &QuantizedTensor, dtype: DType) -> Result<Tensor> {
    let mut y = Tensor::empty(x.scale_inv.device(), &[x.rows, x.columns], dtype)?;
    y.expect_dtype("dequantize: type", &[DType::F32, DType::BF16])?;
    let shape = x.scale_inv.shape();
    let (codes, layout) = match (&x.codes, &x.transposed) {
        (Some(codes), _) => (codes, Layout::new(x.granularity.of_rows(), [x.rows, x.columns], codes.shape()[1], shape)),
        (None, Some(codes)) => {
            let layout = Layout::new(x.granularity.of_columns(), [x.columns, x.rows], codes.shape()[1], shape);
            (codes, layout.transposed())
        }
        (None, None) => return Err(Error::Value("dequantize: a matrix without codes".into())),
    };
    match y.device().clone() {
        Device::Cpu => cpu::dequantize(codes, &x.scale_inv, &layout, &mut y),
        Device::DryCpu(_) => {}
        Device::Cuda(gpu) => cuda::dequantize(&gpu, codes, &x.scale_inv, &layout, &mut y)?,
    }
    Ok(y)
}
