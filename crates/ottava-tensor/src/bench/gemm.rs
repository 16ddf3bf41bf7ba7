//! The products of linear layers, relative to the rate of a large product.

use super::{Cost, Meter, copy_bandwidth};
use crate::ops::{
    Accumulation, CastScale, CastStatistics, CodeCopies, CurrentScaling, Fp8Output, Groups, Operand, cast, gemm_nt,
    gemm_nt_into, grouped_gemm_nt, grouped_wgrad_into, normal,
};
use crate::{DType, Device, Granularity, QuantizedTensor, Result, Tensor};

/// The approximate length of a round in milliseconds. It is long enough to reach the clock of sustained load, as in training.
pub(super) const ROUND_MILLISECONDS: f64 = 40.0;

/// A product of a linear layer with `N` outputs and `K` inputs, over `T` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Product {
    /// `y = x · Wᵀ`, `[T, N]`.
    Fprop,
    /// `dx = dy · W`, `[T, K]`.
    Dgrad,
    /// `dW = dyᵀ · x`, `[N, K]`.
    Wgrad,
}

impl Product {
    /// All products, in the order of a step.
    pub const ALL: [Product; 3] = [Product::Fprop, Product::Dgrad, Product::Wgrad];
}

/// The operand types of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operands {
    /// Matrices of this type.
    Plain(DType),
    /// FP8 codes of these formats and granularities.
    Fp8 {
        /// The codes and granularity of `x`.
        input: (DType, Granularity),
        /// The codes and granularity of `W`.
        weight: (DType, Granularity),
        /// The codes and granularity of `dy`.
        grad_output: (DType, Granularity),
    },
}

/// A random operand in the form that products read.
enum Matrix {
    Plain(Tensor),
    Fp8(QuantizedTensor),
}

impl Matrix {
    /// Returns normal values that use most of the range of the format. The speed depends on the power, and the power depends on the number of bits
    /// that flip.
    fn random(
        device: &Device,
        shape: [usize; 2],
        (dtype, granularity): (DType, Granularity),
        seed: u64,
    ) -> Result<Matrix> {
        let Some(largest) = dtype.max_finite().filter(|_| dtype.is_fp8()) else {
            return Ok(Matrix::Plain(cast(&normal(device, &shape, 1.0, seed)?, dtype)?));
        };
        let x = cast(&normal(device, &shape, 1.0, seed)?, DType::BF16)?;
        let (given, mut unread) =
            (Tensor::from_slice(device, &[1], &[largest / 6.0])?, CastStatistics::new(device, 1)?);
        let scale = match granularity {
            Granularity::PerTensor => CastScale::Given(&given),
            granularity => CastScale::Own(granularity, CurrentScaling::default()),
        };
        let to = Fp8Output { format: dtype, scale, copies: CodeCopies::Both, statistics: &mut unread, slot: 0 };
        Ok(Matrix::Fp8(to.cast(&x)?))
    }

    fn rows(&self) -> Operand<'_> {
        match self {
            Matrix::Plain(x) => Operand::plain(x),
            Matrix::Fp8(codes) => Operand::Rows(codes),
        }
    }

    fn columns(&self) -> Operand<'_> {
        match self {
            Matrix::Plain(x) => Operand::plain_transposed(x),
            Matrix::Fp8(codes) => Operand::Columns(codes),
        }
    }
}

/// The product `x · Wᵀ` of random operands, with a BF16 result.
pub(super) struct Fprop {
    x: Matrix,
    w: Matrix,
}

impl Fprop {
    /// Creates operands of `[T, N, K]`, both of type `dtype`.
    pub(super) fn random(device: &Device, [tokens, outputs, inputs]: [usize; 3], dtype: DType) -> Result<Fprop> {
        let matrix = |rows, seed| Matrix::random(device, [rows, inputs], (dtype, Granularity::PerTensor), seed);
        Ok(Fprop { x: matrix(tokens, 1)?, w: matrix(outputs, 2)? })
    }

    /// Enqueues the product.
    pub(super) fn run(&self) -> Result<()> {
        gemm_nt(self.x.rows(), self.w.rows(), DType::BF16, Accumulation::Fast).map(drop)
    }
}

