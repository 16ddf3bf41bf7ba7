//! Comparisons of what a recipe computes with what the compute type gives, recorded in one pass.

use crate::glob;
use crate::mode::StepPrecision;
use ottava_common::error::Result;
use ottava_tensor::ops::{self, Operand, SUMS};
use ottava_tensor::{DType, Device, QuantizedTensor, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// What is compared. If a pass is repeated in the same precision, the tensors of both passes are compared as the tensors of two precisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// FP8 codes, with the operand that was cast.
    Cast,
    /// A linear's `y = x · Wᵀ` of codes, with the product of the values of these codes in the compute type.
    Fprop,
    /// A linear's `dx = dy · W`, in the same way.
    Dgrad,
    /// A linear's `dW = dyᵀ · x`, in the same way.
    Wgrad,
    /// `dy · y` of sampled tokens, for the output `y` of a linear by its codes, with `dy · y` for the output of the operands that were cast. Half
    /// the sum of the squared differences, per token, is what the casts cost in the loss ([`PrecisionComparison::loss_costs`]).
    LossCost,
    /// The output of a block after forward by the recipe, with the output after forward in the compute type.
    Output,
    /// The gradient by the input of a block after backward by the recipe, with the gradient after backward in the compute type.
    GradInput,
    /// The gradient of a parameter after backward by the recipe, with the gradient after backward in the compute type.
    Gradient,
}

impl Quantity {
    /// All quantities.
    pub const ALL: [Quantity; 8] = [
        Quantity::Cast,
        Quantity::Fprop,
        Quantity::Dgrad,
        Quantity::Wgrad,
        Quantity::LossCost,
        Quantity::Output,
        Quantity::GradInput,
        Quantity::Gradient,
    ];

    /// Its name in files.
    pub fn as_str(self) -> &'static str {
        match self {
            Quantity::Cast => "cast",
            Quantity::Fprop => "fprop",
            Quantity::Dgrad => "dgrad",
            Quantity::Wgrad => "wgrad",
            Quantity::LossCost => "loss_cost",
            Quantity::Output => "output",
            Quantity::GradInput => "grad_input",
            Quantity::Gradient => "gradient",
        }
    }

    /// Whether it is a product of a linear.
    pub fn is_product(self) -> bool {
        matches!(self, Quantity::Fprop | Quantity::Dgrad | Quantity::Wgrad)
    }
}

/// The comparison of a tensor `x` with its reference `r`.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The cast, linear, block or parameter.
    pub name: String,
    /// What was compared.
    pub quantity: Quantity,
    /// `Σ x²`, `Σ r²`, `Σ x·r` and `Σ (x − r)²`.
    pub sums: [f64; SUMS],
}

impl Comparison {
    /// `‖x − r‖ / ‖r‖`; 0 if both are zero.
    pub fn error(&self) -> f64 {
        root_of_ratio(self.sums[3], self.sums[1])
    }

    /// `‖x‖ / ‖r‖`; 1 if both are zero.
    pub fn norm_ratio(&self) -> f64 {
        if self.is_zero() { 1.0 } else { root_of_ratio(self.sums[0], self.sums[1]) }
    }

    /// `x·r / (‖x‖ ‖r‖)`; 1 if both are zero.
    pub fn cosine(&self) -> f64 {
        let [x, r, product, _] = self.sums;
        if self.is_zero() { 1.0 } else { product / (x * r).sqrt().max(f64::MIN_POSITIVE) }
    }

    /// `x·r / r·r`, the factor of `r` that is nearest to `x`; 1 if both are zero.
    pub fn slope(&self) -> f64 {
        let [_, r, product, _] = self.sums;
        if self.is_zero() { 1.0 } else { product / r.max(f64::MIN_POSITIVE) }
    }

    /// Whether all elements are equal.
    pub fn is_equal(&self) -> bool {
        self.sums[3] == 0.0
    }

    fn is_zero(&self) -> bool {
        self.sums[0] == 0.0 && self.sums[1] == 0.0
    }

