//! Views of the queries, keys and values of a call.

use super::AttentionSpec;
use crate::ops::expect_compute;
use crate::{DType, Device, Error, Result, Tensor};
use std::ops::Range;

/// The heads that lie next to each other in the rows of a matrix `[T, width]`. Head `h` of token `t` is the elements
/// `column + h·D .. column + (h + 1)·D` of row `t`. The stride between tokens is the width of the matrix.
#[derive(Clone, Copy, Debug)]
pub struct HeadView<'a> {
    /// The matrix that holds the heads, `[T, width]`.
    pub matrix: &'a Tensor,
    /// The column of the first head in each row.
    pub column: usize,
}

impl<'a> HeadView<'a> {
    /// Returns a view of heads that fill the rows of `matrix`.
    pub fn whole(matrix: &'a Tensor) -> HeadView<'a> {
        HeadView { matrix, column: 0 }
    }

    /// Returns the number of elements from one token to the next.
    pub(super) fn stride(&self) -> usize {
        self.matrix.shape()[1]
    }

    /// Returns the address of the first head of the first token.
    pub(super) fn address(&self) -> u64 {
        self.matrix.device_ptr() + (self.column * self.matrix.dtype().size()) as u64
    }
}

/// The queries, keys and values of `batch` sequences, their positions and their documents.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInput<'a> {
    /// The queries: `H` heads of size `D` for `B·S` tokens.
    pub q: HeadView<'a>,
    /// The keys: `H_kv` heads of size `D` for `B·S_k` tokens.
    pub k: HeadView<'a>,
    /// The values: `H_kv` heads of size `D_v` for `B·S_k` tokens.
    pub v: HeadView<'a>,
    /// The number `B` of sequences. They have equal length and follow each other in the rows.
    pub batch: usize,
    /// The position of the first query of each sequence. The first key has position 0. If queries and keys are different parts of a sequence, the
    /// first query has another position.
    pub first_query: usize,
    /// The boundaries of documents, I32 `[documents + 1]` on the device, or `None` if each sequence is one document.
    ///
    /// Document `d` has the keys `cu_seqlens[d]..cu_seqlens[d + 1]` of the `B·S_k` keys, all in one sequence. Unused entries at the end are `B·S_k`,
    /// so a tensor of fixed capacity holds any number of documents. A query belongs to the document of the key at its position. The CPU checks the
    /// boundaries. On a GPU, wrong boundaries give undefined results.
    pub cu_seqlens: Option<&'a Tensor>,
}

