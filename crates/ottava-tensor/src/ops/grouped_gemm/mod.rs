//! Products of rows that belong to groups. Each group has a separate matrix, such as an expert of a mixture.
//!
//! The CPU definition is a loop over the products. On Hopper, `Product::plan` (`ops/gemm/wgmma.rs`) chooses a kernel for tensor cores; other GPUs
//! and types use a plain kernel. The number of rows of each group stays on the device, so the host does not wait for the router.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::gemm;
use super::groups::Groups;
use super::operand::{Accumulation, Operand};
use crate::granularity::Shared;
use crate::ops::dispatch::dispatch;
use crate::{DType, Error, Result, Tensor, planted};

/// The dimension of an operand along which the matrices of the groups are stacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stack {
    /// The rows: `[G · N, K]`.
    Rows,
    /// The contracted dimension: `[N, G · K]`.
    Contracted,
}

/// The sizes of a product whose rows are grouped.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    stack: Stack,
    /// The number of rows of `a`.
    p: usize,
    /// The number of columns of the result.
    n: usize,
    /// The length of the contracted dimension.
    k: usize,
}

/// Computes `y[r] = a[r] · b[g]ᵀ` for the rows `r` of each group `g`. The padding of groups is zero, and rows after the last group are undefined. Returns
/// `[P, N]` in type `out`.
///
/// `a` is `[P, K]`. `b` stacks a matrix for each group along the first dimension of its tensor: `[N, K]` for [`Operand::Rows`] and plain operands,
/// `[K, N]` for [`Operand::Columns`] and transposed operands. So one weight `[G · N, K]` is the operand of fprop by its rows, and of dgrad by its
/// columns.
///
/// Types, scales and sums are as in [`gemm_nt`](super::gemm_nt()). The result equals a separate product for each group; the order of sums depends
/// only on the shapes. Errors if a block of scales of `b` extends over two groups.
pub fn grouped_gemm_nt(
    a: Operand,
    b: Operand,
    groups: &Groups,
    out: DType,
    accumulation: Accumulation,
) -> Result<Tensor> {
    let sizes = check(a, b, groups, out, accumulation)?;
    let mut y = Tensor::empty(groups.counts.device(), &[sizes.p, sizes.n], out)?;
    dispatch! { y.device().clone(),
        cpu => {
            cpu::grouped_gemm(a, b, groups, sizes, &mut y)?;
            if a.scale_inv().is_some() {
                planted::damage(&mut y);
            }
        },
        gpu => cuda::grouped_gemm(&gpu, a, b, groups, sizes, &mut y, accumulation)?,
    }
    Ok(y)
}

/// Computes `into[g] = a[:, rows of g] · b[:, rows of g]ᵀ` for each group `g`: the gradients of weights. A group without rows gives zeros.
///
/// `a` is `[M, P]`, `b` `[N, P]` and `into` `[G · M, N]`. Types are as in [`gemm_nt`](super::gemm_nt()).
pub fn grouped_wgrad_into(
    a: Operand,
    b: Operand,
    groups: &Groups,
    into: &mut Tensor,
    accumulation: Accumulation,
) -> Result<()> {
    wgrad(a, b, groups, into, accumulation, false)
}

/// Computes [`grouped_wgrad_into`], but adds the products to `into`. A group without rows adds nothing.
pub fn grouped_wgrad_add(
    a: Operand,
    b: Operand,
    groups: &Groups,
    into: &mut Tensor,
    accumulation: Accumulation,
) -> Result<()> {
    wgrad(a, b, groups, into, accumulation, true)
}

fn wgrad(
    a: Operand,
    b: Operand,
    groups: &Groups,
    into: &mut Tensor,
    accumulation: Accumulation,
    add: bool,
) -> Result<()> {
    let ((m, rows), (n, other)) = (a.size("grouped_wgrad: a")?, b.size("grouped_wgrad: b")?);
    if rows != other {
        return Err(Error::Shape {
            what: "grouped_wgrad: b".into(),
            expected: format!("[{n}, {rows}], to be contracted with a [{m}, {rows}]"),
            got: vec![n, other],
        });
    }
    check_types(a, b, into.dtype(), accumulation)?;
    let device = a.matrix("grouped_wgrad: a")?.0.device().clone();
    b.matrix("grouped_wgrad: b")?.0.expect_device("grouped_wgrad: b", &device)?;
    into.expect("grouped_wgrad: into", &[groups.len() * m, n])?;
    into.expect_device("grouped_wgrad: into", &device)?;
    groups.expect("grouped_wgrad: groups", &device)?;
    dispatch! { device,
        cpu => {
            cpu::grouped_wgrad(a, b, groups, into, add)?;
            if a.scale_inv().is_some() {
                planted::damage(into);
            }
        },
        gpu => cuda::grouped_wgrad(&gpu, a, b, groups, into, accumulation, add)?,
    }
    Ok(())
}

/// Checks types and scales as [`gemm_nt`](super::gemm_nt()) does. Grouped products have no scales of the tensors besides scales of blocks.
fn check_types(a: Operand, b: Operand, out: DType, accumulation: Accumulation) -> Result<()> {
    if let Some((_, granularity)) = a.scale_inv().filter(|(_, granularity)| granularity.has_tensor_scale()) {
        return Err(Error::Value(format!("grouped_gemm: there are no grouped products of {granularity} operands")));
    }
    gemm::check_types(a, b, out, accumulation)
}

fn check(a: Operand, b: Operand, groups: &Groups, out: DType, accumulation: Accumulation) -> Result<Sizes> {
    let ((p, k), (n, stacked)) = (a.size("grouped_gemm: a")?, b.size("grouped_gemm: b")?);
    let stack = match b {
        Operand::Plain { transposed: false, .. } | Operand::Rows(_) => Stack::Rows,
        Operand::Plain { transposed: true, .. } | Operand::Columns(_) => Stack::Contracted,
    };
    let count = groups.len();
    let fits = match stack {
        Stack::Rows => n.is_multiple_of(count.max(1)) && stacked == k,
        Stack::Contracted => stacked == count * k,
    };
    if !fits || count == 0 {
        let expected = match stack {
            Stack::Rows => format!("a matrix [N, {k}] for each of {count} groups"),
            Stack::Contracted => format!("a matrix [{k}, N] for each of {count} groups"),
        };
        return Err(Error::Shape { what: "grouped_gemm: b".into(), expected, got: vec![n, stacked] });
    }
    check_types(a, b, out, accumulation)?;
    let device = a.matrix("grouped_gemm: a")?.0.device();
    b.matrix("grouped_gemm: b")?.0.expect_device("grouped_gemm: b", device)?;
    groups.expect("grouped_gemm: groups", device)?;
    let n = if stack == Stack::Rows { n / count } else { n };
    if let Some((_, granularity)) = b.scale_inv() {
        let (what, step, block) = match (stack, granularity.info().shared) {
            (Stack::Rows, Shared::Square(side)) => ("rows", n, side),
            (Stack::Rows, _) => ("rows", n, 1),
            (Stack::Contracted, _) => ("columns", k, granularity.block().unwrap_or(1)),
        };
        if !step.is_multiple_of(block) {
            return Err(Error::Value(format!(
                "grouped_gemm: {granularity} scales of b: the {step} {what} of a group are not whole blocks of {block}"
            )));
        }
    }
    Ok(Sizes { stack, p, n, k })
}
