//! The bias of a linear layer, and its gradient. Grouped rows have a bias for each group.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::{Groups, expect_compute, expect_gradient, real_type};
use crate::ops::dispatch::dispatch;
use crate::{Result, Tensor};

pub(super) use cuda::{add_column_sums, add_partial_sums};

/// Computes `x[t, c] += bias[c]` in place, for `x` `[T, C]` and `bias` `[C]` of one type.
pub fn add_bias(x: &mut Tensor, bias: &Tensor) -> Result<()> {
    let [_, columns] = x.dims("add_bias: x")?;
    expect_compute("add_bias: x", x)?;
    bias.expect("add_bias: bias", &[columns])?;
    bias.expect_dtype("add_bias: bias", &[x.dtype()])?;
    dispatch! { x.device().clone(),
        cpu => cpu::add_bias(x, bias),
        gpu => cuda::add_bias(&gpu, x, bias)?,
    }
    Ok(())
}

/// Computes `dbias[c] += Σ_t dy[t, c]`, for `dy` `[T, C]` and `dbias` `[C]` in F32 (F64 for F64).
pub fn bias_gradient(dy: &Tensor, dbias: &mut Tensor) -> Result<()> {
    let [_, columns] = dy.dims("bias_gradient: dy")?;
    expect_compute("bias_gradient: dy", dy)?;
    dbias.expect("bias_gradient: dbias", &[columns])?;
    expect_gradient("bias_gradient: dbias", dbias, dy)?;
    dispatch! { dy.device(),
        cpu => cpu::bias_gradient(dy, dbias),
        gpu => cuda::bias_gradient(gpu, dy, dbias)?,
    }
    Ok(())
}

/// Computes `x[r, c] += bias[g, c]` in place for the rows `r` of each group `g`, for `x` `[P, C]` and `bias` `[G, C]` of one type. Padding rows do
/// not change.
pub fn add_grouped_bias(x: &mut Tensor, bias: &Tensor, groups: &Groups) -> Result<()> {
    check_groups("add_grouped_bias", x, bias, groups)?;
    bias.expect_dtype("add_grouped_bias: bias", &[x.dtype()])?;
    dispatch! { x.device().clone(),
        cpu => cpu::add_grouped_bias(x, bias, groups),
        gpu => cuda::add_grouped_bias(&gpu, x, bias, groups)?,
    }
    Ok(())
}

/// Computes `dbias[g, c] += Σ_r dy[r, c]` over the rows `r` of each group `g`, for `dy` `[P, C]` and `dbias` `[G, C]` in F32 (F64 for F64). The
/// padding rows of `dy` must be zero. A group without rows adds nothing.
pub fn grouped_bias_gradient(dy: &Tensor, groups: &Groups, dbias: &mut Tensor) -> Result<()> {
    check_groups("grouped_bias_gradient", dy, dbias, groups)?;
    expect_gradient("grouped_bias_gradient: dbias", dbias, dy)?;
    dispatch! { dy.device(),
        cpu => cpu::grouped_bias_gradient(dy, groups, dbias),
        gpu => cuda::grouped_bias_gradient(gpu, dy, groups, dbias)?,
    }
    Ok(())
}

/// Computes `dots[r] += Σ_c dy[r, c] · bias[g, c]` for the rows `r` of each group `g`, for `dy` `[P, C]`, `bias` `[G, C]` of one type and `dots`
/// `[P]` in
/// F32 (F64 for F64). If the outputs of a row are multiplied by a factor, `dots` is the part of the factor's gradient that comes from the bias. The
/// padding of `dots` does not change.
pub fn grouped_bias_dots(dy: &Tensor, bias: &Tensor, groups: &Groups, dots: &mut Tensor) -> Result<()> {
    check_groups("grouped_bias_dots", dy, bias, groups)?;
    bias.expect_dtype("grouped_bias_dots: bias", &[dy.dtype()])?;
    dots.expect("grouped_bias_dots: dots", &dy.shape()[..1])?;
    dots.expect_dtype("grouped_bias_dots: dots", &[real_type(dy.dtype())])?;
    dots.expect_device("grouped_bias_dots: dots", dy.device())?;
    dispatch! { dy.device(),
        cpu => cpu::grouped_bias_dots(dy, bias, groups, dots),
        gpu => cuda::grouped_bias_dots(gpu, dy, bias, groups, dots)?,
    }
    Ok(())
}

fn check_groups(what: &str, x: &Tensor, bias: &Tensor, groups: &Groups) -> Result<()> {
    let [_, columns] = x.dims(what)?;
    expect_compute(what, x)?;
    bias.expect(what, &[groups.len(), columns])?;
    bias.expect_device(what, x.device())?;
    groups.expect(what, x.device())
}
