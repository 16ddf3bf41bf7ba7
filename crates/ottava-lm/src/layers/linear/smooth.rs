//! Smooth-SwiGLU: FP8 products of an input with scaled columns and of a weight with inversely scaled columns.
//!
//! `y = (x · s) · (W / s)ᵀ`, where the powers of two `s` bring the amax of each column of `x` to between one half and one. So outliers of
//! one channel do not affect the cast of the others, and the input's amax is always in the range of the history.
//! Fishman et al. 2024, arXiv:2409.12517, section 4.

use super::super::cast::OperandCast;
use super::{Linear, LinearConfig, Parts};
use crate::context::Context;
use crate::error::Result;
use crate::mode::{Mode, Pass};
use crate::operand::{FrozenScale, View};
use crate::param::Builder;
use crate::scaling::Slot;
use ottava_tensor::ops::{
    CodeCopies, Operand, add_unscaled_columns, column_scales, gemm_nt, scale_columns, unscale_columns,
};
use ottava_tensor::{DType, Tensor};

/// The linear after SwiGLU, whose input may be smoothed.
pub struct DownProjection {
    /// The linear itself. If its input is smoothed, it owns the cast of the output gradient only.
    pub linear: Linear,
    smooth: Option<SmoothCasts>,
}

/// The casts of a smoothed input and of the inversely scaled weight.
#[derive(Clone, Copy, Debug)]
pub struct SmoothCasts {
    input: Slot,
    weight: Slot,
}

/// What forward saves of a smoothed input: the scales of its columns, and the scales of the casts of input and weight.
pub struct ColumnScales {
    casts: SmoothCasts,
    columns: Tensor, /* [K] */
    input: FrozenScale,
    weight: FrozenScale,
}

impl DownProjection {
    /// A linear after SwiGLU.
    pub fn new(build: &mut Builder, config: LinearConfig) -> Result<DownProjection> {
        let mut parts = config.build(build, true)?;
        let Some((casts, products)) = parts.fp8.filter(|_| parts.smooth) else {
            return Ok(DownProjection { linear: Linear::of(build, config, parts)?, smooth: None });
        };
        let name = config.name;
        let input = build.slots.add(format!("{name}.input"), casts.input);
        // The scaled weight depends on the input, so no update can cast it: its cast does not belong to the parameter.
        let weight = build.slots.add(format!("{name}.weight"), casts.weight);
        parts.weight.place_weights()?;
        let gradient = build.slots.add(format!("{name}.grad_output"), casts.grad_output);
        let gradient = OperandCast::new(gradient, [products.dgrad, products.wgrad], parts.bias.is_some());
        let Parts { weight: own, bias, adapter, .. } = parts;
        let linear = Linear { weight: own, bias, adapter, products, input: OperandCast::NONE, gradient };
        Ok(DownProjection { linear, smooth: Some(SmoothCasts { input, weight }) })
    }

    /// The casts of a smoothed input; `None` if products of this mode do not smooth it.
    pub fn smooth_casts(&self, mode: Mode) -> Option<SmoothCasts> {
        self.smooth.filter(|_| !mode.is_high_precision())
    }

    /// `x · Wᵀ + b`, plus `residual` `[T, N]` if given, with a smoothed input.
    pub fn forward_smooth(
        &self,
        x: &Tensor,
        casts: SmoothCasts,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<(Tensor, ColumnScales)> {
        let SmoothCasts { input: input_slot, weight: weight_slot } = casts;
        let Context { casts: pass, fetched, .. } = context;
        let mut columns = column_scales(x)?;
        if pass.mode.pass == Pass::Inference {
            // The amax of a column is one over all requests.
            columns = Tensor::from_slice(x.device(), columns.shape(), &vec![1f32; columns.len()])?;
        }
        let x = scale_columns(x, &columns)?;
        let input = pass.freeze(input_slot, &x)?;
        let x = pass.quantize(input_slot, &input, &x, CodeCopies::Rows)?;
        let scaled = unscale_columns(&self.linear.weight.read(fetched)?, &columns)?;
        let weight = pass.freeze(weight_slot, &scaled)?;
        let scaled = pass.quantize(weight_slot, &weight, &scaled, CodeCopies::Rows)?;
        let how = self.linear.products.fprop.accumulation();
        let y = self.linear.output(Operand::Rows(&x), Operand::Rows(&scaled), residual, how)?;
        Ok((y, ColumnScales { casts, columns, input, weight }))
    }

    /// Measures what [`DownProjection::forward_smooth`] would cast, in a step that does not smooth `x`.
    pub fn measure_smooth(&self, x: &View, context: &mut Context) -> Result<()> {
        let (Some(SmoothCasts { input, weight }), View::Value(x)) = (self.smooth, x) else { return Ok(()) };
        let Context { casts, fetched, .. } = context;
        let columns = column_scales(x)?;
        casts.measure(input, &scale_columns(x, &columns)?)?;
        casts.measure(weight, &unscale_columns(&self.linear.weight.read(fetched)?, &columns)?)
    }

    /// `dy · W`, as `(dy · (W / s)) · s`.
    pub fn dgrad_smooth(&self, dy: &View, scales: &ColumnScales, context: &mut Context) -> Result<Tensor> {
        let Context { casts, fetched, .. } = context;
        let weight = unscale_columns(&self.linear.weight.read(fetched)?, &scales.columns)?;
        let weight = casts.requantize(scales.casts.weight, &scales.weight, &weight, CodeCopies::Columns)?;
        let (out, how) = (self.linear.weight.dtype(), self.linear.products.dgrad.accumulation());
        let dx = gemm_nt(dy.rows(), Operand::Columns(&weight), out, how)?;
        Ok(scale_columns(&dx, &scales.columns)?)
    }

    /// Adds `dyᵀ · x`, as `(dyᵀ · (x · s)) / s`, to the gradient of the weight.
    pub fn wgrad_smooth(&mut self, dy: &View, x: &Tensor, scales: &ColumnScales, context: &mut Context) -> Result<()> {
        let x = scale_columns(x, &scales.columns)?;
        let x = context.casts.requantize(scales.casts.input, &scales.input, &x, CodeCopies::Columns)?;
        let how = self.linear.products.wgrad.accumulation();
        let product = gemm_nt(dy.columns(), Operand::Columns(&x), DType::F32, how)?;
        self.linear.weight.add_to_grad(|grad| Ok(add_unscaled_columns(grad, &product, &scales.columns)?))
    }
}
