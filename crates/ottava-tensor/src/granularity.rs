//! The granularity of scales of FP8 matrices, and the shapes of codes and scales for each granularity.
//!
//! To add a granularity, add a variant here, and complete every match that no longer compiles:
//!
//! - in this crate: `Granularity` and `quantized.rs`; the casts in `ops/quantize/`, and `ops/destination.rs` with the define `SHARING` of
//!   `destination.cuh`, or for a format without products on Hopper `ops/microscaling/`; the scale modes of products in `cuda/cublaslt/spec.rs`, `ops/gemm/` and `ops/gemm/wgmma.rs`, and `ops/grouped_gemm/`; `ops/permute/mod.rs`;
//!   `CAPABILITIES` in `capability.rs`
//! - in other crates: the recipe (`Precision::recipe`, `recipe/linears.rs`, `recipe/fp8_pays.rs`), `scaling/scales.rs`, `layers/moe/dispatch.rs`, and,
//!   for writing and reading folders, `export/linears.rs`, `export/format.rs` and `models/quantization.rs`
//! - the lists `FINER` in `sentinel/what_if.rs` and `COLUMNS` in `commands/inspect.rs`, which compile even without the new variant

use std::fmt;

/// The number whose multiples are both dimensions of codes.
pub(crate) const PAD: usize = 16;

/// Returns `n` rounded up to a multiple of [`PAD`].
pub(crate) const fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// The elements that share a scale.
///
/// Rows and 1x128 blocks run along the contracted dimension, so a matrix that is contracted along both dimensions is cast twice, with separate
/// scales. With 128x128 blocks and per-tensor scales, the transposed copy has the same codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Granularity {
    /// One scale for the whole tensor.
    PerTensor,
    /// One scale per row: per token, or per output channel of a weight.
    PerRow,
    /// One scale per 128 neighbours along a row.
    #[serde(rename = "blocks-1x128")]
    Blocks1x128,
    /// One scale per square of 128 rows and 128 columns.
    #[serde(rename = "blocks-128x128")]
    Blocks128x128,
    /// One scale per 128 neighbours along a row. The transposed copy has one scale per 128x128 square. A product of 1x128 blocks with 128x128 blocks
    /// is faster than a product of 1x128 blocks with 1x128 blocks.
    #[serde(rename = "mixed-blocks")]
    MixedBlocks,
    /// One power of two per 32 neighbours along a row: OCP MX specification v1.0, section 5. Products are emulated ([`Microscaling`]).
    #[serde(rename = "mx")]
    Mx,
    /// NVFP4 for activations: E2M1 values, one E4M3 scale per 16 neighbours along a row, and one F32 scale per tensor. The transposed copy is cast
    /// after a Hadamard transform. Products are emulated ([`Microscaling`]).
    #[serde(rename = "nvfp4")]
    Nvfp4,
    /// NVFP4 for activations of inference: as [`Granularity::Nvfp4`], with one F32 scale per row instead of per tensor, so that a row does not depend on
    /// other rows.
    #[serde(rename = "nvfp4-rows")]
    Nvfp4Rows,
    /// NVFP4 for weights: one E4M3 scale per square of 16 rows and 16 columns, so that both copies have the same values.
    #[serde(rename = "nvfp4-16x16")]
    Nvfp4Squares,
    /// NVFP4 for gradients: as [`Granularity::Nvfp4`], with stochastic rounding.
    #[serde(rename = "nvfp4-stochastic")]
    Nvfp4Stochastic,
}

/// A format with scales of small blocks, for the tensor cores of Blackwell GPUs. Casts are separate ops
/// (`ops/microscaling/`), and products multiply dequantized operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Microscaling {
    /// The scales of blocks.
    pub levels: Levels,
    /// The number of rows that share the scale of a block.
    pub rows: usize,
    /// Whether the transposed copy is cast after a Hadamard transform of 16 neighbours along its rows.
    pub rotates_columns: bool,
    /// Whether values are rounded stochastically instead of to nearest.
    pub stochastic: bool,
    /// Whether the second level has a scale for each row instead of one for the tensor.
    pub scales_rows: bool,
}

/// The scales of a format with small blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Levels {
    /// FP8 codes with one E8M0 scale per 32 values (MX).
    One,
    /// E2M1 values with one E4M3 scale per 16 values, and one F32 scale per tensor (NVFP4). The values are stored as E4M3 codes. The scale of the
    /// tensor follows the scales of blocks, once for each row.
    Two,
}

