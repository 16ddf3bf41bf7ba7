//! Products of rows that ranks still send each other.

use super::Linear;
use ottava_common::error::Result;
use ottava_recipe::operand::View;
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
        let View::Gathering(x) = x else { return Ok(None) };
        let Some((own, range)) = x.own().filter(|_| addend.is_none() && self.adapter.is_none()) else {
            return Ok(None);
        };
        let (rows, outputs, device) = (x.row_count(), b.rows("weight")?, own.tensor().device());
        let first = usize::from(range.start > 0);
        let ranges = [0..range.start, range.clone(), range.end..rows];
        let ranges: Vec<_> = ranges.into_iter().filter(|rows| !rows.is_empty()).collect();
        let elements: Vec<_> = ranges.iter().map(|rows| rows.start * outputs..rows.end * outputs).collect();
        let y = Tensor::empty(device, &[rows * outputs], self.weight.dtype())?;
        let parts = y.split(&elements)?.into_iter().zip(&ranges);
        let mut parts: Vec<_> =
            parts.map(|(part, rows)| part.reshape(&[rows.len(), outputs])).collect::<ottava_tensor::Result<_>>()?;
        x.beside(|| gemm_nt_into(own.rows(), b, &mut parts[first], how))?;
        drop(own);
        let all = x.all()?;
        for (i, rows) in ranges.iter().enumerate().filter(|(i, _)| *i != first) {
            let part = all.row_range(rows.clone())?.expect("each rank has whole groups of rows");
            gemm_nt_into(part.rows(), b, &mut parts[i], how)?;
        }
        Ok(Some(Tensor::join(parts)?.reshape(&[rows, outputs])?))
    }
}
