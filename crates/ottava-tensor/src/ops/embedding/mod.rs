//! Looks up rows of a table by token id.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{expect_compute, expect_gradient};
use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// Returns `y[t] = table[ids[t]]` for `ids` I32 `[T]` and `table` `[V, C]`. The caller must have checked that ids are in `0..V`.
pub fn embedding(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    rows(table, ids, None)
}

/// Looks up rows as in [`embedding`], but `table` `[V', C]` has only the tokens `first..first + V'` of a vocabulary. Other tokens give zeros, so the
/// sum over all parts of the vocabulary is the embedding.
pub fn embedding_of_part(table: &Tensor, ids: &Tensor, first: usize) -> Result<Tensor> {
    rows(table, ids, Some(first))
}

fn rows(table: &Tensor, ids: &Tensor, first: Option<usize>) -> Result<Tensor> {
    let [_, channels] = table.dims("embedding: table")?;
    let [tokens] = ids.dims("embedding: ids")?;
    expect_compute("embedding: table", table)?;
    ids.expect_dtype("embedding: ids", &[DType::I32])?;
    ids.expect_device("embedding: ids", table.device())?;
    let mut y = Tensor::empty(table.device(), &[tokens, channels], table.dtype())?;
    dispatch! { table.device(),
        cpu => cpu::embedding(table, ids, first, &mut y),
        gpu => cuda::embedding(gpu, table, ids, first, &mut y)?,
    }
    Ok(y)
}

/// Computes `dtable[v] += Σ_{t: ids[t] = v} dy[t]`, in the order of `t`, for `dy` `[T, C]` and `dtable` `[V, C]` in F32 (F64 for F64).
pub fn embedding_gradient(dy: &Tensor, ids: &Tensor, dtable: &mut Tensor) -> Result<()> {
    add_rows(dy, ids, None, dtable)
}

/// Adds the gradient as in [`embedding_gradient`], but the table has only the tokens `first..first + V'`. Other tokens are ignored.
pub fn embedding_of_part_gradient(dy: &Tensor, ids: &Tensor, first: usize, dtable: &mut Tensor) -> Result<()> {
    add_rows(dy, ids, Some(first), dtable)
}

fn add_rows(dy: &Tensor, ids: &Tensor, first: Option<usize>, dtable: &mut Tensor) -> Result<()> {
    let [tokens, channels] = dy.dims("embedding_gradient: dy")?;
    let [vocabulary, _] = dtable.dims("embedding_gradient: dtable")?;
    expect_compute("embedding_gradient: dy", dy)?;
    ids.expect("embedding_gradient: ids", &[tokens])?;
    dtable.expect("embedding_gradient: dtable", &[vocabulary, channels])?;
    expect_gradient("embedding_gradient: dtable", dtable, dy)?;
    dispatch! { dy.device(),
        cpu => cpu::embedding_gradient(dy, ids, first, dtable),
        gpu => cuda::embedding_gradient(gpu, dy, ids, first, dtable)?,
    }
    Ok(())
}