/// Returns the cost of `product` for `[T, N, K]` on random operands, with results in type `out`. With `groups`, the T rows are divided into this many
/// groups of unequal sizes, 0.3 to 1.7 times the mean, and each group has a separate matrix.
pub fn gemm_cost(
    meter: Meter,
    product: Product,
    [tokens, outputs, inputs]: [usize; 3],
    groups: Option<usize>,
    operands: Operands,
    out: DType,
    accumulation: Accumulation,
) -> Result<Cost> {
    let device = meter.device;
    let [input, weight, grad_output] = match operands {
        Operands::Plain(dtype) => [(dtype, Granularity::PerTensor); 3],
        Operands::Fp8 { input, weight, grad_output } => [input, weight, grad_output],
    };
    let rows = groups.map_or(tokens, |groups| Groups::capacity(tokens, groups));
    let stacked = groups.unwrap_or(1) * outputs;
    let groups = groups.map(|groups| Groups::new(device, &unequal(tokens, groups))).transpose()?;
    let x = || Matrix::random(device, [rows, inputs], input, 1);
    let w = || Matrix::random(device, [stacked, inputs], weight, 2);
    let dy = || Matrix::random(device, [rows, outputs], grad_output, 3);
    let multiply = |a: Operand, b: Operand| match &groups {
        None => gemm_nt(a, b, out, accumulation).map(drop),
        Some(groups) => grouped_gemm_nt(a, b, groups, out, accumulation).map(drop),
    };
    match product {
        Product::Fprop => {
            let (x, w) = (x()?, w()?);
            meter.rounds_for(ROUND_MILLISECONDS, &mut || multiply(x.rows(), w.rows()))
        }
        Product::Dgrad => {
            let (dy, w) = (dy()?, w()?);
            meter.rounds_for(ROUND_MILLISECONDS, &mut || multiply(dy.rows(), w.columns()))
        }
        Product::Wgrad => {
            let (dy, x) = (dy()?, x()?);
            let mut dw = Tensor::empty(device, &[stacked, inputs], out)?;
            meter.rounds_for(ROUND_MILLISECONDS, &mut || match &groups {
                None => gemm_nt_into(dy.columns(), x.columns(), &mut dw, accumulation),
                Some(groups) => grouped_wgrad_into(dy.columns(), x.columns(), groups, &mut dw, accumulation),
            })
        }
    }
}

/// Divides `rows` rows into `groups` groups that are as unequal as the groups of a trained router.
fn unequal(rows: usize, groups: usize) -> Vec<usize> {
    let weights: Vec<usize> = (0..groups).map(|group| 300 + group * 7919 % 1401).collect();
    let total: usize = weights.iter().sum();
    let mut counts: Vec<_> = weights.iter().map(|weight| rows * weight / total).collect();
    counts[0] += rows - counts.iter().sum::<usize>();
    counts
}

/// The reference rates of a device, measured in this run.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Rates {
    /// The FLOP/s of a large product of BF16 operands.
    pub bf16_flops: f64,
    /// The FLOP/s of a large product of FP8 operands with fast accumulation.
    pub fp8_flops: f64,
    /// The bytes per second of a copy, counting reads and writes.
    pub copy_bytes: f64,
}

impl Rates {
    /// Measures the rates, with products of 8192³ on a GPU and tiny products on the CPU.
    pub fn measure(device: &Device) -> Result<Rates> {
        let size: usize = if matches!(device, Device::Cpu) { 64 } else { 8192 };
        let rate = |operands| {
            let how = (DType::BF16, Accumulation::Fast);
            let meter = Meter { device, power: false };
            let cost = gemm_cost(meter, Product::Fprop, [size; 3], None, operands, how.0, how.1)?;
            Ok::<_, crate::Error>(2.0 * (size as f64).powi(3) / (cost.milliseconds * 1e-3))
        };
        let codes = (DType::E4M3, Granularity::PerTensor);
        Ok(Rates {
            bf16_flops: rate(Operands::Plain(DType::BF16))?,
            fp8_flops: rate(Operands::Fp8 { input: codes, weight: codes, grad_output: codes })?,
            copy_bytes: copy_bandwidth(device)?,
        })
    }

    /// Returns the FLOP/s for `operands`.
    pub fn flops(&self, operands: Operands) -> f64 {
        match operands {
            Operands::Plain(_) => self.bf16_flops,
            Operands::Fp8 { .. } => self.fp8_flops,
        }
    }
}
