//! Smooth-SwiGLU: FP8 products of an input whose columns are scaled one by one, and of a weight that takes the scales back.
//!
//! `y = (x · s) · (W / s)ᵀ`, where the powers of two `s` bring the largest value of each column of `x` to between one half and one. So
//! no channel's outliers decide how the others are cast, and no amax of the input surprises a history.
//! Fishman et al. 2024, arXiv:2409.12517, section 4.

use super::Linear;
use crate::error::Result;
use crate::layer::GemmInput;
use crate::recipe::ProductPrecision;
use crate::scaling::{Frozen, ScalingState, Slot};
use ottava_tensor::ops::{
    Accumulation, Copies, Operand, add_unscaled_columns, column_scales, gemm_nt, scale_columns, unscale_columns,
};
use ottava_tensor::{DType, Tensor};

/// What backward has of an input that its producer makes again: how it and the weight were scaled and cast.
pub struct Smooth {
    scales: Tensor, /* [K] */
    input: Frozen,
    weight: Frozen,
}

impl Linear {
    /// Whether the columns of its input are scaled one by one in this step.
    pub fn is_smooth(&self, scaling: &ScalingState) -> bool {
        self.fp8.as_ref().is_some_and(|fp8| fp8.smooth_weight.is_some()) && !scaling.is_high_precision()
    }

    /// [`Linear::forward_plus`] of a linear that [is smooth](Linear::is_smooth).
    pub fn forward_smooth(
        &self,
        x: Tensor,
        residual: Option<&Tensor>,
        scaling: &mut ScalingState,
    ) -> Result<(Tensor, Smooth)> {
        let (input_slot, weight_slot) = self.smooth_slots();
        let scales = column_scales(&x)?;
        let x = scale_columns(&x, &scales)?;
        let input = scaling.freeze(input_slot, &x)?;
        let x = scaling.quantize_by(input_slot, &input, &x, Copies::Rows)?;
        let scaled = unscale_columns(&self.weight.value()?, &scales)?;
        let weight = scaling.freeze(weight_slot, &scaled)?;
        let scaled = scaling.quantize_by(weight_slot, &weight, &scaled, Copies::Rows)?;
        let how = fp8(self.products(scaling).fprop);
        let y = self.output(Operand::Rows(&x), Operand::Rows(&scaled), residual, how)?;
        Ok((y, Smooth { scales, input, weight }))
    }

    /// Measures what [`Linear::forward_smooth`] would cast.
    pub(super) fn measure_smooth(&self, x: &Tensor, scaling: &mut ScalingState) -> Result<()> {
        let (input, weight) = self.smooth_slots();
        let scales = column_scales(x)?;
        scaling.measure(input, &scale_columns(x, &scales)?)?;
        scaling.measure(weight, &unscale_columns(&self.weight.value()?, &scales)?)
    }

    /// `dy · W`, as `(dy · (W / s)) · s`, of a gradient from [`Linear::cast_gradient`].
    pub fn dgrad_smooth(&self, dy: &GemmInput, smooth: &Smooth, scaling: &mut ScalingState) -> Result<Tensor> {
        let (_, slot) = self.smooth_slots();
        let weight = unscale_columns(&self.weight.value()?, &smooth.scales)?;
        let weight = scaling.quantize_again(slot, &smooth.weight, &weight, Copies::Columns)?;
        let (out, how) = (self.weight.dtype(), fp8(self.products(scaling).dgrad));
        let dx = gemm_nt(Operand::Rows(dy.codes()), Operand::Columns(&weight), out, how)?;
        Ok(scale_columns(&dx, &smooth.scales)?)
    }

    /// Adds `dyᵀ · x`, as `(dyᵀ · (x · s)) / s`, to the gradient of the weight.
    pub fn wgrad_smooth(
        &mut self,
        dy: &GemmInput,
        x: &Tensor,
        smooth: &Smooth,
        scaling: &mut ScalingState,
    ) -> Result<()> {
        let (slot, _) = self.smooth_slots();
        let x = scale_columns(x, &smooth.scales)?;
        let x = scaling.quantize_again(slot, &smooth.input, &x, Copies::Columns)?;
        let how = fp8(self.products(scaling).wgrad);
        let product = gemm_nt(Operand::Columns(dy.codes()), Operand::Columns(&x), DType::F32, how)?;
        self.weight.add_to_grad(|grad| Ok(add_unscaled_columns(grad, &product, &smooth.scales)?))
    }

    /// The casts of the input and of the weight.
    fn smooth_slots(&self) -> (Slot, Slot) {
        let fp8 = self.fp8.as_ref().expect("a smooth linear is cast");
        (fp8.input, fp8.smooth_weight.expect("its weight is cast here"))
    }
}

fn fp8(product: ProductPrecision) -> Accumulation {
    match product {
        ProductPrecision::Fp8(how) => how,
        ProductPrecision::High => unreachable!("all products of a smooth linear read codes"),
    }
}
