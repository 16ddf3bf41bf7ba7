//! The definition: for each group, a product of parts of the operands.

use super::{Sizes, Stack};
use crate::granularity::Shared;
use crate::ops::gemm::cpu as product;
use crate::ops::groups::Groups;
use crate::ops::operand::Operand;
use crate::{DType, QuantizedTensor, Result, Tensor};
use std::ops::Range;

pub(super) fn grouped_gemm(a: Operand, b: Operand, groups: &Groups, sizes: Sizes, y: &mut Tensor) -> Result<()> {
    let Sizes { stack, n, k, .. } = sizes;
    y.fill_zero()?;
    for (g, rows) in rows_of(groups).into_iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
        let b = match stack {
            Stack::Rows => Part::new(b, g * n..(g + 1) * n, 0..k)?,
            Stack::Contracted => Part::new(b, 0..n, g * k..(g + 1) * k)?,
        };
        let a = Part::new(a, rows.clone(), 0..k)?;
        let mut part = Tensor::empty(y.device(), &[rows.len(), n], y.dtype())?;
        product::gemm(a.operand(), b.operand(), &mut part, false)?;
        y.copy_from(rows.start, &part)?;
    }
    Ok(())
}

pub(super) fn grouped_wgrad(a: Operand, b: Operand, groups: &Groups, into: &mut Tensor, add: bool) -> Result<()> {
    let (m, n) = (into.shape()[0] / groups.len(), into.shape()[1]);
    for (g, rows) in rows_of(groups).into_iter().enumerate() {
        let first = g * m;
        let mut part = Tensor::zeros(into.device(), &[m, n], into.dtype())?;
        if add {
            part.copy_from(0, &into.rows(first, first + m)?)?;
        }
        if !rows.is_empty() {
            let (a, b) = (Part::new(a, 0..m, rows.clone())?, Part::new(b, 0..n, rows)?);
            product::gemm(a.operand(), b.operand(), &mut part, add)?;
        }
        into.copy_from(first, &part)?;
    }
    Ok(())
}

/// Returns the rows of each group.
fn rows_of(groups: &Groups) -> Vec<Range<usize>> {
    let rows = groups.offsets.host::<i32>().iter().zip(groups.counts.host::<i32>());
    rows.map(|(&first, &count)| first as usize..(first + count) as usize).collect()
}

/// A part of an operand, which is an operand itself.
enum Part {
    Plain { x: Tensor, transposed: bool },
    Codes(QuantizedTensor),
}

impl Part {
    /// Returns the `rows` of an operand, with the contracted columns `k`. If blocks share scales, `k` must begin with a block.
    fn new(operand: Operand, rows: Range<usize>, k: Range<usize>) -> Result<Part> {
        let (x, transposed) = operand.matrix("grouped_gemm")?;
        let Some((scale_inv, granularity)) = operand.scale_inv() else {
            let [lines, columns] = if transposed { [k, rows] } else { [rows, k] };
            return Ok(Part::Plain { x: block(x, lines, columns)?, transposed });
        };
        let scales = |rows: Range<usize>, columns: Range<usize>| block(scale_inv, rows, columns);
        let blocks = |length: usize| k.start / length..k.end.div_ceil(length);
        let scale_inv = match granularity.info().shared {
            Shared::Tensor => scale_inv.clone(),
            Shared::Row => scale_inv.rows(rows.start, rows.end)?,
            Shared::Square(side) => scales(rows.start / side..rows.end.div_ceil(side), blocks(side))?,
            Shared::Strip(block) => scales(blocks(block), rows.clone())?,
        };
        Ok(Part::Codes(QuantizedTensor {
            rows: rows.len(),
            columns: k.len(),
            format: x.dtype(),
            codes: Some(block(x, rows, k)?),
            transposed: None,
            scale_inv,
            transposed_scale_inv: None,
            granularity,
        }))
    }

    fn operand(&self) -> Operand<'_> {
        match self {
            &Part::Plain { ref x, transposed } => Operand::Plain { x, transposed },
            Part::Codes(codes) => Operand::Rows(codes),
        }
    }
}

/// Returns a submatrix.
fn block(x: &Tensor, rows: Range<usize>, columns: Range<usize>) -> Result<Tensor> {
    let [_, width] = x.dims("grouped_gemm: an operand")?;
    if columns == (0..width) {
        return x.rows(rows.start, rows.end);
    }
    let (size, bytes) = (x.dtype().size(), bytes_of(x));
    let line = |row: usize| &bytes[(row * width + columns.start) * size..][..columns.len() * size];
    let values: Vec<u8> = rows.clone().flat_map(line).copied().collect();
    Tensor::from_bytes(x.device(), &[rows.len(), columns.len()], x.dtype(), &values)
}

fn bytes_of(x: &Tensor) -> &[u8] {
    use crate::fp8::{E4M3, E5M2};
    match x.dtype() {
        DType::F64 => bytemuck::cast_slice(x.host::<f64>()),
        DType::F32 => bytemuck::cast_slice(x.host::<f32>()),
        DType::F16 => bytemuck::cast_slice(x.host::<half::f16>()),
        DType::BF16 => bytemuck::cast_slice(x.host::<half::bf16>()),
        DType::E4M3 => bytemuck::cast_slice(x.host::<E4M3>()),
        _ => bytemuck::cast_slice(x.host::<E5M2>()),
    }
}
