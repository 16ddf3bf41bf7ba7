//! Comparisons of the results in a recipe's precision with the results in the compute type, recorded in one pass.

use crate::glob;
use crate::mode::StepPrecision;
use ottava_common::error::Result;
use ottava_tensor::ops::{self, Operand, SUMS};
use ottava_tensor::{DType, Device, QuantizedTensor, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// The quantity that is compared. If a pass is repeated in the same precision, the tensors of both passes are compared like tensors of two
/// precisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// FP8 codes, compared with the operand before the cast.
    Cast,
    /// A linear's `y = x · Wᵀ` of codes, compared with the product of the dequantized codes in the compute type.
    Fprop,
    /// A linear's `dx = dy · W`, compared like [`Quantity::Fprop`].
    Dgrad,
    /// A linear's `dW = dyᵀ · x`, compared like [`Quantity::Fprop`].
    Wgrad,
    /// `dy · y` of sampled tokens, for a linear's output `y` from codes, compared with `dy · y` for the output from the operands before the cast.
    /// Half the sum of the squared differences, per token, estimates how much the casts raise the loss ([`PrecisionComparison::loss_costs`]).
    LossCost,
    /// The output of a block after forward in the recipe's precision, compared with forward in the compute type.
    Output,
    /// The gradient by the input of a block after backward in the recipe's precision, compared with backward in the compute type.
    GradInput,
    /// The gradient of a parameter after backward in the recipe's precision, compared with backward in the compute type.
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

    /// Returns the name in files.
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

    /// Returns whether the quantity is a product of a linear.
    pub fn is_product(self) -> bool {
        matches!(self, Quantity::Fprop | Quantity::Dgrad | Quantity::Wgrad)
    }
}

/// The comparison of a tensor `x` with its reference `r`.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The name of the cast, linear, block or parameter.
    pub name: String,
    /// The quantity that was compared.
    pub quantity: Quantity,
    /// `Σ x²`, `Σ r²`, `Σ x·r` and `Σ (x − r)²`.
    pub sums: [f64; SUMS],
}

impl Comparison {
    /// Returns `‖x − r‖ / ‖r‖`, or 0 if both are zero.
    pub fn error(&self) -> f64 {
        root_of_ratio(self.sums[3], self.sums[1])
    }

    /// Returns `‖x‖ / ‖r‖`, or 1 if both are zero.
    pub fn norm_ratio(&self) -> f64 {
        if self.is_zero() { 1.0 } else { root_of_ratio(self.sums[0], self.sums[1]) }
    }

    /// Returns `x·r / (‖x‖ ‖r‖)`, or 1 if both are zero.
    pub fn cosine(&self) -> f64 {
        let [x, r, product, _] = self.sums;
        if self.is_zero() { 1.0 } else { product / (x * r).sqrt().max(f64::MIN_POSITIVE) }
    }

    /// Returns `x·r / r·r`, the factor `f` for which `f · r` is nearest to `x`, or 1 if both are zero.
    pub fn slope(&self) -> f64 {
        let [_, r, product, _] = self.sums;
        if self.is_zero() { 1.0 } else { product / r.max(f64::MIN_POSITIVE) }
    }

    /// Returns whether all elements are equal.
    pub fn is_equal(&self) -> bool {
        self.sums[3] == 0.0
    }

    fn is_zero(&self) -> bool {
        self.sums[0] == 0.0 && self.sums[1] == 0.0
    }

    /// Adds the sums of comparisons with the same name and quantity. The result has the order in which the names first appear.
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
    /// The mean loss per target token, in the recipe's precision and in the compute type.
    pub losses: [f64; 2],
    /// The comparisons of casts, products, blocks and parameters, in the order of the passes.
    pub tensors: Vec<Comparison>,
    /// Twice the loss per target token that corresponds to a squared difference of 1 in [`Quantity::LossCost`].
    pub loss_per_square: f64,
}

impl PrecisionComparison {
    /// Returns an estimate of how much the casts of a linear's forward raise the loss, in nats per token. `compared` has [`Quantity::LossCost`].
    ///
    /// A change `δ` of a linear's output changes the loss by half of `δ · H · δ`. If the Fisher information replaces the Hessian `H`, the cost is
    /// half the mean over tokens of `(dy · δ)²`, for gradients `dy` of the summed loss. Errors of different tokens are assumed to be
    /// independent. Martens 2014, arXiv:1412.1193, section 9.
    pub fn loss_cost(&self, compared: &Comparison) -> f64 {
        0.5 * compared.sums[3] * self.loss_per_square
    }

