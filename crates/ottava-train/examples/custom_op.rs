//! A custom op: the squared ReLU, `y = max(x, 0)²`, with its gradient and a check of the gradient, as for each op of this project.
//!
//! This is the definition on the CPU, with which every op begins. docs/adding-an-op.md adds the kernel.
//!
//! usage: cargo run --example custom_op

use ottava_tensor::{Device, Result, Tensor};

/// Computes `y = max(x, 0)²` for `x` in F64 of any shape.
fn squared_relu(x: &Tensor) -> Result<Tensor> {
    let y: Vec<f64> = x.to_vec::<f64>()?.into_iter().map(|x| x.max(0.0).powi(2)).collect();
    Tensor::from_slice(x.device(), x.shape(), &y)
}

/// Returns the gradient by `x`, from the gradient `dy` by `y = squared_relu(x)`. `dy` and the result have the shape of `x`.
fn squared_relu_backward(dy: &Tensor, x: &Tensor) -> Result<Tensor> {
    dy.expect("dy", x.shape())?;
    let dx: Vec<f64> =
        dy.to_vec::<f64>()?.iter().zip(x.to_vec::<f64>()?).map(|(dy, x)| dy * 2.0 * x.max(0.0)).collect();
    Tensor::from_slice(x.device(), x.shape(), &dx)
}

fn main() -> Result<()> {
    let tensor = |values: &[f64]| Tensor::from_slice(&Device::Cpu, &[2, 3], values);
    let x = [-1.5, -0.2, 0.3, 0.8, 1.1, 2.0];
    let dy = [0.7, -0.4, 1.3, 0.2, -0.9, 0.5];
    let gradient = squared_relu_backward(&tensor(&dy)?, &tensor(&x)?)?.to_vec::<f64>()?;

    // The loss Σ dy · y has the gradient dx. A central difference with step h has an error of about h² plus 2^-53 / h.
    let loss = |x: &[f64]| -> Result<f64> {
        Ok(squared_relu(&tensor(x)?)?.to_vec::<f64>()?.iter().zip(dy).map(|(y, dy)| y * dy).sum())
    };
    for i in 0..x.len() {
        let moved = |by: f64| {
            let mut x = x;
            x[i] += by;
            loss(&x)
        };
        let difference = (moved(1e-5)? - moved(-1e-5)?) / 2e-5;
        println!("d loss / d x[{i}] = {:8.5}, by differences {difference:8.5}", gradient[i]);
        assert!((gradient[i] - difference).abs() < 1e-9);
    }
    Ok(())
}

#[test]
fn the_example_runs() {
    main().expect("it runs to its end");
}
