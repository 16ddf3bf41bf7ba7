//! The passes of a step. A pass is a set of tokens that are computed together with the same kernels.
//!
//! `Engine::run_passes` divides a step into passes. With `batch_invariant`, passes run within `CudaDevice::with_batch_invariance`. There, products and
//! attention have sums whose order does not depend on the batch. If the GPU has no such products for the types of the model, all passes have 64 rows, and
//! each token is a row with its own context.

use crate::batching::{Drawn, Engine, Plan};
use crate::decode::Scored;
use crate::drawing::by_rows;
use crate::flight::Pace;
use crate::request::Event;
use ottava_common::error::Result;
use ottava_models::{InferenceBatch, MOST_PACKED, PREFILL_MULTIPLE, SequenceTokens, padded_rows};
use ottava_tensor::{Device, Tensor};
use std::collections::BTreeMap;

/// The maximum number of rows of logits that exist at once, and of rows of a pass with proposed tokens.
pub(super) const MOST_ROWS: usize = 256;

/// The kind of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BatchKind {
    /// Tokens that the kernels of single tokens compute, on a GPU. Each token is a row with its own context.
    Rows,
    /// The first tokens of sequences, which the attention of training computes: on a GPU, or of an encoder.
    Packed,
    /// Any numbers of tokens of sequences.
    Mixed,
}

impl Engine {
    /// Selects the tokens of a step, computes them, and returns the drawn tokens. With [`Pace::Begin`], the step is in flight afterwards.
    pub(super) fn run_passes(&mut self, pace: Pace, events: &mut Vec<Event>) -> Result<Vec<Drawn>> {
        let plan = self.schedule()?;
        // If requests were preempted, the plan may have prompts.
        let is_decoding = plan.iter().all(|&(at, new)| new == 1 && self.running[at].pending() == 1);
        if pace == Pace::Begin && is_decoding && !plan.is_empty() {
            let places: Vec<usize> = plan.iter().map(|&(at, _)| at).collect();
            self.ahead.flight = Some(self.launch(&places, None)?);
            self.advance(&plan)?;
            return Ok(Vec::new());
        }
        let passes = self.passes(plan);
        let mut drawn = Vec::new();
        for (kind, plan) in &passes {
            drawn.extend(self.compute(*kind, plan, events)?);
            self.advance(plan)?;
        }
        Ok(drawn)
    }

    /// Returns whether the device is a GPU and results must not depend on the batch. Results of a CPU never depend on it.
    pub(super) fn keeps_invariant(&self) -> bool {
        self.options.batch_invariant && matches!(self.model.device(), Device::Cuda(_))
    }

    /// Divides a plan by adapter and, on a GPU, by kernels. The adapters that the linears hold come first. So each step computes requests of all
    /// adapters.
    fn passes(&self, plan: Plan) -> Vec<(BatchKind, Plan)> {
        let mut by_adapter: BTreeMap<_, Plan> = BTreeMap::new();
        for (at, new) in plan {
            let adapter = self.running[at].request.adapter;
            by_adapter.entry((adapter != self.adapter, adapter)).or_default().push((at, new));
        }
        let plans = by_adapter.into_values();
        match self.model.device() {
            // Each token of an encoder reads its whole text.
            _ if self.model.config().is_encoder() => {
                let packed = |plan: Plan| plan.chunks(MOST_PACKED).map(<[_]>::to_vec).collect::<Vec<_>>();
                plans.flat_map(packed).map(|plan| (BatchKind::Packed, plan)).collect()
            }
            Device::Cuda(_) if self.reads_tokens_as_rows() => {
                plans.flat_map(|plan| self.passes_of_rows(plan)).collect()
            }
            Device::Cuda(_) => plans.flat_map(|plan| self.passes_by_kernel(plan)).collect(),
            _ => plans.map(|plan| (BatchKind::Mixed, plan)).collect(),
        }
    }

    /// Divides a plan of one adapter: single tokens and tokens proposed after them, first tokens of prompts, and the other tokens. First tokens are in
    /// packed passes, unless there are few. If the model does not pack prompts, whole prompts are computed one by one.
    fn passes_by_kernel(&self, plan: Plan) -> Vec<(BatchKind, Plan)> {
        let (single, rest): (Plan, Plan) = plan.into_iter().partition(|&(at, _)| {
            let sequence = &self.running[at];
            sequence.draws_next() && !sequence.reads_activations()
        });
        let (first, mut rest): (Plan, Plan) = rest.into_iter().partition(|&(at, new)| {
            let may_leave_cache = match self.options.batch_invariant {
                true => self.packs_in_order,
                false => self.packs_prompts || new.is_multiple_of(PREFILL_MULTIPLE),
            };
            self.running[at].computed == 0 && may_leave_cache
        });
        let most = single.len().max(MOST_ROWS);
        let mut passes: Vec<_> = divided(single, most).into_iter().map(|plan| (BatchKind::Rows, plan)).collect();
        let are_few = first.iter().map(|&(_, new)| new).sum::<usize>() < PREFILL_MULTIPLE;
        match self.packs_prompts {
            true if are_few => rest.extend(first),
            true => passes.extend(first.chunks(MOST_PACKED).map(|plan| (BatchKind::Packed, plan.to_vec()))),
            false => passes.extend(first.into_iter().map(|one| (BatchKind::Mixed, vec![one]))),
        }
        passes.push((BatchKind::Mixed, rest));
        passes.retain(|(_, plan)| !plan.is_empty());
        passes
    }

