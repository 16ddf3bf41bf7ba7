//! A description of a matrix product without its pointers, and a check that the library supports the product.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::granularity::Granularity;

/// The dimension of a GEMM operand that is contiguous in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// The inner dimension: `a` is `[M, K]` and `b` is `[N, K]`, both row-major. FP8 requires it for both operands.
    K,
    /// The outer dimension: `a` is `[K, M]` and `b` is `[K, N]`, both row-major.
    MN,
}

/// The scales of FP8 operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleMode {
    /// No scales. Wider types require it.
    None,
    /// One F32 inverse scale per operand. The scales are in device memory, aligned to 16 bytes.
    PerTensor,
    /// One F32 inverse scale per row of each operand, `[M]` and `[N]`.
    PerRow,
    /// F32 inverse scales for blocks of 128 along K, laid out as in [`Granularity::scales_shape`].
    Blocks {
        /// The blocks of `a`.
        a: Granularity,
        /// The blocks of `b`. At most one of `a` and `b` can have blocks of 128x128.
        b: Granularity,
    },
}

impl ScaleMode {
    /// Returns the `cublasLtMatmulMatrixScale_t` of `a` and of `b`.
    pub(super) fn of_operands(self) -> [i32; 2] {
        let mode = |granularity: Granularity| granularity.info().cublaslt_mode;
        match self {
            ScaleMode::None | ScaleMode::PerTensor => [mode(Granularity::PerTensor); 2],
            ScaleMode::PerRow => [mode(Granularity::PerRow); 2],
            ScaleMode::Blocks { a, b } => [mode(a), mode(b)],
        }
    }
}

/// A matrix product `out[M, N] = a · bᵀ`, or `out += a · bᵀ`, without its pointers. Leading dimensions are numbers of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmSpec {
    /// The number of rows of `out`.
    pub m: usize,
    /// The number of columns of `out`.
    pub n: usize,
    /// The number of terms of each sum.
    pub k: usize,
    /// The element type of `a`.
    pub a: DType,
    /// The element type of `b`.
    pub b: DType,
    /// The element type of `out`.
    pub out: DType,
    /// The memory order of `a`.
    pub a_layout: Major,
    /// The memory order of `b`.
    pub b_layout: Major,
    /// The number of elements from one stored row of `a` to the next.
    pub lda: usize,
    /// The number of elements from one stored row of `b` to the next.
    pub ldb: usize,
    /// The number of elements from one row of `out` to the next.
    pub ldc: usize,
    /// The scales of FP8 operands.
    pub scale: ScaleMode,
    /// Whether FP8 products keep sums in tensor-core registers with about 14 bits. This is up to 10 % faster and less accurate.
    pub fast_accumulation: bool,
    /// Whether a matrix with the layout of `out`, or `out` itself, is added. A 16-bit `out` may be rounded twice: after the product and after the
    /// sum.
    pub accumulate: bool,
}

impl GemmSpec {
    /// Creates the spec of a product of contiguous operands with K as the inner dimension, without scales.
    pub fn contiguous([m, n, k]: [usize; 3], a: DType, b: DType, out: DType) -> GemmSpec {
        GemmSpec {
            m,
            n,
            k,
            a,
            b,
            out,
            a_layout: Major::K,
            b_layout: Major::K,
            lda: k,
            ldb: k,
            ldc: n,
            scale: ScaleMode::None,
            fast_accumulation: false,
            accumulate: false,
        }
    }

    /// Returns the scales of the FP8 operands. The list is empty for wider types.
    pub(in crate::cuda) fn fp8_scales(&self) -> Vec<Granularity> {
        match self.scale {
            _ if !self.a.is_fp8() => vec![],
            ScaleMode::None | ScaleMode::PerTensor => vec![Granularity::PerTensor],
            ScaleMode::PerRow => vec![Granularity::PerRow],
            ScaleMode::Blocks { a, b } => vec![a, b],
        }
    }

