//! Products of rows that belong to groups, each with a matrix of its own: the experts of a mixture.
//!
//! The definition, on the CPU, is a loop over the products. On Hopper, `Product::plan` (`wgmma.rs`) chooses a kernel for tensor cores; other GPUs
//! and types use a plain kernel. The number of rows of each group stays on the device, so no host waits for the router.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;
pub(super) mod wgmma;

use super::gemm::{self, Accumulation, Operand};
use crate::granularity::Shared;
use crate::ops::dispatch::dispatch;
use crate::{DType, Device, Error, Result, Tensor, planted};

/// The rows of a matrix `[P, …]` that belong to each of `G` groups. Both tensors are on the device of the matrix, and nothing reads them on
/// the host, so a captured step may change them.
#[derive(Clone, Debug)]
pub struct Groups {
    /// I32 `[G + 1]`: where each group begins, in ascending multiples of [`Groups::ALIGNMENT`]; last, where the rows of no group begin.
    pub offsets: Tensor,
    /// I32 `[G]`: the rows of each group. Rows between them and the next group are padding, which operands hold as zeros.
    pub counts: Tensor,
}

impl Groups {
    /// Groups begin at multiples of this.
    pub const ALIGNMENT: usize = 128;

    /// Groups of these sizes, one after the other.
    pub fn new(device: &Device, counts: &[usize]) -> Result<Groups> {
        let mut offsets = vec![0i32];
        for count in counts {
            offsets.push(offsets[offsets.len() - 1] + count.next_multiple_of(Groups::ALIGNMENT) as i32);
        }
        let counts: Vec<i32> = counts.iter().map(|&count| count as i32).collect();
        Ok(Groups {
            offsets: Tensor::from_slice(device, &[offsets.len()], &offsets)?,
            counts: Tensor::from_slice(device, &[counts.len()], &counts)?,
        })
    }

    /// Rows that suffice for `rows` rows in `groups` groups of any sizes.
    pub fn capacity(rows: usize, groups: usize) -> usize {
        (rows + (Groups::ALIGNMENT - 1) * groups.min(rows)) / Groups::ALIGNMENT * Groups::ALIGNMENT
    }

    /// The number of groups.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// True without groups.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks types, shapes and the device.
    pub(super) fn expect(&self, what: &str, device: &Device) -> Result<()> {
        self.offsets.expect(what, &[self.len() + 1])?;
        for tensor in [&self.offsets, &self.counts] {
            tensor.expect_dtype(what, &[DType::I32])?;
            tensor.expect_device(what, device)?;
        }
        Ok(())
    }
}

/// Which dimension of an operand has a part for each group.
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
    /// Rows of `a`.
    p: usize,
    /// Columns of the result.
    n: usize,
    /// The contracted dimension.
    k: usize,
}

/// `y[r] = a[r] · b[g]ᵀ` for the rows `r` of each group `g`; zero in all other rows. Returns `[P, N]` in type `out`.
///
/// `a` is `[P, K]`. `b` stacks a matrix for each group along the first dimension of the tensor that the operand holds: `[N, K]` of
/// [`Operand::Rows`] and of plain operands, `[K, N]` of [`Operand::Columns`] and of transposed ones. So a weight `[G · N, K]` serves fprop by
/// its rows, and dgrad by its columns.
///
/// Types, scales and sums as in [`gemm_nt`](super::gemm_nt()): the result equals a product for each group, in any order of sums that depends
/// on the shapes alone. Errors if blocks of scales of `b` do not lie within one group.
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

/// `into[g] = a[:, rows of g] · b[:, rows of g]ᵀ` for each group `g`: the gradients of weights. A group without rows gives zeros.
///
/// `a` is `[M, P]`, `b` `[N, P]` and `into` `[G · M, N]`. Types as in [`gemm_nt`](super::gemm_nt()).
pub fn grouped_wgrad_into(
    a: Operand,
    b: Operand,
    groups: &Groups,
    into: &mut Tensor,
    accumulation: Accumulation,
) -> Result<()> {
    wgrad(a, b, groups, into, accumulation, false)
}

/// [`grouped_wgrad_into`] that adds to `into`. A group without rows adds nothing.
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
    gemm::check_types(a, b, into.dtype(), accumulation)?;
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
    gemm::check_types(a, b, out, accumulation)?;
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
