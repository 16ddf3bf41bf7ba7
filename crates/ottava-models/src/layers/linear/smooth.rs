//! Smooth-SwiGLU: FP8 products of an input with scaled columns and of a weight with inversely scaled columns.
//!
//! `y = (x · s) · (W / s)ᵀ`. In training, the powers of two `s` scale the amax of each column of `x` to between 1/2 and 1, unless the column is zero
//! or infinite. So an outlier in one channel does not change the scale of the other channels, and a scale from the amax history fits every step.
//! Fishman et al. 2024, arXiv:2409.12517, section 4.

use super::super::cast::OperandCast;
use super::core::{Core, WeightProduct};
use super::exchange::Exchange;
use super::{Linear, LinearConfig, Parts, amax_group};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::mode::Pass;
use ottava_recipe::operand::{FrozenScale, View};
use ottava_recipe::param::Builder;
use ottava_recipe::scaling::{Quantity, Slot};
use ottava_tensor::ops::{
    CodeCopies, Operand, add_unscaled_columns, column_scales, gemm_nt, scale_columns, unscale_columns,
};
use ottava_tensor::{DType, Tensor};

/// The casts of a smoothed input and of the inversely scaled weight.
#[derive(Clone, Copy, Debug)]
pub struct SmoothCasts {
    input: Slot,
    weight: Slot,
}

/// The scales that forward saves of a smoothed input: the scales of its columns, and the scales for casting input and weight.
pub struct ColumnScales {
    columns: Tensor, /* [K] */
    input: FrozenScale,
    weight: FrozenScale,
}

impl Linear {
    /// Creates a linear after an activation. If its input is smoothed, also returns the casts of input and weight. The linear then owns only the cast
    /// of the output gradient.
    pub fn after_activation(build: &mut Builder, config: LinearConfig) -> Result<(Linear, Option<SmoothCasts>)> {
        let parts = config.build(build, true)?;
        let Some((casts, products)) = parts.fp8.filter(|_| parts.smooth) else {
            return Ok((Linear::from_parts(build, config, parts)?, None));
        };
        let name = config.name;
        let group = amax_group(build);
        let input = build.slots.add(format!("{name}.input"), casts.input, group, None);
        // The scaled weight depends on the input, so updates cannot cast it, and its cast is not part of the parameter.
        let weight = build.slots.add(format!("{name}.weight"), casts.weight, group, Some(input));
        let gradient = build.slots.add(format!("{name}.grad_output"), casts.grad_output, group, Some(input));
        let gradient = OperandCast::new(gradient, [products.dgrad, products.wgrad], parts.bias.is_some()).gathering();
        let Parts { weight: own, bias, adapter, .. } = parts;
        let exchange = Exchange::new(config.split, build.place());
        let core = Core { weight: own, products, input: OperandCast::NONE, gradient };
        let linear = Linear { core, bias, adapter, constants: None, exchange };
        Ok((linear, Some(SmoothCasts { input, weight })))
    }
}

impl SmoothCasts {
    /// Returns `x · Wᵀ + b`, plus `residual` `[T, N]` if given, with a smoothed input.
    pub fn forward(
        self,
        linear: &Linear,
        x: &Tensor,
        residual: Option<&Tensor>,
        context: &mut Context,
    ) -> Result<(Tensor, ColumnScales)> {
        let sums = linear.sums(WeightProduct::Fprop);
        let Context { casts: pass, loan, .. } = &mut *context;
        let mut columns = column_scales(x)?;
        if pass.mode.pass == Pass::Inference {
            // In inference all `s` are 1, because the amax of a column would depend on the other requests of the batch.
            columns = Tensor::from_slice(x.device(), columns.shape(), &vec![1f32; columns.len()])?;
        }
        let scaled = scale_columns(x, &columns)?;
        let input = pass.freeze(self.input, &scaled)?;
        let codes = pass.quantize(self.input, &input, &scaled, CodeCopies::Rows)?;
        pass.keep_rows(self.input, x)?;
        pass.probe_cast(self.input, &codes, &scaled)?;
        let scaled = unscale_columns(&linear.core.weight.read(loan)?, &columns)?;
        let weight = pass.freeze(self.weight, &scaled)?;
        let weight_codes = pass.quantize(self.weight, &weight, &scaled, CodeCopies::Rows)?;
        pass.probe_cast(self.weight, &weight_codes, &scaled)?;
        let how = linear.core.products.fprop.accumulation();
        let operands = [Operand::Rows(&codes), Operand::Rows(&weight_codes)];
        let addend = residual.filter(|_| !sums);
        let y = linear.core.product(WeightProduct::Fprop, operands, addend, how, context)?;
        let y = linear.with_bias(WeightProduct::Fprop, y, context)?;
        let y = if sums { context.sum(linear.core.weight.identity.name(), y, residual)? } else { y };
        Ok((y, ColumnScales { columns, input, weight }))
    }

    /// Measures the tensors that [`SmoothCasts::forward`] would cast, in a step that does not smooth `x`.
    pub fn measure(self, linear: &Linear, x: &View, context: &mut Context) -> Result<()> {
        let View::Value(x) = x else { return Ok(()) };
        let Context { casts, loan, .. } = context;
        let columns = column_scales(x)?;
        casts.measure(self.input, &scale_columns(x, &columns)?)?;
        casts.measure(self.weight, &unscale_columns(&linear.core.weight.read(loan)?, &columns)?)
    }

    /// Returns `dy · W`, computed as `(dy · (W / s)) · s`.
    pub fn dgrad(self, linear: &Linear, dy: &View, scales: &ColumnScales, context: &mut Context) -> Result<Tensor> {
        let Context { casts, loan, .. } = &mut *context;
        linear.core.compare_loss_cost(dy, casts)?;
        let weight = unscale_columns(&linear.core.weight.read(loan)?, &scales.columns)?;
        let weight = casts.requantize(self.weight, &scales.weight, &weight, CodeCopies::Columns)?;
        let how = linear.core.products.dgrad.accumulation();
        let operands = [dy.rows()?, Operand::Columns(&weight)];
        let dx = linear.core.product(WeightProduct::Dgrad, operands, None, how, context)?;
        Ok(scale_columns(&dx, &scales.columns)?)
    }

    /// Adds `dyᵀ · x`, computed as `(dyᵀ · (x · s)) / s`, to the gradient of the weight. This product is never deferred, since it is divided by
    /// columns.
    pub fn wgrad(
        self,
        linear: &mut Linear,
        dy: &View,
        x: &Tensor,
        scales: &ColumnScales,
        context: &mut Context,
    ) -> Result<()> {
        let x = scale_columns(x, &scales.columns)?;
        let x = context.casts.requantize(self.input, &scales.input, &x, CodeCopies::Columns)?;
        let how = linear.core.products.wgrad.accumulation();
        let (dy, x) = (dy.columns()?, Operand::Columns(&x));
        let product = gemm_nt(dy, x, DType::F32, how)?;
        if context.casts.compares() {
            linear.core.compare_rows(Quantity::Wgrad, &product, [dy, x], &mut context.casts)?;
        }
        linear.core.weight.gradient.add(|grad| Ok(add_unscaled_columns(grad, &product, &scales.columns)?))
    }
}
