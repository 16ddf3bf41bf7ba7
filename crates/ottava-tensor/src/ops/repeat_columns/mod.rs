//! Repeats blocks of columns. If there are more ranks that divide sequences than key and value heads, these ranks send repeated heads.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::ops::dispatch::dispatch;
use crate::{Error, Result, Tensor};

/// Consecutive columns of a matrix, in blocks that are repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepeatedColumns {
    /// The number of columns of the section in the matrix.
    pub columns: usize,
    /// The number of columns of a block.
    pub block: usize,
    /// The number of consecutive repetitions of each block in the repeated matrix.
    pub times: usize,
}

/// The sections of a row, and the number of columns of the matrix and of the repeated matrix.
struct Sections {
    of: [RepeatedColumns; 3],
    columns: usize,
    repeated: usize,
}

impl Sections {
    fn new(what: &str, sections: &[RepeatedColumns]) -> Result<Sections> {
        let fits = |section: &RepeatedColumns| {
            section.block > 0 && section.times > 0 && section.columns.is_multiple_of(section.block)
        };
        if sections.len() > 3 || !sections.iter().all(fits) {
            return Err(Error::Value(format!("{what}: {sections:?} are not at most three sections of whole blocks")));
        }
        let mut of = [RepeatedColumns { columns: 0, block: 1, times: 1 }; 3];
        of[..sections.len()].copy_from_slice(sections);
        let columns = of.iter().map(|section| section.columns).sum();
        let repeated = of.iter().map(|section| section.columns * section.times).sum();
        Ok(Sections { of, columns, repeated })
    }
}

/// Returns the matrix `x` `[T, C]` with repeated blocks of columns. The `sections`, at most three, divide the columns of `x`.
///
/// Errors with [`Error::Value`] if a section does not consist of whole blocks.
pub fn repeat_columns(x: &Tensor, sections: &[RepeatedColumns]) -> Result<Tensor> {
    let [rows, _] = x.dims("repeat_columns: x")?;
    expect_compute("repeat_columns: x", x)?;
    let sections = Sections::new("repeat_columns", sections)?;
    x.expect("repeat_columns: x", &[rows, sections.columns])?;
    let mut y = Tensor::empty(x.device(), &[rows, sections.repeated], x.dtype())?;
    dispatch! { x.device(),
        cpu => cpu::repeat(x, &mut y, &sections),
        gpu => cuda::repeat_columns(gpu, x, &mut y, &sections)?,
    }
    Ok(y)
}

/// Returns the gradient of [`repeat_columns`] from `dy`, the gradient by the repeated matrix. Repetitions are added in order, and the sum is rounded
/// once.
pub fn repeat_columns_backward(dy: &Tensor, sections: &[RepeatedColumns]) -> Result<Tensor> {
    let [rows, _] = dy.dims("repeat_columns_backward: dy")?;
    expect_compute("repeat_columns_backward: dy", dy)?;
    let sections = Sections::new("repeat_columns_backward", sections)?;
    dy.expect("repeat_columns_backward: dy", &[rows, sections.repeated])?;
    let mut dx = Tensor::empty(dy.device(), &[rows, sections.columns], dy.dtype())?;
    dispatch! { dy.device(),
        cpu => cpu::backward(dy, &mut dx, &sections),
        gpu => cuda::repeat_columns_backward(gpu, dy, &mut dx, &sections)?,
    }
    Ok(dx)
}