    /// Adds the sums of comparisons of parts of the same tensors, in the order in which their names first appear.
    pub fn merge(parts: impl IntoIterator<Item = Comparison>) -> Vec<Comparison> {
        let (mut all, mut places): (Vec<Comparison>, HashMap<_, usize>) = (Vec::new(), HashMap::new());
        for part in parts {
            let place = *places.entry((part.name.clone(), part.quantity)).or_insert(all.len());
            match all.get_mut(place) {
                Some(before) => before.sums.iter_mut().zip(part.sums).for_each(|(sum, own)| *sum += own),
                None => all.push(part),
            }
        }
        all
    }
}

/// The comparison of a recipe with the compute type on some sequences, over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct PrecisionComparison {
    /// Mean loss per target token, by the recipe and in the compute type.
    pub losses: [f64; 2],
    /// Casts, products, blocks and parameters, in the order of the passes.
    pub tensors: Vec<Comparison>,
    /// The loss per target token that a squared difference of 1 in [`Quantity::LossCost`] stands for, twice.
    pub loss_per_square: f64,
}

impl PrecisionComparison {
    /// What the casts of a linear's forward cost in the loss, in nats per token: an estimate, from a comparison of [`Quantity::LossCost`].
    ///
    /// A change `δ` of a linear's output changes the loss by half of `δ · H · δ`. The Fisher information stands for the Hessian `H`, so
    /// that the cost is half the mean over tokens of `(dy · δ)²`, for gradients `dy` of the summed loss. Errors of different tokens
    /// are independent. Martens 2014, arXiv:1412.1193, section 9.
    pub fn loss_cost(&self, compared: &Comparison) -> f64 {
        0.5 * compared.sums[3] * self.loss_per_square
    }

    /// The linears with their costs, the largest first.
    pub fn loss_costs(&self) -> Vec<(String, f64)> {
        let compared = self.tensors.iter().filter(|compared| compared.quantity == Quantity::LossCost);
        let mut costs: Vec<_> = compared.map(|compared| (compared.name.clone(), self.loss_cost(compared))).collect();
        costs.sort_by(|a, b| b.1.total_cmp(&a.1));
        costs
    }
}

fn root_of_ratio(x: f64, r: f64) -> f64 {
    if x == 0.0 { 0.0 } else { (x / r.max(f64::MIN_POSITIVE)).sqrt() }
}

/// Rows of the buffers in which a device collects sums.
const ROWS: usize = 256;

/// The most rows of a matrix that are sampled.
const SAMPLED: usize = 128;

/// The distance of the rows that are sampled of a matrix, evenly spread over all `rows`, beginning with the first. An error of a whole product
/// shows in each row, and the product of the sampled rows takes 1/32 of the time of 4096 rows. The distance is odd, so that the tokens of
/// sequences whose length is a power of two have different positions.
pub fn sampling_step(rows: usize) -> usize {
    rows.div_ceil(SAMPLED) | 1
}

/// What passes that compare have left.
#[derive(Default)]
pub struct Compared {
    /// All comparisons; the comparisons of one tensor are added.
    pub tensors: Vec<Comparison>,
    /// The tensors of the first pass that were observed, by name.
    pub observed: Vec<(String, Tensor)>,
}

/// The comparisons of a pass so far, whose sums stay on the device until the end.
pub struct Probe {
    device: Device,
    /// The precisions of the two passes.
    precisions: [StepPrecision; 2],
    names: Vec<(String, Quantity)>,
    sums: Vec<Tensor>,
    /// Sampled rows of the matrices that a block has cast, by the name of the cast.
    rows: HashMap<String, Tensor>,
    /// Of linears whose backward has not run, by name: the rows of their outputs that belong to sampled tokens, by the codes of both operands
    /// and by their values.
    outputs: HashMap<String, [Tensor; 2]>,
    /// The indices of the rows that are sampled, by the number of rows.
    samples: HashMap<usize, Tensor>,
    observer: Option<Observer>,
}