/// How values are cast to a granularity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Casting {
    /// By the kernels of `destination.cuh`, with this value of `SHARING`. Producers can write codes.
    Fused(&'static str),
    /// By separate ops.
    Separate(Microscaling),
}

/// The properties of a granularity. [`Granularity::info`] has a row for each granularity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GranularityInfo {
    /// The name in messages and plans, such as `1x128`.
    pub name: &'static str,
    /// The name of the group of elements that has a separate scale, such as `row`.
    pub each: &'static str,
    /// The elements that share a scale. For mixed blocks, the elements of `codes`.
    pub shared: Shared,
    /// The granularities of `codes` and of the transposed codes, if they differ from this granularity.
    pub copies: Option<[Granularity; 2]>,
    /// Whether every scale is a power of two.
    pub power_of_two: bool,
    /// How values are cast.
    pub casting: Casting,
    /// The value of `cublasLtMatmulMatrixScale_t`.
    pub cublaslt_mode: i32,
}

/// The elements of a matrix that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// All elements.
    Tensor,
    /// The elements of a row.
    Row,
    /// This many neighbours along a row.
    Strip(usize),
    /// A square whose sides have this many elements.
    Square(usize),
}

/// The layout of scales. The index of an element's scale is `row / shared[0] * steps[0] + column / shared[1] * steps[1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScaleLayout {
    /// The numbers of rows and of columns that share a scale.
    pub shared: [usize; 2],
    /// The distances in scales from a group of rows to the next group, and from a group of columns to the next group.
    pub steps: [usize; 2],
}

impl Granularity {
    /// Returns the properties of the granularity.
    pub const fn info(self) -> GranularityInfo {
        match self {
            Granularity::PerTensor => GranularityInfo::new("per-tensor", "tensor", Shared::Tensor, "PerTensor", 0),
            Granularity::PerRow => GranularityInfo::new("per-row", "row", Shared::Row, "PerRow", 3),
            Granularity::Blocks1x128 => GranularityInfo::new("1x128", BLOCKS, Shared::Strip(128), "Blocks1x128", 4),
            Granularity::Blocks128x128 => {
                GranularityInfo::new("128x128", BLOCKS, Shared::Square(128), "Blocks128x128", 5)
            }
            Granularity::MixedBlocks => GranularityInfo {
                copies: Some([Granularity::Blocks1x128, Granularity::Blocks128x128]),
                ..GranularityInfo::new("1x128, transposed 128x128", BLOCKS, Shared::Strip(128), "MixedBlocks", 4)
            },
            Granularity::Mx => GranularityInfo {
                power_of_two: true,
                casting: Casting::Separate(Microscaling { levels: Levels::One, ..NVFP4 }),
                ..GranularityInfo::new("mx", "32 neighbours along the sums", Shared::Strip(32), "", 2)
            },
            Granularity::Nvfp4 => GranularityInfo::nvfp4("nvfp4", Microscaling { rotates_columns: true, ..NVFP4 }),
            Granularity::Nvfp4Rows => {
                GranularityInfo::nvfp4("nvfp4, rows", Microscaling { scales_rows: true, ..NVFP4 })
            }
            Granularity::Nvfp4Squares => GranularityInfo::nvfp4("nvfp4, 16x16", Microscaling { rows: 16, ..NVFP4 }),
            Granularity::Nvfp4Stochastic => GranularityInfo::nvfp4(
                "nvfp4, stochastic",
                Microscaling { rotates_columns: true, stochastic: true, ..NVFP4 },
            ),
        }
    }

    /// Returns the format of small blocks, or `None` for a granularity with products on Hopper.
    pub const fn microscaling(self) -> Option<Microscaling> {
        match self.info().casting {
            Casting::Fused(_) => None,
            Casting::Separate(how) => Some(how),
        }
    }

    /// Returns whether the tensor has a scale besides the scales of blocks.
    pub const fn has_tensor_scale(self) -> bool {
        matches!(self.microscaling(), Some(Microscaling { levels: Levels::Two, .. }))
    }

    /// Returns the length of a block along the contracted dimension, or `None` for one scale per row or tensor.
    pub const fn block(self) -> Option<usize> {
        match self.info().shared {
            Shared::Tensor | Shared::Row => None,
            Shared::Strip(length) | Shared::Square(length) => Some(length),
        }
    }

