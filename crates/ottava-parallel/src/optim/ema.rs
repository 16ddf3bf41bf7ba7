//! The exponential moving average of the weights, beside the states of another optimizer.

use super::optimizer::{Optimizer, Per, StateTensor, Updated};
use super::update::IN_ORDER;
use ottava_common::error::Result;
use ottava_recipe::param::Param;
use ottava_recipe::scaling::Casts;
use ottava_tensor::ops::ema;
use ottava_tensor::{DType, Tensor};

/// The kind of the state that holds averages.
pub const EMA: &str = "ema";

/// When and how weights are averaged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmaConfig {
    /// The share of the average that stays when weights are added, above 0 and below 1.
    pub decay: f64,
    /// The first step after which weights may be added.
    pub start: u64,
    /// The number of steps between two additions, at least 1.
    pub every: u64,
}

impl EmaConfig {
    /// Returns the share of the weights in the average after update number `step`, from 1: the average begins with the weights themselves.
    fn share(&self, step: u64) -> f64 {
        match step.checked_sub(self.start) {
            Some(since) if since.is_multiple_of(self.every) && step > 0 => match self.has_begun(step - 1) {
                true => 1.0 - self.decay,
                false => 1.0,
            },
            _ => 0.0,
        }
    }

    /// Returns whether weights have been added in the first `steps` updates.
    pub fn has_begun(&self, steps: u64) -> bool {
        steps >= if self.start == 0 { self.every } else { self.start }
    }
}

/// An optimizer whose states include the averages of the weights that it updates. The averages have no effect on the updates.
pub struct EmaOptimizer {
    optimizer: Box<dyn Optimizer>,
    config: EmaConfig,
    /// The average of each parameter, in the shape of its update.
    averages: Vec<Tensor>,
    /// The share of the weights in the average of the current step, F32 `[1]` on the device.
    share: Tensor,
}

impl EmaOptimizer {
    /// Creates averages for `params`, which `optimizer` updates.
    pub fn new(optimizer: Box<dyn Optimizer>, config: EmaConfig, params: &[&mut Param]) -> Result<EmaOptimizer> {
        let zeros = |param: &&mut Param| {
            Tensor::zeros_in(param.weights.device(), &param.update_shape(), DType::F32, param.states_memory)
        };
        let averages = params.iter().map(|param| Ok(zeros(param)?)).collect::<Result<_>>()?;
        let device = params.first().expect("a model has parameters").weights.device();
        Ok(EmaOptimizer { optimizer, config, averages, share: Tensor::zeros(device, &[1], DType::F32)? })
    }
}

impl Optimizer for EmaOptimizer {
    fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    fn set_steps(&mut self, steps: u64) {
        self.optimizer.set_steps(steps);
    }

    fn begin_step(&mut self, learning_rate: f64, gradient_scale: f64) -> Result<()> {
        self.optimizer.begin_step(learning_rate, gradient_scale)?;
        let share = self.config.share(self.optimizer.steps()) as f32;
        Ok(self.share.write_bytes(&share.to_le_bytes())?)
    }

    fn skip_step(&mut self) {
        self.optimizer.skip_step();
    }

    fn states(&mut self) -> Vec<Vec<StateTensor<'_>>> {
        let averages = self.averages.iter_mut().map(|tensor| StateTensor { kind: EMA, per: Per::Element, tensor });
        let with = |(mut states, average): (Vec<_>, _)| {
            states.push(average);
            states
        };
        self.optimizer.states().into_iter().zip(averages).map(with).collect()
    }

    fn fuses_casts(&self) -> bool {
        self.optimizer.fuses_casts()
    }

    fn amaxes_of(&self, param: &Param) -> usize {
        self.optimizer.amaxes_of(param)
    }

    fn find_amaxes(&mut self, group: &mut [Updated], norm: &Tensor) -> Result<()> {
        self.optimizer.find_amaxes(group, norm)
    }

    fn transforms(&self, param: &Param) -> bool {
        self.optimizer.transforms(param)
    }

    fn directions(&mut self, group: &mut [Updated], norm: &Tensor) -> Result<()> {
        self.optimizer.directions(group, norm)
    }

    fn transform(&self, direction: &Tensor) -> Result<Tensor> {
        self.optimizer.transform(direction)
    }

    fn update(&mut self, group: &mut [Updated], casts: &mut Casts, norm: &Tensor) -> Result<()> {
        self.optimizer.update(group, casts, norm)?;
        let mut averages = self.averages.iter_mut().enumerate();
        for Updated { param, index, .. } in group {
            let (_, average) = averages.find(|(number, _)| number == index).expect(IN_ORDER);
            ema(average, param.weights.for_update(), &self.share, norm)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_begin_with_the_weights_and_continue_every_few_steps() {
        let shares = |start, every| {
            let config = EmaConfig { decay: 0.75, start, every };
            (1..8).map(|step| config.share(step)).collect::<Vec<_>>()
        };
        assert_eq!(shares(0, 1), [1.0, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]);
        assert_eq!(shares(0, 3), [0.0, 0.0, 1.0, 0.0, 0.0, 0.25, 0.0]);
        assert_eq!(shares(2, 3), [0.0, 1.0, 0.0, 0.0, 0.25, 0.0, 0.0]);
        assert!(!EmaConfig { decay: 0.5, start: 0, every: 2 }.has_begun(1));
    }
}
