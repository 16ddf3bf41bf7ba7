//! What an export wrote, read back from the files, and what its casts lose.

use super::linears::Group;
use crate::checkpoint::WeightFiles;
use crate::error::{Error, Result};
use serde::Serialize;

/// What was exported.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Values of all weights.
    pub parameters: usize,
    /// Bytes of all tensors.
    pub bytes: usize,
    /// The linears in FP8.
    pub linears: Vec<LinearReport>,
    /// Linears that stay in BF16.
    pub left: Vec<Left>,
    /// The most ranks of tensor parallelism that may divide the weights; `None` without FP8 weights.
    pub tensor_parallel: Option<usize>,
}

/// A linear that stays in BF16.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Left {
    /// Its name in the folder.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// A linear in FP8, with those that are cast together with it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinearReport {
    /// Its name, of the fused linear.
    pub name: String,
    /// Why its codes are not those of training; `None` if they are.
    pub recast: Option<String>,
    /// Root of the sum of squared differences between weights in BF16 and in FP8, relative to that of squared weights.
    pub relative_error: f64,
    /// The largest difference.
    pub largest_error: f64,
    /// Weights beyond the largest finite code.
    pub saturated: usize,
    /// Weights that became zero.
    pub underflowed: usize,
}

impl LinearReport {
    /// Reads the linears of `group` from the folder that was `written` and compares them with those of its `source`.
    ///
    /// Errors with [`Error::Model`] when a weight is not the nearest value of its codes: a fault of the writer, the disk or the reader.
    pub(super) fn compare(group: &Group, source: &WeightFiles, written: &WeightFiles) -> Result<LinearReport> {
        let mut report = LinearReport {
            name: group.name.clone(),
            recast: group.recast.clone(),
            relative_error: 0.0,
            largest_error: 0.0,
            saturated: 0,
            underflowed: 0,
        };
        let (mut error, mut total) = (0f64, 0f64);
        for (part, _) in &group.parts {
            let name = format!("{part}.weight");
            let (values, found) = (source.values(&name)?.to_vec::<f32>()?, written.values(&name)?.to_vec::<f32>()?);
            let scales = written.scales(&name)?;
            for (i, (value, found)) in values.into_iter().zip(found).enumerate() {
                let (value, scale) = (half::bf16::from_f32(value).to_f32(), scales.at(i));
                let difference = (value - found).abs();
                // E4M3 has three bits after the first one, and no finer steps than 2⁻⁹: half of the last place is lost. The products and
                // quotients of scaling are rounded too.
                let allowed = (value.abs() / 16.0).max(scale / 1024.0) * 1.0001;
                // The amax of a scale may exceed the largest code by those.
                let saturated = value.abs() > scale * 448.0 * 1.0001;
                if !(difference <= allowed || saturated) {
                    return Err(Error::Model(format!(
                        "`{name}` was exported wrongly: element {i} is {value} and was read back as {found}; nothing was kept"
                    )));
                }
                report.saturated += usize::from(saturated);
                report.underflowed += usize::from(value != 0.0 && found == 0.0);
                report.largest_error = report.largest_error.max(difference.into());
                error += f64::from(difference).powi(2);
                total += f64::from(value).powi(2);
            }
        }
        report.relative_error = if total > 0.0 { (error / total).sqrt() } else { 0.0 };
        Ok(report)
    }
}
