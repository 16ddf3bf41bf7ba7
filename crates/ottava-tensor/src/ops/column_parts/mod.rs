//! Divides the columns of a matrix into equal parts that follow each other in memory. Ranks that divide heads exchange such parts.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::expect_compute;
use crate::ops::dispatch::dispatch;
use crate::{Error, Result, Tensor};

/// Sections of the columns of a matrix. Each section is divided into equal parts.
struct Sections {
    /// The number of columns of each section of a part. There are at most three sections; further widths are 0.
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

    /// Returns the number of columns of a part.
    fn part(&self) -> usize {
        self.widths.iter().sum()
    }

    /// Returns the number of columns of the matrix.
    fn columns(&self) -> usize {
        self.part() * self.parts
    }

    /// Returns the first column in the matrix of section `section` of part `part`.
    fn first(&self, part: usize, section: usize) -> usize {
        self.widths[..section].iter().sum::<usize>() * self.parts + part * self.widths[section]
    }
}

/// Divides the columns of `x` `[T, C]` into `P` parts, `[P, T, C / P]`. Each section of columns is divided into `P` equal pieces, and part `p` has
/// the
/// `p`th piece of each section.
///
/// `widths` has the number of columns of each section, at most three. For example, the sections are queries, keys and values, and each part gets
/// whole heads. Errors with [`Error::Value`] if a section cannot be divided into `P` equal pieces.
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

/// Joins parts `[P, T, C / P]` to a matrix `[T, C]`: the inverse of [`divide_columns`].
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
