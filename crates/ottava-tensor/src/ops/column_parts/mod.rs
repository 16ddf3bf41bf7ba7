//! Columns of a matrix in equal parts, one after another: what ranks that divide heads send each other.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::ops::dispatch::dispatch;
use crate::{Error, Result, Tensor};

/// Sections of the columns of a matrix. Each section is divided into equal parts.
struct Sections {
    /// Columns of each section in a part; at most three, the others are 0.
    widths: [usize; 3],
    parts: usize,
    rows: usize,
}

impl Sections {
    fn new(what: &str, widths: &[usize], parts: usize, rows: usize) -> Result<Sections> {
        let divides = parts > 0 && widths.iter().all(|width| width.is_multiple_of(parts));
        if widths.is_empty() || widths.len() > 3 || !divides {
            return Err(Error::Value(format!("{what}: {parts} parts do not divide sections of {widths:?} columns")));
        }
        let mut of_part = [0; 3];
        of_part.iter_mut().zip(widths).for_each(|(of_part, width)| *of_part = width / parts);
        Ok(Sections { widths: of_part, parts, rows })
    }

    /// Columns of a part.
    fn part(&self) -> usize {
        self.widths.iter().sum()
    }

    /// Columns of the matrix.
    fn columns(&self) -> usize {
        self.part() * self.parts
    }

    /// The first column of the matrix of section `section` of part `part`.
    fn first(&self, part: usize, section: usize) -> usize {
        self.widths[..section].iter().sum::<usize>() * self.parts + part * self.widths[section]
    }
}

/// `[P, T, C / P]`: part `p` has the `p`th of `P` equal parts of each section of the columns of `x` `[T, C]`. The sections have these
/// `widths`, at most three; for example queries, keys and values, where each part gets whole heads.
///
/// Errors with [`Error::Value`] if the parts do not divide a section.
pub fn divide_columns(x: &Tensor, widths: &[usize], parts: usize) -> Result<Tensor> {
    let [rows, columns] = x.dims("divide_columns: x")?;
    expect_compute("divide_columns: x", x)?;
    let sections = Sections::new("divide_columns", widths, parts, rows)?;
    x.expect("divide_columns: x", &[rows, sections.columns()])?;
    let mut y = Tensor::empty(x.device(), &[parts, rows, columns / parts], x.dtype())?;
    dispatch! { x.device(),
        cpu => cpu::divide(x, &mut y, &sections),
        gpu => cuda::divide(gpu, x, &mut y, &sections)?,
    }
    Ok(y)
}

/// `[T, C]` from its parts `[P, T, C / P]`: the inverse of [`divide_columns`].
pub fn join_columns(parts: &Tensor, widths: &[usize]) -> Result<Tensor> {
    let [count, rows, columns] = parts.dims("join_columns: parts")?;
    expect_compute("join_columns: parts", parts)?;
    let sections = Sections::new("join_columns", widths, count, rows)?;
    parts.expect("join_columns: parts", &[count, rows, sections.part()])?;
    let mut y = Tensor::empty(parts.device(), &[rows, columns * count], parts.dtype())?;
    dispatch! { parts.device(),
        cpu => cpu::join(parts, &mut y, &sections),
        gpu => cuda::join(gpu, parts, &mut y, &sections)?,
    }
    Ok(y)
}
