//! Products of rows that ranks still send each other.

use super::Linear;
use crate::error::Result;
use crate::operand::View;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Accumulation, Operand, gemm_nt_into};

impl Linear {
    /// `x · bᵀ`, in which this rank's rows are multiplied while those of other ranks arrive. `None` if all are there, and for what is more than
    /// this product: an `addend`, or an adapter.
    pub(super) fn product_while_gathering(
        &self,
        x: &View,
        b: Operand,
        addend: Option<&Tensor>,
        how: Accumulation,
    ) -> Result<Option<Tensor>> {
        let (View::Gathering(x), Operand::Plain { x: weight, transposed }) = (x, b) else { return Ok(None) };
        let Some((own, range)) = x.own().filter(|_| addend.is_none() && self.adapter.is_none()) else {
            return Ok(None);
        };
        let (rows, outputs) = (x.row_count(), weight.shape()[usize::from(transposed)]);
        let first = usize::from(range.start > 0);
        let ranges = [0..range.start, range.clone(), range.end..rows];
        let ranges: Vec<_> = ranges.into_iter().filter(|rows| !rows.is_empty()).collect();
        let elements: Vec<_> = ranges.iter().map(|rows| rows.start * outputs..rows.end * outputs).collect();
        let y = Tensor::empty(own.device(), &[rows * outputs], self.weight.dtype())?;
        let parts = y.split(&elements)?.into_iter().zip(&ranges);
        let mut parts: Vec<_> =
            parts.map(|(part, rows)| part.reshape(&[rows.len(), outputs])).collect::<ottava_tensor::Result<_>>()?;
        own.device().beside_collectives(|| gemm_nt_into(Operand::plain(&own), b, &mut parts[first], how))?;
        drop(own);
        let all = x.all()?;
        for (i, rows) in ranges.iter().enumerate().filter(|(i, _)| *i != first) {
            gemm_nt_into(Operand::plain(&all.rows(rows.start, rows.end)?), b, &mut parts[i], how)?;
        }
        Ok(Some(Tensor::join(parts)?.reshape(&[rows, outputs])?))
    }
}
