//! How the values of an FP8 matrix share scales, and the shapes of codes and scales that follow from it.

use std::fmt;

/// Both dimensions of codes are multiples of this.
pub(crate) const PAD: usize = 16;

/// `n` rounded up to whole multiples of [`PAD`].
pub(crate) const fn padded(n: usize) -> usize {
    n.next_multiple_of(PAD)
}

/// How many elements share one scale.
///
/// A row, and a block of 1x128, runs along the dimension that is contracted. So a matrix that is contracted both ways is cast twice,
/// each copy with scales of its own; blocks of 128x128 and whole tensors have the same codes in both.
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
    /// One for 128 neighbours along a row, and in the transposed copy one for each square of 128 by 128. What reads the transposed
    /// copy beside blocks of 1x128 is faster so.
    #[serde(rename = "mixed-blocks")]
    MixedBlocks,
    /// One power of two for 32 neighbours along a row: MX of the OCP's specification (v1.0, section 5). On the CPU alone, since Hopper
    /// has no such products.
    #[serde(rename = "mx")]
    Mx,
}

impl Granularity {
    /// Elements along the contracted dimension that share a scale, where not all of them do.
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

    /// How the codes as they lie share scales.
    pub const fn of_rows(self) -> Granularity {
        match self {
            Granularity::MixedBlocks => Granularity::Blocks1x128,
            both => both,
        }
    }

    /// How the transposed codes share theirs.
    pub const fn of_columns(self) -> Granularity {
        match self {
            Granularity::MixedBlocks => Granularity::Blocks128x128,
            both => both,
        }
    }

    /// Shape of the codes of a matrix of `rows` that are contracted over `length`: whole multiples of
    /// [`QuantizedTensor::PAD`](crate::QuantizedTensor::PAD), and of whole blocks along the contracted dimension.
    pub const fn codes_shape(self, rows: usize, length: usize) -> [usize; 2] {
        let pad = match self.block() {
            Some(block) => block,
            None => PAD,
        };
        [padded(rows), length.next_multiple_of(pad)]
    }

    /// Shape of what multiplies these codes, as cuBLASLt wants it: `[1]`; `[rows]`; for blocks of 1x128 `[length / 128, rows]`, block
    /// by block along the contracted dimension; for blocks of 128x128 `[rows / 128, length / 128]`, whose rows of scales are padded
    /// to multiples of 4. All count what is padded. Padding is scaled as zeros are, beyond the blocks of 128x128 by zero. Of a matrix
    /// whose copies differ these are the codes as they lie.
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

    /// Where the scale of `row`, and of `block` along the contracted dimension, lies among scales of a `shape`.
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
