//! Lion: the sign of an interpolation of momentum and gradient. Chen et al. 2023, arXiv:2302.06675.

use super::momenta::{Momenta, MomentumConfig};
use super::optimizer::{Optimizer, StateTensor, Updated};
use ottava_common::error::Result;
use ottava_recipe::param::Param;
use ottava_recipe::scaling::Casts;
use ottava_tensor::Tensor;
use ottava_tensor::ops::Direction;

/// Lion for all parameters.
pub struct LionOptimizer {
    momenta: Momenta,
    steps: u64,
}

impl LionOptimizer {
    /// Creates zero momenta for `params`.
    pub fn new(config: MomentumConfig, params: &[&mut Param]) -> Result<LionOptimizer> {
        Ok(LionOptimizer { momenta: Momenta::new(config, Direction::Sign, params, |_| true)?, steps: 0 })
    }

    /// Updates `group`, or only raises its amaxes if `stores` is false.
    fn run(&mut self, group: &mut [Updated], norm: &Tensor, stores: bool) -> Result<()> {
        for updated in group {
            let direction = self.momenta.direction(updated, norm, stores)?;
            self.momenta.descend(updated, &direction, norm, stores)?;
        }
        Ok(())
    }
}

impl Optimizer for LionOptimizer {
    fn steps(&self) -> u64 {
        self.steps
    }

    fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    fn begin_step(&mut self, learning_rate: f64, gradient_scale: f64) -> Result<()> {
        self.steps += 1;
        self.momenta.begin_step(self.steps, learning_rate, gradient_scale)
    }

    fn states(&mut self) -> Vec<Vec<StateTensor<'_>>> {
        self.momenta.states().collect()
    }

    fn amaxes_of(&self, param: &Param) -> usize {
        Momenta::amaxes_of(param)
    }

    fn find_amaxes(&mut self, group: &mut [Updated], norm: &Tensor) -> Result<()> {
        group
            .iter_mut()
            .filter(|updated| updated.amaxes.is_some())
            .try_for_each(|updated| self.run(std::slice::from_mut(updated), norm, false))
    }

    fn update(&mut self, group: &mut [Updated], _: &mut Casts, norm: &Tensor) -> Result<()> {
        self.run(group, norm, true)
    }
}