/// Copies of tensors of a pass, in host memory.
#[derive(Default)]
pub struct Observer {
    /// Patterns of the names of tensors.
    patterns: Vec<String>,
    /// The tensors by name, in the order of the pass.
    tensors: Vec<(String, Tensor)>,
}

impl Observer {
    /// An observer of tensors whose names match any of `patterns`.
    pub fn new(patterns: &[String]) -> Observer {
        Observer { patterns: patterns.to_vec(), tensors: Vec::new() }
    }

    /// The tensors that were seen.
    pub fn into_tensors(self) -> Vec<(String, Tensor)> {
        self.tensors
    }

    fn see(&mut self, name: String, x: &Tensor) -> Result<()> {
        let is_new = self.tensors.iter().all(|(other, _)| *other != name);
        if is_new && self.patterns.iter().any(|pattern| glob(pattern, &name)) {
            self.tensors.push((name, x.to_device(&Device::Cpu)?));
        }
        Ok(())
    }
}

impl Probe {
    /// No comparisons yet of passes in these precisions.
    pub fn new(device: &Device, precisions: [StepPrecision; 2]) -> Probe {
        let (device, rows, outputs) = (device.clone(), HashMap::new(), HashMap::new());
        Probe {
            device,
            precisions,
            names: Vec::new(),
            sums: Vec::new(),
            rows,
            outputs,
            samples: HashMap::new(),
            observer: None,
        }
    }

    /// The precisions of the two passes.
    pub fn precisions(&self) -> [StepPrecision; 2] {
        self.precisions
    }

    /// Whether both passes compute the same.
    pub fn repeats(&self) -> bool {
        self.precisions[0] == self.precisions[1]
    }

    /// Copies tensors of the first pass to `observer`.
    pub fn observe(&mut self, observer: Option<Observer>) {
        self.observer = observer;
    }

    /// Compares `x` with `reference`. Enqueues work without waiting, unless `x` is observed.
    pub fn compare(&mut self, name: &str, quantity: Quantity, x: &Tensor, reference: &Tensor) -> Result<()> {
        if let Some(observer) = &mut self.observer {
            observer.see(format!("{name}.{}", quantity.as_str()), x)?;
        }
        let (sums, at) = self.next(name, quantity)?;
        Ok(ops::compare(x, reference, sums, at)?)
    }

    /// Compares rows 0, `every`, 2 · `every`, … of `x` with the rows of `reference`. Enqueues work without waiting.
    pub fn compare_rows(
        &mut self,
        name: &str,
        quantity: Quantity,
        x: &Tensor,
        every: usize,
        reference: &Tensor,
    ) -> Result<()> {
        let (sums, at) = self.next(name, quantity)?;
        Ok(ops::compare_rows(x, every, reference, sums, at)?)
    }

    /// Compares the codes that a product reads with the matrix that was cast. Enqueues work without waiting, unless the matrix is observed.
    pub fn compare_codes(&mut self, name: &str, codes: Operand, x: &Tensor) -> Result<()> {
        if let Some(observer) = &mut self.observer {
            observer.see(name.into(), x)?;
        }
        let (sums, at) = self.next(name, Quantity::Cast)?;
        Ok(ops::compare_codes(codes, x, sums, at)?)
    }

    /// [`Probe::compare_codes`] of each copy of the codes.
    pub fn compare_cast(&mut self, name: &str, codes: &QuantizedTensor, x: &Tensor) -> Result<()> {
        if codes.codes.is_some() {
            self.compare_codes(name, Operand::Rows(codes), x)?;
        }
        match codes.transposed {
            Some(_) => self.compare_codes(name, Operand::Columns(codes), x),
            None => Ok(()),
        }
    }

    /// Rows of `x` `[M, N]` at the distance of [`sampling_step`].
    pub fn sample(&mut self, x: &Tensor) -> Result<Tensor> {
        let rows = x.shape()[0];
        if !self.samples.contains_key(&rows) {
            let ids: Vec<i32> = (0..rows as i32).step_by(sampling_step(rows)).collect();
            self.samples.insert(rows, Tensor::from_slice(&self.device, &[ids.len()], &ids)?);
        }
        Ok(ops::embedding(x, &self.samples[&rows])?)
    }