    /// Returns whether scales change along the contracted dimension.
    pub const fn is_blocks(self) -> bool {
        self.block().is_some()
    }

    /// Returns the granularity of `codes`.
    pub const fn of_rows(self) -> Granularity {
        match self.info().copies {
            Some([of_rows, _]) => of_rows,
            None => self,
        }
    }

    /// Returns the granularity of the transposed codes.
    pub const fn of_columns(self) -> Granularity {
        match self.info().copies {
            Some([_, of_columns]) => of_columns,
            None => self,
        }
    }

    /// Returns the padded shape of the codes of `rows` rows contracted over `length`: multiples of
    /// [`QuantizedTensor::PAD`](crate::QuantizedTensor::PAD), and whole blocks along the contracted dimension.
    pub const fn codes_shape(self, rows: usize, length: usize) -> [usize; 2] {
        let pad = match self.block() {
            Some(block) => block,
            None => PAD,
        };
        [padded(rows), length.next_multiple_of(pad)]
    }

    /// Returns whether the transposed copy of a matrix `[rows, columns]` has the codes of the matrix in transposed order. It has them if scales
    /// belong to the tensor or to squares, and both copies have the same padding.
    pub fn shares_codes(self, rows: usize, columns: usize) -> bool {
        let [padded_rows, padded_columns] = self.codes_shape(rows, columns);
        matches!(self.info().shared, Shared::Tensor | Shared::Square(_))
            && self.codes_shape(columns, rows) == [padded_columns, padded_rows]
    }

    /// Returns the shape of the inverse scales of these codes, in the layout of cuBLASLt. Per tensor: `[1]`. Per row: `[rows]`. 1x128 blocks:
    /// `[length / 128, rows]`. 128x128 blocks: `[rows / 128, length / 128]`, with the second dimension padded to a multiple of 4. The sizes are
    /// padded sizes. Padding has the scale of zeros, except that the padding of 128x128 scales is zero. For mixed blocks, returns the shape for
    /// `codes`. With a scale of the tensor, one more row of scales repeats this scale.
    pub fn scales_shape(self, rows: usize, length: usize) -> Vec<usize> {
        let padded = padded(rows);
        match self.info().shared {
            Shared::Tensor => vec![1],
            Shared::Row => vec![padded],
            Shared::Strip(block) => vec![length.div_ceil(block) + self.has_tensor_scale() as usize, padded],
            Shared::Square(side) => vec![rows.div_ceil(side), length.div_ceil(side).next_multiple_of(4)],
        }
    }

    /// Returns the layout of scales of `shape`, which comes from [`Granularity::scales_shape`].
    pub(crate) fn scale_layout(self, shape: &[usize]) -> ScaleLayout {
        let (shared, steps) = match self.info().shared {
            Shared::Tensor => ([1, 1], [0, 0]),
            Shared::Row => ([1, 1], [1, 0]),
            Shared::Strip(block) => ([1, block], [1, shape[1]]),
            Shared::Square(side) => ([side, side], [shape[1], 1]),
        };
        ScaleLayout { shared, steps }
    }

    /// Returns the index of the scale of `row` and `block` (along the contracted dimension), among scales of `shape`.
    pub fn scale_index(self, shape: &[usize], row: usize, block: usize) -> usize {
        let ScaleLayout { shared, steps } = self.scale_layout(shape);
        row / shared[0] * steps[0] + block * steps[1]
    }
}

/// NVFP4 with scales of strips, to nearest.
const NVFP4: Microscaling =
    Microscaling { levels: Levels::Two, rows: 1, rotates_columns: false, stochastic: false, scales_rows: false };

/// The name of the group of elements with a separate scale, in a recipe with blocks.
const BLOCKS: &str = "block of 1x128, of weights of 128x128,";

impl GranularityInfo {
    const fn new(
        name: &'static str,
        each: &'static str,
        shared: Shared,
        sharing: &'static str,
        cublaslt_mode: i32,
    ) -> GranularityInfo {
        let casting = Casting::Fused(sharing);
        GranularityInfo { name, each, shared, copies: None, power_of_two: false, casting, cublaslt_mode }
    }

    const fn nvfp4(name: &'static str, how: Microscaling) -> GranularityInfo {
        let each = "16 neighbours along the sums, of weights each 16x16,";
        GranularityInfo {
            casting: Casting::Separate(how),
            ..GranularityInfo::new(name, each, Shared::Strip(16), "", 0)
        }
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.info().name)
    }
}
