//! AdamW steps of a decoder without a `TrainStep`.

use super::{finish_step, losses_and_gradients, mean};
use ottava_models::Decoder;
use ottava_parallel::optim::{grad_norm, optimizer_tensors};
use ottava_recipe::param::Param;
use ottava_tensor::ops::{AdamW, AdamWParameter, AdamWScalars, CastStatistics, Moments, adamw};
use ottava_tensor::{DType, Tensor};

/// A decoder and the moments of its parameters.
pub struct Training {
    pub decoder: Decoder,
    moments: Vec<Moments>,
    step: u64,
}

impl Training {
    pub fn new(mut decoder: Decoder) -> Training {
        let zeros = |p: &Param| Tensor::zeros(p.weights.device(), p.weights.shape(), DType::F32).expect("memory");
        let moments = decoder.parameters().iter().map(|p| Moments::Plain { m: zeros(p), v: zeros(p) }).collect();
        Training { decoder, moments, step: 0 }
    }

    /// Runs one AdamW step as the referee does, with clipping to norm 1 and decay of matrices. Returns the mean loss.
    pub fn step(&mut self, [inputs, targets]: &[Tensor; 2], rows: usize) -> f64 {
        let losses = {
            let (inputs, targets) = (self.place(inputs), self.place(targets));
            let scale = 1.0 / targets.len() as f64;
            losses_and_gradients(&mut self.decoder, &inputs, &targets, rows, scale).expect("forward and backward run")
        };
        self.step += 1;
        let norm = grad_norm(&self.decoder.parameters()).expect("a norm");
        let (learning_rate, beta1, beta2, epsilon, step) = (1e-3, 0.9, 0.95, 1e-8, self.step);
        let how = AdamW { learning_rate, beta1, beta2, epsilon, step, max_norm: 1.0, gradient_scale: 1.0 };
        let mut scalars = AdamWScalars::new(norm.device()).expect("memory");
        scalars.set(&how).expect("memory");
        let mut unread = CastStatistics::new(norm.device(), 1).expect("memory");
        for (param, moments) in self.decoder.parameters().into_iter().zip(&mut self.moments) {
            let weight_decay = if param.identity.is_matrix() { 0.1 } else { 0.0 };
            let (weight, grad, amaxes, cast) = (param.weights.for_update(), param.gradient.read(), None, None);
            let parameter = AdamWParameter { weight, moments, grad, weight_decay, seed: 0, offset: 0, amaxes, cast };
            adamw(&mut [parameter], &mut unread, &norm, &scalars).expect("an update");
            param.gradient.clear();
        }
        finish_step(&mut self.decoder);
        mean(&losses)
    }

    /// Copies `x` to the device of the decoder.
    pub fn place(&self, x: &Tensor) -> Tensor {
        x.to_device(self.decoder.device()).expect("a copy")
    }

    /// Returns all bits that a step changes: weights, master weights and scaling state.
    pub fn bits(&mut self) -> Vec<Vec<u8>> {
        let scaling = self.decoder.scaling().arrays().expect("readable");
        let mut weights = Vec::new();
        for (param, moments) in self.decoder.parameters().into_iter().zip(&self.moments) {
            let Moments::Plain { m, v } = moments else { unreachable!("as they were made") };
            weights.push(param.weights.value().expect("readable"));
            let masters = optimizer_tensors(&mut param.weights, Vec::new());
            weights.extend(masters.into_iter().map(|kept| kept.tensor.clone()).chain([m.clone(), v.clone()]));
        }
        let tensors = weights.into_iter().chain(scaling.into_iter().map(|(_, array)| array));
        tensors.map(|tensor| tensor.read_bytes().expect("readable")).collect()
    }
}
