//! The chunks of the segments of a batch.

use super::Segments;
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::UNTYPED;
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = { file: "chunk_table", headers: ["segments.cuh"], constants: [CHUNK], variants: UNTYPED };
    kernel chunk_table(of: *mut int2, of_segments: *mut int2, at: *const i32, count: i32, rows: i32, chunks: i32);
}

/// The number of tokens of a chunk.
pub(in crate::ops) const CHUNK: usize = 64;

/// The columns of a panel, in BF16 (`chunk_panels.cuh`), and the bytes of a panel of a chunk.
pub(in crate::ops) const PANEL_COLUMNS: usize = 64;
pub(in crate::ops) const PANEL: usize = CHUNK * PANEL_COLUMNS * 2;

/// The chunks of the segments of a batch. Each segment begins with a chunk, and each chunk except the last of a segment is full.
pub(in crate::ops) struct ChunkTable<'a> {
    /// The first row and the number of rows of each chunk, I32 `[max, 2]`. Chunks after the last have no rows.
    pub of: Tensor,
    /// The first chunk and the number of chunks of each segment, I32 `[count, 2]`.
    pub of_segments: Tensor,
    /// The maximum number of chunks.
    pub max: usize,
    /// The offsets of the segments, if there are any.
    pub at: Option<&'a Tensor>,
    /// The number of segments.
    pub count: usize,
    /// The number of rows, with padding.
    pub rows: usize,
}

impl<'a> ChunkTable<'a> {
    /// Computes the chunks of the segments of the rows of `x`.
    pub fn new(gpu: &CudaDevice, x: &Tensor, segments: &Segments<'a>) -> Result<ChunkTable<'a>> {
        let (rows, count, at) = (x.shape()[0], segments.count(), segments.offsets());
        // Reserved segments may be more than rows.
        let max = rows / CHUNK + count.min(rows);
        let mut of = Tensor::empty(x.device(), &[max, 2], DType::I32)?;
        let mut of_segments = Tensor::empty(x.device(), &[count, 2], DType::I32)?;
        let entry = kernel::chunk_table(&mut of, &mut of_segments, at, count, rows, max);
        // SAFETY: the segments have at most `max` chunks, if the offsets do not exceed the rows: the caller's promise, because
        // offsets are on the GPU.
        unsafe { gpu.launch(&SOURCE.kernel(&[], entry), [1, 1, 1], 1024, 0)? };
        Ok(ChunkTable { of, of_segments, max, at, count, rows })
    }
}