    /// Returns an error with the reason if the library cannot run this product.
    pub(in crate::cuda) fn check(&self) -> Result<()> {
        use DType::{BF16, E4M3, E5M2, F16, F32};
        let wrong = |text: String| Err(Error::Value(format!("gemm {}x{}x{}: {text}", self.m, self.n, self.k)));
        match (self.a, self.b, self.out) {
            (F32, F32, F32) | (BF16, BF16, BF16 | F32) | (F16, F16, F16 | F32) => {}
            (E4M3, E4M3 | E5M2, BF16 | F32) | (E5M2, E4M3, BF16 | F32) => {}
            (a, b, out) => return wrong(format!("{a} · {b} to {out} is not supported")),
        }
        let fp8 = self.a.is_fp8();
        if !fp8 && (self.fast_accumulation || self.scale != ScaleMode::None) {
            return wrong(format!("scales and fast accumulation are for FP8, the operands are {}", self.a));
        }
        if fp8 && (self.a_layout, self.b_layout) != (Major::K, Major::K) {
            return wrong("FP8 operands must both have K innermost".to_string());
        }
        if let ScaleMode::Blocks { a, b } = self.scale {
            let known = |granularity: Granularity| granularity.block() == Some(128);
            if !known(a) || !known(b) || (a, b) == (Granularity::Blocks128x128, Granularity::Blocks128x128) {
                return wrong(format!("{a} · {b} scales are not supported by the hardware"));
            }
            if self.fast_accumulation {
                return wrong("block scales have no fast accumulation".to_string());
            }
            if !self.k.is_multiple_of(128) {
                return wrong("K must be a multiple of 128".into());
            }
        }
        if [self.m, self.n, self.k].contains(&0) {
            return wrong("an empty dimension".to_string());
        }
        let row = |layout, outer| if layout == Major::K { self.k } else { outer };
        let rows = [
            ("lda", self.lda, row(self.a_layout, self.m)),
            ("ldb", self.ldb, row(self.b_layout, self.n)),
            ("ldc", self.ldc, self.n),
        ];
        for (name, stride, length) in rows {
            if stride < length {
                return wrong(format!("{name} is {stride}, less than a row of {length}"));
            }
        }
        if fp8 {
            // The size in bytes of each row of an FP8 operand is a multiple of 16 (cuBLAS manual, "FP8 and FP4 usage").
            let sizes = [("K", self.k), ("lda", self.lda), ("ldb", self.ldb)];
            if let Some((name, value)) = sizes.into_iter().find(|(_, value)| !value.is_multiple_of(16)) {
                return wrong(format!("FP8 needs {name} to be a multiple of 16, it is {value}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_products_are_errors() {
        use DType::{BF16, E4M3, E5M2, F32};
        use Granularity::{Blocks1x128 as Along, Blocks128x128 as Square, PerRow};
        let blocks = |a, b| ScaleMode::Blocks { a, b };
        let fine = GemmSpec::contiguous([16, 32, 48], E4M3, E5M2, F32);
        let cases = [
            (GemmSpec { a: E5M2, ..fine }, "not supported"),
            (GemmSpec { b_layout: Major::MN, ..fine }, "K innermost"),
            (GemmSpec { k: 40, ..fine }, "multiple of 16"),
            (GemmSpec { lda: 47, ..fine }, "less than a row"),
            (GemmSpec { m: 0, ..fine }, "empty"),
            (GemmSpec { scale: blocks(Square, Square), k: 128, ..fine }, "128x128 · 128x128"),
            (GemmSpec { scale: blocks(PerRow, PerRow), k: 128, ..fine }, "per-row · per-row"),
            (GemmSpec { scale: blocks(Along, Square), ..fine }, "multiple of 128"),
            (GemmSpec { scale: blocks(Along, Along), fast_accumulation: true, ..fine }, "no fast"),
            (GemmSpec { a: BF16, b: BF16, fast_accumulation: true, ..fine }, "for FP8"),
        ];
        assert!(fine.check().is_ok());
        for (spec, words) in cases {
            let message = spec.check().expect_err("an impossible product").to_string();
            assert!(message.contains(words), "{message}");
        }
    }
}
