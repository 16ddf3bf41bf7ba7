//! A sublayer with norms of its own, inside a branch whose sublayers are summed before a norm of the branch.

use super::cast::{CastInput, OperandCast, SavedOperand};
use super::sublayer::{BranchOperand, Sublayer, SublayerSaved};
use super::{Adaptable, Norm, NormSaved};
use ottava_common::error::Result;
use ottava_recipe::context::Context;
use ottava_recipe::operand::{ResidualGradient, View};
use ottava_recipe::param::Param;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{SavedActivation, add};

/// `y = after(sublayer(before(x)))`. A missing norm is the identity.
pub struct NormedSublayer {
    before: Option<Norm>,
    sublayer: Box<dyn Sublayer>,
    after: Option<Norm>,
}

/// The values that forward of [`NormedSublayer`] saves.
struct NormedSaved {
    before: Option<NormSaved>,
    operand: SavedOperand,
    sublayer: SublayerSaved,
    after: Option<NormSaved>,
}

impl NormedSublayer {
    /// Puts a norm before and a norm after `sublayer`.
    pub fn new(before: Option<Norm>, sublayer: Box<dyn Sublayer>, after: Option<Norm>) -> NormedSublayer {
        NormedSublayer { before, sublayer, after }
    }

    /// Returns the operand of the sublayer, and what the norm before it saves.
    fn operand(&self, x: &Tensor, context: &mut Context) -> Result<(CastInput, Option<NormSaved>)> {
        let cast = self.sublayer.input();
        match &self.before {
            Some(norm) => norm.forward_for(x, &cast, context).map(|(operand, saved)| (operand, Some(saved))),
            None => Ok((cast.cast_input(x.clone(), context.operand_copies(), context)?, None)),
        }
    }
}

impl Sublayer for NormedSublayer {
    /// Returns no cast: the norm, or the sublayer's own cast, reads the value.
    fn input(&self) -> OperandCast {
        OperandCast::NONE
    }

    fn gradient(&self) -> OperandCast {
        OperandCast::NONE
    }

    fn forward(&self, x: View, residual: Option<&Tensor>, context: &mut Context) -> Result<(Tensor, SublayerSaved)> {
        let (CastInput { rows, saved: operand }, before) = self.operand(x.value()?, context)?;
        drop(x);
        let Some(norm) = &self.after else {
            let (y, sublayer) = self.sublayer.forward(rows, residual, context)?;
            return Ok((y, SublayerSaved::new(NormedSaved { before, operand, sublayer, after: None })));
        };
        let (y, sublayer) = self.sublayer.forward(rows, None, context)?;
        let (y, after) = norm.forward(&y, context)?;
        let y = residual.map_or_else(|| Ok(y.clone()), |residual| add(residual, &y))?;
        Ok((y, SublayerSaved::new(NormedSaved { before, operand, sublayer, after: Some(after) })))
    }

    fn save(&self, x: View, context: &mut Context) -> Result<SublayerSaved> {
        if self.after.is_some() {
            return Ok(self.forward(x, None, context)?.1);
        }
        let (CastInput { rows, saved: operand }, before) = self.operand(x.value()?, context)?;
        let sublayer = self.sublayer.save(rows, context)?;
        Ok(SublayerSaved::new(NormedSaved { before, operand, sublayer, after: None }))
    }

    fn backward(
        &mut self,
        dy: ResidualGradient,
        saved: SublayerSaved,
        x: BranchOperand,
        other: Option<Tensor>,
        context: &mut Context,
    ) -> Result<Tensor> {
        let NormedSaved { before, operand, sublayer, after } = saved.into();
        let dy = match (&mut self.after, after) {
            (Some(norm), Some(saved)) => norm.backward(&dy.value, saved)?.into(),
            _ => dy,
        };
        let cast = self.sublayer.input();
        let input = match &self.before {
            Some(_) => None,
            None => Some(SavedActivation::Exact(x.columns(context)?.value()?.clone())),
        };
        let operand = BranchOperand::new(self.before.as_ref().zip(before.as_ref()), input, cast, operand);
        let of_sublayer = if self.before.is_none() { other.clone() } else { None };
        let dx = self.sublayer.backward(dy, sublayer, operand, of_sublayer, context)?;
        match (&mut self.before, before, &other) {
            (Some(norm), Some(saved), Some(other)) => {
                Ok(norm.backward_for(&dx, saved, other, &OperandCast::NONE, context)?.value)
            }
            (Some(norm), Some(saved), None) => norm.backward(&dx, saved),
            _ => Ok(dx),
        }
    }

    fn parameters<'a>(&'a self, visit: &mut dyn FnMut(&'a Param)) {
        self.before.iter().for_each(|norm| norm.parameters(visit));
        self.sublayer.parameters(visit);
        self.after.iter().for_each(|norm| norm.parameters(visit));
    }

    fn parameters_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut Param)) {
        self.before.iter_mut().for_each(|norm| norm.parameters_mut(visit));
        self.sublayer.parameters_mut(visit);
        self.after.iter_mut().for_each(|norm| norm.parameters_mut(visit));
    }

    fn linears_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&'a mut dyn Adaptable)) {
        self.sublayer.linears_mut(visit);
    }
}
