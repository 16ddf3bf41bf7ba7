//! Reads an exported folder back, and measures the errors of the casts.

use super::cast::Codes;
use super::format::Fp8Format;
use super::linears::Group;
use ottava_checkpoint::WeightFiles;
use ottava_common::error::{Error, Result};
use ottava_tensor::fp8::E4M3;
use ottava_tensor::{Device, Staging};
use serde::Serialize;

/// The result of an export.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The format of the linears; `None` for BF16.
    #[serde(flatten)]
    pub format: Option<Fp8Format>,
    /// Whether the scales of blocks are powers of two, which engines that round scales keep exactly; `None` for other formats.
    pub power_of_two_scales: Option<bool>,
    /// The number of values of all weights.
    pub parameters: usize,
    /// The number of bytes of all tensors.
    pub bytes: usize,
    /// The linears in FP8 or in four bits.
    pub linears: Vec<LinearReport>,
    /// Linears that stay in BF16.
    pub left: Vec<Left>,
    /// The maximum number of tensor parallel ranks that can divide the weights; `None` without FP8 weights.
    pub tensor_parallel: Option<usize>,
}

/// A linear that stays in BF16.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Left {
    /// The name of the linear in the folder.
    pub name: String,
    /// The reason why it stays in BF16.
    pub reason: String,
}

/// A linear in FP8, together with the linears that are cast with it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinearReport {
    /// The name of the fused linear.
    pub name: String,
    /// Why the codes differ from the codes of training; `None` if they are equal.
    pub recast: Option<String>,
    /// The root of the sum of squared cast errors, relative to the root of the sum of squared weights.
    pub relative_error: f64,
    /// The largest absolute cast error.
    pub largest_error: f64,
    /// The number of weights beyond the largest finite code. Not counted in four bits.
    pub saturated: usize,
    /// The number of weights that became zero.
    pub underflowed: usize,
}

impl LinearReport {
    /// Reads the linears of `group` from the `written` folder, and compares them with the linears of `source`.
    ///
    /// Errors with [`Error::Model`] if a weight is not the nearest value of its codes, which means that the writer, the disk or the reader has a
    /// fault.
    pub(super) fn compare(group: &Group, source: &WeightFiles, written: &WeightFiles) -> Result<LinearReport> {
        let mut report = LinearReport::of(group);
        let (mut error, mut total) = (0f64, 0f64);
        for (part, _) in &group.parts {
            let name = format!("{part}.weight");
            let (values, found) = (source.values(&name)?.to_vec::<f32>()?, written.values(&name)?.to_vec::<f32>()?);
            let (scales, codes) =
                (written.scales(&name)?, written.codes(&mut Staging::new(&Device::Cpu), &name)?.read_bytes()?);
            for (i, ((value, found), code)) in values.into_iter().zip(found).zip(codes).enumerate() {
                let scaled = f64::from(value) / f64::from(scales.at(i));
                if !is_nearest(code, scaled) {
                    return Err(exported_wrongly(&name, i, value, found));
                }
                let difference = f64::from(value) - f64::from(found);
                // The amax of a scaled weight may exceed the largest code by the rounding error of the product.
                report.saturated += usize::from(scaled.abs() > 448.0 * 1.0001);
                report.underflowed += usize::from(value != 0.0 && found == 0.0);
                report.largest_error = report.largest_error.max(difference.abs());
                error += difference.powi(2);
                total += f64::from(value).powi(2);
            }
        }
        report.relative_error = if total > 0.0 { (error / total).sqrt() } else { 0.0 };
        Ok(report)
    }

    /// Reads the linears of `group` in four bits from the `written` folder, and compares them with a second cast of the linears of `source`.
    ///
    /// Errors with [`Error::Model`] if a weight is not the value of its cast.
    pub(super) fn compare_fp4(
        group: &Group,
        format: Fp8Format,
        source: &WeightFiles,
        written: &WeightFiles,
    ) -> Result<LinearReport> {
        let Codes::Fp4(packed) = group.cast(source, format)? else { unreachable!("the format has four bits") };
        let (mut report, mut error, mut total) = (LinearReport::of(group), 0f64, 0f64);
        for ((part, _), rows) in group.parts.iter().zip(group.rows()) {
            let name = format!("{part}.weight");
            let (values, found) = (source.values(&name)?.to_vec::<f32>()?, written.values(&name)?.to_vec::<f32>()?);
            for (i, ((value, found), expected)) in values.into_iter().zip(found).zip(packed.values(rows)).enumerate() {
                if found != expected {
                    return Err(exported_wrongly(&name, i, value, found));
                }
                let difference = f64::from(value) - f64::from(found);
                report.underflowed += usize::from(value != 0.0 && found == 0.0);
                report.largest_error = report.largest_error.max(difference.abs());
                error += difference.powi(2);
                total += f64::from(value).powi(2);
            }
        }
        report.relative_error = if total > 0.0 { (error / total).sqrt() } else { 0.0 };
        Ok(report)
    }

    /// Returns the report of a group without errors.
    fn of(group: &Group) -> LinearReport {
        LinearReport {
            name: group.name.clone(),
            recast: group.recast.clone(),
            relative_error: 0.0,
            largest_error: 0.0,
            saturated: 0,
            underflowed: 0,
        }
    }
}

fn exported_wrongly(name: &str, element: usize, value: f32, found: f32) -> Error {
    Error::Model(format!(
        "`{name}` was exported wrongly: element {element} is {value} and was read back as {found}; nothing was kept"
    ))
}

/// Whether no code is nearer to `scaled`, a weight divided by its scale. Scale and product were rounded to F32, so the midpoint between two codes may
/// be off by this rounding error.
fn is_nearest(code: u8, scaled: f64) -> bool {
    let distance = |code: u8| (scaled - f64::from(E4M3(code).to_f32())).abs();
    // Codes of the same sign are ordered by value. The neighbours of both zeros are the two smallest codes.
    let near = match code & 0x7f {
        0 => [0x01, 0x81],
        _ => [code - 1, code + 1],
    };
    let allowed = scaled.abs().min(448.0) * 2f64.powi(-22);
    let nearer = |other: u8| distance(other) + allowed < distance(code);
    distance(code).is_finite() && !near.into_iter().any(nearer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_nearest_code_passes() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            let value = f64::from(E4M3(code).to_f32());
            for scaled in [value, value * (1.0 + 1.0 / 64.0), value + 1e-4] {
                let nearest = E4M3::from_f32(scaled as f32).0;
                let same = E4M3(nearest).to_f32() == E4M3(code).to_f32();
                assert_eq!(is_nearest(code, scaled), same, "{code:#x} of {scaled}, whose code is {nearest:#x}");
            }
        }
        assert!(is_nearest(0x7e, 1e9) && is_nearest(0xfe, -1e9) && !is_nearest(0x7d, 1e9) && !is_nearest(0x7e, -1e9));
        assert!(!is_nearest(0x7f, 480.0) && !is_nearest(0x38, f64::NAN));
    }
}