impl<'a> AttentionInput<'a> {
    /// Returns three views of a fused projection `[B·S, H·D + H_kv·D + H_kv·D_v]`.
    pub fn fused(
        qkv: &'a Tensor,
        spec: &AttentionSpec,
        batch: usize,
        cu_seqlens: Option<&'a Tensor>,
    ) -> AttentionInput<'a> {
        let view = |column| HeadView { matrix: qkv, column };
        let (q, k) = (spec.query_width(), spec.key_width());
        AttentionInput { q: view(0), k: view(q), v: view(q + k), batch, first_query: 0, cu_seqlens }
    }

    /// Returns the number of query tokens per sequence.
    pub(in crate::ops) fn query_len(&self) -> usize {
        self.q.matrix.shape()[0] / self.batch
    }

    /// Returns the number of key tokens per sequence.
    pub(super) fn key_len(&self) -> usize {
        self.k.matrix.shape()[0] / self.batch
    }

    /// Returns whether queries and keys belong to the same tokens.
    pub(super) fn is_self_attention(&self) -> bool {
        self.first_query == 0 && self.query_len() == self.key_len()
    }

    pub(super) fn views(&self) -> [HeadView<'a>; 3] {
        [self.q, self.k, self.v]
    }

    /// Returns the matrices of the views, each once, in the order of queries, keys and values.
    pub(super) fn matrices(&self) -> Vec<&'a Tensor> {
        let mut found: Vec<&Tensor> = Vec::new();
        for view in self.views() {
            if !found.iter().any(|matrix| std::ptr::eq(*matrix, view.matrix)) {
                found.push(view.matrix);
            }
        }
        found
    }

    /// Returns for each view the index of its matrix in [`AttentionInput::matrices`].
    pub(super) fn matrix_of_views(&self) -> [usize; 3] {
        let matrices = self.matrices();
        self.views().map(|view| {
            matrices.iter().position(|matrix| std::ptr::eq(*matrix, view.matrix)).expect("a view is of a matrix")
        })
    }

    /// Checks types, sizes, devices and documents.
    pub(in crate::ops) fn check(&self, what: &str, spec: &AttentionSpec) -> Result<()> {
        spec.check(what)?;
        expect_compute(what, self.q.matrix)?;
        let widths = [spec.query_width(), spec.key_width(), spec.value_width()];
        for ((name, view), width) in ["q", "k", "v"].iter().zip(self.views()).zip(widths) {
            let what = format!("{what}: {name}");
            let [rows, row_width] = view.matrix.dims(&what)?;
            view.matrix.expect_dtype(&what, &[self.q.matrix.dtype()])?;
            view.matrix.expect_device(&what, self.q.matrix.device())?;
            if view.column + width > row_width {
                let (from, to) = (view.column, view.column + width);
                return Err(Error::Value(format!("{what} is in columns {from}..{to} of rows of {row_width} elements")));
            }
            if self.batch == 0 || !rows.is_multiple_of(self.batch) {
                return Err(Error::Value(format!(
                    "{what}: {rows} tokens are not {} sequences of one length",
                    self.batch
                )));
            }
        }
        self.v.matrix.expect(&format!("{what}: v"), &[self.k.matrix.shape()[0], self.v.stride()])?;
        self.check_documents(what)
    }

    fn check_documents(&self, what: &str) -> Result<()> {
        let Some(at) = self.cu_seqlens else { return Ok(()) };
        let name = format!("{what}: cu_seqlens");
        at.dims::<1>(&name)?;
        at.expect_dtype(&name, &[DType::I32])?;
        at.expect_device(&name, self.q.matrix.device())?;
        if at.len() < 2 {
            return Err(Error::Value(format!("{name} needs at least the start and the end of a document")));
        }
        if self.first_query + self.query_len() > self.key_len() {
            return Err(Error::Value(format!(
                "{what}: with documents each query is at the position of a key; {} queries from position {} are not, at {} keys",
                self.query_len(),
                self.first_query,
                self.key_len()
            )));
        }
        // On a GPU, reading the boundaries would wait for the stream.
        match at.device() {
            Device::Cpu => self.check_boundaries(&name, at.host()),
            _ => Ok(()),
        }
    }

    /// Checks that each document lies within one sequence.
    fn check_boundaries(&self, name: &str, at: &[i32]) -> Result<()> {
        let (tokens, length) = (self.k.matrix.shape()[0] as i32, self.key_len() as i32);
        let is_within_one = |start: i32, end: i32| start == end || start / length == (end - 1) / length;
        for (document, edges) in at.windows(2).enumerate() {
            let (start, end) = (edges[0], edges[1]);
            if start < 0 || end < start || end > tokens || !is_within_one(start, end) {
                return Err(Error::Value(format!(
                    "{name}: document {document}, tokens {start}..{end}, does not lie within one of {} sequences of {length} tokens",
                    self.batch
                )));
            }
        }
        Ok(())
    }

    /// Checks that the views of each matrix cover its columns exactly once. Then its gradient is complete.
    pub(super) fn check_coverage(&self, what: &str, spec: &AttentionSpec) -> Result<()> {
        let widths = [spec.query_width(), spec.key_width(), spec.value_width()];
        for matrix in self.matrices() {
            let of_matrix = self.views().into_iter().zip(widths).filter(|(view, _)| std::ptr::eq(view.matrix, matrix));
            let mut columns: Vec<Range<usize>> =
                of_matrix.map(|(view, width)| view.column..view.column + width).collect();
            columns.sort_by_key(|range| range.start);
            let mut end = 0;
            let in_a_row = columns.iter().all(|range| range.start == std::mem::replace(&mut end, range.end));
            if !in_a_row || end != matrix.shape()[1] {
                return Err(Error::Value(format!(
                    "{what}: queries, keys and values in columns {columns:?} do not divide rows of {} elements among them",
                    matrix.shape()[1]
                )));
            }
        }
        Ok(())
    }
}

/// The gradient of an [`AttentionInput`]: one tensor per matrix of its views, with the same layout.
#[derive(Clone, Debug)]
pub struct AttentionGradient {
    pub(super) tensors: Vec<Tensor>,
}

impl AttentionGradient {
    /// Returns the gradient of a fused projection. Panics if queries, keys and values were views of several tensors.
    pub fn fused(self) -> Tensor {
        let [dqkv] = <[Tensor; 1]>::try_from(self.tensors).expect("queries, keys and values are views of one tensor");
        dqkv
    }

    /// Returns the gradients of the matrices, in the order of queries, keys and values.
    pub fn tensors(self) -> Vec<Tensor> {
        self.tensors
    }
}
