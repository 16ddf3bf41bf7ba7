//! Scale granularity of FP8 matrices, and the shapes of codes and scales for each.
//!
//! To add a granularity, add a variant here, and complete every match that no longer compiles:
//!
//! - in this crate: `Granularity` and `quantized.rs`; the casts in `ops/quantize/`, and `ops/destination.rs` with the define `SHARING` of
//!   `destination.cuh`; the scale modes of products in `cuda/cublaslt/spec.rs`, `ops/gemm/cuda.rs` and `ops/grouped_gemm/`
//! - in `ottava-lm`: the recipe (`Precision::recipe`, `recipe/linears.rs`, `recipe/fp8_pays.rs`), `scaling/scales.rs`, and, to write and read
//!   folders, `export/linears.rs`, `export/format.rs` and `models/quantization.rs`

use std::fmt;

/// Both dimensions of codes are multiples of this.
pub(crate) const PAD: usize = 16;

/// `n` rounded up to whole multiples of [`PAD`].
pub(crate) const fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// How many elements share one scale.
///
/// Rows and 1x128 blocks run along the contracted dimension, so a matrix that is contracted both ways is cast twice, with separate scales.
/// With 128x128 blocks and per-tensor scales, the transposed copy has the same codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Granularity {
    /// One scale for the whole tensor.
    PerTensor,
    /// One for each row: a token, or an output channel of a weight.
    PerRow,
    /// One for 128 neighbours along a row.
    #[serde(rename = "blocks-1x128")]
    Blocks1x128,
    /// One for each square of 128 rows and 128 columns.
    #[serde(rename = "blocks-128x128")]
    Blocks128x128,
    /// One for 128 neighbours along a row; in the transposed copy, one for each 128x128 square. A product of 1x128 with 128x128 blocks is
    /// faster than one of 1x128 with 1x128.
    #[serde(rename = "mixed-blocks")]
    MixedBlocks,
    /// One power of two for 32 neighbours along a row: OCP MX specification v1.0, section 5. CPU only: Hopper has no MX products.
    #[serde(rename = "mx")]
    Mx,
}

impl Granularity {
    /// Block length along the contracted dimension; `None` for one scale per row or tensor.
    pub const fn block(self) -> Option<usize> {
        match self {
            Granularity::PerTensor | Granularity::PerRow => None,
            Granularity::Blocks1x128 | Granularity::Blocks128x128 | Granularity::MixedBlocks => Some(128),
            Granularity::Mx => Some(32),
        }
    }

    /// Whether scales change along the contracted dimension.
    pub const fn is_blocks(self) -> bool {
        self.block().is_some()
    }

    /// Granularity of `codes`.
    pub const fn of_rows(self) -> Granularity {
        match self {
            Granularity::MixedBlocks => Granularity::Blocks1x128,
            both => both,
        }
    }

    /// Granularity of the transposed codes.
    pub const fn of_columns(self) -> Granularity {
        match self {
            Granularity::MixedBlocks => Granularity::Blocks128x128,
            both => both,
        }
    }

    /// Padded shape of the codes of `rows` rows contracted over `length`: multiples of
    /// [`QuantizedTensor::PAD`](crate::QuantizedTensor::PAD), and whole blocks along the contracted dimension.
    pub const fn codes_shape(self, rows: usize, length: usize) -> [usize; 2] {
        let pad = match self.block() {
            Some(block) => block,
            None => PAD,
        };
        [padded(rows), length.next_multiple_of(pad)]
    }

    /// Whether the transposed copy of a matrix `[rows, columns]` has the same codes, transposed: if scales belong to the tensor or to squares,
    /// and both copies have the same padding.
    pub fn shares_codes(self, rows: usize, columns: usize) -> bool {
        let [padded_rows, padded_columns] = self.codes_shape(rows, columns);
        matches!(self, Granularity::PerTensor | Granularity::Blocks128x128)
            && self.codes_shape(columns, rows) == [padded_columns, padded_rows]
    }

    /// Shape of the inverse scales of these codes, in the layout of cuBLASLt: `[1]`; `[rows]`; 1x128 blocks: `[length / 128, rows]`;
    /// 128x128 blocks: `[rows / 128, length / 128]` with the second dimension padded to a multiple of 4. Sizes are padded sizes. Padding
    /// has
    /// the scale of zeros; the padding of 128x128 scales is zero. For mixed blocks, the shape for `codes`.
    pub fn scales_shape(self, rows: usize, length: usize) -> Vec<usize> {
        let padded = padded(rows);
        match self {
            Granularity::PerTensor => vec![1],
            Granularity::PerRow => vec![padded],
            Granularity::Blocks1x128 | Granularity::MixedBlocks => vec![length.div_ceil(128), padded],
            Granularity::Mx => vec![length.div_ceil(32), padded],
            Granularity::Blocks128x128 => vec![rows.div_ceil(128), length.div_ceil(128).next_multiple_of(4)],
        }
    }

    /// Index of the scale of `row` and `block` (along the contracted dimension) among scales of `shape`.
    pub fn scale_index(self, shape: &[usize], row: usize, block: usize) -> usize {
        match self {
            Granularity::PerTensor => 0,
            Granularity::PerRow => row,
            Granularity::Blocks1x128 | Granularity::MixedBlocks | Granularity::Mx => block * shape[1] + row,
            Granularity::Blocks128x128 => row / 128 * shape[1] + block,
        }
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Granularity::PerTensor => "per-tensor",
            Granularity::PerRow => "per-row",
            Granularity::Blocks1x128 => "1x128",
            Granularity::Blocks128x128 => "128x128",
            Granularity::MixedBlocks => "1x128, transposed 128x128",
            Granularity::Mx => "mx",
        })
    }
}
