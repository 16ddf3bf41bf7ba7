//! The loss scale of FP16 training. The loss is multiplied by the loss scale so that small gradients do not underflow. Micikevicius et al. 2018,
//! arXiv:1710.03740. The factors are the factors of PyTorch's `GradScaler`.

use ottava_recipe::LossScaling;
use serde::{Deserialize, Serialize};

/// The loss scale of a run, a power of two times its initial value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// The factor of the loss in the next step.
    pub scale: f64,
    /// The number of consecutive steps with finite gradients.
    pub good_steps: u64,
    /// The number of steps that were skipped because gradients were not finite.
    pub skipped_steps: u64,
}

/// Whether the gradients of a step overflowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// Gradients were finite, and weights have been updated.
    No,
    /// Gradients were not finite. The step is skipped, and the scale is halved.
    Skipped,
    /// Gradients were not finite, and the scale is already at its minimum.
    AtMinimum,
}

impl LossScale {
    /// Returns the state before the first step.
    pub fn new(how: LossScaling) -> LossScale {
        LossScale { scale: how.initial, good_steps: 0, skipped_steps: 0 }
    }

    /// Updates the scale after a step. `finite` says whether the gradients were finite.
    pub fn update(&mut self, finite: bool, how: LossScaling) -> Overflow {
        if finite {
            self.good_steps += 1;
            if self.good_steps >= how.window {
                self.good_steps = 0;
                // A larger scale would overflow F32.
                self.scale = (self.scale * 2.0).min(2f64.powi(100));
            }
            return Overflow::No;
        }
        if self.scale / 2.0 < how.minimum {
            return Overflow::AtMinimum;
        }
        *self = LossScale { scale: self.scale / 2.0, good_steps: 0, skipped_steps: self.skipped_steps + 1 };
        Overflow::Skipped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_grows_after_a_window_and_halves_at_once() {
        let how = LossScaling { initial: 1024.0, window: 3, minimum: 1.0 };
        let mut scale = LossScale::new(how);
        let mut seen = Vec::new();
        for finite in [true, true, false, true, true, true, true, false, false] {
            scale.update(finite, how);
            seen.push(scale.scale);
        }
        assert_eq!(seen, [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 512.0, 256.0]);
        assert_eq!((scale.skipped_steps, scale.good_steps), (3, 0));
    }

    #[test]
    fn a_scale_at_the_minimum_is_not_halved() {
        let how = LossScaling { initial: 4.0, window: 3, minimum: 1.0 };
        let mut scale = LossScale::new(how);
        let outcomes: Vec<_> = (0..3).map(|_| scale.update(false, how)).collect();
        assert_eq!(outcomes, [Overflow::Skipped, Overflow::Skipped, Overflow::AtMinimum]);
        assert_eq!(scale.scale, 1.0);
    }
}