    /// Keeps sampled rows of `x`, the matrix of the cast `name`, until [`Probe::forget_rows`].
    pub fn keep_rows(&mut self, name: &str, x: &Tensor) -> Result<()> {
        let rows = self.sample(x)?;
        self.rows.insert(name.into(), rows);
        Ok(())
    }

    /// The rows that were kept of the matrix of the cast `name`.
    pub fn rows_of(&self, name: &str) -> Option<Tensor> {
        self.rows.get(name).cloned()
    }

    /// Drops all rows that were kept, at the end of a block.
    pub fn forget_rows(&mut self) {
        self.rows.clear();
    }

    /// Keeps the outputs of sampled tokens of the linear `name`, by codes and by values, until its backward.
    pub fn keep_outputs(&mut self, name: &str, outputs: [Tensor; 2]) {
        self.outputs.insert(name.into(), outputs);
    }

    /// What [`Probe::keep_outputs`] has kept of the linear `name`.
    pub fn take_outputs(&mut self, name: &str) -> Option<[Tensor; 2]> {
        self.outputs.remove(name)
    }

    /// Compares products of the outputs of sampled tokens of the linear `name` with the gradient `dy` by them.
    pub fn compare_loss_cost(&mut self, name: &str, outputs: &[Tensor; 2], dy: &Tensor) -> Result<()> {
        let (sums, at) = self.next(name, Quantity::LossCost)?;
        Ok(ops::compare_along(&outputs[0], &outputs[1], dy, sums, at)?)
    }

    fn next(&mut self, name: &str, quantity: Quantity) -> Result<(&mut Tensor, usize)> {
        let at = self.names.len();
        if at == ROWS * self.sums.len() {
            self.sums.push(Tensor::zeros(&self.device, &[ROWS, SUMS], DType::F64)?);
        }
        self.names.push((name.to_string(), quantity));
        Ok((self.sums.last_mut().expect("there is room"), at % ROWS))
    }

    /// All comparisons, and what was observed; the comparisons of one tensor are added. Waits for the device.
    pub fn read(self) -> Result<Compared> {
        let mut all = Vec::with_capacity(self.names.len());
        let mut names = self.names.into_iter();
        for sums in self.sums {
            let sums = sums.to_vec::<f64>()?;
            let rows = names.by_ref().take(ROWS).zip(sums.chunks_exact(SUMS));
            all.extend(rows.map(|((name, quantity), sums)| Comparison {
                name,
                quantity,
                sums: sums.try_into().expect("four sums"),
            }));
        }
        let observed = self.observer.map_or(Vec::new(), Observer::into_tensors);
        Ok(Compared { tensors: Comparison::merge(all), observed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison(name: &str, sums: [f64; SUMS]) -> Comparison {
        Comparison { name: name.into(), quantity: Quantity::Fprop, sums }
    }

    #[test]
    fn a_factor_is_the_slope() {
        let factor = comparison("a", [4.0 * 9.0, 9.0, 2.0 * 9.0, 9.0]);
        assert_eq!([factor.slope(), factor.cosine(), factor.norm_ratio(), factor.error()], [2.0, 1.0, 2.0, 1.0]);
        let zero = comparison("a", [0.0; SUMS]);
        assert_eq!([zero.slope(), zero.cosine(), zero.norm_ratio(), zero.error()], [1.0, 1.0, 1.0, 0.0]);
        let lost = comparison("a", [0.0, 9.0, 0.0, 9.0]);
        assert_eq!([lost.slope(), lost.norm_ratio(), lost.error()], [0.0, 0.0, 1.0]);
    }

    #[test]
    fn parts_of_a_tensor_are_added_in_the_order_of_the_model() {
        let parts = [comparison("b", [1.0; 4]), comparison("a", [2.0; 4]), comparison("b", [3.0; 4])];
        assert_eq!(Comparison::merge(parts), [comparison("b", [4.0; 4]), comparison("a", [2.0; 4])]);
    }
}