    /// Returns whether each token of a pass must be a row with its own context.
    pub(super) fn reads_tokens_as_rows(&self) -> bool {
        self.keeps_invariant() && self.fixed_rows().is_some()
    }

    /// Divides a plan of one adapter into passes whose tokens are rows with their own contexts. Rows whose activations are read are in separate passes.
    fn passes_of_rows(&self, plan: Plan) -> Vec<(BatchKind, Plan)> {
        let most = self.fixed_rows().unwrap_or(plan.len().max(MOST_ROWS));
        let (read, others): (Plan, Plan) = plan.into_iter().partition(|&(at, _)| self.running[at].reads_activations());
        let of = |kind, plan| divided(plan, most).into_iter().map(move |plan| (kind, plan));
        of(BatchKind::Rows, others).chain(of(BatchKind::Mixed, read)).collect()
    }

    /// Returns the number of rows of all passes, if it must be the same.
    pub(super) fn fixed_rows(&self) -> Option<usize> {
        self.steps.rows
    }

    /// Returns the number of rows of a pass that computes `rows` rows.
    fn padded(&self, rows: usize) -> usize {
        self.fixed_rows().unwrap_or(padded_rows(self.model.device(), rows))
    }

    /// Computes `plan`, which has requests of one adapter, in one pass, and draws the tokens that follow.
    fn compute(&mut self, kind: BatchKind, plan: &Plan, events: &mut Vec<Event>) -> Result<Vec<Drawn>> {
        self.invariantly(|engine| engine.compute_pass(kind, plan, events))
    }

    fn compute_pass(&mut self, kind: BatchKind, plan: &Plan, events: &mut Vec<Event>) -> Result<Vec<Drawn>> {
        self.set_adapter(plan.first().and_then(|&(at, _)| self.running[at].request.adapter));
        let new: Vec<Vec<u32>> = plan.iter().map(|&(at, new)| self.running[at].next(new)).collect();
        let running = plan.iter().map(|&(at, _)| &self.running[at]);
        let sequences: Vec<SequenceTokens> = running
            .zip(&new)
            .map(|(of, new)| SequenceTokens::new(of.computed, new, &of.blocks.tables).in_slot(of.blocks.slot()))
            .collect();
        let drawing = self.drawing(plan);
        if kind == BatchKind::Rows {
            let rows = SequenceTokens::rows(&sequences);
            let scored = self.steps.run(&self.model, self.adapter, &mut self.cache, &rows, None)?;
            return self.draw(&scored, drawing);
        }
        let device = self.model.device();
        let batch = match kind {
            BatchKind::Packed => InferenceBatch::packed(device, &sequences)?,
            _ if self.reads_tokens_as_rows() => {
                let rows = SequenceTokens::rows(&sequences);
                InferenceBatch::of_rows(device, &rows, self.padded(rows.len()))?
            }
            _ if self.keeps_invariant() => InferenceBatch::over_cache(device, &sequences)?,
            _ => InferenceBatch::padded(device, &sequences)?,
        };
        let hidden = self.model.hidden(&batch, &mut self.cache)?;
        self.score_prompts(plan, &hidden, events)?;
        self.pool_prompts(plan, &hidden, events)?;
        let mut drawn = Vec::new();
        for mut drawing in by_rows(drawing, self.logit_rows()) {
            let rows: Vec<i32> = drawing.iter().flat_map(|of| of.row as i32..(of.row + of.count) as i32).collect();
            let rows = self.on_device(&rows)?;
            let scored = Scored::score(&self.model, &hidden, &rows)?;
            let mut row = 0;
            for of in &mut drawing {
                (of.row, row) = (row, row + of.count);
            }
            drawn.extend(self.draw(&scored, drawing)?);
        }
        Ok(drawn)
    }

    /// Returns the maximum number of rows of logits that exist at once.
    pub(super) fn logit_rows(&self) -> usize {
        self.fixed_rows().unwrap_or(MOST_ROWS)
    }

    /// Copies row numbers to the device, padded by row 0.
    pub(super) fn on_device(&self, rows: &[i32]) -> Result<Tensor> {
        let mut padded = rows.to_vec();
        padded.resize(self.padded(rows.len()), 0);
        Ok(Tensor::from_slice(self.model.device(), &[padded.len()], &padded)?)
    }
}

/// Divides a plan into passes of at most `most` tokens. A request with at most `most` tokens is not divided.
fn divided(plan: Plan, most: usize) -> Vec<Plan> {
    let (mut passes, mut room): (Vec<Plan>, usize) = (Vec::new(), 0);
    for (at, mut new) in plan {
        while new > 0 {
            if room == 0 || (new > room && new <= most) {
                passes.push(Plan::new());
                room = most;
            }
            let taken = new.min(room);
            passes.last_mut().expect("there is one").push((at, taken));
            (new, room) = (new - taken, room - taken);
        }
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_tokens_of_a_request_stay_together() {
        let plan = vec![(0, 1), (1, 5), (2, 3), (3, 20), (4, 2), (5, 8)];
        let expected =
            [vec![(0, 1), (1, 5)], vec![(2, 3), (3, 5)], vec![(3, 8)], vec![(3, 7)], vec![(4, 2)], vec![(5, 8)]];
        assert_eq!(divided(plan, 8), expected);
        assert!(divided(Plan::new(), 8).is_empty());
    }
}
