//! A custom optimizer: sign descent, `weight -= learning rate · sign(gradient)` (Bernstein et al. 2018, arXiv:1802.04434), on the CPU.
//!
//! Such an optimizer trains on any number of ranks with any ZeRO stage, since it reads only the elements that this process updates. An optimizer with
//! states returns them in `states`, and checkpoints then hold them. `crates/ottava-parallel/src/optim/lion.rs` also has a kernel.
//!
//! usage: cargo run --release --example custom_optimizer

mod setup;

use ottava_common::Result;
use ottava_parallel::optim::{Optimizer, StateTensor, Updated};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::scaling::Casts;
use ottava_tensor::Tensor;
use ottava_tensor::ops::{Gradient, UpdatedWeight, WeightCopy, cast};
use ottava_train::step::TrainStep;

/// Sign descent on weights with F32 master weights.
struct SignDescent {
    steps: u64,
    learning_rate: f32,
    /// The number of parameters.
    params: usize,
}

impl Optimizer for SignDescent {
    fn steps(&self) -> u64 {
        self.steps
    }

    fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Stores the learning rate. The scale of the gradients does not change their signs.
    fn begin_step(&mut self, learning_rate: f64, _gradient_scale: f64) -> Result<()> {
        (self.steps, self.learning_rate) = (self.steps + 1, learning_rate as f32);
        Ok(())
    }

    fn states(&mut self) -> Vec<Vec<StateTensor<'_>>> {
        (0..self.params).map(|_| Vec::new()).collect()
    }

    fn update(&mut self, group: &mut [Updated], _: &mut Casts, norm: &Tensor) -> Result<()> {
        // Gradients with an infinity or a NaN do not change any weight.
        if !norm.to_vec::<f32>()?[0].is_finite() {
            return Ok(());
        }
        for Updated { param, .. } in group {
            let Gradient::Plain(gradient) = param.gradient.read() else { unreachable!("gradients are F32 here") };
            let UpdatedWeight::Master { master, copy } = param.weights.for_update() else {
                unreachable!("masters are F32 here")
            };
            let signs = gradient.to_vec::<f32>()?.into_iter().map(|g| if g == 0.0 { 0.0 } else { g.signum() });
            let new: Vec<f32> =
                master.to_vec::<f32>()?.iter().zip(signs).map(|(w, sign)| w - self.learning_rate * sign).collect();
            master.write_bytes(bytemuck::cast_slice(&new))?;
            if let WeightCopy::Stored(copy) = copy {
                copy.write_bytes(&cast(master, copy.dtype())?.read_bytes()?)?;
            }
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let mut model = setup::model()?;
    let mut optimizer = SignDescent { steps: 0, learning_rate: 0.0, params: model.parameters().len() };
    let mut step = TrainStep::new(&model, 1, setup::ROWS, setup::TOKENS)?;
    let mut losses = Vec::new();
    for number in 1..=40 {
        step.load(0, &setup::counting(number))?;
        let done = step.run(&mut model, &mut optimizer, 1e-3, StepPrecision::Recipe)?;
        println!("step {number:2}: loss {:.3}", done.loss);
        losses.push(done.loss);
    }
    assert!(losses[39] < losses[0] - 1.0, "the model learns to count");
    Ok(())
}

#[test]
fn the_example_runs() {
    main().expect("it runs to its end");
}
