//! Muon: the update of each hidden matrix is its orthogonalised momentum. Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon/>. Updates
//! are scaled as in Liu et al. 2025, arXiv:2502.16982.

use super::adamw::{AdamWConfig, AdamWOptimizer};
use super::momenta::{Momenta, MomentumConfig};
use super::optimizer::{Optimizer, StateTensor, Updated};
use ottava_common::error::Result;
use ottava_recipe::param::Param;
use ottava_recipe::scaling::Casts;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Direction, newton_schulz};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The factor of the learning rate of a matrix `[R, C]`, named as in PyTorch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// `0.2 · √max(R, C)`: updates are as large as AdamW's updates, so that its learning rate and weight decay apply.
    #[default]
    MatchRmsAdamw,
    /// `√max(1, R / C)`, Jordan's.
    Original,
}

impl AdjustLr {
    fn factor(self, rows: usize, columns: usize) -> f32 {
        let (rows, columns) = (rows as f64, columns as f64);
        let factor = match self {
            AdjustLr::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
            AdjustLr::Original => (rows / columns).max(1.0).sqrt(),
        };
        factor as f32
    }
}

/// Muon for the matrices of the blocks, and AdamW for embeddings, head, norms and biases. Muon treats each tensor of a model folder separately.
pub struct MuonOptimizer {
    adjust: AdjustLr,
    momenta: Momenta,
    /// The optimizer of all other parameters. It also counts the steps.
    adamw: AdamWOptimizer,
}

impl MuonOptimizer {
    /// Creates zero states for `params`. `momentum` is the decay of Muon's momentum.
    pub fn new(momentum: f64, adjust: AdjustLr, adamw: AdamWConfig, params: &[&mut Param]) -> Result<MuonOptimizer> {
        let AdamWConfig { weight_decay, max_grad_norm, .. } = adamw;
        let config = MomentumConfig { beta1: momentum, beta2: momentum, weight_decay, max_grad_norm };
        let momenta = Momenta::new(config, Direction::Nesterov, params, |param| param.identity.is_hidden_matrix())?;
        let adamw = AdamWOptimizer::for_some(adamw, params, |param| !param.identity.is_hidden_matrix())?;
        Ok(MuonOptimizer { adjust, momenta, adamw })
    }
}

impl Optimizer for MuonOptimizer {
    fn steps(&self) -> u64 {
        self.adamw.steps()
    }

    fn set_steps(&mut self, steps: u64) {
        self.adamw.set_steps(steps);
    }

    fn begin_step(&mut self, learning_rate: f64, gradient_scale: f64) -> Result<()> {
        self.adamw.begin_step(learning_rate, gradient_scale)?;
        self.momenta.begin_step(self.adamw.steps(), learning_rate, gradient_scale)
    }

    fn states(&mut self) -> Vec<Vec<StateTensor<'_>>> {
        let both = self.adamw.states().into_iter().zip(self.momenta.states());
        both.map(|(moments, momentum)| moments.into_iter().chain(momentum).collect()).collect()
    }

    fn amaxes_of(&self, param: &Param) -> usize {
        if self.transforms(param) { Momenta::amaxes_of(param) } else { self.adamw.amaxes_of(param) }
    }

    /// Finds the amax of a matrix's momentum before the direction is known, and the amax of its weights afterwards.
    fn find_amaxes(&mut self, group: &mut [Updated], norm: &Tensor) -> Result<()> {
        for updated in group.iter_mut().filter(|updated| updated.amaxes.is_some()) {
            match updated.direction.clone() {
                Some(direction) => self.momenta.descend(updated, &direction, norm, false)?,
                None if self.transforms(updated.param) => drop(self.momenta.direction(updated, norm, false)?),
                None => self.adamw.find_amaxes(std::slice::from_mut(updated), norm)?,
            }
        }
        Ok(())
    }

    fn transforms(&self, param: &Param) -> bool {
        param.identity.is_hidden_matrix()
    }

    fn directions(&mut self, group: &mut [Updated], norm: &Tensor) -> Result<()> {
        for updated in group {
            updated.direction = Some(self.momenta.direction(updated, norm, true)?);
        }
        Ok(())
    }

    fn transform(&self, direction: &Tensor) -> Result<Tensor> {
        let [rows, columns] = direction.dims("Muon's direction")?;
        Ok(newton_schulz(direction, self.adjust.factor(rows, columns))?)
    }

    fn update(&mut self, group: &mut [Updated], casts: &mut Casts, norm: &Tensor) -> Result<()> {
        for part in group.chunk_by_mut(|a, b| a.direction.is_none() && b.direction.is_none()) {
            match part[0].direction.take() {
                Some(direction) => self.momenta.descend(&mut part[0], &direction, norm, true)?,
                None => self.adamw.update(part, casts, norm)?,
            }
        }
        Ok(())
    }
}