    /// Returns the linears with their costs, largest first.
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

/// The number of rows of the buffers in which a device collects sums.
const ROWS: usize = 256;

/// The maximum number of sampled rows of a matrix.
const SAMPLED: usize = 128;

/// Returns the distance between sampled rows, which are evenly spread over all `rows` from the first on. An error of a whole product is visible in
/// each row, and with 4096 rows the product of the sampled rows takes 1/32 of the time. The distance is odd, so that sampled tokens have different
/// positions if the length of sequences is a power of two.
pub fn sampling_step(rows: usize) -> usize {
    rows.div_ceil(SAMPLED) | 1
}

/// The results of comparison passes.
#[derive(Default)]
pub struct Compared {
    /// All comparisons. Comparisons of the same tensor are added.
    pub tensors: Vec<Comparison>,
    /// The observed tensors of the first pass, by name.
    pub observed: Vec<(String, Tensor)>,
}

/// The comparisons that the pass has made. Their sums stay on the device until the end.
pub struct Probe {
    device: Device,
    /// The precisions of the two passes.
    precisions: [StepPrecision; 2],
    names: Vec<(String, Quantity)>,
    sums: Vec<Tensor>,
    /// Sampled rows of the operands that a block has cast, by the name of the cast.
    rows: HashMap<String, Tensor>,
    /// The outputs of sampled tokens, for linears whose backward has not run, by the name of the linear: from the codes of both operands, and from
    /// the operands before the cast.
    outputs: HashMap<String, [Tensor; 2]>,
    /// The indices of the sampled rows, by the number of rows.
    samples: HashMap<usize, Tensor>,
    observer: Option<Observer>,
}

/// Copies of tensors of a pass, in host memory.
#[derive(Default)]
pub struct Observer {
    /// Patterns of the names of observed tensors.
    patterns: Vec<String>,
    /// The observed tensors by name, in the order of the pass.
    tensors: Vec<(String, Tensor)>,
}

impl Observer {
    /// Creates an observer of tensors whose names match one of `patterns`.
    pub fn new(patterns: &[String]) -> Observer {
        Observer { patterns: patterns.to_vec(), tensors: Vec::new() }
    }

    /// Returns the observed tensors.
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
    /// Creates an empty set of comparisons for passes in these precisions.
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

    /// Returns the precisions of the two passes.
    pub fn precisions(&self) -> [StepPrecision; 2] {
        self.precisions
    }

    /// Returns whether both passes have the same precision.
    pub fn repeats(&self) -> bool {
        self.precisions[0] == self.precisions[1]
    }

    /// Sets the observer, which receives copies of the tensors of the first pass.
    pub fn observe(&mut self, observer: Option<Observer>) {
        self.observer = observer;
    }

    /// Compares `x` with `reference`. Enqueues work without waiting unless `x` is observed.
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

    /// Compares the codes that a product reads with the matrix before the cast. Enqueues work without waiting unless the matrix is observed.
    pub fn compare_codes(&mut self, name: &str, codes: Operand, x: &Tensor) -> Result<()> {
        if let Some(observer) = &mut self.observer {
            observer.see(name.into(), x)?;
        }
        let (sums, at) = self.next(name, Quantity::Cast)?;
        Ok(ops::compare_codes(codes, x, sums, at)?)
    }

    /// Compares each copy of the codes like [`Probe::compare_codes`].
    pub fn compare_cast(&mut self, name: &str, codes: &QuantizedTensor, x: &Tensor) -> Result<()> {
        if codes.codes.is_some() {
            self.compare_codes(name, Operand::Rows(codes), x)?;
        }
        match codes.transposed {
            Some(_) => self.compare_codes(name, Operand::Columns(codes), x),
            None => Ok(()),
        }
    }

    /// Returns sampled rows of `x` `[M, N]`, at the distance of [`sampling_step`].
    pub fn sample(&mut self, x: &Tensor) -> Result<Tensor> {
        let rows = x.shape()[0];
        if !self.samples.contains_key(&rows) {
            let ids: Vec<i32> = (0..rows as i32).step_by(sampling_step(rows)).collect();
            self.samples.insert(rows, Tensor::from_slice(&self.device, &[ids.len()], &ids)?);
        }
        Ok(ops::embedding(x, &self.samples[&rows])?)
    }

    /// Keeps sampled rows of `x`, the operand of the cast `name`, until [`Probe::forget_rows`].
    pub fn keep_rows(&mut self, name: &str, x: &Tensor) -> Result<()> {
        let rows = self.sample(x)?;
        self.rows.insert(name.into(), rows);
        Ok(())
    }

    /// Returns the rows that were kept for the cast `name`.
    pub fn rows_of(&self, name: &str) -> Option<Tensor> {
        self.rows.get(name).cloned()
    }

    /// Drops all kept rows, at the end of a block.
    pub fn forget_rows(&mut self) {
        self.rows.clear();
    }

    /// Keeps the outputs of sampled tokens of the linear `name` until its backward: from codes, and from the operands before the cast.
    pub fn keep_outputs(&mut self, name: &str, outputs: [Tensor; 2]) {
        self.outputs.insert(name.into(), outputs);
    }

    /// Takes the outputs that [`Probe::keep_outputs`] kept for the linear `name`.
    pub fn take_outputs(&mut self, name: &str) -> Option<[Tensor; 2]> {
        self.outputs.remove(name)
    }

    /// Compares the dot products of the two `outputs` of sampled tokens of the linear `name` with the gradient `dy` by the outputs.
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

    /// Returns all comparisons and the observed tensors. Comparisons of the same tensor are added. Waits for the device.
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
